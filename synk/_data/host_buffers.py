"""Host buffers: aligned memory for rows on their way to a device, used again when nothing refers to it."""

import threading
import weakref
from collections.abc import Sequence
from math import prod

import numpy as np

# On CPUs JAX uses memory of this alignment without a copy: https://github.com/jax-ml/jax/issues/4486
ALIGNMENT = 64
# Fewer bytes are cheaper to allocate than to keep, and cheaper to copy than to align.
SMALL = 1 << 16
# The most bytes that are kept for later.
LIMIT = 1 << 29

# Memory of transfers that are over, by size: to ask the system for it again costs a page fault a page.
_free: dict[int, list[np.ndarray]] = {}
# The bytes in `_free`, which stay below LIMIT.
_kept = 0
# Reentrant: the garbage collector may return memory while this thread asks for some.
_lock = threading.RLock()


def acquire(count: int, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Return uninitialised memory for some arrays of one shape, stacked. Large memory is used again later."""
    size = prod(shape) * dtype.itemsize
    step = -(-size // ALIGNMENT) * ALIGNMENT
    if count * step < SMALL:
        return np.empty((count, *shape), dtype)
    # JAX may read this memory (on CPUs) or send it (elsewhere) long after a call returns. It holds a reference as long,
    # and only memory to which nothing refers is used again. A step of whole alignments lets each array begin aligned.
    return _lend(count * step).reshape(count, step)[:, :size].view(dtype).reshape(count, *shape)


def fresh(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Return uninitialised aligned memory, which is not used again."""
    return np.ndarray(shape, dtype, _allocate(prod(shape) * dtype.itemsize))


def _allocate(size: int) -> np.ndarray:
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size]


def _lend(size: int) -> np.ndarray:
    """Return memory that is given back when nothing refers to it or a view of it."""
    memory = _take(size)
    # NumPy views refer to the last array of their chain. A memoryview makes `lease` the last one.
    lease = np.frombuffer(memoryview(memory), np.uint8)  # type: ignore[arg-type]  # a buffer
    weakref.finalize(lease, _give, memory).atexit = False
    return lease


def _take(size: int) -> np.ndarray:
    global _kept
    with _lock:
        if _free.get(size):
            _kept -= size
            return _free[size].pop()
    return _allocate(size)


def _give(memory: np.ndarray) -> None:
    global _kept
    size = len(memory)
    with _lock:
        # All at once: nothing tells which sizes are asked for again.
        if _kept + size > LIMIT:
            _free.clear()
            _kept = 0
        if size <= LIMIT:
            _free.setdefault(size, []).append(memory)
            _kept += size
