"""Calls as one replica: rows that see one another are those of the serial program, also where they do not divide."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import synk
from synk._data import transfer

from ..helpers import assert_close, group_of, needs_devices, numbers

# Tests go through many numbers of rows.
pytestmark = pytest.mark.filterwarnings("ignore:.*it has compiled for")

AXIS = "replica"
X, Y = (np.random.default_rng(seed).normal(size=(24, width)).astype(np.float64) for seed, width in ((0, 6), (1, 8)))
IMAGES = np.random.default_rng(2).normal(size=(24, 6, 6, 3)).astype(np.float64)
WEIGHTS = {
    "a": np.random.default_rng(3).normal(size=(6, 8)).astype(np.float64),
    "b": np.random.default_rng(4).normal(size=(8, 8)).astype(np.float64),
    "k": np.random.default_rng(5).normal(size=(3, 3, 3, 8)).astype(np.float64),
}


# Functions of rows and weights that communicate over the axis "replica", as users write them.


def mean(x, axis=0):
    return lax.pmean(x.mean(axis), AXIS)


def normed(x, axis=0):
    """Batch norm: pmean of the mean and of the mean of squares."""
    now = mean(x, axis)
    return (x - now) / jnp.sqrt(mean(x * x, axis) - now * now + 1e-5)


def unit(z):
    return z / jnp.linalg.norm(z, axis=-1, keepdims=True)


def batch_norm(x, y, w):
    return ((normed(jax.nn.relu(normed(x @ w["a"]))) @ w["b"] - y) ** 2).mean()


def convolution(x, y, w):
    """Images made of the rows."""
    images = x[:, :, None, None] * jnp.ones((1, 1, 6, 3), x.dtype)
    out = lax.conv_general_dilated(images, w["k"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return ((jax.nn.relu(normed(out, (0, 1, 2))).mean((1, 2)) - y) ** 2).mean()


def contrastive(x, y, w):
    """All rows in a row's softmax; its own is found without its number."""
    a, b = unit(x @ w["a"]), unit(y @ w["b"])
    return (jax.nn.logsumexp(a @ lax.all_gather(b, AXIS, tiled=True).T, axis=-1) - (a * b).sum(-1)).mean()


def barlow(x, y, w):
    n = lax.psum(len(x), AXIS)

    def standard(z):
        now = lax.psum(z.sum(0), AXIS) / n
        return (z - now) / jnp.sqrt(lax.psum(((z - now) ** 2).sum(0), AXIS) / n + 1e-5)

    c = lax.psum(standard(x @ w["a"]).T @ standard(y @ w["b"]), AXIS) / n
    return ((c - jnp.eye(8, dtype=c.dtype)) ** 2).sum()


def softmax(x, y, w):
    s = (x @ w["a"]).sum(-1)
    top = lax.stop_gradient(lax.pmax(lax.stop_gradient(s).max(), AXIS))
    e = jnp.exp(s - top)
    return ((lax.psum(e @ y, AXIS) / lax.psum(e.sum(), AXIS) @ w["b"]) ** 2).mean()


def quantile(x, y, w):
    loss = ((x @ w["a"] @ w["b"] - y) ** 2).mean(-1)
    return jnp.minimum(loss, jnp.quantile(lax.all_gather(loss, AXIS, tiled=True), 0.7)).mean()


def sinkhorn(x, y, w):
    def scale(_, q):
        q = q / lax.psum(q.sum(0), AXIS) / q.shape[1]
        return q / q.sum(1, keepdims=True)

    q = lax.fori_loop(0, 3, scale, jnp.exp(jnp.tanh(x @ w["a"])))
    return -(lax.stop_gradient(q) * jax.nn.log_softmax(y @ w["b"])).sum(-1).mean()


PROGRAMS = [batch_norm, convolution, contrastive, barlow, softmax, quantile, sinkhorn]


def step_of(loss):
    """The loss and its gradient."""
    return lambda x, y, w: jax.value_and_grad(loss, 2)(x, y, w)


def serial(fn, *rows, w=WEIGHTS):
    """What one replica with all rows gives."""
    out = jax.jit(jax.vmap(lambda *rows: fn(*rows, w), axis_name=AXIS))(*(row[None] for row in rows))
    return jax.tree.map(lambda leaf: np.asarray(leaf[0]), out)


def without_axis(fn):
    """The function as one writes it for one device, where nothing communicates."""

    def alone(x, y, w):
        out = jax.vmap(lambda x, y: fn(x, y, w), axis_name=AXIS)(x[None], y[None])
        return jax.tree.map(lambda leaf: leaf[0], out)

    return alone


def assert_near(got, want, most):
    """Each leaf is near, measured by its largest entry, or by a thousandth of the largest of all."""
    wants = jax.tree.leaves(want)
    top = max(np.abs(leaf).max() for leaf in wants)
    for one, other in zip(jax.tree.leaves(got), wants, strict=True):
        error = np.abs(np.asarray(one) - other).max() / max(np.abs(other).max(), 1e-3 * top, 1e-9)
        assert error <= most, error


@pytest.fixture(autouse=True)
def as_users_write():
    """Let JAX promote, as it does by default."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def bad_filler(monkeypatch):
    """Rows that do not exist are NaN, or the largest integers."""

    def fill_badly(parts, source, selection, starts, counts):
        fill(parts, source, selection, starts, counts)
        for part, count in zip(parts, counts, strict=True):
            is_float = np.issubdtype(part.dtype, np.floating)
            part[count:] = np.nan if is_float else np.iinfo(part.dtype).max

    fill = transfer.fill_parts
    monkeypatch.setattr(transfer, "fill_parts", fill_badly)


@pytest.mark.parametrize("engine", ["shard_map", "jit"])
@pytest.mark.parametrize("loss", [batch_norm, contrastive], ids=lambda loss: loss.__name__)
def test_any_rows(on_group, bad_filler, loss, engine):
    """Losses and gradients are those of one device, and no filler is seen."""
    fn = step_of(loss) if engine == "shard_map" else without_axis(step_of(loss))
    f = synk.function(fn, ["x", "y"], reduce="mean", engine=engine)
    with jax.enable_x64(True):
        for rows in (5, 8, 5):
            assert_near(f(X[:rows], Y[:rows], WEIGHTS), serial(step_of(loss), X[:rows], Y[:rows]), 1e-11)


@pytest.mark.parametrize("engine", ["shard_map", "jit"])
def test_updates(on_group, engine):
    """Calls of rows that divide and that do not update one variable in turn, as on one device."""
    fn = step_of(barlow) if engine == "shard_map" else without_axis(step_of(barlow))
    v, w = synk.shared(jax.tree.map(np.float32, WEIGHTS), name="v"), jax.tree.map(np.float32, WEIGHTS)

    def then(loss, slopes):
        v.update(jax.tree.map(lambda old, slope: old - slope / 8, v.value, slopes))
        return loss

    f = synk.function(lambda x, y: fn(x, y, v.value), reduce="mean", then=then, engine=engine)
    for rows in (8, 7, 7, 8, 3, 8):
        x, y = X[:rows].astype(np.float32), Y[:rows].astype(np.float32)
        loss, slopes = serial(step_of(barlow), x, y, w=w)
        w = jax.tree.map(lambda old, slope: old - slope / 8, w, slopes)
        assert_close(f(x, y), loss, rtol=1e-4)
        assert_close(v.value, w, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("replicas", "rows"), [(2, 5), (3, 8), (4, 3)])
def test_running_variance(replicas, rows):
    """Of all rows, not the mean of the parts': what SyncBatchNorm of torch had to learn for 5 rows beside 3."""

    def stats(x, w):
        n, slope = lax.psum(len(x), AXIS), jax.grad(lambda x: (normed(x) ** 3 @ w).mean())(x)
        return lax.psum(((x - mean(x)) ** 2).sum(0), AXIS) / (n - 1), slope * len(x)

    w = X[-1].astype(np.float32)
    with group_of("devices", replicas):
        f = synk.function(stats, ["x"], outputs=("mean", "concat"))
        x = X[:rows].astype(np.float32)
        variance, slope = f(x, w)
        assert_close(variance, x.var(0, ddof=1))
        assert_close(slope, serial(stats, x, w=w)[1], rtol=1e-4, atol=1e-4)


def test_noise_drawn_by_shape(on_group):
    """One replica draws it, so it has the bits of one device."""
    drop = lambda x, key: x * jax.random.bernoulli(key, 0.5, x.shape)  # noqa: E731
    f = synk.function(drop, ["x"], reduce="concat", engine="jit")
    for key in (jax.random.key(1), jax.random.PRNGKey(1)):
        np.testing.assert_array_equal(f(numbers(7), key), jax.jit(drop)(numbers(7), key))


@pytest.mark.parametrize("engine", ["shard_map", "jit"])
def test_where_rows_come_from(four, engine):
    """Rows of data of every place, picked in every way, are those of arrays."""
    f = synk.function(
        lambda x: (x - mean(x), mean(x)) if engine == "shard_map" else (x - x.mean(0), x.mean(0)),
        outputs=("concat", "mean"),
        engine=engine,
    )
    x = numbers(13)
    for given in (x, jnp.asarray(x), *(synk.data(x, place=place) for place in ("host", "scatter", "broadcast"))):
        for batch in (None, 7, slice(1, 12, 2), np.array([12, -1, 5])):
            rows = x[:batch] if isinstance(batch, int) else x[batch] if batch is not None else x
            assert_close(f(given, batch=batch), (rows - rows.mean(0), rows.mean(0)))
    loop = list(f.iterate(x, batches=synk.minibatches(13, 4, shuffle=False), prefetch=2))
    assert_close([now for _, now in loop], [x[at : at + 4].mean(0) for at in range(0, 13, 4)])


@pytest.mark.parametrize("engine", ["shard_map", "jit"])
def test_data_on_the_devices_stays_there(four, engine):
    """A call over arrays and broadcast data that lie on the devices sends nothing from the host."""
    y = synk.data(numbers(5), place="broadcast")
    f = synk.function(lambda x, y: (x @ y.T).sum(0), ["x"], engine=engine)
    x = jax.device_put(numbers(8), jax.NamedSharding(four.mesh, jax.sharding.PartitionSpec(AXIS)))
    want = f(x, y)
    with jax.transfer_guard_host_to_device("disallow_explicit"):
        got = f(x, y)
    assert_close(got, want)
    y[2] = 7
    assert_close(f(x, y), (numbers(8) @ y[:].T).sum(0))


@pytest.mark.parametrize("engine", ["shard_map", "jit"])
def test_transformed(four, engine):
    """Gradients, maps and compilation around a call are those of the serial function."""

    def cubes(x, w):
        return (normed(x @ w) ** 3).mean()

    def alone(x, w):
        return jax.vmap(cubes, (0, None), axis_name=AXIS)(x[None], w)[0]

    f = synk.function(cubes if engine == "shard_map" else alone, ["x"], reduce="mean", engine=engine)
    w = jnp.asarray(numbers(2, 2, seed=1))
    for rows in (7, 3):
        x = jnp.asarray(numbers(rows))
        for around in (jax.jit, lambda g: jax.grad(g, 1), lambda g: jax.jit(jax.grad(jax.checkpoint(g), 1))):
            assert_close(around(f)(x, w), around(alone)(x, w), rtol=1e-4, atol=1e-4)
        ws = jnp.stack([w, 2 * w])
        assert_close(jax.vmap(f, (None, 0))(x, ws), jax.vmap(alone, (None, 0))(x, ws), rtol=1e-4, atol=1e-4)


def test_even_calls_keep_their_program(four):
    """A call of rows that do not divide leaves the others the program that they had."""

    def made():
        return synk.function(lambda x: x - mean(x), reduce="concat", name="f")

    f, other = made(), made()
    f(numbers(7))
    before = other.compile(numbers(8)).as_text()
    assert f.compile(numbers(8)).as_text() == before
    other(numbers(7))
    assert other.compile(numbers(8)).as_text() == before
    before = f.stats.compilations
    for rows in (7, 8, 7, 8):
        f(numbers(rows))
    assert f.stats.compilations == before


@needs_devices(4)
@pytest.mark.parametrize(
    "loss", [batch_norm, convolution, contrastive, barlow, softmax], ids=lambda loss: loss.__name__
)
def test_work_is_divided(four, loss):
    """Products and convolutions have ceil(n / replicas) rows on a device."""
    f = synk.function(step_of(loss), ["x", "y"], reduce="mean")
    x, y, w = (jax.tree.map(np.float32, tree) for tree in (np.tile(X, (2, 1)), np.tile(Y, (2, 1)), WEIGHTS))
    text = f.compile(x[:45], y[:45], w).as_text()
    found = re.findall(r"= (\w+\[[\d,]*\])\S* (?:dot|convolution)\((.*?)\)", text)
    assert found, text
    for of_all in found:
        for shape in re.findall(r"\[([\d,]+)\]", " ".join(of_all)):
            dims = shape.split(",")
            assert sum(dim in ("45", "46", "47", "48") for dim in dims) <= (loss is contrastive), of_all


TELLING = {
    "rank": {"fn": lambda x: mean(x) + jnp.float32(synk.rank())},
    "size": {"fn": lambda x: mean(x) / synk.size()},
    "ppermute": {"fn": lambda x: lax.ppermute(x.sum(0), AXIS, [(0, 1), (1, 2), (2, 3), (3, 0)])},
    "scatter": {"fn": lambda x: x - mean(x), "outputs": "scatter"},
    "stack": {"fn": mean, "outputs": "stack"},
    "size in then": {"fn": mean, "then": lambda m: m * synk.size()},
    "sum in then": {"fn": mean, "then": lambda m: lax.psum(m, AXIS)},
    "all_reduce in then": {"fn": mean, "then": lambda m: synk.all_reduce(m, "sum")},
}


@pytest.mark.parametrize("case", TELLING)
def test_what_tells_replicas_apart(four, case):
    """It would mean another thing where one replica takes the rows, so such a call raises."""
    f = synk.function(**{"reduce": "mean", **TELLING[case]})
    f(numbers(8))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"communicates[\s\S]*divide"):
            f(numbers(7))
    f(numbers(8))


def test_variables(four):
    """Rows in them are all rows, and not written; values that differ raise."""
    x = numbers(7)
    held, apart = synk.shared(np.zeros((1, 2), np.float32), name="held"), synk.shared(np.zeros(2, np.float32), name="a")
    synk.scatter(held, x)
    read = synk.function(lambda: mean(held.value), reduce="mean")
    assert_close(read(), x.mean(0))
    with pytest.raises(ValueError, match="held holds rows"):
        synk.function(lambda: held.update(held.value - mean(held.value)))()
    synk.function(lambda x: apart.update(x.sum(0)))(x)
    with pytest.raises(synk.errors.DivergedError, match="a: its replicas"):
        synk.function(lambda x: mean(x) + apart.value, reduce="mean")(x)


@pytest.mark.parametrize("meet", [lambda x: lax.pmean(x, AXIS), lambda x: synk.all_reduce(x, "mean")])
def test_an_error_of_its_own(four, meet):
    """A function that fails behind its collective raises that error for any number of rows."""
    f = synk.function(lambda x: meet(x.mean(0)) @ jnp.ones(5), reduce="mean")
    for rows in (8, 7, 7):
        with pytest.raises(TypeError, match="dot_general requires contracting dimensions"):
            f(X[:rows])


def test_a_row_for_each_row_of_a_broadcast_argument(four):
    """What fits all rows, and no part of them, runs as one replica; also the second time, without compiling."""
    f = synk.function(lambda x, y: (lax.all_gather(x, AXIS, tiled=True).sum(1) * y).sum(), inputs=["x"], reduce="mean")
    for _ in range(2):
        assert_close(f(X[:7], np.arange(7.0)), (X[:7].sum(1) * np.arange(7.0)).sum())
    assert f.stats.compilations == 1


def test_each_number_of_rows_is_a_program(four):
    """The third number of rows for which one function compiles gives a warning, once."""
    f = synk.function(lambda x: x - x.mean(0), reduce="concat", engine="jit")
    f(X[:5]), f(X[:6]), f(X[:5])
    with pytest.warns(UserWarning, match=r"for 5, 6, 7 rows.*drop_last=True.*cache="):
        f(X[:7])
    f(X[:9])


def test_explanation(four):
    """It says who runs the rows and why, and which operations run whole on every device."""
    divided = synk.function(lambda x: x - mean(x), reduce="concat")
    assert divided.explain(X[:8]).way == "each replica runs its rows"
    assert divided.explain(X[:7]).way.startswith("7 rows do not divide over 4 replicas: all devices make one replica")
    assert divided.explain(X[:7]).whole == []
    mixed = synk.function(lambda x, w: (x[::-1][jnp.argsort(x[:, 0])] @ w).mean(), inputs=["x"], engine="jit")
    explained = mixed.explain(X[:11], np.ones((6, 5)))
    assert explained.way.startswith('engine="jit"') and any("sort" in name for name in explained.whole)


def test_over_batches(four):
    """Each batch has its own statistics, and entries of rows are joined."""
    f = synk.function(lambda x: ((x - x.mean(0)).sum(1), x.std()), outputs=("concat", "mean"), engine="jit")
    rows, spread = f.over(X, batches=synk.minibatches(24, 7, shuffle=False))
    parts = [X[at : at + 7] for at in range(0, 24, 7)]
    assert_close(rows, np.concatenate([(part - part.mean(0)).sum(1) for part in parts]))
    assert_close(spread, sum(part.std() * len(part) for part in parts) / 24)


def test_check_names_the_cure(four):
    """For coupled rows it is engine="jit", and for a psum of means an op that fits."""
    with pytest.raises(synk.LawError, match='engine="jit" runs all rows as one device does'):
        synk.function(lambda x: x / x.std(0), reduce="concat").check(X[:8])
    with pytest.raises(synk.LawError, match=r"a collective combines by its op too.*pmean means of rows"):
        synk.function(lambda x: lax.psum(x.mean(0), AXIS), reduce="mean").check(X[:8])


@pytest.mark.parametrize(
    ("options", "call"),
    [
        ({"reduce": "stack"}, {}), ({"reduce": "scatter"}, {}), ({"wire": "bf16"}, {}), ({"blocks": 2}, {}),
        ({}, {"num_slices": 2}), ({}, {"batch_s": [0]}),
    ],
)  # fmt: skip
def test_what_speaks_of_parts_is_refused(four, options, call):
    """There is one part; the error comes before anything runs."""
    with pytest.raises(ValueError, match=r'engine="jit" runs all rows.* as one part, so it does not go with'):
        synk.function(lambda x: x.sum(0), engine="jit", **options)(X[:8], **call)


@pytest.mark.parametrize("engine", ["shard_map", "jit"])
def test_a_row_that_is_not_finite(four, engine):
    """It is named, and nothing is updated."""
    v = synk.shared(np.zeros(2, np.float32))
    fn = (lambda x: mean(jnp.log(x))) if engine == "shard_map" else (lambda x: jnp.log(x).mean(0))
    f = synk.function(fn, reduce="mean", then=v.update, nan="raise", engine=engine)
    x = np.abs(numbers(7)) + 1
    f(x)
    kept = v.value
    x[5] = -1
    with pytest.raises(FloatingPointError, match="row 5"):
        f(x)
    assert_close(v.value, kept)


def draws():
    """Drawn programs, groups and rows."""
    random = np.random.default_rng(52)
    groups = [("devices", 1), ("devices", 3), ("devices", 4), ("devices", 8), ("simulated", 4)]
    for _ in range(20):
        group = groups[random.integers(len(groups))]
        program, engine = PROGRAMS[random.integers(len(PROGRAMS))], ("shard_map", "jit")[random.integers(2)]
        yield pytest.param(program, engine, *group, int(random.integers(1, 18)))


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "engine", "kind", "n", "rows"), list(draws()))
def test_drawn(bad_filler, loss, engine, kind, n, rows):
    """Losses and gradients are those of one device, by itself with the axis, and by engine="jit" without."""
    fn = step_of(loss) if engine == "shard_map" else without_axis(step_of(loss))
    with jax.enable_x64(True), group_of(kind, n):
        f = synk.function(fn, ["x", "y"], reduce="mean", engine=engine)
        got, want = f(X[:rows], Y[:rows], WEIGHTS), serial(step_of(loss), X[:rows], Y[:rows])
        assert_near(got, want, 1e-9 if rows <= 2 else 1e-11)


@needs_devices(3)
@pytest.mark.parametrize("n", [1, 3])
def test_rows_of_jax_lie_anywhere(n):
    """Rows of JAX that divide come from one device, whole from each, or cut over the replicas."""
    with synk.init(n) as group:
        f = synk.function(lambda x: x - x.mean(0), reduce="concat", engine="jit")
        places = [group.devices[0], group.replicated, group.stacked]
        for rows in (jnp.asarray(X), *(jax.device_put(jnp.asarray(X), place) for place in places)):
            assert_close(f(rows), X - X.mean(0))
            np.testing.assert_array_equal(rows, np.asarray(jnp.asarray(X)))
