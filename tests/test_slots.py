"""Slots: indexes that programs read in the very memory they were written to, which no other call may touch meanwhile."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import synk
from synk import _flight, _slots

from .helpers import assert_same, group_of

GROUPS = [("devices", 1), ("devices", 3), ("simulated", 3)]
on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="other devices read no host memory in place")


@pytest.fixture(autouse=True, params=GROUPS, ids=str)
def current(request):
    with group_of(*request.param) as group:
        yield group


@synk.function(reduce="concat")
def late(x):
    """The rows, once the devices have worked for a while."""
    work = jax.lax.fori_loop(0, 10, lambda i, m: jnp.tanh(m @ m), jnp.ones((200, 200)))
    return x + 0 * work[0, 0]


def pointers(array):
    return [np.asarray(shard.data).ctypes.data for shard in array.addressable_shards]


@pytest.mark.parametrize("place", ["broadcast", "scatter"])
def test_calls_in_line_have_their_own(current, place):
    """Many more than there are slots, none awaited; and once more, with slots that have been used."""
    x, rng = np.arange(60, dtype=np.float32), np.random.default_rng(0)
    data = synk.data(x, place=place)
    picked = "batch" if place == "broadcast" or current.size == 1 else "batch_s"
    rows = x.reshape(1 if picked == "batch" else current.size, -1)
    for _ in range(2):
        indexes = [rng.integers(0, rows.shape[1], 15) for _ in range(3 * _slots.LIMIT)]
        got = [late(data, **{picked: index}) for index in indexes]
        assert_same(got, [rows[:, index].ravel() for index in indexes])


@on_cpu
def test_written_where_it_is_read(current):
    """No array is made, and a slot that is out is not given to another."""
    slots = _slots.Slots(current, (current.size, 5))
    values = np.arange(5 * current.size, dtype=np.int32).reshape(current.size, 5)
    one, other = slots.take(values), slots.take(values[:, :1])
    assert_same([one.array, other.array], [values, np.broadcast_to(values[:, :1], values.shape)])
    assert not set(pointers(one.array)) & set(pointers(other.array))
    assert all(pointer % 64 == 0 for pointer in pointers(one.array))
    array = one.array
    one.give_back()
    again = slots.take(values + 7)
    assert again.array is array
    assert_same(pointers(array), [again.memory[rank:].ctypes.data for rank in range(len(array.addressable_shards))])


@on_cpu
def test_no_more_than_the_limit(current):
    """Where so many are out, there is none; one that is lost with its call makes room."""
    slots, values = _slots.Slots(current, (current.size, 1)), np.zeros((current.size, 1), int)
    out = [slots.take(values) for _ in range(_slots.LIMIT)]
    assert None not in out
    assert slots.take(values) is None
    del out[3]
    assert slots.take(values) is not None


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
    assert _slots.Slots(current, (current.size, 5)).take(np.zeros((current.size, 5), int)) is None
    x, rng = np.arange(48, dtype=np.float32), np.random.default_rng(0)
    data = synk.data(x, place="broadcast")
    indexes = [rng.permutation(48)[:21] for _ in range(6)]
    assert_same([late(data, batch=index) for index in indexes], [x[index] for index in indexes])


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
