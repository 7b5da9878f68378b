"""Staging: aligned host memory for rows on their way to a device, used again once nothing reads it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from math import prod

import numpy as np

ALIGNMENT = 64  # what JAX takes over without a copy on CPU
SMALL = 1 << 16  # bytes that are cheaper to allocate than to keep
LIMIT = 1 << 29  # bytes kept for later, at most

_free: dict[int, list[np.ndarray]] = {}
_out: dict[int, tuple[weakref.ref[np.ndarray], np.ndarray]] = {}
_kept = 0
_lock = threading.RLock()  # memory may come back while this very thread asks for some


def aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Uninitialised memory for an array, used again once the array, its views and what JAX made of them are gone.

    JAX may read this very memory (on CPU) or be sending it (elsewhere) long after a call returns: it holds a reference
    until it is done, and that is what says when.
    """
    size = prod(shape) * dtype.itemsize
    return fresh(shape, dtype) if size < SMALL else _leased(size).view(dtype).reshape(shape)


def aligned_parts(parts: int, shape: Sequence[int], dtype: np.dtype) -> list[np.ndarray]:
    """The same for several arrays of one shape."""
    size = prod(shape) * dtype.itemsize
    if parts == 1 or size < SMALL:
        return [aligned(shape, dtype) for _ in range(parts)]
    step = -(-size // ALIGNMENT) * ALIGNMENT
    lease = _leased(parts * step)
    return [lease[at : at + size].view(dtype).reshape(shape) for at in range(0, parts * step, step)]


def _leased(size: int) -> np.ndarray:
    memory = _take(size)
    # Views of this one refer to it and not, as NumPy's views do, to the memory behind.
    lease = np.frombuffer(memoryview(_cut(memory, size)), np.uint8)  # type: ignore[arg-type]  # it is a buffer
    reference = weakref.ref(lease, _give)
    _out[id(reference)] = reference, memory
    return lease


def fresh(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Uninitialised aligned memory that goes back to the system."""
    size = prod(shape) * dtype.itemsize
    return _cut(np.empty(size + ALIGNMENT, np.uint8), size).view(dtype).reshape(shape)


def _cut(memory: np.ndarray, size: int) -> np.ndarray:
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size]


def _take(size: int) -> np.ndarray:
    global _kept
    with _lock:
        free = _free.get(size)
        if free:
            _kept -= size
            return free.pop()
    return np.empty(size + ALIGNMENT, np.uint8)


def _give(lease: weakref.ref[np.ndarray]) -> None:
    global _kept
    _, memory = _out.pop(id(lease))
    size = len(memory) - ALIGNMENT
    with _lock:
        if _kept + size > LIMIT:
            _free.clear()
            _kept = 0
        if size <= LIMIT:
            _free.setdefault(size, []).append(memory)
            _kept += size
