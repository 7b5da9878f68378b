"""Sources: objects that hold rows, in memory, on disk or on devices, and copies of their rows by several threads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from mmap import mmap
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from .._base.errors import shown
from .._base.pytree import array_of_list, as_data, is_number, refuse_tracer
from .._runtime.dispatch import LOCK

# Bytes that are converted at a time, so that they stay in a core's cache.
BLOCK = 1 << 18
# Bytes that pay for a second thread. Fewer are copied before it has woken up.
SHARED = 1 << 22
# More threads do not read a machine's memory any faster.
THREADS = 16
# Bytes of consecutive rows that are read from a file at a time.
AT_ONCE = 1 << 28


class Reader:
    """A source that gives rows by position when it is indexed (h5py, zarr). It is read in parts, never whole.

    Rows are checked when they come. NumPy would convert, unmask or repeat them to fit a buffer.
    """

    def __init__(self, of: Any, what: str) -> None:
        self.of, self.what = of, what
        self.shape: tuple[int, ...] = tuple(of.shape)
        self.dtype = np.dtype(of.dtype)
        self.ndim = len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype)

    def __getitem__(self, index: Any) -> np.ndarray:
        wanted = len(range(len(self))[index]) if isinstance(index, slice) else None
        rows = self.of[index]
        has_dtype, rows = hasattr(rows, "dtype"), np.asanyarray(rows)
        if np.ma.is_masked(rows):
            raise TypeError(
                f"{self.what} gave masked rows, whose mask would be lost; read it into memory and give .filled(...)."
            )
        if has_dtype and rows.dtype.newbyteorder("=") != self.dtype.newbyteorder("="):
            raise TypeError(
                f"{self.what} gave rows of dtype {rows.dtype}, but its own is {self.dtype}; read it into memory, or "
                f"let it give what it stores (of netCDF4: variable.set_auto_maskandscale(False))."
            )
        if wanted is not None and len(rows) < wanted:
            raise IndexError(
                f"{self.what} gave {len(rows)} rows where {wanted} were: it no longer has the {len(self)} that it had "
                f"when it was given. Give it again."
            )
        return np.asarray(rows)

    def __setitem__(self, index: Any, rows: Any) -> None:
        self.of[index] = rows

    def find(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Read rows that hold those of the indexes, and return them with the positions of these.

        Files want increasing indexes without repetitions:
        https://docs.h5py.org/en/stable/high/dataset.html#fancy-indexing
        """
        unique, inverse = np.unique(index, return_inverse=True)
        first, stop = int(unique[0]), int(unique[-1]) + 1
        # A run of rows reads faster than single ones.
        if stop - first <= 2 * len(unique):
            return self[first:stop], index - first
        return self[unique], inverse


HostSource: TypeAlias = np.ndarray | Reader
Source: TypeAlias = HostSource | jax.Array


def as_source(value: Any, what: str, advice: str) -> Source:
    """Return an array as a source, without a copy. Raise TypeError for other values."""
    if isinstance(value, jax.Array):
        return value
    if type(value) is not np.ndarray:
        if isinstance(value, np.ma.MaskedArray):
            raise TypeError(f"{what} is a masked array, whose mask would be lost; give .filled(...).")
        if hasattr(value, "todense"):
            raise TypeError(f"{what} is a {type(value).__name__}, which is sparse; give .todense().")
        if _is_read_by_rows(value):
            value = Reader(value, what)
        elif hasattr(value, "__array__") and not isinstance(value, str | bytes):
            value = np.asarray(value)
        else:
            raise TypeError(f"{what} is a {type(value).__name__}; {advice}.")
    if not is_number(value.dtype):
        raise TypeError(f"{what} has dtype {value.dtype}; give numbers or booleans that JAX has.")
    return value


def copied(value: Any) -> Any:
    """Copy an array whose owner may write to its memory (NumPy, a tensor of PyTorch) or donate it (JAX)."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, jax.Array) and value.is_fully_addressable and not isinstance(value, jax.core.Tracer):
        return copied_on_device(value)
    is_as_it_is = isinstance(value, jax.Array | np.generic | str | bytes) or _is_read_by_rows(value)
    return value if is_as_it_is or not hasattr(value, "__array__") else np.array(value)


def copied_on_device(value: jax.Array) -> jax.Array:
    """Copy an array where it lies."""
    # CPU devices bear few programs in flight, and this one is not counted. Elsewhere a wait would be for the call that
    # runs, and the loop could not launch the next one in time.
    is_awaited = any(device.platform == "cpu" for device in value.devices())
    if is_awaited:
        # Before the lock is taken, so that other threads can call meanwhile.
        jax.block_until_ready(value)
    with LOCK:
        copy = jnp.copy(value)
        return jax.block_until_ready(copy) if is_awaited else copy


def as_rows(value: Any, name: str) -> Source:
    """Return the source that a `Data` may hold: one array with rows."""
    refuse_tracer(value, f"{name}: its value")
    if isinstance(value, list):
        value = array_of_list(value, f"{name}: its value")
    advice = "give one array; for a tree of them, jax.tree.map(synk.data, tree)"
    source = as_source(as_data(value), f"{name}: its value", advice)
    # The raw data of a single typed key has an axis, but the key has no rows.
    if source.ndim == 0 or getattr(value, "ndim", None) == 0:
        raise ValueError(f"{name}: its value is a scalar and has no rows. Pass numbers as they are, as broadcast ones.")
    return source


def as_number_dtype(dtype: Any, name: str) -> np.dtype:
    """Check a dtype that a user asks for."""
    try:
        asked = np.dtype(dtype)
    except TypeError:
        asked = np.dtype(object)
    if not is_number(asked):
        raise TypeError(f"{name}: dtype is {shown(dtype)}; give one of numbers or booleans that JAX has.")
    return asked


def is_in_memory(source: Source) -> bool:
    """Check for a NumPy array that is not memory-mapped from a file."""
    base: Any = source
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    return isinstance(source, np.ndarray) and not isinstance(base, mmap)


def _is_read_by_rows(value: Any) -> bool:
    """Check for an object that is indexed by position and whose `__array__` would read all of it."""
    if not all(hasattr(value, name) for name in ("shape", "dtype", "__getitem__")):
        return False
    # Arrays in memory have one of the first three; pandas, which indexes by label, has the last.
    if any(hasattr(value, name) for name in ("__array_interface__", "__array_struct__", "__dlpack__", "iloc")):
        return False
    try:
        np.dtype(value.dtype)
    except TypeError:
        return False
    return isinstance(value.shape, tuple) and len(value.shape) > 0


class Rows(NamedTuple):
    """Rows to copy into a buffer.

    Attributes:
      buffer: where the rows go; its length says how many.
      source: where they come from.
      indexes: the rows of the source that are selected; None for all of them, in order.
      start: the first row to copy among the selected ones.
    """

    buffer: np.ndarray
    source: HostSource
    indexes: np.ndarray | None
    start: int

    @property
    def stop(self) -> int:
        """Return the end of the rows among the selected ones."""
        return self.start + len(self.buffer)

    def copy(self) -> None:
        """Fill the buffer from an array in memory."""
        buffer, source, stop = self.buffer, self.source, self.stop
        assert not isinstance(source, Reader)
        rows = slice(self.start, stop) if self.indexes is None else self.indexes[self.start : stop]
        if isinstance(rows, slice):
            buffer[...] = source[rows]
        elif source.dtype == buffer.dtype and source.flags.c_contiguous and source.flags.aligned:
            # The indexes were checked once; "clip" is the mode that neither checks nor copies again.
            np.take(source, rows, axis=0, out=buffer, mode="clip")
        else:
            step = _rows_in(buffer, BLOCK)
            for at in range(0, len(buffer), step):
                buffer[at : at + step] = source[rows[at : at + step]]

    def split(self, size: int) -> list[Rows]:
        """Cut the copy into pieces of about `size` bytes."""
        buffer, start, step = self.buffer, self.start, _rows_in(self.buffer, size)
        return [self._replace(buffer=buffer[i : i + step], start=start + i) for i in range(0, len(buffer), step)]


def _rows_in(buffer: np.ndarray, size: int) -> int:
    """Return how many rows of a buffer have about `size` bytes."""
    return max(1, size * len(buffer) // max(buffer.nbytes, 1))


def copy_rows(parts: Sequence[Rows]) -> None:
    """Copy the rows of all parts, which share source and selection, by as many threads as pay."""
    # h5py and the like may not allow several threads.
    if parts and isinstance(parts[0].source, Reader):
        _read(parts[0].source, parts)
        return
    total = sum(part.buffer.nbytes for part in parts)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = min(cores, THREADS, 2 * total // SHARED)
    if workers < 2:
        for part in parts:
            part.copy()
        return
    # NumPy releases the interpreter's lock while it copies. Several pieces a thread even out their speeds.
    pieces = [piece for part in parts for piece in part.split(max(BLOCK, total // (4 * workers)))]
    for _ in _threads().map(Rows.copy, pieces):
        pass


def _read(source: Reader, parts: Sequence[Rows]) -> None:
    """Fill all parts from a file. Read each row once: a file unpacks a whole chunk for any of its rows."""
    if (indexes := parts[0].indexes) is not None:
        rows, at = source.find(np.concatenate([indexes[part.start : part.stop] for part in parts]))
        for part in parts:
            here, at = at[: len(part.buffer)], at[len(part.buffer) :]
            part.buffer[...] = rows[here]
        return
    for run in _runs(parts):
        first = run[0].start
        rows = source[first : max(part.stop for part in run)]
        for part in run:
            part.buffer[...] = rows[part.start - first : part.stop - first]


def _runs(parts: Sequence[Rows]) -> list[list[Rows]]:
    """Group parts whose rows are consecutive, up to `AT_ONCE` bytes, since memory holds them twice."""
    runs: list[list[Rows]] = []
    stop = size = 0
    for part in sorted(parts, key=lambda part: part.start):
        size += part.buffer.nbytes
        if not runs or part.start > stop or size > AT_ONCE:
            runs.append([])
            size = part.buffer.nbytes
        runs[-1].append(part)
        stop = max(stop, part.stop)
    return runs


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, "synk-rows")
