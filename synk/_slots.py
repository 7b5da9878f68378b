"""Slots: small numbers that programs read where they were written, on CPU.

Bringing a few indexes to four CPU devices takes as long as starting a program on them. But such devices read aligned
host memory in place. So arrays are made once, and each call writes into the memory of one that no program is reading.
"""

from __future__ import annotations

import weakref
from typing import Any

import jax
import numpy as np

from ._group import Group
from ._staging import ALIGNMENT, fresh

LIMIT = 8  # programs that may be reading; further ones get arrays of their own
_INT32 = np.dtype(np.int32)


class Slot:
    """Memory, and the array of a group that reads it: "stacked", one row of numbers a replica."""

    __slots__ = ("__weakref__", "_free", "array", "memory")

    def __init__(self, array: jax.Array, memory: np.ndarray, free: list[Slot]) -> None:
        self.array, self.memory, self._free = array, memory, free

    def give_back(self) -> None:
        """The program that was started with it has ended."""
        self._free.append(self)


class Slots:
    """Those of one group and shape (replicas, numbers), for int32; under the lock of calls."""

    def __init__(self, group: Group, shape: tuple[int, int]) -> None:
        self._group, self._shape = group, shape
        self._free: list[Slot] = []
        self._all: weakref.WeakSet[Slot] = weakref.WeakSet()  # one that a failed call has used is not used again
        self._limit = LIMIT if group.platform == "cpu" and not group.spans and shape[1] else 0

    def take(self, values: np.ndarray) -> Slot | None:
        """A slot that holds these integers, of the shape or broadcast to it; None where an array must be made.

        Give it back once the program is known to have ended, and at no other time.
        """
        if self._free:
            slot = self._free.pop()
        elif len(self._all) < self._limit:
            slot = self._new()
            if slot is None:
                self._limit = 0
                return None
            self._all.add(slot)
        else:
            return None
        slot.memory[...] = values
        return slot

    def _new(self) -> Slot | None:
        """One more; None where the devices do not read host memory in place."""
        group, (size, width) = self._group, self._shape
        if group.is_on_one:
            memory = fresh(self._shape, _INT32)
            parts = [memory]
        else:  # each replica's part begins where a device can read it
            step = -(-width * _INT32.itemsize // ALIGNMENT) * ALIGNMENT // _INT32.itemsize
            memory = fresh((size, step), _INT32)[:, :width]
            parts = [memory[rank : rank + 1] for rank in range(size)]

        def part_at(index: Any) -> np.ndarray:
            return parts[0 if group.is_on_one else index[0].start or 0]

        memory[...] = 0
        array = jax.make_array_from_callback(self._shape, group.stacked, part_at)
        there = {np.asarray(shard.data).ctypes.data for shard in array.addressable_shards}
        return Slot(array, memory, self._free) if there == {part.ctypes.data for part in parts} else None
