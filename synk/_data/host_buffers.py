"""Host buffers: aligned memory for rows on their way to a device, used again once nothing refers to it."""

import threading
import weakref
from collections.abc import Sequence
from math import prod

import numpy as np

ALIGNMENT = 64  # what JAX takes over without a copy on CPU
SMALL = 1 << 16  # bytes that are cheaper to allocate than to keep
LIMIT = 1 << 29  # bytes kept for later, at most

_free: dict[int, list[np.ndarray]] = {}
_kept = 0
_lock = threading.RLock()  # memory may come back while this very thread asks for some


def acquire(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Uninitialised memory for an array, used again once the array, its views and what JAX made of them are gone.

    JAX may read this very memory (on CPU) or be sending it (elsewhere) long after a call returns. It holds a reference
    until it is done, and that is what says when.
    """
    return acquire_parts(1, shape, dtype)[0]


def acquire_parts(count: int, shape: Sequence[int], dtype: np.dtype) -> list[np.ndarray]:
    """The same for several arrays of one shape."""
    size = prod(shape) * dtype.itemsize
    if size < SMALL:
        return [fresh(shape, dtype) for _ in range(count)]
    step = -(-size // ALIGNMENT) * ALIGNMENT
    memory = _take(count * step)
    # A view refers to the array at the end of its chain of NumPy arrays; a memoryview makes `lease` that end.
    lease = np.frombuffer(memoryview(_aligned(memory, count * step)), np.uint8)  # type: ignore[arg-type]  # a buffer
    weakref.finalize(lease, _give, memory).atexit = False
    return [lease[at : at + size].view(dtype).reshape(shape) for at in range(0, count * step, step)]


def fresh(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Uninitialised aligned memory that goes back to the system."""
    size = prod(shape) * dtype.itemsize
    return _aligned(np.empty(size + ALIGNMENT, np.uint8), size).view(dtype).reshape(shape)


def _aligned(memory: np.ndarray, size: int) -> np.ndarray:
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size]


def _take(size: int) -> np.ndarray:
    global _kept
    with _lock:
        if _free.get(size):
            _kept -= size
            return _free[size].pop()
    return np.empty(size + ALIGNMENT, np.uint8)


def _give(memory: np.ndarray) -> None:
    global _kept
    size = len(memory) - ALIGNMENT
    with _lock:
        if _kept + size > LIMIT:
            _free.clear()
            _kept = 0
        if size <= LIMIT:
            _free.setdefault(size, []).append(memory)
            _kept += size
