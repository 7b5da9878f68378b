"""Law: what holds in groups over processes. Each case runs in every process of a gang."""

import errno
import functools
import resource
import sys
import time
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils

import synk
from synk._distributed import agreement

from ..harness import say
from ..helpers import assert_close as close
from ..helpers import numbers
from ..test_law import by_numpy, statistics
from .programs import join, raises

CASES = {}


def case(fn):
    CASES[fn.__name__] = fn
    return fn


class Noted(dict):
    """Values by which gangs are compared, bit for bit, and the folder of the run."""

    def __init__(self, folder):
        super().__init__()
        self.folder = Path(folder)

    def __call__(self, name, tree):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            array = np.asarray(leaf)
            self[f"{name}{jax.tree_util.keystr(path)}"] = array.view(np.uint16) if array.itemsize == 2 else array


def law(folder, *names):
    """Run the cases of the law, report each by its name, and keep the values that it notes."""
    group = join(heartbeat=100)  # nobody is to be found gone, however busy the machine
    for name in names or CASES:
        noted, start = Noted(folder), time.process_time()
        try:
            CASES[name](group, noted)
        except BaseException:
            say(name, error=traceback.format_exc()[-4000:])
            if not isinstance(sys.exc_info()[1], AssertionError):
                traceback.print_exc()
        else:
            say(name, seconds=round(time.process_time() - start, 2))
        np.savez(Path(folder) / f"{name}.{jax.process_index()}.npz", **noted)
    say("end")


def normal(rows, columns=3, seed=0):
    """Return numbers whose sums depend on the order."""
    return np.random.default_rng([seed, rows]).normal(size=(rows, columns)).astype(np.float32)


@case
def over_processes(group, note):
    """Arrays that lie over the processes, wherever rows may come from; refused rows of batches that went ahead."""
    x, batches = numbers(6 * group.size), list(synk.minibatches(6 * group.size, 5, seed=1))
    spread = jax.make_array_from_callback(x.shape, group.stacked, lambda index: x[index])
    f = synk.function(lambda x: x.sum(0), name="f")
    for given in (spread, synk.data(spread)):
        for _ in range(2):
            got = [np.asarray(each) for each in f.iterate(given, batches=batches)]
            close(got, [x[batch].sum(0) for batch in batches])
            close(f.over(given, batches=batches), x.sum(0))
            close(f.serial(given), x.sum(0))
            f.check(given, num_slices=2)
            assert f.blame(given) is None
    close([np.asarray(f(each)) for each in synk.prefetch([spread, x, spread])], [x.sum(0)] * 3)
    close([np.asarray(each) for each in f.stream([spread, x])], [x.sum(0)] * 2)
    beside = synk.function(lambda x, w: (x * w).sum(0), inputs=["x"])
    whole = jax.device_put(np.float32(2), group.replicated)
    close(beside.serial(spread, whole), 2 * x.sum(0))
    x[3] = -1000
    log = synk.function(lambda x: jnp.log(x + 500).sum(0), name="log", nan="raise")
    for prefetch in (0, 2):
        results = log.iterate(
            x, batches=[np.arange(group.size) + 4, np.arange(group.size)[::-1] + 3], prefetch=prefetch
        )
        next(results)
        raises(FloatingPointError, "row 3", lambda: next(results))  # noqa: B023  # called here


@functools.partial(synk.function, outputs=("stack", "first", lambda parts: jnp.median(parts, axis=0)))
def of_parts(x):
    return x.sum(0), x[0], x.max()


@case
def ops(group, noted):
    """Every op, for rows that divide, do not, and are fewer than the replicas."""
    n = group.size
    for rows in sorted({n - 1, n, 2 * n + 1} - {0}):
        x = numbers(rows)
        close(statistics(x), by_numpy(x.astype(np.float64)))
        parts = [part for part in np.array_split(x, n) if len(part)]
        close(of_parts(x), (np.stack([p.sum(0) for p in parts]), x[0], np.median([p.max() for p in parts])))


@functools.partial(synk.function, outputs=("sum", "mean", "max", "concat"))
def moments(x):
    return jnp.sum(x * x, 0), jnp.mean(x, 0), jnp.max(x), x * 3


def moments_by_numpy(x):
    x = x.astype(np.float64)
    return (x * x).sum(0), x.mean(0), x.max(), x * 3


@case
def bits(group, noted):
    """Sums of numbers that rounding orders: the same in every process."""
    n = group.size
    for rows in sorted({n - 1, 2 * n, 2 * n + 1} - {0}):  # shapes that other cases have compiled
        x = normal(rows)
        noted(f"{rows}", got := moments(x))
        close(got, moments_by_numpy(x))


@case
def slices(group, noted):
    """Slices, of rows that divide and do not."""
    n = group.size
    for rows in (4 * n, 4 * n + 1):
        x = normal(rows)
        noted(f"{rows}", got := moments(x, num_slices=2))
        close(got, moments_by_numpy(x))


@case
def batches(group, noted):
    """Batches of every kind."""
    n, x = group.size, normal(31)
    rows = 2 * n
    index = np.random.default_rng(0).integers(-31, 31, rows)
    mask = np.random.default_rng(1).permutation(np.arange(31) < rows)
    for batch in (rows, slice(3, 3 + rows), slice(3 + rows, 3, -1), slice(0, 2 * rows, 2), mask, index, index.tolist()):
        close(moments(x, batch=batch), moments_by_numpy(x[:batch] if isinstance(batch, int) else x[batch]))
    index = np.append(index, 5)
    close(moments(x, batch=index), moments_by_numpy(x[index]))
    raises(IndexError, "31", lambda: moments(x, batch=[3, 31]))
    raises(ValueError, "batch", lambda: moments(x, batch=[]))


@case
def data(group, noted):
    """`synk.data` in the three places, whole and picked, and after rows were written."""
    n = group.size
    x = normal(2 * n + 1)
    index = np.random.default_rng(0).integers(-len(x), len(x), 2 * n)
    for place in ("host", "scatter", "broadcast"):
        held = synk.data(x.copy(), place=place)
        close(moments(held), moments_by_numpy(x))
        noted(place, got := moments(held, batch=index))
        close(got, moments_by_numpy(x[index]))
        held[2:4] = 7
        other = x.copy()
        other[2:4] = 7
        close(moments(held, batch=index), moments_by_numpy(other[index]))


@case
def batch_s(group, noted):
    """Rows picked on each replica: as many on each, and other numbers."""
    n = group.size
    x = normal(3 * n)
    held, parts = synk.data(x, place="scatter"), np.array_split(x, n)
    close(moments(held, batch_s=[2, 0]), moments_by_numpy(np.concatenate([p[[2, 0]] for p in parts])))
    each = [[1, 2] if rank == n - 1 else [0] for rank in range(n)]
    want = np.concatenate([p[e] for p, e in zip(parts, each, strict=True)])
    close(moments(held, batch_s=each), moments_by_numpy(want))
    close(moments.serial(held, batch_s=each), moments_by_numpy(want))


def trainer(w):
    """Return a step of linear regression that updates `w` in then."""

    @synk.function(inputs=["x"], outputs=("mean", "mean"), name="train")
    def train(x, lr):
        def loss(w):
            return jnp.mean((x[:, :2] @ w - x[:, 2]) ** 2)

        return jax.value_and_grad(loss)(w.value)

    @train.then
    def train(value, grad, lr):
        w.value = w.value - lr * grad
        return value

    return train


@case
def then(group, noted):
    """A training step with rows that divide and do not; check, serial, iterate, prefetch, and equal replicas."""
    w = synk.shared(np.zeros(2, np.float32), name="w")
    size = 8 * group.size
    train, x, oracle = trainer(w), normal(3 * size + 1), np.zeros(2)

    def expect(rows):
        nonlocal oracle
        off = rows[:, :2].astype(np.float64) @ oracle - rows[:, 2]
        oracle = oracle - 0.1 * 2 * off @ rows[:, :2] / len(rows)
        return np.mean(off**2)

    lr = np.float32(0.1)
    for rows in (size, size + 1):
        want = expect(x[:rows])
        close(train.serial(x, lr, batch=rows), want, rtol=1e-4)
        close(train(x, lr, batch=rows), want, rtol=1e-4)
        close(w.value, oracle, rtol=1e-4)
    train.check(x, lr, batch=size + 1)
    close(w.value, oracle, rtol=1e-4)
    picks = list(synk.minibatches(len(x), size, seed=1, drop_last=True))
    losses = list(train.iterate(x, lr, batches=picks))
    close([float(one) for one in losses], [expect(x[pick]) for pick in picks], rtol=1e-4)
    for pick, (rows,) in zip(picks, synk.prefetch(((x[pick],) for pick in picks), size=2), strict=True):
        close(train(rows, lr), expect(x[pick]), rtol=1e-3)
    close(w.value, oracle, rtol=1e-3)
    synk.check_replicas(w)
    noted("w", w.value)


@case
def tune(group, noted):
    """All processes choose the same settings of a step, and no variable changes."""
    import optax

    import synk.train

    step = synk.train.step(lambda w, x: ((x[:, :2] @ w - x[:, 2]) ** 2).mean(), np.zeros(2, np.float32), optax.sgd(0.1))
    x = normal(8 * group.size + 1)
    with jax.numpy_dtype_promotion("standard"):
        for seconds in (2, 0.01):
            options = synk.contrib.tune(step, x, seconds=seconds)
            multihost_utils.assert_equal(np.array(options.get("num_slices", 1)), "processes choose alike")
        assert not step.params.value.any() and step.stats.calls == 0
        close(step.with_options(**options)(x), np.mean(x[:, 2] ** 2), rtol=1e-4)
        # Slices are refused in every process, and all go on.
        alone = synk.train.step(lambda w, x: synk.all_reduce(x[:, 2] * w, "sum").mean(), np.float32(1), optax.sgd(0.1))
        assert synk.contrib.tune(alone, x[: 8 * group.size], seconds=2) == {}
    synk.check_replicas(*step.variables.values())


@case
def words_of_pmap(group, noted):
    """Axes of another name, rows that know nothing of one another, and what is equal on all replicas already."""
    x, size = normal(4 * group.size), group.size
    centre = synk.function(
        lambda x: (x - lax.pmean(x.mean(0, keepdims=True), "batch"), lax.psum(x.sum(), "batch")),
        outputs=("concat", "same"),
        axis_name="batch",
    )
    for _ in range(2):
        close(centre(x), (x - x.mean(0), x.sum()))
        close(centre.serial(x), (x - x.mean(0), x.sum()))
    odd = normal(4 * size + 1)
    close(synk.map(lambda row: row * 2)(odd), odd * 2)
    close(synk.map(lambda row: lax.pmean(row, "i"), outputs="same", axis_name="i")(x[:size]), x[:size].mean(0))
    w = synk.shared(np.zeros(x.shape[1], np.float32))
    learn = synk.function(lambda x: w.update(w.value + lax.pmean(x.mean(0), "replica")))
    for times in (1, 2):
        learn(x)
        synk.check_replicas(w)
        close(w.value, times * x.mean(0))
    stays = synk.function(lambda x: x + 1, reduce="scatter")(x)
    assert stays.array.sharding.is_equivalent_to(group.stacked, 2)
    close(jnp.sum(stays.array), (x + 1).sum(), rtol=1e-4)


@case
def shared(group, noted):
    """Variables that replicas update by themselves, that hold rows, and what reads them."""
    n = group.size
    own, rows = synk.shared(np.zeros(2, np.float32), name="own"), synk.shared(np.zeros((1, 2), np.float32), name="rows")
    x = numbers(2 * n + 1)
    count = synk.function(lambda x: own.update(own.value + x.sum(0), slices="add"), name="count")
    count(x)
    parts = np.array_split(x, n)
    for rank in range(n):
        close(own.get_value(rank), parts[rank].sum(0))
        close(own.get_value(rank, borrow=True), parts[rank].sum(0))
    if n > 1:
        raises(synk.errors.DivergedError, "own", lambda: own.value)
        raises(synk.errors.DivergedError, "own", lambda: synk.check_replicas(own))
    count(x, num_slices=2)
    close(own.get_value(n - 1), 2 * parts[-1].sum(0))
    synk.scatter(rows, x)
    assert synk.contrib.synkhronos.get_lengths(rows) == [len(part) for part in parts]
    assert synk.contrib.synkhronos.get_shapes(rows) == [part.shape for part in parts]
    total = synk.function(lambda: (rows.value.sum(0), rows.value), outputs=("sum", "concat"), name="total")
    close(total(), (x.sum(0), x))
    close(total.serial(), (x.sum(0), x))
    total.check()
    close(total(batch_s=[0]), (sum(p[0] for p in parts), np.stack([p[0] for p in parts])))
    both = synk.function(lambda y: (rows.value * y).sum(0), name="both")
    close(both(x), (x * x).sum(0))
    if n > 1:
        raises(ValueError, "rows", lambda: both(x[:1]))

    @synk.function(inputs=[], name="double")
    def double():
        rows.value = rows.value * 2

    double()
    close(synk.gather(rows, nd_up=0), x * 2)


@case
def collectives(group, noted):
    """Every collective, with equal and unequal lengths."""
    n = group.size
    x = normal(2 * n + 1, 2)
    parts = np.array_split(x, n)
    v = synk.shared(np.zeros((1, 2), np.float32), name="v")
    synk.scatter(v, x)
    close(synk.gather(v, nd_up=0), x)
    close(v.get_value(n - 1), parts[-1])
    v.set_value(np.ones((4, 2), np.float32), rank=n - 1)
    assert synk.contrib.synkhronos.get_lengths(v)[-1] == 4
    if n > 1:
        raises(ValueError, "rows", lambda: synk.gather(v))
        raises(ValueError, "rows", lambda: synk.all_reduce(v))
    synk.all_gather(v)
    close(v.value, np.concatenate([*parts[:-1], np.ones((4, 2))]))
    synk.scatter(v, x, batch=np.arange(2 * n)[::-1].copy())
    close(synk.gather(v), x[: 2 * n][::-1].reshape(n, 2, 2))
    synk.broadcast(v)
    close(v.value, x[: 2 * n][::-1][:2])
    synk.check_replicas(v)
    for rank in range(n):
        v.set_value(x[rank : rank + 2], rank=rank)
    each = np.stack([x[rank : rank + 2] for rank in range(n)]).astype(np.float64)
    for op, want in {"sum": each.sum(0), "mean": each.mean(0), "max": each.max(0), "min": each.min(0)}.items():
        noted(op, got := synk.reduce(v, op, in_place=False))
        close(got, want)
    close(synk.gather(v), each)
    synk.reduce(v, "sum")
    close(v.get_value(0), each.sum(0))
    if n > 1:
        close(v.get_value(n - 1), each[-1])
        raises(synk.errors.DivergedError, "v", lambda: synk.check_replicas(v))
    v.set_value(x[:2], rank=0)
    weights = list(range(1, n + 1))
    synk.all_reduce(v, "mean", weights=weights)
    close(v.value, np.average(each, axis=0, weights=weights))
    synk.broadcast(v, np.full((2, 2), 5, np.float32))
    close(v.value, np.full((2, 2), 5))


@case
def inside(group, noted):
    """Collectives on traced values, and which rank runs."""
    n = group.size
    x = numbers(2 * n)
    centred = synk.function(lambda x: x - synk.all_reduce(x.mean(0), "mean"), reduce="concat", name="centred")
    close(centred(x), x - x.mean(0))
    joined = synk.function(lambda x: synk.all_gather(x), reduce="first", name="joined")
    close(joined(x), x)
    close(synk.function(lambda: synk.rank(), reduce="stack")(), np.arange(n))
    close(centred(numbers(2 * n + 1)), numbers(2 * n + 1) - numbers(2 * n + 1).mean(0))
    if n > 1:
        told = synk.function(lambda x: synk.all_reduce(x.sum(), "sum") + jnp.float32(synk.rank()), name="told")
        raises(ValueError, "communicates inside", lambda: told(numbers(2 * n + 1)))


def batch_norm(x):
    mean = lax.pmean(x.mean(0), "replica")
    return (x - mean) / jnp.sqrt(lax.pmean(((x - mean) ** 2).mean(0), "replica") + 1e-3)


@case
def coupled(group, note):
    """Rows that see one another, which do not divide: one replica that all devices make takes them."""
    x, w = normal(7), normal(3, 2, seed=1)
    with jax.default_device(jax.local_devices()[0]):
        want = jax.vmap(lambda x: batch_norm(x) @ w, axis_name="replica")(x[None])[0]
    for engine in ("shard_map", "jit"):
        v, mean = synk.shared(w, name="v"), synk.shared(np.zeros(3, np.float32), name="mean")

        @synk.function(outputs=("concat", "mean"), engine=engine, name="normed")
        def normed(x):
            return batch_norm(x) @ v.value, lax.pmean(x.mean(0), "replica")  # noqa: B023  # called here

        @normed.then
        def normed_then(rows, now):
            mean.update(mean.value / 2 + now / 2)  # noqa: B023
            return rows

        for given in (x, synk.data(x), synk.data(x, place="scatter"), synk.data(x, place="broadcast")):
            got = normed(given)
            close(got, want)
        close(mean.value, x.mean(0) * (1 - 2.0**-4))
        even = normal(2 * group.size)
        close(normed(even)[0], (jax.vmap(lambda x: batch_norm(x) @ w, axis_name="replica")(even[None]))[0][0])
        close(normed(x), want)
        note(engine, [got, mean.value])


def coarse(keys):
    """Return noise that costs no compilation: the keys' own numbers."""
    return (jax.random.key_data(keys)[..., 1] >> 8).astype(jnp.float32)


@case
def keys(group, noted):
    """Noise of row_keys is that of each row; typed keys are arguments and variables."""
    n = group.size
    rows = 2 * n + 1
    x = np.zeros((rows, 2), np.float32)
    noisy = synk.function(lambda x, k: x + coarse(k)[:, None], reduce="concat", name="noisy")
    each = synk.row_keys(jax.random.key(0), rows)
    want = np.repeat(np.asarray(coarse(each))[:, None], 2, 1)
    noted("rows", got := noisy(x, each))
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(noisy(x[: 2 * n], each[: 2 * n]), want[: 2 * n])
    same = synk.function(lambda x, k: x + coarse(k), inputs=["x"], reduce="concat", name="same")
    np.testing.assert_array_equal(same(x, jax.random.key(1)), x + np.asarray(coarse(jax.random.key(1))))
    k = synk.shared(jax.random.key(3), name="k")
    draw = synk.function(lambda x: jnp.sum(x) + jax.random.uniform(k.value), reduce="mean", then=lambda u: advance(u))

    def advance(u):
        k.value = jax.random.split(k.value)[0]
        return u

    close(draw(x), jax.random.uniform(jax.random.key(3)))
    assert jnp.array_equal(jax.random.key_data(k.value), jax.random.key_data(jax.random.split(jax.random.key(3))[0]))
    synk.check_replicas(k)


@case
def halves(group, noted):
    """16-bit floats combine in float32, and come back in their dtype."""
    n = group.size
    for dtype in (jnp.bfloat16, np.float16):
        for rows in (2 * n, 2 * n + 1):
            x = normal(rows).astype(dtype)
            f = synk.function(lambda x: (x.sum(0), x.mean(0), x), outputs=("sum", "mean", "concat"), name="halves")
            got = f(x)
            assert all(one.dtype == dtype for one in got)
            wide = x.astype(np.float64)
            close(got[:2], (wide.sum(0), wide.mean(0)), rtol=2e-2, atol=5e-2)
            np.testing.assert_array_equal(np.asarray(got[2]), x)
            noted(f"{np.dtype(dtype).name} {rows}", got)
        scaled = synk.function(lambda x, rate: x * rate, inputs=["x"], reduce="concat", name="scaled")
        for rate in (0.5, jnp.asarray(0.5)):  # which take the dtype of what they meet, as on one device
            assert scaled(x, rate).dtype == dtype


@case
def composed(group, noted):
    """Under jit, grad and both, with rows that divide and do not."""
    n = group.size
    total = synk.function(lambda z: jnp.sum(z**2, 0), name="total")
    x = normal(n + 1)
    close(jax.jit(lambda x: total(x) * 2)(x), 2 * (x * x).sum(0))
    close(whole(jax.grad(lambda x: total(x).sum())(x)), 2 * x)
    x = normal(2 * n)
    close(whole(jax.jit(jax.grad(lambda x: total(x).sum()))(x)), 2 * x)


def whole(array):
    """Return the rows of an array over all processes, which JAX has left where they are."""
    return np.asarray(array) if array.is_fully_addressable else multihost_utils.process_allgather(array, tiled=True)


@case
def captured(group, noted):
    """Arrays over all processes as constants, stale constants, and a variable as an argument."""
    x = numbers(group.size + 1)
    w = synk.shared(np.float32([2, -1]), name="w")
    value = w.value

    def model(x):
        rows = jax.vmap(lambda row: jax.nn.relu(jnp.dot(row, value)) + jnp.where(row[0] > 0, value, -value).sum())(x)
        return rows + jnp.sort(value)[0] + value.at[0].set(1.0).sum()

    wanted = np.maximum(x @ [2, -1], 0) + np.where(x[:, 0] > 0, 1, -1) - 1 + 0
    f = synk.function(model, reduce="concat")
    for rows in (len(x), group.size, len(x)):
        close(f(x[:rows]), wanted[:rows])
        close(f.serial(x[:rows]), wanted[:rows])
    close(f(x, num_slices=2), wanted)
    close(jax.jit(f)(x), wanted)
    f.check(x)
    key = synk.function(lambda x: jax.random.key_data(jax.random.key(3)), ["broadcast"], "max")(1.0)
    noise = synk.function(
        lambda x: x[:, 0] + jax.vmap(jax.random.normal)(synk.row_keys(jax.random.wrap_key_data(key))), reduce="concat"
    )
    close(noise(x), noise.serial(x))
    settings = {"scale": 1.0}
    g = synk.function(lambda x: x.sum() * settings["scale"])
    close(g(x), x.sum())
    settings["scale"] = 3.0
    raises(synk.LawError, "reads from outside has changed", lambda: g.check(x))
    read = synk.function(lambda w, x: w.value[0] * x.sum())
    other = synk.shared(np.float32([5, 5]), name="other")
    for variable, times in [(w, 2), (other, 5), (w, 2)]:
        close(read(variable, x), times * x.sum())


@case
def pmap(group, noted):
    """The other engine gives the same bits."""
    n = group.size
    w = synk.shared(np.zeros(2, np.float32), name="w")

    def mean(x):
        return jnp.mean(x, 0), x * 2

    one = synk.function(mean, outputs=("mean", "concat"), engine="shard_map")
    other = synk.function(mean, outputs=("mean", "concat"), engine="pmap")
    for rows in (2 * n, 2 * n + 1):
        x = normal(rows)
        noted(f"{rows}", got := other(x))
        for a, b in zip(one(x), got, strict=True):
            np.testing.assert_array_equal(a, b)

    @synk.function(reduce="mean", engine="pmap")
    def step(x):
        return x.mean(0)

    @step.then
    def step(mean):
        w.value = w.value + mean

    x = normal(2 * n, 2)
    step(x)
    close(w.value, x.mean(0))
    synk.check_replicas(w)


@case
def local(group, noted):
    """Rows that each process alone holds: as many, other numbers, and none."""
    me, count, n = jax.process_index(), jax.process_count(), group.size
    here = n // count
    w = synk.shared(np.zeros(2, np.float32), name="w")
    train, lr = trainer(w), np.float32(0.1)
    unequal = [5, 2, 1, 6][:count]
    for given in ([2 * here] * count, unequal, [0, 2, 0, 5][:count] if count > 1 else [3], [1] + [0] * (count - 1)):
        parts = [normal(rows, seed=i) for i, rows in enumerate(given)]
        rows_of_all, mine = np.concatenate(parts), synk.local(parts[me])
        close(moments(mine), moments_by_numpy(rows_of_all))
        if given == unequal:
            close(moments(mine, num_slices=2), moments_by_numpy(rows_of_all))
            close(moments.serial(mine), moments_by_numpy(rows_of_all))
            close(train(mine, lr), np.mean(rows_of_all[:, 2] ** 2))
            train.check(mine, lr)
    parts = [normal(8, seed=i) for i in range(count)]
    picked = moments(synk.local(parts[me]), batch=list(range(me + 1)))
    close(picked, moments_by_numpy(np.concatenate([part[: i + 1] for i, part in enumerate(parts)])))
    for _ in train.iterate(synk.local(parts[me]), lr, batches=[list(range(here)), slice(2, 2 + here)]):
        pass
    synk.check_replicas(w)
    noted("w", w.value if count > 1 else np.zeros(2))
    raises(ValueError, "0 rows", lambda: moments(synk.local(normal(8)[:0])))
    close(moments(synk.local(parts[me])), moments_by_numpy(np.concatenate(parts)))
    if count > 1:  # a pick of none by one of them, and one that it refuses, which all leave together
        rest = np.concatenate([part[:3] for part in parts[1:]])
        for nothing in ([], slice(0, 0), np.zeros(8, bool)):
            batch = nothing if me == 0 else range(3)
            close(moments(synk.local(parts[me]), batch=np.asarray(batch) if me else batch), moments_by_numpy(rest))
        picks = [[0, 1], [] if me == 0 else [2], [1]]
        counted = synk.function(lambda x: x.shape[0] + 0 * x.sum(), name="counted")
        found = [float(n) for n in counted.iterate(synk.local(parts[me]), batches=picks)]
        assert found == [2 * count, count - 1, count], found
        close(float(counted.over(synk.local(parts[me]), batches=picks)), 4 * count - 1)
        refused = (IndexError, "index 99") if me == 0 else (ValueError, "process 0 has refused its synk.local rows")
        wrong = [99] if me == 0 else [0]
        raises(*refused, lambda: moments(synk.local(parts[me]), batch=wrong))
        close(moments(synk.local(parts[me])), moments_by_numpy(np.concatenate(parts)))
        raises(*refused, lambda: list(counted.iterate(synk.local(parts[me]), batches=[[0], wrong])))
        raises(*refused, lambda: moments.serial(synk.local(parts[me]), batch=wrong))
        # Rows that 32 bits do not hold, in one process.
        ids = np.array([3, 2**40 if me == 0 else 5, 4])
        raised = (ValueError, "out of bounds for int32") if me == 0 else refused
        raises(*raised, lambda: counted(synk.local(ids)))
        raises(*raised, lambda: counted.serial(synk.local(ids)))
        raises(*raised, lambda: list(counted.iterate(synk.local(ids), batches=[[0, 2], [1]])))
        close(float(counted(synk.local(ids), batch=[0, 2])), 2 * count)
        close(moments(synk.local(parts[me])), moments_by_numpy(np.concatenate(parts)))
        with synk.init(sorted(group.devices, key=lambda device: -device.process_index)):
            whole = synk.function(lambda x: (x, x.sum(0)), outputs=("concat", "sum"))
            rows_of_all = np.concatenate(parts[::-1])
            close(whole(synk.local(parts[me]))[0], rows_of_all)
            close(whole.serial(synk.local(parts[me]))[0], rows_of_all)
            whole.check(synk.local(parts[me]))


@case
def reads(group, noted):
    """Reads of a variable by one process alone do not disturb the others."""
    n = group.size
    w = synk.shared(np.zeros(2, np.float32), name="w")
    tree = synk.shared({"a": np.zeros(2, np.float32), "b": np.float32(0)}, name="tree")

    def update(a, b):
        w.value = w.value + a
        tree.value = {"a": tree.value["a"] + a, "b": b}

    step = synk.function(lambda x: (x[:, :2].sum(0), x[:, 2].sum()), then=update, name="step")
    for rows in (2 * n, 2 * n + 1, 2 * n):  # an uneven call has a program of its own, on which all agree
        for _ in range(2):
            step(normal(rows))
            if jax.process_index() == 0:
                for _ in range(2):
                    assert np.isfinite(w.value).all() and np.isfinite(w.get_value()).all()
                    assert np.isfinite(tree.value["a"]).all() and np.isfinite(tree.get_value()["b"])
    synk.check_replicas(w, tree)
    noted("w", w.value)


@case
def arguments(group, noted):
    """Trees, static and broadcast arguments, arrays that lie on devices already, results given back, and output_subset."""
    n = group.size
    x = normal(2 * n)

    def fn(tree, scale, power):
        return {"a": (tree["x"] * scale) ** power, "b": tree["y"].sum()}

    f = synk.function(fn, inputs={"scale": "broadcast", "power": "static"}, outputs={"a": "concat", "b": "sum"})
    y = np.arange(2 * n)
    for given in (x, jnp.asarray(x)):
        got = f({"x": given, "y": y}, 2.0, 2)
        close(got, {"a": (x * 2) ** 2, "b": y.sum()}, rtol=1e-4)
    again = f({"x": got["a"], "y": y}, jnp.float32(2), 1)
    close(again["a"], 2 * (2 * x) ** 2, rtol=1e-4)
    close(moments(again["a"], output_subset=[1]), (again["a"].mean(0),))
    assert moments.compile(x) is not None
    scattered = jax.make_array_from_callback(x.shape, group.stacked, x.__getitem__)  # as synk would cut it
    close(moments(scattered), moments_by_numpy(x))
    close(moments(jax.make_array_from_callback(x.shape, group.replicated, x.__getitem__)), moments_by_numpy(x))


@case
def moved(group, noted):
    """A user's arrays over all processes are scattered and broadcast as the values that they hold."""
    x = numbers(4 * group.size)
    by_rows = jax.make_array_from_callback(x.shape, group.stacked, x.__getitem__)
    by_columns = jax.sharding.NamedSharding(group.mesh, jax.sharding.PartitionSpec(None, "replica"))
    by_columns = jax.make_array_from_callback((2, len(x)), by_columns, x.T.__getitem__)
    f = synk.function(lambda rows, p: (rows * 2, p.sum(0)), inputs={"p": "broadcast"}, outputs=("concat", "mean"))
    close(f(by_rows, by_rows), (x * 2, x.sum(0)))
    close(f(by_rows, by_columns), (x * 2, x.T.sum(0)))


@case
def errors(group, noted):
    """Errors of one call leave variables as they were, in every process, and the group goes on."""
    n = group.size
    w = synk.shared(np.zeros(2, np.float32), name="w")
    train = trainer(w)
    x = normal(4 * n)
    train(x, np.float32(0.1))
    before = np.asarray(w.value)
    raises(ValueError, "rows", lambda: synk.function(lambda a, b: a.sum())(x, x[:-1]))
    raises(TypeError, "dot_general", lambda: synk.function(lambda x: x @ w.value)(x))
    raises(KeyError, "mine", lambda: synk.function(lambda x: {}["mine"])(x))
    raises(ValueError, "tree", lambda: w.set_value({"a": before}))
    np.testing.assert_array_equal(w.value, before)
    train(x, np.float32(0.1))


@case
def checkpoint(group, noted):
    """Process 0 saves and all load: equal and unequal variables, variables with rows. All raise an error of process 0."""
    n = group.size
    w = synk.shared({"a": np.float32(3), "b": jnp.arange(4, dtype=jnp.bfloat16)}, name="w")
    k, own = synk.shared(jax.random.key(7), name="k"), synk.shared(np.zeros(2, np.int8), name="own")
    rows = synk.shared(np.zeros((1, 2), np.float32), name="rows")
    variables, x = {"w": w, "k": k, "own": own, "rows": rows}, numbers(2 * n + 1)
    for rank in range(n):
        own.set_value(np.full(2, rank + 1, np.int8), rank=rank)
    synk.scatter(rows, x)
    raises(FileNotFoundError, "has no checkpoint", lambda: synk.load(noted.folder / "saved", variables))
    for step in range(3):
        synk.save(noted.folder / "saved", variables, step=step, extra={"n": n}, keep=2)
    w.value = {"a": np.float32(0), "b": jnp.zeros(4, jnp.bfloat16)}
    k.value = jax.random.key(0)
    synk.broadcast([own, rows], [np.zeros(2, np.int8), np.zeros((1, 2), np.float32)])
    raises(ValueError, "has no v", lambda: synk.load(noted.folder / "saved", {"v": w}))
    assert synk.load(noted.folder / "saved", variables) == (2, {"n": n})
    close(w.value, {"a": np.float32(3), "b": np.arange(4)})
    assert int(jax.random.key_data(k.value)[1]) == 7
    close(synk.gather(rows, nd_up=0), x)
    for rank in range(n):
        close(own.get_value(rank), np.full(2, rank + 1))
    raises(
        FileNotFoundError, "has no step 0; it has 1, 2", lambda: synk.load(noted.folder / "saved", variables, step=0)
    )
    synk.load(noted.folder / "saved", variables, step=1)
    synk.save(noted.folder / "saved", variables, step=1, extra={"n": n})
    assert (noted.folder / "saved" / "left-step-00000002").exists()
    if jax.process_index() == 0:
        (noted.folder / "a file").write_text("")
    raises(FileExistsError, "a file", lambda: synk.save(noted.folder / "a file", {"w": w}, step=1))
    synk.check_replicas(w, k)


@case
def in_shards(group, noted):
    """Variables in shards: steps of even, uneven and few rows are those of whole ones; read, saved, loaded, assigned."""
    import optax

    import synk.train

    start = {
        "w": normal(131, 127) / 11,
        "s": normal(3 * 131, 127).reshape(3, 131, 127) / 11,
        "b": np.zeros(127, np.float32),
    }
    x = normal(8 * group.size + 1, 131)

    def loss(p, x):
        h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w @ p["w"].T), None), x, p["s"])
        return jnp.mean((h @ p["w"] + p["b"][None]) ** 2) + jnp.sum(p["w"] ** 2) * x.mean() ** 2

    options = {"clip": 0.1, "ema": 0.5, "log": lambda grads, updates, params: jnp.abs(grads["w"]).sum()}
    with jax.numpy_dtype_promotion("standard"):
        whole, step = [
            synk.train.step(loss, start, optax.adam(0.01), shard_params=sharded, **options) for sharded in (False, True)
        ]
        for rows, slices in ((8 * group.size, 1), (1, 1), (8 * group.size + 1, 2)):
            close(step(x, batch=rows, num_slices=slices), whole(x, batch=rows, num_slices=slices))
        close(step.serial(x)[0], loss(step.params.value, x))
    close(step.params.value, whole.params.value)
    close(step.opt_state.get_value(group.size - 1), whole.opt_state.value)
    kept = step.ema.get_value(borrow=True)
    close(kept, whole.ema.value)
    synk.check_replicas(*step.variables.values())
    made = synk.shared(lambda: jnp.ones((131, 127)), "made", sharded=True)
    close(made.value, np.ones((131, 127)))
    synk.save(noted.folder / "shards", step.variables, step=1)
    for variable in step.variables.values():
        variable.value = jax.tree.map(jnp.zeros_like, variable.value)
    synk.load(noted.folder / "shards", step.variables)
    close(step.ema.value, kept, rtol=0, atol=0)
    close(step.opt_state.value, whole.opt_state.value)
    synk.load(noted.folder / "shards", whole.variables)
    close(whole.ema.value, kept, rtol=0, atol=0)


@case
def checkpoints_of_groups(group, noted):
    """The processes that own the variables save them, whatever the current group: all together, or each its own."""
    me = jax.process_index()
    w, fresh = synk.shared(np.float32(3), name="w"), synk.shared(np.float32(0), name="fresh")
    w.set_value(np.float32(4))
    with synk.init(jax.local_devices()) as alone:
        own = synk.shared(np.float32(10 + me), name="own")
        own.set_value(np.float32(me))
        for step in (1, 2, 3):
            synk.save(noted.folder / "together", {"w": w}, step=step, keep=1, background=True)
        mixed = {"w": w, "fresh": fresh}
        raises(synk.SynkError, "w lives in Group(", lambda: synk.save(noted.folder / "mixed", mixed, step=1))
    raises(synk.SynkError, "own in Group(", lambda: synk.load(noted.folder / "together", {"w": w, "own": own}))
    synk.save(noted.folder / f"own {me}", {"own": own}, step=5 + me)
    own.set_value(np.float32(-1))
    assert synk.load(noted.folder / f"own {me}", {"own": own}) == (5 + me, None) and own._group is alone
    assert float(own.get_value(0)) == me
    with synk.simulate(2):
        assert synk.load(noted.folder / "together", {"w": w}) == (3, None) and float(w.value) == 4
    assert not (noted.folder / "mixed").exists()
    synk.load(noted.folder / "together", {"w": fresh})
    assert fresh._group is group


@case
def known(group, noted):
    """Statistics and merges of all rows, uneven and in slices."""

    @synk.function
    def f(x):
        product = jax.lax.associative_scan(jnp.matmul, jnp.round(x[:, :2, None] * x[:, None, :2]) % 3)[-1]
        return synk.stats.var(x), synk.stats.argmax(x), synk.stats.quantile(x, 0.5), synk.Monoid(product, jnp.matmul)

    for rows, slices in ((11, 1), (12, 1), (13, 3)):
        x = numbers(rows, 3)
        var, most, middle, product = f(x, num_slices=slices)
        close((var, middle), (x.var(0), np.median(x, 0)), rtol=1e-4)
        assert most.tolist() == x.argmax(0).tolist()
        close(product, f.serial(x)[3])
        batches = [slice(0, 5), [7, 5, 6], slice(8, rows)]
        order = np.concatenate([np.arange(rows)[batch] for batch in batches])
        var, most, middle, product = f.over(x, batches=batches, num_slices=slices)
        close((var, middle), (x[order].var(0), np.median(x[order], 0)), rtol=1e-4)
        assert most.tolist() == x[order].argmax(0).tolist()
        close(product, f.serial(x, batch=order)[3])
        joined = synk.function(lambda x: (2 * x, x[0]), outputs=("concat", lambda firsts: firsts.sum(0)))
        rows, firsts = joined.over(x, batches=batches, num_slices=slices)
        assert type(rows) is type(firsts) is np.ndarray
        close(rows, 2 * x[order])


@case
def blaming(group, noted):
    """All processes blame the same row and refuse the same call. Explanations are alike."""
    w = synk.shared(np.float32(0), name="w")

    @synk.function(reduce="mean", nan="raise", name="f")
    def f(x):
        return jnp.log(x).mean()

    @f.then
    def f(mean):
        w.value = w.value + mean
        return mean

    x = np.ones((23, 2), np.float32)
    for slices in (1, 2):
        assert f.blame(x, num_slices=slices) is None
        for bad in (0, 11, 22):
            x[bad] = -1
            assert f.blame(x, num_slices=slices).row == bad
            try:
                f(x, num_slices=slices)
            except FloatingPointError as error:
                assert f"row {bad} " in str(error)
            else:
                raise AssertionError("it took the step")
            x[bad] = 1
        f(x, num_slices=slices)
        assert float(w.value) == 0
        e = f.explain(x, num_slices=slices)
        assert sum(e.lengths) == 23
        assert e.was_compiled
        assert f.explain(x, num_slices=slices, run=1).measured.calls == 1


@case
def travelling(group, noted):
    """Narrow sums, blocks, and slices that memory asks for; the group's memory is that of process 0."""
    x = numbers(43, 300)
    for wire in ("bf16", "int8"):
        total = synk.shared(np.zeros(300, np.float32), name=f"total of {wire}")

        @synk.function(wire=wire)
        def f(x):
            return x.sum(0)

        @f.then
        def f(found, total=total):
            total.value = total.value + found
            return found

        for slices in (1, 3):
            close(f(x, num_slices=slices), x.sum(0), rtol=0.02, atol=np.abs(x).sum(0).max() * 0.02)
        synk.check_replicas(total)
        f.check(x)
    w = numbers(300, 7) / 1000
    g = synk.function(lambda x: jnp.tanh(x @ w).sum(0), blocks=8)
    assert np.asarray(g(x)).tobytes() == np.asarray(g.serial(x)).tobytes() == np.asarray(g(x, num_slices=2)).tobytes()
    g.check(x)


@case
def pieces(group, noted):
    """An optimizer's state in shards over all processes, and PowerSGD's own of each replica; saved and loaded."""
    import optax

    import synk.train

    # A leaf large enough to lie in shards.
    x, start = normal(43, 6), {"w": normal(6, 2741) / 4, "b": np.zeros(7, np.float32)}

    def loss(params, x):
        return jnp.mean((x @ params["w"] + params["b"].sum() - jnp.tanh(x[:, :1])) ** 2)

    def train(step, count):
        return [float(step(x, batch=slice(i % 3, 43), num_slices=1 + i % 2)) for i in range(count)]

    def made(**options):
        return synk.train.step(loss, start, optax.sgd(0.05, 0.9), **options)

    plain, sharded, thin = made(), made(shard_optimizer=True), made(wire=synk.contrib.PowerSGD(1))
    close(train(sharded, 4), train(plain, 4))
    close(sharded.opt_state.value, plain.opt_state.value)
    close(sharded.opt_state.get_value(0, borrow=True), plain.opt_state.value)
    sharded.check(x)
    close(sharded.serial(x), plain.serial(x))
    train(thin, 4)
    synk.check_replicas(sharded.params, sharded.opt_state, thin.params, thin.variables["basis"])
    for step, options in ((sharded, {"shard_optimizer": True}), (thin, {"wire": synk.contrib.PowerSGD(1)})):
        folder = noted.folder / f"pieces {sorted(options)[0]}"
        synk.save(folder, step.variables, step=4)
        again = made(**options)
        assert synk.load(folder, again.variables) == (4, None)
        assert train(again, 3) == train(step, 3)
    sharded.opt_state.value = plain.opt_state.value
    train(sharded, 2)


@case
def staying(group, noted):
    """Outputs that stay on their replicas go from function to function, and are read by all together."""
    f = synk.function(lambda x: x + 1, reduce="scatter")
    total = synk.function(lambda x: (x.sum(0), synk.stats.argmax(x)), outputs=("sum", "merge"))
    for rows, slices in ((11, 1), (12, 1), (13, 3), (1, 1)):
        x = numbers(rows, 3)
        found = f(f(x, num_slices=slices))
        close(total(found)[0], (x + 2).sum(0))
        close(f(found, batch=[0, rows - 1])[:], (x + 3)[[0, rows - 1]])
        close(found[:], x + 2)
        close(f.serial(found), x + 3)


@case
def neighbours(group, noted):
    """Stencils, scans and pairs over all rows, wherever they lie."""
    smooth = synk.function(lambda x: x[:-3] + x[3:], inputs=[synk.Overlap(2, 1, edge="reflect")], reduce="scatter")
    for rows, slices in ((11, 1), (12, 1), (13, 3)):
        x = numbers(rows, 3)
        once = np.pad(x, ((2, 1), (0, 0)), mode="reflect")
        twice = np.pad(once[:-3] + once[3:], ((2, 1), (0, 0)), mode="reflect")
        found = smooth(smooth(x, num_slices=slices), num_slices=slices)
        close(found[:], twice[:-3] + twice[3:])
        close(synk.contrib.scan(jnp.add, found), np.cumsum(found[:], 0), rtol=1e-4)
        close(synk.contrib.pairs(jnp.maximum, x), np.maximum(x[:, None], x[None]).sum(1))
        batch = [rows - 1, 0, 4]
        picked = np.pad(x[batch], ((2, 1), (0, 0)), mode="reflect")
        close(smooth(x, batch=batch)[:], picked[:-3] + picked[3:])


@case
def checkpoint_of_any_dtype(group, noted):
    """Values that process 0 has read reach the others bit for bit, whatever their dtypes and sizes."""
    rng = np.random.default_rng(0)
    kinds = [np.int8, np.float32, jnp.bfloat16, np.bool_, np.complex64, np.uint16]
    value = [jnp.asarray(rng.normal(size=(5 * i, 3, 17)) > 0, kind) for i, kind in enumerate(kinds)]
    value += [np.float32(-0.0), np.float32(np.nan), rng.normal(size=(3, 299)).astype(np.float32)]
    w = synk.shared(value, name="w")
    synk.save(noted.folder / "dtypes", {"w": w}, step=1)
    w.value = jax.tree.map(lambda leaf: np.zeros_like(leaf), value)
    assert synk.load(noted.folder / "dtypes", {"w": w}) == (1, None)
    assert [np.asarray(leaf).tobytes() for leaf in w.value] == [np.asarray(leaf).tobytes() for leaf in value]


@case
def checkpoint_in_background(group, noted):
    """Process 0 writes while all go on. The next save reports a failed write in all processes. Parts can be loaded."""
    folder = noted.folder / "background"
    w, own = synk.shared(np.zeros(5, np.float32), name="w"), synk.shared(np.zeros(2, np.int8), name="own")
    own.set_value(np.ones(2, np.int8), rank=group.size - 1)
    for step in (1, 2, 3):
        w.value = np.full(5, step, np.float32)
        synk.save(folder, {"w": w, "own": own}, step=step, background=True)
    w.value = np.zeros(5, np.float32)
    assert synk.load(folder, {"w": w}, partial=True) == (3, None) and w.value[0] == 3
    assert synk.load(folder, {"own": own}, step=2, partial=True)[0] == 2
    assert [int(own.get_value(rank)[0]) for rank in range(group.size)] == [0] * (group.size - 1) + [1]
    synk.save("/dev/null/no", {"w": w}, step=4, background=True)
    raises(NotADirectoryError, "step 4 was not written in the background", lambda: synk.save(folder, {"w": w}, step=5))
    raises(FileNotFoundError, "has no step 5", lambda: synk.load(folder, {"w": w}, step=5))
    synk.save(folder, {"w": w}, step=5)
    if jax.process_index() == 0:
        (folder / "step-00000005" / "arrays.npz").unlink()
    raises(synk.errors.CheckpointError, "arrays.npz is missing", lambda: synk.load(folder, {"w": w}, step=5))


@case
def full_disk(group, noted):
    """A disk that is full for process 0 fails a save in all processes, now and in the background. All go on."""
    folder, w = noted.folder / "full", synk.shared(np.zeros(1 << 20, np.float32), name="w")
    synk.save(folder, {"w": w}, step=0)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    for step, in_background in ((1, False), (2, True)):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, most))
        try:
            synk.save(folder, {"w": w}, step=step, background=in_background)
            synk.save(folder, {"w": w}, step=step)
            raise AssertionError("nothing was raised")
        except OSError as error:
            assert (type(error), error.errno, error.filename) == (OSError, errno.EFBIG, str(folder)), repr(error)
            assert ("step 2 was not written in the background" in str(error)) == in_background
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert agreement.PEERS.ended is None and synk.load(folder, {"w": w}) == (0, None)
    synk.save(folder, {"w": w}, step=3, background=True)
    assert synk.load(folder, {"w": w}) == (3, None)
    raises(NotADirectoryError, "Not a directory: '/dev/null/no'", lambda: synk.save("/dev/null/no", {"w": w}, step=4))


@case
def first_values(group, noted):
    """First values that differ raise in all processes, and the named remedy helps, also where they lie in shards."""
    import optax

    import synk.train

    w = synk.shared(np.full(3, jax.process_index(), np.float32), name="w")
    for act in (lambda: w.value, lambda: synk.function(lambda x: x.sum() * w.value)(np.ones(4, np.float32))):
        if jax.process_count() > 1:
            raises(synk.errors.DisagreementError, "differ in the value of w", act)
    synk.broadcast(w)
    assert w.value.tolist() == [0, 0, 0]
    synk.check_replicas(w)
    follower = optax.GradientTransformation(lambda params: params, lambda grads, state, params=None: (grads, state))
    start = synk.shared(np.full((3, 2), jax.process_index(), np.float32), name="params")

    def make():
        # The state in shards is made of the parameters as soon as the step is made.
        return synk.train.step(lambda params, x: jnp.sum(params) * jnp.mean(x), start, follower, shard_optimizer=True)

    if jax.process_count() > 1:
        raises(synk.errors.DisagreementError, "params", make)
    synk.broadcast(start)
    step = make()
    assert not step.opt_state.value.any() and step.opt_state.value.shape == (3, 2)
    synk.check_replicas(step.opt_state)
    made = [synk.shared(np.zeros(2)) for _ in range(1 + jax.process_index())][-1]  # its name is another in each
    assert made.value.tolist() == [0, 0]


@case
def groups(group, noted):
    """Replicas simulated in each process, beside the group of all."""
    x = normal(7)
    total = synk.function(lambda x: x.sum(0), name="total")
    with synk.simulate(3):
        close(total(x), x.sum(0))
    close(total(x), x.sum(0))
    if jax.process_count() > 1:
        assert f"of {jax.process_count()} processes" in repr(group)
        assert [d.process_index for d in group.devices[group._local_ranks.start : group._local_ranks.stop]] == [
            jax.process_index()
        ] * len(group._local_ranks)
        raises(
            ValueError,
            "this is process",
            lambda: synk.init([d for d in jax.devices() if d.process_index != jax.process_index()]),
        )
        assert synk.group() is group
