"""wire=PowerSGD: the algorithm, beside NumPy's; what replicas keep of their own; saved, loaded, checked."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import synk
import synk.orbax
import synk.train

from ..helpers import group_of, needs_devices, slow

RANDOM = np.random.default_rng(11)
X = RANDOM.normal(size=(44, 12)).astype(np.float32)
Y = np.tanh(X[:, :7]).astype(np.float32)
START = {
    "w": RANDOM.normal(size=(12, 7)).astype(np.float32) / 4,
    "b": np.zeros(7, np.float32),
    "kernel": RANDOM.normal(size=(1, 2, 3, 9)).astype(np.float32),  # of no use, whose gradient is its decay
    "small": np.ones((2, 2), np.float32),
}
RANK = 2


@pytest.fixture(autouse=True)
def promotion():
    """Biases are added to rows."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def mean_loss(params, x, y):
    off = (x @ params["w"] * params["small"].mean() + params["b"] - y) ** 2
    return off.mean() + 0.1 * (params["kernel"] ** 2).mean()


def masked_loss(params, x, y):
    weight = (x[:, 0] > 0).sum()
    kept = jnp.where((x[:, 0] > 0)[:, None], x @ params["w"] + params["b"] - y, 0)
    return synk.Weighted((kept**2).sum() / weight, weight)


def made(loss=mean_loss, optimizer=None, start=START, **options):
    return synk.train.step(loss, start, optimizer or optax.sgd(0.1), wire=synk.contrib.PowerSGD(RANK), **options)


def orthonormal(columns):
    """By NumPy; the signs of columns do not matter, since factors meet them twice."""
    return np.linalg.qr(columns)[0]


def expected(loss, n, steps):
    """Parameters after steps of SGD by the algorithm, as the paper has it, in NumPy and float64."""
    params = {name: np.asarray(leaf, np.float64) for name, leaf in START.items()}
    low = [name for name in ("kernel", "w")]
    matrix = {name: params[name].reshape(-1, params[name].shape[-1]).shape for name in low}
    rng = np.random.default_rng(0)
    basis = {name: rng.normal(size=(matrix[name][1], RANK)).astype(np.float32).astype(np.float64) for name in low}
    errors = [{name: np.zeros(matrix[name]) for name in low} for _ in range(n)]
    rows = np.array_split(np.arange(len(X)), n)

    def value(params, part):
        out = loss(params, X[part], Y[part])
        return (out.value, out.weight) if isinstance(out, synk.Weighted) else (out, len(part))

    for _ in range(steps):
        current = jax.tree.map(lambda leaf: leaf.astype(np.float32), params)
        each = [jax.value_and_grad(value, has_aux=True)(current, part) for part in rows]
        weights = np.array([weight for (_, weight), _ in each], np.float64)
        grads = [jax.tree.map(lambda g: np.asarray(g, np.float64), g) for _, g in each]
        for name in params:
            parts = [w * g[name] for w, g in zip(weights / weights.sum(), grads, strict=True)]
            if name not in low:
                params[name] = params[name] - 0.1 * sum(parts)
                continue
            own = [part.reshape(matrix[name]) + e[name] for part, e in zip(parts, errors, strict=True)]
            left = orthonormal(sum(own) @ basis[name])
            basis[name] = sum(own).T @ left
            found = left @ basis[name].T
            for e, matrix_of_rank in zip(errors, own, strict=True):
                e[name] = matrix_of_rank - left @ (left.T @ matrix_of_rank)
            params[name] = params[name] - 0.1 * found.reshape(params[name].shape)
    return params, sum(e["w"] for e in errors)


@pytest.mark.parametrize(
    ("group", "loss"),
    [
        (("simulated", 3), masked_loss),
        slow(("devices", 2), mean_loss),
        slow(("devices", 8), masked_loss),
    ],
)
def test_the_algorithm(group, loss):
    """As the paper has it; slices change nothing."""
    kind, n = group
    with group_of(kind, n):
        step = made(loss)
        for i in range(6):
            step(X, Y, num_slices=1 + i % 2)
        params, left_out = expected(loss, n, 6)
        for name, leaf in step.params.value.items():
            np.testing.assert_allclose(leaf, params[name], rtol=1e-4, atol=1e-5)
        kept = sum(step.variables["feedback"].get_value(rank)[1] for rank in range(n)) / n
        np.testing.assert_allclose(kept, left_out, rtol=1e-3, atol=1e-5)
        synk.check_replicas(*step.variables.values())  # but for what is each replica's own


def test_alone_nothing_travels():
    """One replica takes the plain step."""
    with group_of("devices", 1):
        step, plain = made(optimizer=optax.sgd(0.1)), synk.train.step(mean_loss, START, optax.sgd(0.1))
        for _ in range(3):
            assert float(step(X, Y)) == float(plain(X, Y))
        assert not any(np.any(leaf) for leaf in step.variables["feedback"].value)


@pytest.mark.slow
def test_nothing_is_lost(four):
    """What was left out comes later: the sum of all updates and what is left is that of all gradients."""
    coefficients = RANDOM.normal(size=(44, 12, 7)).astype(np.float32)
    step = synk.train.step(
        lambda w, c: (w * c).sum((1, 2)).mean(), np.zeros((12, 7), np.float32), optax.sgd(1.0),
        wire=synk.contrib.PowerSGD(1),
    )  # fmt: skip
    for i in range(7):
        step(coefficients, batch=slice(i, 30))
    total = sum(coefficients[i:30].mean(0) for i in range(7))
    kept = sum(step.variables["feedback"].get_value(rank)[0] for rank in range(4)) / 4
    np.testing.assert_allclose(-step.params.value + kept, total, rtol=1e-4, atol=1e-5)


def test_gradients_that_vanish_and_come_back(four):
    """A step without any gradient does not end the search for directions."""
    step = synk.train.step(
        lambda w, x: (x.mean(1)[:, None, None] * w).mean(), np.zeros((12, 7), np.float32), optax.sgd(1.0),
        wire=synk.contrib.PowerSGD(2),
    )  # fmt: skip
    step(X * 0)
    step(X * 0 + 1e-25)
    step(X * 0 + 1)
    np.testing.assert_allclose(step.params.value, np.full((12, 7), -1 / 84), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 4])
def test_halves(n):
    """They travel as float32, and the optimizer sees them as they are."""
    start = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), START)

    def loss(params, x, y):
        return mean_loss(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params), x, y)

    with group_of("devices", n):
        for shard in (False, True):
            step = made(loss, optax.adam(0.01), start, shard_optimizer=shard)
            losses = [float(step(X, Y)) for _ in range(20)]
            assert losses[-1] < losses[0] and step.params.value["w"].dtype == jnp.bfloat16


def test_a_huge_gradient_ends_nothing(four):
    """Its squares are no numbers of float32."""
    step = synk.train.step(
        lambda w, x: (x.mean(1)[:, None, None] * w).mean(), np.zeros((12, 7), np.float32), optax.sign_sgd(0.1),
        wire=synk.contrib.PowerSGD(2),
    )  # fmt: skip
    step(X * 0 + 1e24)
    np.testing.assert_allclose(step.params.value, np.full((12, 7), -0.1), rtol=1e-5)


@pytest.mark.slow
def test_check_and_serial(four):
    """They look at the step as if all travelled as it is, and change nothing."""
    step = made(optimizer=optax.sgd(0.1, 0.9))
    for _ in range(2):
        step(X, Y)
        step.check(X, Y)
        step.check(X, Y, batch=15, num_slices=2)
        before = jax.tree.map(np.asarray, (step.params.value, step.variables["feedback"].get_value(2)))
        np.testing.assert_allclose(step.serial(X, Y), step(X, Y), rtol=1e-5)
        assert np.any(step.params.value["w"] != before[0]["w"])


@pytest.mark.slow
@pytest.mark.parametrize("module", [synk, synk.orbax])
def test_checkpoints(tmp_path, module):
    """Into as many replicas each has its own again; into others all have the average, which means the same sum."""

    def folder(name):
        if module is synk:
            return tmp_path / name
        return pytest.importorskip("orbax.checkpoint").CheckpointManager(tmp_path / name)

    with group_of("devices", 2):
        step = made()
        for _ in range(3):
            step(X, Y)
        place = folder("a")
        module.save(place, step.variables, step=3)
        own = [step.variables["feedback"].get_value(rank) for rank in range(2)]
        want = [float(step(X, Y)) for _ in range(3)]
        again = made()
        module.load(place, again.variables)
        for rank in range(2):
            jax.tree.map(np.testing.assert_array_equal, own[rank], again.variables["feedback"].get_value(rank))
        assert [float(again(X, Y)) for _ in range(3)] == want
    for n in (1, 3):
        with synk.simulate(n):
            other = made()
            module.load(place, other.variables)
            mean = [(a + b) / 2 for a, b in zip(*own, strict=True)]
            for rank in range(n):
                for got, each in zip(other.variables["feedback"].get_value(rank), mean, strict=True):
                    np.testing.assert_allclose(got, each, rtol=1e-6)
            if n > 1:
                np.testing.assert_allclose([float(other(X, Y)) for _ in range(3)], want, rtol=1e-4)


@pytest.mark.slow
def test_what_is_not_finite_is_not_taken(four):
    """nan="raise": what replicas keep is not spoiled either."""
    step = made(nan="raise")
    step(X, Y)
    before = step.variables["feedback"].get_value(3)
    bad = X.copy()
    bad[2, 0] = np.nan
    with pytest.raises(FloatingPointError, match="row 2"):
        step(bad, Y)
    jax.tree.map(np.testing.assert_array_equal, before, step.variables["feedback"].get_value(3))


@needs_devices(4)
def test_what_travels():
    """Factors alone, of what has more numbers than they."""
    start = {"w": np.ones((12, 400), np.float32), "b": np.zeros(400, np.float32)}

    def loss(params, x):
        return jnp.mean((x @ params["w"] + params["b"]) ** 2)

    with group_of("devices", 4):
        step = synk.train.step(loss, start, optax.sgd(0.1), wire=synk.contrib.PowerSGD(2))
        explained = step.explain(X)
        sent = sum(c.operand_bytes for program in explained.programs for c in program.collectives)
        assert 4 * (2 * 412 + 400) <= sent <= 4 * (2 * 412 + 400 + 2)


def test_bad_ranks():
    """An error says what is asked for."""
    for rank in (0, -1, 1.5, True, "2"):
        with pytest.raises((TypeError, ValueError), match=r"synk.contrib.PowerSGD: rank is .*; give an integer >= 1"):
            synk.contrib.PowerSGD(rank)
    with pytest.raises(TypeError, match="wire"):
        synk.function(lambda x: x.sum(), wire=synk.contrib.PowerSGD())
    with pytest.raises(ValueError, match=r"PowerSGD.*blocks=4"):
        made(blocks=4)
    with pytest.raises(ValueError, match=r"wire='int8' works on each replica's sums.*blocks=4"):
        synk.train.step(lambda w, x: ((w - x) ** 2).mean(), np.float32(0), optax.sgd(0.1), wire="int8", blocks=4)


@pytest.mark.slow
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_an_optimizer_that_skips(four, value):
    """What is not finite reaches it, and nothing of that comes again with the steps that follow."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(24, 20)).astype(np.float32), rng.normal(size=(24, 10)).astype(np.float32)
    bad = x.copy()
    bad[3, 2] = value
    step = synk.train.step(
        lambda w, x, y: ((x @ w - y) ** 2).mean(), np.zeros((20, 10), np.float32),
        optax.apply_if_finite(optax.sgd(0.5), 3), wire=synk.contrib.PowerSGD(2),
    )  # fmt: skip
    step(x, y)
    before = [np.asarray(leaf) for leaf in (step.params.value, *step.variables["feedback"].get_value(1))]
    step(bad, y)
    after = [step.params.value, *step.variables["feedback"].get_value(1)]
    assert all(np.array_equal(one, two) for one, two in zip(before, after, strict=True))
    losses = [float(step(x, y)) for _ in range(6)]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.8 * losses[0]
