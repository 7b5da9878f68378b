"""Slots: arguments that programs read where they were written, on CPU.

Bringing a few indexes or a number to four CPU devices takes as long as starting a program on them. But such devices
read aligned host memory in place. So arrays are made once, and each call writes into the memory of one that no program
is reading. What is larger than a few megabytes takes long anyway.
"""

from __future__ import annotations

import weakref
from functools import lru_cache
from math import prod
from typing import Any

import jax
import numpy as np

from . import _engine
from ._engine import Lies
from ._group import Group
from ._staging import ALIGNMENT, fresh

LIMIT = 32  # of one kind, at most; four programs in flight and the next one take five
SMALL = 1 << 23  # bytes of one, at most
KEPT = 1 << 28  # bytes of all, at most


class Slot:
    """An array of a group, and the memory that it reads: an entry for each part that a device has alone."""

    __slots__ = ("__weakref__", "_home", "array", "memory", "parts")

    def __init__(self, array: jax.Array, memory: np.ndarray, parts: list[np.ndarray], home: Slots) -> None:
        self.array, self.memory, self.parts = array, memory, parts
        self._home = weakref.ref(home)  # no cycle: memory goes back at once

    def give_back(self) -> None:
        """The program that was started with it has ended."""
        home = self._home()
        if home is not None:
            home.free.append(self)


class Slots:
    """Those of one kind; used under the lock of calls."""

    def __init__(self, group: Group, lies: Lies, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self._group, self._shape, self._dtype = group, shape, dtype
        self._sharding = _engine.sharding(group, lies)
        self.free: list[Slot] = []
        self._all: weakref.WeakSet[Slot] = weakref.WeakSet()  # one that a failed call has used is not used again
        self._is_cut = lies != "everywhere" and not group.is_on_one
        size = prod(shape) * dtype.itemsize
        can_be = group.platform == "cpu" and not group.spans and 0 < size <= SMALL
        self._limit = min(LIMIT, max(8, SMALL // size)) if can_be else 0

    def take(self) -> Slot | None:
        """One whose memory may be written; None where an array must be made.

        Give it back once the program is known to have ended, and at no other time.
        """
        if self.free:
            return self.free.pop()
        if len(self._all) >= self._limit:
            return None
        slot = self._new()
        if slot is None:
            self._limit = len(self._all)  # and no further one is looked for
        else:
            self._all.add(slot)
            _there.add(slot)
        return slot

    def _new(self) -> Slot | None:
        """One more; None where the devices do not read host memory in place, or there are too many."""
        group, shape, dtype = self._group, self._shape, self._dtype
        count = group.size if self._is_cut else 1
        shape = (shape[0] // count, *shape[1:]) if self._is_cut else shape
        # Each part begins where a device can read it.
        size, step = prod(shape), -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT // dtype.itemsize
        if sum(slot.memory.nbytes for slot in _there) + count * size * dtype.itemsize > KEPT:
            return None
        memory = fresh((count, step), dtype)[:, :size].reshape(count, *shape)
        memory[...] = np.zeros((), dtype)
        parts = [memory[rank, ...] for rank in range(count)]

        def part_at(index: Any) -> np.ndarray:
            return parts[(index[0].start or 0) // shape[0] if self._is_cut else 0]

        array = jax.make_array_from_callback(self._shape, self._sharding, part_at)
        there = {np.asarray(shard.data).ctypes.data for shard in array.addressable_shards}
        return Slot(array, memory, parts, self) if there == {part.ctypes.data for part in parts} else None


_there: weakref.WeakSet[Slot] = weakref.WeakSet()  # of all kinds


@lru_cache(maxsize=256)
def slots(group: Group, lies: Lies, shape: tuple[int, ...], dtype: np.dtype) -> Slots:
    """Those of arrays of the group of this shape."""
    return Slots(group, lies, shape, dtype)
