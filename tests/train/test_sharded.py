"""shard_optimizer=True: the plain step, a state in shards, and everything that is done with such a variable."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import synk
import synk.orbax
import synk.train

from ..helpers import GROUPS, group_of, needs_devices, numbers, slow, slow_but

RANDOM = np.random.default_rng(7)
X = RANDOM.normal(size=(47, 6)).astype(np.float32)
Y = np.tanh(X[:, :2]).astype(np.float32)
START = {
    "in": RANDOM.normal(size=(6, 11)).astype(np.float32) / 3,
    "bias": np.zeros(11, np.float32),
    "out": RANDOM.normal(size=(11, 2)).astype(np.float32) / 3,
    "one": np.ones((1, 1), np.float32),
    "scale": np.float32(1),
    "none": np.zeros((0, 3), np.float32),
}
MATRICES = lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)  # noqa: E731
OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.05, 0.9),
    "adamw": optax.adamw(optax.warmup_cosine_decay_schedule(0, 1e-2, 10, 100), mask=MATRICES),
    "several": optax.MultiSteps(optax.inject_hyperparams(optax.lion)(1e-3), 2),
}


@pytest.fixture(autouse=True)
def promotion():
    """Adam of optax multiplies floats with integers, and biases are added to rows."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def mean_loss(params, x, y):
    return jnp.mean(distances(params, x, y))


def masked_loss(params, x, y):
    """Some rows count; a part may have none of them."""
    mask = (x[:, 0] > 0.3).astype(jnp.float32)
    return synk.Weighted((distances(params, x, y) * mask).sum() / mask.sum(), mask.sum())


def distances(params, x, y):
    hidden = jnp.tanh(x @ params["in"] + params["bias"]) * params["scale"]
    return ((hidden @ params["out"] + params["one"] + params["none"].sum() - y) ** 2).mean(1)


def trained(step, steps=12):
    """Uneven rows, batches and slices; the losses."""
    return [step(X, Y, batch=slice(i % 5, 41 + i % 5), num_slices=1 + i % 2) for i in range(steps)]


def assert_like(step, other, rtol=1e-5, atol=1e-6):
    for name in {*other.variables} - {"feedback"}:  # which is each replica's own
        for got, want in zip(
            *map(jax.tree.leaves, (step.variables[name].value, other.variables[name].value)), strict=True
        ):
            np.testing.assert_allclose(got, want, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("group", "optimizer", "loss", "clip"),
    [  # every optimizer, and each loss on devices and on one
        (("devices", 2), "adamw", mean_loss, 0.1),
        slow(("simulated", 3), "momentum", masked_loss, None),
        slow(("devices", 8), "several", masked_loss, 0.1),
    ],
)
def test_the_plain_step(group, optimizer, loss, clip):
    """The same parameters and state, fresh and warm, for any rows and slices; each replica keeps one n-th."""
    with group_of(*group):
        plain, sharded = [
            synk.train.step(loss, START, OPTIMIZERS[optimizer], clip=clip, shard_optimizer=shard, ema=0.9)
            for shard in (False, True)
        ]
        for got, want in zip(trained(sharded), trained(plain), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5)
        assert_like(sharded, plain)
        synk.check_replicas(*sharded.variables.values())
        sharded.check(X, Y, batch=13, num_slices=2)
        np.testing.assert_allclose(sharded.serial(X, Y), plain.serial(X, Y), rtol=1e-5)
        assert_like(sharded, plain)
        kept = sum(leaf.nbytes for leaf in sharded.opt_state._state.leaves) / group[1]
        whole = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(plain.opt_state.value))
        leaves = len(jax.tree.leaves(plain.opt_state.value))
        assert kept <= whole / group[1] + leaves * 4 * (2 if group[1] > 1 else 0)


@pytest.mark.slow
def test_a_part_without_weight(four):
    """Its NaN counts for nothing."""
    x = X.copy()
    x[:12, 0], x[12:, 0] = -1, 1
    plain, sharded = [synk.train.step(masked_loss, START, optax.adam(0.01), shard_optimizer=s) for s in (False, True)]
    for _ in range(2):
        np.testing.assert_allclose(sharded(x, Y), plain(x, Y), rtol=1e-5)
    assert_like(sharded, plain)


def test_model_state_and_aux(four):
    """They combine as ever."""

    def loss(params, state, x, y):
        return mean_loss(params, x, y), state + x.mean(0), x.max()

    options = {"state": np.zeros(6, np.float32), "aux": "max"}
    plain, sharded = [
        synk.train.step(loss, START, optax.adam(0.01), shard_optimizer=s, **options) for s in (False, True)
    ]
    for _ in range(2):
        assert float(sharded(X, Y)[1]) == float(plain(X, Y)[1])
    assert_like(sharded, plain)


@pytest.mark.smoke
def test_other_dtypes(four):
    """Halves are added up as float32; each dtype has its own shards."""
    start = {"a": jnp.ones((6, 3), jnp.bfloat16), "b": np.ones(5, np.float32)}

    def loss(params, x):
        return jnp.mean((x @ params["a"].astype(jnp.float32)) ** 2) + (params["b"] ** 2).sum() * x.mean() ** 2

    plain, sharded = [synk.train.step(loss, start, optax.sgd(0.01, 0.9), shard_optimizer=s) for s in (False, True)]
    for _ in range(3):
        plain(X), sharded(X)
    assert_like(sharded, plain, rtol=2**-7)


REFUSED = {
    "global norm": (optax.chain(optax.clip_by_global_norm(1e6), optax.sgd(0.1)), "reduce_sum"),
    "now and then": (optax.MultiSteps(optax.chain(optax.clip(1), optax.clip_by_global_norm(1)), 9), "reduce_sum"),
    "trust ratio": (optax.lamb(1e-3), "This one mixes them, or depends"),
    "rows and columns": (optax.adafactor(1e-3, min_dim_size_to_factor=2), "This one mixes them, or depends"),
    "noise": (optax.noisy_sgd(0.1, key=0), "This one mixes them, or depends"),
    "finite": (optax.apply_if_finite(optax.sgd(0.1), 3), "reduce_and"),
    "orthogonal": (optax.contrib.muon(1e-3), "This one mixes them, or depends"),
    "by size": (optax.adamw(1e-3, mask=lambda params: jax.tree.map(lambda leaf: leaf.size > 20, params)), "shapes"),
}


@pytest.mark.smoke
@pytest.mark.parametrize("case", REFUSED)
def test_optimizers_that_mix_numbers(case):
    """They raise before anything runs, and the message says what they do."""
    optimizer, words = REFUSED[case]
    with pytest.raises(ValueError, match=words) as caught:
        synk.train.step(
            mean_loss, {name: leaf for name, leaf in START.items() if name != "none"}, optimizer, shard_optimizer=True
        )
    assert "synk.train.step: shard_optimizer=True" in str(caught.value)


def by_shape(condition):
    """Weight decay where a leaf's shape says so."""
    return optax.adamw(0.1, weight_decay=0.5, mask=lambda params: jax.tree.map(lambda p: condition(p.shape), params))


SHAPES = {
    "rows": by_shape(lambda shape: bool(shape) and shape[0] > 8),
    "tall": by_shape(lambda shape: len(shape) == 2 and shape[0] > shape[1]),
    "between": by_shape(lambda shape: 8 < np.prod(shape) < 30),
    "constant": optax.stateless(
        lambda g, _: jax.tree.map(lambda g: g * np.array([1 / np.sqrt(g.size)], np.float32)[0], g)
    ),
    "power": optax.stateless(lambda g, _: jax.tree.map(lambda g: jax.lax.integer_pow(g, max(g.size, 1)), g)),
    "count": optax.stateless(lambda g, _: jax.tree.map(lambda g: g * jnp.ones_like(g).sum(), g)),
    "places": optax.stateless(lambda g, _: jax.tree.map(lambda g: g * jnp.arange(g.size, dtype=g.dtype).sum(), g)),
}


@pytest.mark.smoke
@pytest.mark.parametrize("case", SHAPES)
def test_optimizers_that_ask_for_shapes(four, case):
    """They raise at the latest where the shards are known, before anything runs."""
    start = {"a": np.ones((6, 6), np.float32), "b": np.ones((6, 11), np.float32)}
    with pytest.raises(ValueError, match=r"This one mixes them, or depends on the shapes of parameters"):
        synk.train.step(
            lambda p, x: (p["a"].sum() + p["b"].sum()) * x.mean(), start, SHAPES[case], shard_optimizer=True
        )(X)


@pytest.mark.parametrize(
    "optimizer",
    slow_but(
        ["adamax"],
        ["adamax", "amsgrad", "adan", "adadelta", "lion", "radam", "rprop"],
    ),
)
def test_optimizers_that_do_not(four, optimizer):
    """What optax has of them."""
    plain, sharded = [
        synk.train.step(mean_loss, START, getattr(optax, optimizer)(1e-2), shard_optimizer=s) for s in (False, True)
    ]
    for _ in range(3):
        plain(X, Y), sharded(X, Y)
    assert_like(sharded, plain, atol=1e-5)


@pytest.mark.smoke
@pytest.mark.parametrize("wrap", [jax.checkpoint, jax.jit])
def test_an_optimizer_that_calls_functions(four, wrap):
    """It treats each number alone if what it calls does."""
    scaled = wrap(lambda grads: jax.tree.map(lambda g: -0.1 * jnp.tanh(g), grads))
    optimizer = optax.GradientTransformation(
        lambda params: (), lambda grads, state, params=None: (scaled(grads), state)
    )
    plain, sharded = [synk.train.step(mean_loss, START, optimizer, shard_optimizer=s) for s in (False, True)]
    plain(X, Y), sharded(X, Y)
    assert_like(sharded, plain)


@pytest.mark.parametrize("group", [GROUPS[1], slow(GROUPS[2])])
def test_the_variable(group):
    """Read and assigned as a whole; no replica has a value of its own."""
    with group_of(*group):
        step = synk.train.step(mean_loss, START, optax.adam(0.01), shard_optimizer=True)
        state = step.opt_state
        assert not np.any(state.value[0].mu["in"])  # before it is placed too
        trained(step, 3)
        whole = jax.tree.map(np.asarray, state.value)
        assert whole[0].mu["in"].shape == (6, 11)
        for rank in (0, group[1] - 1):
            jax.tree.map(np.testing.assert_array_equal, whole, state.get_value(rank))
            jax.tree.map(np.testing.assert_array_equal, whole, state.get_value(rank, borrow=True))
        assert synk.get_shapes(state)[0][0].mu["in"] == (6, 11)
        changed = jax.tree.map(lambda leaf: leaf + 1, whole)
        state.value = changed
        jax.tree.map(np.testing.assert_array_equal, changed, state.value)
        synk.broadcast(state)
        jax.tree.map(np.testing.assert_array_equal, changed, state.value)
        synk.broadcast(state, whole)
        jax.tree.map(np.testing.assert_array_equal, whole, state.value)
        for refused in (
            lambda: state.set_value(whole, rank=0),
            lambda: synk.all_reduce(state),
            lambda: synk.gather(state),
            lambda: synk.scatter(state, whole),
            lambda: synk.set_value(0, state, whole),
            synk.function(lambda x: state.value[0].count + x.sum()).__call__,
        ):
            with pytest.raises(synk.SynkError, match="opt_state lies in shards"):
                refused(*[X] * (refused.__name__ == "__call__"))
        with pytest.raises(ValueError, match=r"opt_state.*shape"):
            state.value = jax.tree.map(lambda leaf: np.zeros((2, *leaf.shape), leaf.dtype), whole)
        expected = float(step.serial(X, Y, update=True))
        assert step.opt_state.value[0].count == 4
        np.testing.assert_allclose(step(X, Y), expected, rtol=1)


@pytest.mark.slow
@pytest.mark.parametrize("module", [synk, slow(synk.orbax)])
def test_checkpoints_go_anywhere(tmp_path, module):
    """From any number of replicas into any other, and to and from the plain step."""

    start = START | {"none": np.zeros((1, 3), np.float32)}  # orbax saves no empty arrays

    def made(shard):
        return synk.train.step(mean_loss, start, optax.adam(0.01), shard_optimizer=shard)

    def folder(name):
        if module is synk:
            return tmp_path / name
        return pytest.importorskip("orbax.checkpoint").CheckpointManager(tmp_path / name)

    with group_of("devices", 2):
        step = made(True)
        trained(step, 3)
        module.save(place := folder("a"), step.variables, step=3)
        want = float(step(X, Y))
    for n, shard in ((1, True), (3, True), (2, False)):
        with synk.simulate(n) if n == 3 else group_of("devices", n):
            other = made(shard)
            module.load(place, other.variables)
            np.testing.assert_allclose(other(X, Y), want, rtol=1e-5)
            module.save(back := folder(f"{n}{shard}"), other.variables, step=4)
            again = made(True)
            module.load(back, again.variables)
            assert_like(again, other)


@pytest.mark.slow
def test_loaded_before_it_is_placed_and_after(tmp_path):
    """A state of shapes alone takes a checkpoint too; background saves copy."""
    with synk.simulate(3):
        step = synk.train.step(mean_loss, START, optax.adam(0.01), shard_optimizer=True)
        trained(step, 2)
        synk.save(tmp_path, step.variables, step=2, background=True)
        trained(step, 2)
        after = step.opt_state.value[0].mu["in"]
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), np.asarray(leaf).dtype), START)
        other = synk.train.step(mean_loss, shapes, optax.adam(0.01), shard_optimizer=True)
        synk.load(tmp_path, other.variables)
        assert int(other.opt_state.value[0].count) == 2
        trained(other, 2)
        np.testing.assert_allclose(other.opt_state.value[0].mu["in"], after, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_what_is_not_finite_is_not_taken(four):
    """nan="raise": neither parameters nor shards change."""
    step = synk.train.step(mean_loss, START, optax.adam(0.01), shard_optimizer=True, nan="raise")
    step(X, Y)
    before = jax.tree.map(np.asarray, (step.params.value, step.opt_state.value))
    bad = X.copy()
    bad[-1] = np.nan
    for _ in range(2):
        with pytest.raises(FloatingPointError, match="row 46"):
            step(bad, Y)
    jax.tree.map(np.testing.assert_array_equal, before, (step.params.value, step.opt_state.value))
    step(X, Y)


def test_padding_is_not_looked_at(four):
    """What an optimizer makes of the zeros behind the last number is nobody's, not even NaN."""
    step = synk.train.step(
        lambda w, x: ((w - x.mean()) ** 2).mean(), np.ones(6, np.float32), optax.rmsprop(1e-3, eps=0.0, momentum=0.9),
        shard_optimizer=True, nan="raise",
    )  # fmt: skip
    for _ in range(2):
        step(X)
    assert np.isfinite(step.params.value).all()


def test_the_norm_is_not_narrowed(four):
    """Of halves beside floats, as the plain step has it."""
    start = {"a": jnp.ones((64, 33), jnp.bfloat16), "b": np.ones(50, np.float32)}

    def loss(params, x):
        return (params["a"].astype(jnp.float32) * x.mean()).sum() + (params["b"] * jnp.arange(50.0)).sum()

    plain, sharded = [
        synk.train.step(loss, start, optax.sgd(0.1, 0.9), clip=0.5, shard_optimizer=s) for s in (False, True)
    ]
    for _ in range(3):
        plain(X), sharded(X)
    np.testing.assert_allclose(sharded.params.value["b"], plain.params.value["b"], rtol=1e-6)


def test_what_a_failure_took_is_set_again(four, tmp_path):
    """Parameters and shards that were donated to a step that died: assigned, loaded, given to all."""

    def callback(x):
        if fails:
            raise RuntimeError("no")
        return x

    def loss(params, x, y):
        noise = jax.pure_callback(callback, jax.ShapeDtypeStruct((), np.float32), jax.lax.stop_gradient(x.mean()))
        return mean_loss(params, x, y) + noise

    fails = False
    step = synk.train.step(loss, START, optax.adam(0.01), shard_optimizer=True)
    step(X, Y)
    synk.save(tmp_path, step.variables, step=1)
    kept = jax.tree.map(np.asarray, (step.params.value, step.opt_state.value))

    def load():
        synk.load(tmp_path, step.variables)

    def assign():
        step.params.value, step.opt_state.value = kept

    def give():
        synk.broadcast([step.params, step.opt_state], [*kept])

    wanted = []
    for heal in (load, assign, give):
        fails = True
        with pytest.raises(Exception):  # noqa: B017  # of JAX's own, now or when it is read
            step(X, Y)
            step.opt_state.value
        fails = False
        heal()
        jax.tree.map(np.testing.assert_array_equal, kept, (step.params.value, step.opt_state.value))
        wanted.append(float(step(X, Y)))
    assert len(set(wanted)) == 1


def test_replicas_must_share_their_parameters(four):
    """Pieces of different ones would be a patchwork; nothing runs."""
    step = synk.train.step(mean_loss, START, optax.adam(0.01), shard_optimizer=True)
    step(X, Y)
    step.params.set_value(START, rank=1)
    with pytest.raises(synk.DivergedError, match="params"):
        step(X, Y)
    synk.broadcast(step.params)
    step(X, Y)
    synk.check_replicas(step.params)
    assert step.opt_state.value[0].count == 2


def test_old_values_stay_without_donation(four):
    """As of every step."""
    step = synk.train.step(mean_loss, START, optax.adam(0.01), shard_optimizer=True, donate=False)
    before = step.opt_state.value
    step(X, Y)
    assert not np.any(before[0].mu["in"])
    assert np.any(step.opt_state.value[0].mu["in"])


def test_one_group(four):
    """It lives in the group of its first use."""
    step = synk.train.step(mean_loss, START, optax.adam(0.01), shard_optimizer=True)
    step(X, Y)
    with synk.simulate(2), pytest.raises(synk.SynkError, match="lives in"):
        step(X, Y)
    step(X, Y)
    assert step.stats.compilations == 1


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["int8", synk.train.PowerSGD(1)])
def test_beside_a_wire(four, wire):
    """Gradients travel by it; what is updated is the same."""
    plain, sharded = [
        synk.train.step(mean_loss, START, optax.adam(0.01), wire=wire, shard_optimizer=s) for s in (False, True)
    ]
    np.testing.assert_allclose(trained(sharded, 6), trained(plain, 6), rtol=1e-4)
    assert_like(sharded, plain, rtol=1e-3, atol=1e-5)


@needs_devices(4)
def test_what_travels(four):
    """As much as an all-reduce: a reduce-scatter and an all-gather."""
    start = {"w": numbers(6, 400) / 1000, "b": np.zeros(400, np.float32)}

    def loss(params, x):
        return jnp.mean((x @ params["w"] + params["b"]) ** 2)

    sent = []
    for shard in (False, True):
        explained = synk.train.step(loss, start, optax.adam(0.01), shard_optimizer=shard).explain(X)
        by_ring = {"all-reduce": 2 * 3 / 4, "reduce-scatter": 3 / 4, "all-gather": 3}
        sent.append(sum(by_ring[c.kind] * c.operand_bytes for p in explained.programs for c in p.collectives))
    assert 0.95 < sent[1] / sent[0] < 1.05


def test_blocks_do_not_go_with_it():
    """Their bits depend on no replica."""
    with pytest.raises(ValueError, match="shard_optimizer"):
        synk.train.step(mean_loss, START, optax.adam(0.01), shard_optimizer=True, blocks=4)
