"""Host buffers: aligned memory for rows on their way to a device, used again when nothing refers to it."""

import threading
import weakref
from collections.abc import Sequence
from math import prod

import numpy as np

# On CPUs JAX uses memory of this alignment without a copy: https://github.com/jax-ml/jax/issues/4486
ALIGNMENT = 64
# Fewer bytes are cheaper to allocate than to keep.
SMALL = 1 << 16
# The most bytes that are kept for later.
LIMIT = 1 << 29

_free: dict[int, list[np.ndarray]] = {}
_kept = 0
# Reentrant: the garbage collector may return memory while this thread asks for some.
_lock = threading.RLock()


def acquire(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Return uninitialised memory for an array. It is used again when the array and all its users are gone.

    JAX may read this memory (on CPUs) or send it (elsewhere) long after a call returns. It holds a reference as long.
    """
    return acquire_parts(1, shape, dtype)[0]


def acquire_parts(count: int, shape: Sequence[int], dtype: np.dtype) -> list[np.ndarray]:
    """Return memory for several arrays of one shape, as `acquire` does for one."""
    size = prod(shape) * dtype.itemsize
    if size < SMALL:
        return [fresh(shape, dtype) for _ in range(count)]
    step = -(-size // ALIGNMENT) * ALIGNMENT
    memory = _take(count * step)
    # NumPy views refer to the last array of their chain. A memoryview makes `lease` the last one.
    lease = np.frombuffer(memoryview(_aligned(memory, count * step)), np.uint8)  # type: ignore[arg-type]  # a buffer
    weakref.finalize(lease, _give, memory).atexit = False
    return [lease[at : at + size].view(dtype).reshape(shape) for at in range(0, count * step, step)]


def fresh(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Return uninitialised aligned memory, which is not used again."""
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
