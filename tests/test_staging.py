"""Staging: a call takes what arrays hold when it is made, and memory on its way to a device is not used too early."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import synk
from synk import _slots, _staging

from .helpers import assert_same, group_of

ROWS, COLUMNS = 4096, 48  # of 768 KiB in all: staged, not allocated each time
PLACES = ("raw", "host", "scatter", "broadcast")
BATCHES = {
    "all": None,
    "a run": slice(5, 3001),
    "uneven": slice(5, 3002),
    "rows": np.random.default_rng(0).permutation(ROWS)[:2048],
}

rows = synk.function(lambda x: x, reduce="concat", name="rows")
total = synk.function(lambda x: x.sum(0), name="total")


@pytest.fixture(autouse=True, params=[("devices", 2, 0), ("devices", 2, _slots.SMALL), ("simulated", 2, 0)], ids=str)
def on_two_replicas(request, monkeypatch):
    """Where each call asks for memory, and where it takes what an earlier one has left."""
    *which, size = request.param
    monkeypatch.setattr(_slots, "SMALL", size)
    _slots.slots.cache_clear()
    with group_of(*which):
        yield
    _slots.slots.cache_clear()


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


def distinct():
    """Data of rows that are all different, and batches of it."""
    x = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)
    return x, [np.random.default_rng(seed).permutation(ROWS)[:2048] for seed in range(24)]


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


def test_memory_is_used_again(monkeypatch):
    """Fifty calls, each awaited, take the memory of the few before them."""
    x, batches = distinct()
    places, take = [], _staging._take

    def noted(size):
        memory = take(size)
        places.append(memory.ctypes.data)
        return memory

    monkeypatch.setattr(_staging, "_take", noted)
    for batch in [*batches, *batches, *batches[:2]]:
        jax.block_until_ready(total(x, batch=batch))
    assert len(places) >= 50 or _slots.SMALL
    assert len(set(places)) <= 12


def test_memory_is_aligned_and_ones_own():
    """While an array or a view of it lives, nobody else gets its memory; then the next does."""
    size = (1 << 17,)
    one = _staging.aligned(size, np.dtype(np.float32))
    view, place = one[7:9].view(np.uint8), one.ctypes.data
    del one
    other = _staging.aligned(size, np.dtype(np.float32))
    assert other.ctypes.data != place
    del view
    assert _staging.aligned((2, 1 << 16), np.dtype(np.int32)).ctypes.data == place
    assert place % 64 == other.ctypes.data % 64 == 0


def test_an_array_of_jax_keeps_its_memory():
    """Also once nothing but the device refers to it."""
    x = _staging.aligned((1 << 17,), np.dtype(np.float32))
    x[...] = 1
    array = jax.device_put(x)
    del x
    _staging.aligned((1 << 17,), np.dtype(np.float32))[...] = 2
    assert float(array.max()) == 1


def test_the_limit(monkeypatch):
    """No more is kept than that; what is larger is never kept."""
    monkeypatch.setattr(_staging, "_free", {})
    monkeypatch.setattr(_staging, "_kept", 0)
    monkeypatch.setattr(_staging, "LIMIT", 3 << 17)
    for sizes in ([1 << 17] * 5, [1 << 16, 1 << 17, 3 << 16], [1 << 20]):
        arrays = [_staging.aligned((size,), np.dtype(np.uint8)) for size in sizes]
        del arrays
        assert _staging._kept == sum(size * len(free) for size, free in _staging._free.items()) <= _staging.LIMIT
    assert 1 << 20 not in _staging._free
    _staging.aligned((100,), np.dtype(np.uint8))
    assert 100 not in _staging._free
