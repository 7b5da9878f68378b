"""Host buffers: a call takes what arrays hold when it is made, results are nobody else's memory, and memory on its way to
a device is used again only once nothing refers to it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import synk
from synk._data import host_buffers

from ..helpers import assert_same, numbers

pytestmark = pytest.mark.usefixtures("group")

ROWS, COLUMNS = 4096, 48  # of 768 KiB in all: memory that is kept, not allocated each time
PLACES = ("raw", "host", "scatter", "broadcast")
BATCHES = {
    "all": None,
    "a run": slice(5, 3001),
    "uneven": slice(5, 3002),
    "rows": np.random.default_rng(0).permutation(ROWS)[:2048],
}
CALLS = 13  # more than programs may be in flight

rows = synk.function(lambda x: x, reduce="concat", name="rows")
total = synk.function(lambda x: x.sum(0), name="total")


@synk.function
def slow(x):
    """What keeps the devices busy, so that the calls behind it have not begun when they return."""
    return jax.lax.fori_loop(0, 40, lambda i, m: jnp.tanh(m @ m), x)


def busy():
    slow(np.ones((512, 256), np.float32))


def filled(value, is_aligned):
    """Rows of one value, in memory that JAX takes over as it is, or that it must copy."""
    memory = np.empty((ROWS * COLUMNS + 32) * 4, np.uint8)
    start = -memory.ctypes.data % 64 + (0 if is_aligned else 4)
    x = memory[start : start + ROWS * COLUMNS * 4].view(np.float32).reshape(ROWS, COLUMNS)
    x[...] = value
    return x


# What is written later.


@pytest.mark.parametrize(("place", "is_aligned"), [*((place, True) for place in PLACES), ("raw", False)])
@pytest.mark.parametrize("batch", BATCHES)
def test_later_writes_are_not_seen(place, batch, is_aligned):
    """Of arrays and of data, picked in any way, while the call has not run yet."""
    x = filled(1, is_aligned)
    given = x if place == "raw" else synk.data(x, place=place)
    total(given, batch=BATCHES[batch])  # compiles
    busy()
    got = total(given, batch=BATCHES[batch])
    given[...] = 2
    count = ROWS if batch == "all" else len(x[BATCHES[batch]])
    np.testing.assert_array_equal(got, np.full(COLUMNS, count))
    np.testing.assert_array_equal(total(given, batch=BATCHES[batch]), np.full(COLUMNS, 2 * count))


@pytest.mark.parametrize("place", PLACES)
def test_later_writes_to_indexes_are_not_seen(place):
    """What a batch holds is taken when the call is made, too."""
    x, (index, *_) = distinct()
    given = x if place == "raw" else synk.data(x, place=place)
    rows(given, batch=index)
    busy()
    want = x[index]
    got = rows(given, batch=index)
    index[:] = 0
    assert_same(got, want)


@pytest.mark.parametrize("is_aligned", [True, False], ids=["aligned", "unaligned"])
def test_later_writes_to_broadcast_arguments_are_not_seen(is_aligned):
    """Nor of those, as arrays and as data."""
    f = synk.function(lambda x, *ws: sum(w.sum(0) for w in ws) * x.sum(), ["x"])
    ws = [filled(1, is_aligned), *(synk.data(filled(1, is_aligned), place=place) for place in PLACES[1:])]
    one = np.ones(2, np.float32)
    f(one, *ws)
    busy()
    got = f(one, *ws)
    for w in ws:
        w[...] = 2
    np.testing.assert_array_equal(got, np.full(COLUMNS, 2 * 4 * ROWS))


@pytest.mark.parametrize("count", [5, 6])
def test_later_writes_to_small_arrays_are_not_seen(count):
    """Rows and others of a few bytes, in a call whose like has gone before."""
    x, y = numbers(count), np.arange(5, dtype=np.float32)
    for _ in range(3):
        both(x, y)
    busy()
    got = both(x, y)
    want = x.copy(), y.copy()
    x[...], y[...] = 7, 8
    assert_same(got, want)
    assert_same(both(x, y), (x, y))


def distinct():
    """Data of rows that are all different, and batches of it."""
    x = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)
    return x, [np.random.default_rng(seed).permutation(ROWS)[:2048] for seed in range(24)]


# Calls that wait in line.


@pytest.mark.parametrize("count", [2048, 2047])
@pytest.mark.parametrize("place", PLACES[1:])
def test_results_of_many_calls(place, count):
    """Calls that wait in line each have their own rows."""
    x, batches = distinct()
    data = synk.data(x, place=place)
    rows(data, batch=batches[0][:count])
    busy()
    got = [rows(data, batch=batch[:count]) for batch in batches]
    assert_same(got, [x[batch[:count]] for batch in batches])


KINDS = {
    "float": lambda i: i / 4,
    "int": lambda i: 1 - i,
    "bool": lambda i: i % 3 == 0,
    "numpy number": lambda i: np.float32(i),
    "numpy float": lambda i: np.float64(i),
    "numpy": lambda i: np.arange(5, dtype=np.float32) * i,
    "narrowed": lambda i: np.arange(5.0) * i,
    "of jax": lambda i: jnp.arange(5) * i,
    "16 bits": lambda i: jnp.full(3, i, jnp.bfloat16),
    "key": jax.random.key,
    "raw key": jax.random.PRNGKey,
}
GIVEN = {"numpy": np.copy, "of jax": jnp.asarray, "narrowed": np.float64}


@synk.function(inputs=["x"], outputs=("concat", "first"))
def both(x, y):
    """The arguments."""
    return x, jax.random.key_data(y) if jnp.issubdtype(y.dtype, jax.dtypes.prng_key) else y


@pytest.mark.parametrize(
    ("kind", "given"), [*((kind, "numpy") for kind in KINDS), ("float", "of jax"), ("int", "narrowed")]
)
def test_arguments_of_many_calls(kind, given):
    """Each has its own, rows and others, small ones too; twice, as memory comes back."""
    xs, ys = [numbers(6, seed=i) for i in range(CALLS)], [KINDS[kind](i) for i in range(CALLS)]
    want = [np.asarray(jnp.asarray(jax.random.key_data(y) if kind == "key" else y)) for y in ys]
    for _ in range(2):
        busy()
        got = [both(GIVEN[given](x), y) for x, y in zip(xs, ys, strict=True)]
        assert_same([x for x, _ in got], xs)
        assert_same([y for _, y in got], want)


@pytest.mark.parametrize("op", ["concat", "stack", "first"])
def test_later_calls_change_no_result(op):
    """Where a function returns what it was given."""
    same = synk.function(lambda x, y: (x, y), ["x"], (op, "first"))
    calls = [(numbers(6, seed=i), np.full(2, i, np.float32)) for i in range(CALLS)]
    want = [jax.tree.map(np.array, same(*call)) for call in calls]  # copied before the next one
    for (x, y), (some, twos) in zip(calls, want, strict=True):
        assert set(some.ravel()) <= set(x.ravel()) and set(twos.ravel()) == set(y)
    got = [same(*call) for call in calls]
    assert_same(got, want)


@pytest.mark.parametrize("place", PLACES)
def test_results_share_no_memory_with_arguments(place):
    """Large or small, whole or picked: writing to what was given changes no result."""
    for x in (filled(1, True), np.ones((4, 2), np.float32)):
        given = x if place == "raw" else synk.data(x, place=place)
        got = [rows(given), rows(given, batch=len(x) - 1), rows(given, batch=[1, 0])]
        x[...] = 2
        assert all((np.asarray(each) == 1).all() for each in got)


def test_arguments_are_not_changed():
    """Nor taken away: arrays of JAX may be given again."""
    x, y = jnp.asarray(numbers(6)), jnp.arange(5.0)
    w = synk.shared(np.zeros(2, np.float32))
    step = synk.function(lambda x, y: x.sum(0) + y.sum(), ["x"], then=lambda s: setattr(w, "value", w.value + s))
    for _ in range(3):
        step(x, y)
    assert_same((x, y), (numbers(6), np.arange(5, dtype=np.float32)))


def test_callbacks_may_keep_what_they_see():
    """What a callback was given stays as it was."""
    seen = []

    @synk.function(inputs=["x"])
    def noted(x, y):
        jax.debug.callback(lambda x, y: seen.append((x, y)), x, y)
        return x.sum()

    for i in range(CALLS):
        noted(np.full(6, i, np.float32), np.float32(i)).block_until_ready()
    jax.effects_barrier()
    assert {(*np.unique(x).tolist(), float(y)) for x, y in seen} == {(i, i) for i in range(CALLS)}


@pytest.mark.parametrize("size", [0, 3])
def test_results_of_iterate(size):
    """The same where a thread works ahead."""
    x, batches = distinct()
    for source in (x, synk.data(x)):
        busy()
        assert_same(list(rows.iterate(source, batches=batches, prefetch=size)), [x[batch] for batch in batches])


@pytest.mark.parametrize("size", [0, 3])
def test_results_of_prefetch(size):
    """Batches that a generator writes into one array again and again, and that are read late."""
    x, batches = distinct()
    memory = np.empty((2048, COLUMNS), np.float32)

    def source():
        for batch in batches:
            memory[...] = x[batch]
            yield memory

    busy()
    assert_same(list(synk.prefetch(source(), size)), [x[batch] for batch in batches])
    assert_same([rows(each) for each in synk.prefetch(source(), size)], [x[batch] for batch in batches])


# The memory itself.


def test_memory_is_used_again(monkeypatch):
    """Fifty calls, each awaited, take the memory of the few before them."""
    x, batches = distinct()
    places, take = [], host_buffers._take

    def noted(size):
        memory = take(size)
        places.append(memory.ctypes.data)
        return memory

    monkeypatch.setattr(host_buffers, "_take", noted)
    for batch in [*batches, *batches, *batches[:2]]:
        jax.block_until_ready(total(x, batch=batch))
    assert len(places) >= 50
    assert len(set(places)) <= 12


def test_memory_is_aligned_and_ones_own():
    """While an array or a view of it lives, nobody else gets its memory; then the next does."""
    size = (1 << 17,)
    [one] = host_buffers.acquire(1, size, np.dtype(np.float32))
    view, place = one[7:9].view(np.uint8), one.ctypes.data
    del one
    [other] = host_buffers.acquire(1, size, np.dtype(np.float32))
    assert other.ctypes.data != place
    del view
    assert host_buffers.acquire(2, (1 << 16,), np.dtype(np.int32)).ctypes.data == place
    assert place % 64 == other.ctypes.data % 64 == 0


@pytest.mark.parametrize("dtype", [np.int8, np.float32, jnp.int4])
def test_memory_of_many_arrays(dtype):
    """Each is aligned, also where their sizes are odd. One that is held holds the memory of all."""
    parts = host_buffers.acquire(3, (12345, 3), np.dtype(dtype))
    places = [part.ctypes.data for part in parts]
    assert parts.shape == (3, 12345, 3) and parts.dtype == dtype
    assert all(place % 64 == 0 for place in places)
    for value, part in enumerate(parts):
        part[...] = value
    assert [np.unique(part.astype(int)).tolist() for part in parts] == [[0], [1], [2]]
    part, parts = parts[1], None
    assert host_buffers.acquire(3, (12345, 3), np.dtype(dtype)).ctypes.data != places[0]
    del part
    assert host_buffers.acquire(3, (12345, 3), np.dtype(dtype)).ctypes.data in places


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0,), ()])
def test_memory_of_no_bytes(shape):
    """Or of one number."""
    assert host_buffers.acquire(2, shape, np.dtype(np.float32)).shape == (2, *shape)
    assert host_buffers.fresh(shape, np.dtype(np.float32)).shape == shape


def test_an_array_of_jax_keeps_its_memory():
    """Also once nothing but the device refers to it."""
    [x] = host_buffers.acquire(1, (1 << 17,), np.dtype(np.float32))
    x[...] = 1
    array = jax.device_put(x)
    del x
    host_buffers.acquire(1, (1 << 17,), np.dtype(np.float32))[...] = 2
    assert float(array.max()) == 1


def test_the_limit(monkeypatch):
    """No more is kept than that; what is larger is never kept."""
    monkeypatch.setattr(host_buffers, "_free", {})
    monkeypatch.setattr(host_buffers, "_kept", 0)
    monkeypatch.setattr(host_buffers, "LIMIT", 3 << 17)
    for sizes in ([1 << 17] * 5, [1 << 16, 1 << 17, 3 << 16], [1 << 20]):
        arrays = [host_buffers.acquire(1, (size,), np.dtype(np.uint8)) for size in sizes]
        del arrays
        kept = sum(size * len(free) for size, free in host_buffers._free.items())
        assert host_buffers._kept == kept <= host_buffers.LIMIT
    assert 1 << 20 not in host_buffers._free
    host_buffers.acquire(1, (100,), np.dtype(np.uint8))
    assert 100 not in host_buffers._free
