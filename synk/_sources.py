"""Sources: what holds rows, in memory, on disk or on devices, and how rows are copied out of it by several threads."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from mmap import mmap
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

BLOCK = 1 << 18  # bytes that are converted at a time, so that they stay in a core's cache
SHARED = 1 << 22  # bytes that are worth more than one thread: fewer are there before another one has woken up
THREADS = 16  # more gain nothing from one machine's memory


class Reader:
    """An object that gives rows by position when it is indexed (h5py, zarr): read in parts, never whole."""

    def __init__(self, of: Any) -> None:
        self.of = of
        self.shape: tuple[int, ...] = tuple(of.shape)
        self.dtype = np.dtype(of.dtype)
        self.ndim = len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.of[...], dtype)

    def read(self, index: slice | np.ndarray) -> np.ndarray:
        """Rows of a contiguous slice, or of indexes in any order: files give each row once, in ascending order."""
        if isinstance(index, slice):
            return np.asarray(self.of[index])
        unique, inverse = np.unique(index, return_inverse=True)
        first, stop = int(unique[0]), int(unique[-1]) + 1
        if stop - first <= 2 * len(unique):
            return np.asarray(self.of[first:stop])[index - first]
        return np.asarray(self.of[unique])[inverse]


Source: TypeAlias = np.ndarray | jax.Array | Reader


def as_source(value: Any, what: str, advice: str) -> Source:
    """An array as what rows can be copied from, without copying it; TypeError where it is none."""
    if isinstance(value, jax.Array):
        return value
    if type(value) is not np.ndarray:
        if isinstance(value, np.ma.MaskedArray):
            raise TypeError(f"{what} is a masked array, whose mask would be lost; give .filled(...).")
        if isinstance(value, str | bytes) or not (hasattr(value, "__array__") or _is_read_by_rows(value)):
            raise TypeError(f"{what} is a {type(value).__name__}; {advice}.")
        value = Reader(value) if _is_read_by_rows(value) else np.asarray(value)
    if not is_number(value.dtype):
        raise TypeError(f"{what} has dtype {value.dtype}; give numbers or booleans.")
    return value


def is_in_memory(source: Source) -> bool:
    """Is it NumPy's, and not read from a file as it is looked at?"""
    base: Any = source
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    return isinstance(source, np.ndarray) and not isinstance(base, mmap)


def is_number(dtype: np.dtype) -> bool:
    """Is it of numbers or booleans? JAX's own small floats are among them."""
    return dtype.kind not in "OSUMm" and dtype.type is not np.void


def _is_read_by_rows(value: Any) -> bool:
    """Is it indexed by position, and would it be read whole by `__array__`? What shares its memory would not."""
    if isinstance(value, np.ndarray | np.generic) or not all(hasattr(value, a) for a in ("shape", "dtype")):
        return False
    if not hasattr(value, "__getitem__") or any(hasattr(value, a) for a in _SHARES_MEMORY):
        return False
    try:
        np.dtype(value.dtype)
    except TypeError:
        return False
    return isinstance(value.shape, tuple) and len(value.shape) > 0


# Of arrays in memory; and of pandas, which indexes by label.
_SHARES_MEMORY = ("__array_interface__", "__array_struct__", "__dlpack__", "iloc")


def narrow(dtype: np.dtype) -> np.dtype:
    """As JAX has it: 64 bits as 32 unless they are enabled, in the machine's order."""
    return jax.dtypes.canonicalize_dtype(dtype.newbyteorder("="))


class Rows(NamedTuple):
    """Rows to copy: of `source`, those at `indexes` (None: all, in order) from `start` on, until `buffer` is full."""

    buffer: np.ndarray
    source: np.ndarray | Reader
    indexes: np.ndarray | None
    start: int

    def copy(self) -> None:
        """Copy them."""
        buffer, source, stop = self.buffer, self.source, self.start + len(self.buffer)
        if self.indexes is None:
            run = slice(self.start, stop)
            buffer[...] = source.read(run) if isinstance(source, Reader) else source[run]
        elif isinstance(source, Reader):
            buffer[...] = source.read(self.indexes[self.start : stop])
        elif source.dtype == buffer.dtype and source.flags.c_contiguous and source.flags.aligned:
            # The indexes were checked once; "clip" is the mode that neither checks nor copies again.
            np.take(source, self.indexes[self.start : stop], axis=0, out=buffer, mode="clip")
        else:
            rows = _rows_of(buffer, BLOCK)
            for at in range(0, len(buffer), rows):
                part = buffer[at : at + rows]
                part[...] = source[self.indexes[self.start + at : self.start + at + len(part)]]

    def cut(self, rows: int) -> list[Rows]:
        """The same in pieces of at most so many rows."""
        return [
            self._replace(buffer=self.buffer[at : at + rows], start=self.start + at)
            for at in range(0, len(self.buffer), rows)
        ]


def _rows_of(buffer: np.ndarray, size: int) -> int:
    """How many of its rows have about so many bytes."""
    return max(1, size * len(buffer) // max(buffer.nbytes, 1))


def copy(parts: Sequence[Rows]) -> None:
    """Copy all these rows, by as many threads as pay."""
    for part in parts:
        if isinstance(part.source, Reader):  # which may not bear several threads
            part.copy()
    parts = [part for part in parts if not isinstance(part.source, Reader)]
    total = sum(part.buffer.nbytes for part in parts)
    workers = min(_cores(), THREADS, 2 * total // SHARED) - 1
    if total < SHARED or workers < 1:
        for part in parts:
            part.copy()
        return
    size = max(BLOCK, total // (4 * (workers + 1)))
    pieces = deque(piece for part in parts for piece in part.cut(_rows_of(part.buffer, size)))

    def work() -> None:
        while True:
            try:
                piece = pieces.popleft()
            except IndexError:
                return
            piece.copy()

    others = [_threads().submit(work) for _ in range(workers)]
    try:
        work()
    finally:
        pieces.clear()
        for other in others:
            if not other.cancel():  # it has begun
                other.result()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, "synk-rows")
