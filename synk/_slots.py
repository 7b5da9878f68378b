"""Slots: small arguments that programs read where they were written, on CPU.

Bringing a few indexes or a number to four CPU devices takes as long as starting a program on them. But such devices
read aligned host memory in place. So arrays are made once, and each call writes into the memory of one that no program
is reading.
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

LIMIT = 32  # of one kind, at most
SMALL = 1 << 18  # bytes: what is larger takes long anyway, and memory used in turn is colder


class Slot:
    """An array of a group, and the memory that it reads: an entry for each part that a device has alone."""

    __slots__ = ("__weakref__", "_free", "array", "memory", "parts")

    def __init__(self, array: jax.Array, memory: np.ndarray, parts: list[np.ndarray], free: list[Slot]) -> None:
        self.array, self.memory, self.parts, self._free = array, memory, parts, free

    def give_back(self) -> None:
        """The program that was started with it has ended."""
        self._free.append(self)


class Slots:
    """Those of one kind; used under the lock of calls."""

    def __init__(self, group: Group, lies: Lies, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self._group, self._shape, self._dtype = group, shape, dtype
        self._sharding = _engine.sharding(group, lies)
        self._free: list[Slot] = []
        self._all: weakref.WeakSet[Slot] = weakref.WeakSet()  # one that a failed call has used is not used again
        self._is_cut = lies != "everywhere" and not group.is_on_one
        can_be = group.platform == "cpu" and not group.spans and 0 < prod(shape) * dtype.itemsize <= SMALL
        self._limit = LIMIT if can_be else 0

    def take(self) -> Slot | None:
        """One whose memory may be written; None where an array must be made.

        Give it back once the program is known to have ended, and at no other time.
        """
        if self._free:
            return self._free.pop()
        if len(self._all) >= self._limit:
            return None
        slot = self._new()
        if slot is None:
            self._limit = 0
        else:
            self._all.add(slot)
        return slot

    def _new(self) -> Slot | None:
        """One more; None where the devices do not read host memory in place."""
        group, shape, dtype = self._group, self._shape, self._dtype
        count = group.size if self._is_cut else 1
        shape = (shape[0] // count, *shape[1:]) if self._is_cut else shape
        # Each part begins where a device can read it.
        size, step = prod(shape), -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT // dtype.itemsize
        memory = fresh((count, step), dtype)[:, :size].reshape(count, *shape)
        memory[...] = np.zeros((), dtype)
        parts = [memory[rank, ...] for rank in range(count)]

        def part_at(index: Any) -> np.ndarray:
            return parts[(index[0].start or 0) // shape[0] if self._is_cut else 0]

        array = jax.make_array_from_callback(self._shape, self._sharding, part_at)
        there = {np.asarray(shard.data).ctypes.data for shard in array.addressable_shards}
        return Slot(array, memory, parts, self._free) if there == {part.ctypes.data for part in parts} else None


@lru_cache(maxsize=256)
def slots(group: Group, lies: Lies, shape: tuple[int, ...], dtype: np.dtype) -> Slots:
    """Those of arrays of the group of this shape."""
    return Slots(group, lies, shape, dtype)
