"""Slots: small arguments that programs read in the very memory they were written to, which no other call may touch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import synk
from synk import _flight, _slots

from .helpers import assert_same, group_of, numbers

GROUPS = [("devices", 1), ("devices", 3), ("simulated", 3)]
FEW = 5  # slots, one more than programs may be in flight
CALLS = 2 * FEW + 3
on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="other devices read no host memory in place")


@pytest.fixture(autouse=True, params=GROUPS, ids=str)
def current(request, monkeypatch):
    monkeypatch.setattr(_slots, "LIMIT", FEW)
    _slots.slots.cache_clear()
    with group_of(*request.param) as group:
        yield group
    _slots.slots.cache_clear()


@synk.function(inputs=["x"], outputs=("concat", "max"))
def late(x, y):
    """The arguments, once the devices have worked for a while."""
    work = jax.lax.fori_loop(0, 10, lambda i, m: jnp.tanh(m @ m), jnp.ones((200, 200)))
    y = jax.random.key_data(y) if jnp.issubdtype(y.dtype, jax.dtypes.prng_key) else y
    return x + 0 * work[0, 0], jnp.where(work[0, 0] < 2, y, jnp.zeros_like(y))


def in_line(calls):
    """The results of many calls, none awaited before the last; and once more, with slots that have been used."""
    for _ in range(2):
        yield [late(*args, **picked) for args, picked in calls]


@pytest.mark.parametrize("place", ["host", "broadcast", "scatter"])
def test_batches_in_line(current, place):
    """Each call has its own rows."""
    x, rng = numbers(60), np.random.default_rng(0)
    data = synk.data(x, place=place)
    parts = x.reshape(1 if place != "scatter" else current.size, -1, 2)
    option = "batch_s" if place == "scatter" else "batch"
    indexes = [rng.integers(0, parts.shape[1], 15) for _ in range(CALLS)]
    for got in in_line([((data, np.float32(0)), {option: index}) for index in indexes]):
        assert_same([rows for rows, _ in got], [parts[:, index].reshape(-1, 2) for index in indexes])


KINDS = {
    "float": lambda i: i / 4,
    "huge float": lambda i: -1e38 * (i + 1) / CALLS,
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


@pytest.mark.parametrize(
    ("kind", "rows"), [*((kind, "numpy") for kind in KINDS), ("float", "of jax"), ("int", "narrowed")]
)
def test_arguments_in_line(kind, rows):
    """Each call has its own, rows and others."""
    xs = [numbers(6, seed=i) for i in range(CALLS)]
    ys = [KINDS[kind](i) for i in range(CALLS)]
    given = {"numpy": np.copy, "of jax": jnp.asarray, "narrowed": np.float64}[rows]
    want = [jax.random.key_data(y) if kind == "key" else y for y in ys]
    want = [np.asarray(jnp.asarray(y)) for y in want]
    for got in in_line([((given(x), y), {}) for x, y in zip(xs, ys, strict=True)]):
        assert_same([x for x, _ in got], xs)
        assert_same([y for _, y in got], want)


@pytest.mark.parametrize("op", ["concat", "stack", "first"])
def test_results_are_no_slots(current, op):
    """A function that returns what it was given: later calls do not change what earlier ones returned."""
    same = synk.function(lambda x, y: (x, y), ["x"], (op, "first"))
    calls = [(numbers(6, seed=i), np.full(2, i, np.float32)) for i in range(CALLS)]
    want = [jax.tree.map(np.array, same(*call)) for call in calls]  # copied before the next one
    for (x, y), (rows, twos) in zip(calls, want, strict=True):
        assert set(rows.ravel()) <= set(x.ravel()) and set(twos.ravel()) == set(y)
    got = [same(*call) for call in calls]
    assert_same(got, want)


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


def test_later_writes_are_not_seen(current):
    """To rows and to others, while the call has not begun."""
    x, y = numbers(6), np.arange(5, dtype=np.float32)
    late(x, y)
    for _ in range(4):
        late(x, y)
    got = late(x, y)
    want = x.copy(), y.copy()
    x[...], y[...] = 7, 8
    assert_same(got, want)
    assert_same(late(x, y), (x, y))


def test_what_is_no_number_of_jax():
    """As the first call says it."""
    x = numbers(6)
    late(x, 3)
    late(x, 4)
    with pytest.raises(OverflowError):
        late(x, 1 << 40)
    deleted = jnp.ones(5)
    late(x, deleted), late(x, deleted + 1)
    deleted.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        late(x, deleted)
    assert_same(late(x, 5), (x, np.int32(5)))


def pointers(array):
    return [np.asarray(shard.data).ctypes.data for shard in array.addressable_shards]


@on_cpu
@pytest.mark.parametrize(
    ("lies", "shape"), [("stacked", (5,)), ("rows", (2, 5)), ("everywhere", (2, 5)), ("everywhere", ())]
)
def test_written_where_it_is_read(current, lies, shape):
    """No array is made, and a slot that is out is not given to another."""
    if lies != "everywhere":
        shape = (current.size * shape[0], *shape[1:])
    slots = _slots.Slots(current, lies, shape, np.dtype(np.int32))
    one, other = slots.take(), slots.take()
    assert not set(pointers(one.array)) & set(pointers(other.array))
    assert all(pointer % 64 == 0 for pointer in pointers(one.array))
    one.memory[...], other.memory[...] = 3, 4
    assert_same([one.array, other.array], [np.full(shape, 3, np.int32), np.full(shape, 4, np.int32)])
    array = one.array
    one.give_back()
    assert slots.take().array is array


@on_cpu
def test_no_more_than_the_limit(current):
    """Where so many are out, there is none; one that is lost with its call makes room."""
    slots = _slots.Slots(current, "stacked", (current.size,), np.dtype(np.int32))
    out = [slots.take() for _ in range(FEW)]
    assert None not in out
    assert slots.take() is None
    del out[3]
    assert slots.take() is not None
    assert _slots.Slots(current, "everywhere", (_slots.SMALL + 1,), np.dtype(np.int8)).take() is None


@on_cpu
def test_what_is_kept(current, monkeypatch):
    """Not more than that, of all kinds together, however many shapes there are."""
    monkeypatch.setattr(_slots, "KEPT", 1 << 16)
    f = synk.function(lambda x: x.sum(0))
    before = sum(array.nbytes for array in jax.live_arrays())
    for columns in range(200, 220):
        x = np.ones((6, columns), np.float32)
        for _ in range(8):
            got = f(x)
        assert_same(got, np.full(columns, 6, np.float32))
    _flight.drain()
    assert sum(array.nbytes for array in jax.live_arrays()) - before < 3 << 16


def unaligned(shape, dtype):
    """Memory that JAX copies from, as it does for devices that have their own."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(size + 128, np.uint8)
    start = -memory.ctypes.data % 64 + 4
    return memory[start : start + size].view(dtype).reshape(shape)


@on_cpu
def test_where_memory_is_not_read_in_place(current, monkeypatch):
    """An array is made for each call."""
    monkeypatch.setattr(_slots, "fresh", unaligned)
    assert _slots.Slots(current, "stacked", (current.size,), np.dtype(np.int32)).take() is None
    x, rng = numbers(48), np.random.default_rng(0)
    data = synk.data(x, place="broadcast")
    indexes = [rng.permutation(48)[:21] for _ in range(6)]
    got = [late(data, i, batch=index) for i, index in enumerate(indexes)]
    assert_same(got, [(x[index], np.int32(i)) for i, index in enumerate(indexes)])


def test_a_failed_program_keeps_its_own():
    """Whether all devices have done with it nobody knows."""

    class Token:
        def block_until_ready(self):
            raise RuntimeError("died")

    class Loan:
        given = 0

        def give_back(self):
            self.given += 1

    _flight.drain()
    loan = Loan()
    _flight.launched(Token(), lambda error: None, [loan])
    _flight.drain()
    assert loan.given == 0
    _flight.launched(jnp.zeros(()), lambda error: None, [loan])
    _flight.drain()
    assert loan.given == 1
