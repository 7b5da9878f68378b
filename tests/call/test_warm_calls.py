"""Warm calls: each call after the first gives what a first one would have given, whatever it shares with those before."""

from functools import partial

import jax
import numpy as np
import pytest

import synk

from ..helpers import mapped, numbers, slow_but

HOW = {
    "numpy": lambda x: x,
    "read in place": mapped,
    "of jax": jax.numpy.asarray,
    "data": synk.data,
    "narrowed": lambda x: synk.data(x.astype(np.float64)),
    "broadcast": lambda x: synk.data(x, place="broadcast"),
    "scatter": lambda x: synk.data(x, place="scatter"),
    "scatter, read in place": lambda x: synk.data(mapped(x), place="scatter"),
}
INDEXES = {
    "random": lambda rng: rng.integers(0, 23, 16),
    "int32": lambda rng: rng.integers(0, 23, 16).astype(np.int32),
    "strided": lambda rng: rng.integers(0, 23, 32)[::2],
    "negative": lambda rng: rng.integers(-23, 23, 16),
    "unsigned": lambda rng: rng.integers(0, 23, 16).astype(np.uint8),
    "consecutive": lambda rng: np.arange(16) + rng.integers(0, 7),
    "list": lambda rng: rng.integers(0, 23, 16).tolist(),
}


def weighted():
    """A function of rows, and of a number that all see."""
    return synk.function(lambda x, scale: (x.sum(0) * scale, x), inputs=["x"], outputs=("sum", "concat"))


def same(found, rows, scale):
    np.testing.assert_array_equal(found[0], rows.sum(0) * np.float32(scale))
    np.testing.assert_array_equal(found[1], rows)


@pytest.mark.parametrize(
    ("how", "index"),
    [*((how, "random") for how in HOW), *((how, index) for how in ("numpy", "scatter") for index in INDEXES)][1:],
)
def test_batches(group, how, index):
    """Whatever brings the rows, and however they are named."""
    x, f, rng = numbers(23), weighted(), np.random.default_rng(0)
    given = HOW[how](x)
    for call in range(4):
        batch = INDEXES[index](rng)
        same(f(given, call / 2, batch=batch), x[batch], call / 2)
    assert f.stats.compilations == 1 or "scatter" in how  # an exchange is a program too
    assert (f.stats.calls, f.stats.rows) == (4, 64)


@pytest.mark.parametrize("how", HOW)
def test_whole(group, how):
    """All rows, others in each call."""
    f = weighted()
    for call in range(4):
        x = numbers(16, seed=call)
        same(f(HOW[how](x), call / 2), x, call / 2)
    assert f.stats.compilations == 1


@pytest.mark.parametrize("each", [False, True], ids=["one for all", "one for each"])
def test_local_batches(group, each):
    """`batch_s` on rows that the replicas hold, and a variable's with them."""
    x, f, rng = numbers(24), weighted(), np.random.default_rng(0)
    given, held = synk.data(x, place="scatter"), 24 // group.size
    parts = x.reshape(group.size, held, 2)
    for call in range(4):
        index = rng.integers(0, held, (group.size, 2) if each else 2)
        rows = np.concatenate([part[i] for part, i in zip(parts, np.broadcast_to(index, (group.size, 2)), strict=True)])
        same(f(given, call, batch_s=index), rows, call)


@pytest.mark.parametrize("beside", ["numpy", "data", "broadcast"])
def test_batches_of_both_kinds(group, beside):
    """`batch_s` for rows on the replicas, `batch` for those beside them."""
    x, y, rng, held = numbers(24), numbers(23), np.random.default_rng(0), 24 // group.size
    f = synk.function(lambda x, y: (x * y).sum(0))
    given, other = synk.data(x, place="scatter"), HOW[beside](y)
    for _ in range(4):
        index, batch = rng.integers(0, held, 2), rng.integers(0, 23, 2 * group.size)
        rows = np.concatenate([part[index] for part in x.reshape(group.size, held, 2)])
        np.testing.assert_array_equal(f(given, other, batch_s=index, batch=batch), (rows * y[batch]).sum(0))


@pytest.mark.parametrize("how", HOW)
def test_wrong_index(group, how):
    """Indexes are looked at in every call, not the first alone."""
    x, f = numbers(23), weighted()
    given = HOW[how](x)
    for _ in range(3):
        f(given, 1.0, batch=np.arange(16)[::-1])
        for wrong in (23, -24):
            with pytest.raises(IndexError, match=f"holds the index {wrong}, but x has 23 rows"):
                f(given, 1.0, batch=np.array([*range(15), wrong]))
    assert f.stats.calls == 3


@pytest.mark.parametrize("place", ["host", "broadcast", "scatter"])
def test_data_changes(group, place):
    """What is written, shortened, moved, replaced or freed between calls that look alike."""
    x, f, batch = numbers(24), weighted(), np.arange(16)[::-1].copy()
    given = synk.data(x.copy(), place=place)
    same(f(given, 1.0, batch=batch), x[batch], 1.0)
    given[5] = 7.0
    x[5] = 7.0
    same(f(given, 1.0, batch=batch), x[batch], 1.0)
    given.set_length(16)
    same(f(given, 1.0, batch=batch), x[batch], 1.0)
    with pytest.raises(IndexError, match="holds the index 16, but x has 16 rows"):
        f(given, 1.0, batch=batch + 1)
    y = numbers(24, seed=3)
    given.set_value(y)
    same(f(given, 1.0, batch=batch), y[batch], 1.0)
    given.to("host" if place == "broadcast" else "broadcast")
    same(f(given, 1.0, batch=batch), y[batch], 1.0)
    given.free()
    with pytest.raises(synk.SynkError, match="it was freed"):
        f(given, 1.0, batch=batch)


@pytest.mark.parametrize("place", ["host", "broadcast", "scatter"])
def test_written_right_after(group, place):
    """A call takes what its arrays hold when it is made."""
    x, f = numbers(24), weighted()
    given, found = synk.data(x, place=place), []
    batch = np.arange(16)[::-1].copy()
    for call in range(6):
        np.copyto(batch, (np.arange(16)[::-1] + call) % 24)
        found.append((f(given, 1.0, batch=batch), batch.copy()))
        batch[:] = 0
    for result, wanted in found:
        same(result, x[wanted], 1.0)


@pytest.mark.parametrize("how", HOW)
def test_all_rows_in_order(group, how):
    """Indexes of all rows in order are not picked from rows that are scattered already: the same bits in each call."""
    x = np.random.default_rng(0).normal(scale=2, size=(104, 3)).astype(np.float32)
    given, every, f = HOW[how](x), np.arange(104), synk.function(jax.scipy.special.erf, reduce="concat")
    before = np.asarray(f(given, batch=every))
    for _ in range(2):
        np.testing.assert_allclose(f(given, batch=every[::-1].copy())[::-1], before, rtol=1e-6, atol=1e-6)
    compilations = f.stats.compilations
    np.testing.assert_array_equal(f(given, batch=every), before)
    assert f.stats.compilations == compilations


def test_rows_on_disk_follow_rows_in_memory(group):
    """Rows that are replaced by some in a file are brought to the devices once, as those are from the first."""
    x, f, batch = numbers(24), weighted(), np.arange(16)[::-1].copy()
    given = synk.data(x, place="scatter")
    for _ in range(2):
        same(f(given, 1.0, batch=batch), x[batch], 1.0)
    on_disk = mapped(x)
    given.set_value(on_disk)
    same(f(given, 1.0, batch=batch), x[batch], 1.0)
    on_disk[:] = 0  # past the data
    same(f(given, 1.0, batch=batch), x[batch], 1.0)


def test_data_that_grow(group):
    """With every call, and a batch of one size."""
    x, f = numbers(24), weighted()
    for rows in range(8, 24):
        same(f(x[:rows], 1.0, batch=np.array([3, 1])), x[[3, 1]], 1.0)
    assert f.stats.compilations == 1


@pytest.mark.parametrize("number", [1.0, np.True_, np.array(1.0)])
def test_slices_that_are_no_number(group, number):
    """A second call refuses what the first refuses."""
    f = weighted()
    for _ in range(2):
        with pytest.raises(TypeError, match="num_slices is"):
            f(numbers(8), 1.0, num_slices=number)
        f(numbers(8), 1.0)


def test_lengths_differ(group):
    """Arguments of other lengths than those before are refused as in a first call."""
    x, y = numbers(24), numbers(23)
    f = synk.function(lambda x, y: (x * y).sum(0))
    batch = np.arange(16)[::-1]
    for _ in range(2):
        f(x, x, batch=batch)
        with pytest.raises(ValueError, match="argument y has 23 rows, but x has 24"):
            f(x, y, batch=batch)


def test_dtypes_differ(group):
    """Each call has the dtypes of its own arguments, numbers of another kind too."""
    f = synk.function(lambda x, scale: (x.sum(0), scale), inputs=["x"], outputs=("sum", "first"))
    x = np.arange(16)
    for scale in (2, 2.5, True, np.float32(0.5), np.arange(1)):
        for dtype in (np.int32, np.float32, np.uint32):
            for _ in range(2):
                total, seen = f(x.astype(dtype), scale)
                assert (total.dtype, total) == (dtype, 120)
                assert seen.dtype == jax.numpy.asarray(scale).dtype
                np.testing.assert_array_equal(seen, scale)


@pytest.mark.smoke
def test_what_is_returned_follows_names(group):
    """Other trees, Monoids and Weighted values under names of the function's own are noticed, though equations are equal."""
    x = np.arange(6, dtype=np.float32)
    scale, key, is_weighted = 1.0, "loss", False
    merged = synk.function(lambda x: synk.Monoid(x.sum(), jax.numpy.add, lambda s: s * scale), outputs="merge")
    named = synk.function(lambda x: {key: x.sum()})
    pair = synk.function(
        lambda x: synk.Weighted(x.mean(), len(x)) if is_weighted else (x.mean(), len(x)), outputs="mean"
    )
    assert float(merged(x)) == 15 and [*named(x)] == ["loss"] and len(pair(x)) == 2
    scale, key, is_weighted = 3.0, "total", True
    for _ in range(2):
        assert float(merged(x)) == float(merged.serial(x)) == float(merged.over(x, batches=[4, [4, 5]])) == 45
        assert [*named(x)] == [*named.serial(x)] == ["total"]
        assert float(pair(x)) == 2.5
    compilations = merged.stats.compilations
    merged(x), merged.serial(x), merged.check(x)
    assert float(merged(x)) == 45 and merged.stats.compilations <= compilations + 3


@pytest.mark.smoke
def test_check_tells_of_a_stale_merge(group):
    """A Monoid whose functions read something that has changed is stale, and no op is to blame."""
    scale = {"by": 1.0}
    f = synk.function(lambda x: synk.Monoid(x.sum(), jax.numpy.add, lambda s: s * scale["by"]), outputs="merge")
    x = np.arange(6, dtype=np.float32)
    f(x)
    scale["by"] = 3.0
    assert float(f.serial(x)) == 45
    with pytest.raises(synk.LawError, match="has changed since it was traced"):
        f.check(x)


KEYS = {
    "by default": lambda key: key,
    "in place": lambda key: jax.device_put(key, synk.group().replicated),
    "on one device": lambda key: jax.device_put(key, jax.devices()[-1]),
    "raw": jax.random.key_data,
    "data": lambda key: key,
}


@pytest.mark.smoke
@pytest.mark.parametrize(("slices", "then"), slow_but([(1, True)], [(1, False), (1, True), (2, False), (2, True)]))
def test_keys_lie_anywhere(group, slices, then):
    """Typed PRNG keys of two kinds and raw ones, in turn: each call draws as the serial function does."""
    x = numbers(8)

    def noisy(x, key):
        return (x * jax.random.normal(key, ())).sum()

    f = synk.function(noisy, inputs=["x"], then=(lambda s, key: s + jax.random.uniform(key)) if then else None)
    for seed in range(3):
        for impl in ("threefry2x32", "rbg"):
            key = jax.random.key(seed, impl=impl)
            for how, place in KEYS.items():
                given = place(key)
                if how == "raw" and impl == "rbg":
                    continue  # raw keys are of JAX's default kind
                want = noisy(x, key) + (jax.random.uniform(key) if then else 0.0)
                np.testing.assert_allclose(f(x, given, num_slices=slices), want, rtol=1e-5)
                np.testing.assert_allclose(f.serial(x, given), want, rtol=1e-5)
    f.check(x, jax.random.key(7), num_slices=slices)


@pytest.mark.smoke
def test_keys_are_traced_and_mapped(group):
    """Under jit, vmap and grad, a key is a key; and so is one that a loop gives each batch."""
    x = numbers(8)
    f = synk.function(lambda x, key: (x * jax.random.normal(key, ())).sum(), inputs=["x"])
    keys = jax.random.split(jax.random.key(0), 3)
    want = [x.sum() * jax.random.normal(key, ()) for key in keys]
    for _ in range(2):
        np.testing.assert_allclose([jax.jit(f)(x, key) for key in keys], want, rtol=1e-5)
        np.testing.assert_allclose(jax.vmap(lambda key: f(x, key))(keys), want, rtol=1e-5)
        np.testing.assert_allclose([*f.iterate(x, synk.each(keys), batches=[None] * 3)], want, rtol=1e-5)
        np.testing.assert_allclose([*f.stream((x, key) for key in keys)], want, rtol=1e-5)


@pytest.mark.smoke
def test_arrays_lie_anywhere(four):
    """Arrays on a device by default, by name, on all or in their places; they stay as they are, whatever is donated."""
    w = synk.shared(np.zeros(2, np.float32))
    f = synk.function(lambda x, c: (x * c[None]).sum(0), ["x"], then=lambda s: setattr(w, "value", w.value + s))
    x, c, total = numbers(8), np.array([1.0, 3.0], np.float32), np.zeros(2, np.float32)
    places = [
        jax.numpy.asarray,
        lambda a: jax.device_put(a, jax.devices()[:2][-1]),
        lambda a: jax.device_put(a, synk.group().replicated),
        lambda a: jax.device_put(a, synk.group().stacked) if len(a) % 4 == 0 else a,
    ]
    given = [(place(x), other(c)) for place in places for other in places]
    for rows, scale in [*given, *given]:
        f(rows, scale)
        total += (x * c).sum(0)
        np.testing.assert_array_equal(w.value, total)
        np.testing.assert_array_equal(rows, x)
        np.testing.assert_array_equal(scale, c)


@pytest.mark.parametrize("gone", ["freed", "deleted", "donated"])
def test_known_kinds_look_at_values(group, gone):
    """Data that was freed, and arrays that were deleted or donated, raise in a call whose kind is known; others go on."""
    w = synk.shared(np.float32(0))
    f = synk.function(lambda x: x.sum(), then=lambda s: setattr(w, "value", w.value + s))
    make = synk.data if gone == "freed" else jax.numpy.asarray
    here, away = make(numbers(8)), make(numbers(8))
    f(away), f(away)
    if gone == "freed":
        away.free()
    elif gone == "deleted":
        away.delete()
    else:
        jax.jit(lambda x: x + 1, donate_argnums=0)(away)
    before = float(w.value)
    for _ in range(2):
        with pytest.raises((synk.SynkError, RuntimeError, ValueError), match=r"freed|deleted"):
            f(away)
    assert float(w.value) == before
    f(here)
    np.testing.assert_allclose(w.value, before * 1.5)


@pytest.mark.parametrize("batch", [None, [1, 0, 3, 2, 5, 4, 7, 6]])
def test_minibatch_data_stays_on_the_replicas(group, batch):
    """Alone, and beside rows that a batch picks."""
    x, scattered = numbers(8), synk.data(numbers(8), place="scatter", minibatch=True)
    f = synk.function(lambda x, y: (x * y).sum(0)) if batch else synk.function(lambda y: y.sum(0))
    args = (x, scattered) if batch else (scattered,)
    for _ in range(2):
        np.testing.assert_allclose(f(*args, batch=batch), (x[batch] * x).sum(0) if batch else x.sum(0), rtol=1e-6)
        assert f.explain(*args, batch=batch).inputs[-1].how == "rows that lie on the replicas"


def test_callbacks_that_hold_new_objects_in_each_trace(group):
    """They are no change, as in Diffrax, whose errors hold their messages and the stack; a number that changes is."""

    def host(seen, value):
        seen.append(1)
        return value

    def guarded(x):
        seen, shape = [], jax.ShapeDtypeStruct(x.shape, x.dtype)
        return factor["by"] * jax.pure_callback(partial(host, seen), shape, x, vmap_method="sequential")

    factor = {"by": 2.0}
    f, x = synk.function(guarded, reduce="concat"), np.arange(6, dtype=np.float32)
    for _ in range(2):
        np.testing.assert_array_equal(f(x), 2 * x)
        f.check(x)
    factor["by"] = 3.0
    with pytest.raises(synk.LawError, match="has changed since it was traced"):
        f.check(x)
