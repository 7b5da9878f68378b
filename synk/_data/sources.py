"""Sources: objects that hold rows, in memory, on disk or on devices, and copies of their rows by several threads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from mmap import mmap
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from .._base.errors import shown
from .._base.pytree import (
    array_of_list,
    as_data,
    fitting,
    is_number,
    refuse_tracer,
)
from .._runtime.dispatch import LOCK

# Bytes that are converted at a time, so that they stay in a core's cache.
BLOCK = 1 << 18
# Bytes that pay for a second thread. Fewer are copied before it has woken up.
SHARED = 1 << 22
# The least bytes that a thread copies at a time.
PIECE = 1 << 20
# More threads do not read a machine's memory any faster.
THREADS = 16
# Bytes of consecutive rows that are read from a file at a time.
AT_ONCE = 1 << 28


class Reader:
    """A source that gives rows by position when it is indexed (h5py, zarr), and is read in parts, never whole."""

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
        # Rows are checked when they come: NumPy would convert, unmask or repeat wrong ones to fit a buffer.
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
        """Read rows that hold those of the indexes, and return them with the positions of these."""
        # Files want increasing indexes without repetitions:
        # https://docs.h5py.org/en/stable/high/dataset.html#fancy-indexing
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
            if hasattr(value, "column_names") or hasattr(value, "column_name"):
                advice = 'give each column as an array, np.asarray(dataset["x"][:])'
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
    try:
        asked = np.dtype(dtype)
    except TypeError:
        asked = np.dtype(object)
    if not is_number(asked):
        raise TypeError(f"{name}: dtype is {shown(dtype)}; give one of numbers or booleans that JAX has.")
    return asked


def is_in_memory(source: Source) -> bool:
    # A view of a mapped file is a plain ndarray. Only the end of the chain of its bases tells.
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


class Copy(NamedTuple):
    """A buffer and the rows to copy into it.

    Attributes:
      buffer: where the rows go; its length says how many.
      start: the first row, counted in the source or, where there are indexes, in these.
    """

    buffer: np.ndarray
    start: int

    @property
    def stop(self) -> int:
        return self.start + len(self.buffer)


def share_rows(one: Any, other: Any) -> bool:
    """Check whether a write to rows of one source may change rows of another one."""
    if isinstance(one, Reader) and isinstance(other, Reader):
        # Each `file["x"]` of h5py is another object, and equal. What has no hash may compare numbers.
        return one.of is other.of or bool(type(one.of).__hash__ and (one.of == other.of) is True)
    if not (isinstance(one, np.ndarray) and isinstance(other, np.ndarray)):
        return False
    # Work enough to tell columns apart.
    return np.may_share_memory(one, other, max_work=99)  # type: ignore[arg-type]  # any number


def copy_rows(source: HostSource, indexes: np.ndarray | None, copies: Sequence[Copy]) -> None:
    """Fill buffers with rows of a source, or with those that the indexes name, by as many threads as pay."""
    # h5py and the like may not allow several threads.
    if isinstance(source, Reader):
        _read(source, indexes, copies)
        return
    total = sum([copy.buffer.nbytes for copy in copies])
    workers = 1 if total < SHARED else min(_cores(), THREADS, 2 * total // SHARED)
    if workers == 1:
        _copy_all(source, indexes, iter(copies))
        return
    # NumPy releases the interpreter's lock while it copies. Several pieces a thread even out their speeds.
    size = max(PIECE, total // (8 * workers))
    pieces = iter([piece for copy in copies for piece in _pieces(copy, size)])
    # This thread is a worker too: the others may wake up late, or find no core.
    futures = [_threads().submit(_copy_all, source, indexes, pieces) for _ in range(workers - 1)]
    try:
        _copy_all(source, indexes, pieces)
    finally:
        # After an error, too, no thread may write to a buffer that its owner has let go.
        begun = [future for future in futures if not future.cancel()]
        wait(begun)
    for future in begun:
        future.result()


def _copy_all(source: np.ndarray, indexes: np.ndarray | None, copies: Iterator[Copy]) -> None:
    """Fill buffers from an array in memory. Threads that are given one iterator share its copies."""
    for buffer, start in copies:
        stop = start + len(buffer)
        if indexes is None:
            buffer[...] = fitting(source[start:stop], buffer.dtype)
        elif source.dtype == buffer.dtype and source.flags.c_contiguous and source.flags.aligned:
            # The indexes were checked once; "clip" is the mode that neither checks nor copies again.
            source.take(indexes[start:stop], 0, buffer, "clip")
        else:
            for block in _pieces(Copy(buffer, start), BLOCK):
                block.buffer[...] = fitting(source[indexes[block.start : block.stop]], buffer.dtype)


def _pieces(copy: Copy, size: int) -> list[Copy]:
    """Cut a copy into pieces of about `size` bytes."""
    buffer, start = copy
    step = max(1, size * len(buffer) // max(buffer.nbytes, 1))
    return [Copy(buffer[i : i + step], start + i) for i in range(0, len(buffer), step)]


def _read(source: Reader, indexes: np.ndarray | None, copies: Sequence[Copy]) -> None:
    """Fill buffers from a file. Read each row once: a file unpacks a whole chunk for any of its rows."""
    if indexes is not None:
        # One read for all copies: a file unpacks a whole chunk for any of its rows.
        rows, at = source.find(np.concatenate([indexes[copy.start : copy.stop] for copy in copies]))
        for copy in copies:
            own, at = at[: len(copy.buffer)], at[len(copy.buffer) :]
            copy.buffer[...] = fitting(rows[own], copy.buffer.dtype)
        return
    for run in _runs([piece for copy in copies for piece in _pieces(copy, AT_ONCE)]):
        first = run[0].start
        rows = source[first : max(copy.stop for copy in run)]
        for copy in run:
            copy.buffer[...] = fitting(rows[copy.start - first : copy.stop - first], copy.buffer.dtype)


def _runs(copies: Sequence[Copy]) -> list[list[Copy]]:
    """Group copies whose rows are consecutive, up to `AT_ONCE` bytes, since memory holds them twice."""
    runs: list[list[Copy]] = []
    stop = size = 0
    for copy in sorted(copies, key=lambda copy: copy.start):
        size += copy.buffer.nbytes
        if not runs or copy.start > stop or size > AT_ONCE:
            runs.append([])
            size = copy.buffer.nbytes
        runs[-1].append(copy)
        stop = max(stop, copy.stop)
    return runs


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, "synk-rows")


def read_within(source: Reader, length: int, index: Any) -> Any:
    """Return the rows that an index of NumPy's picks among the first rows of a file. Read no other rows."""
    axes: tuple[Any, ...] = (index or (...,)) if isinstance(index, tuple) else (index,)
    first, *rest = axes
    if isinstance(first, int | np.integer) and not isinstance(first, bool):
        row = range(length)[first]
        return source[row : row + 1][(0, *rest)]
    if isinstance(first, slice):
        run = range(length)[first]
        # Files read upwards only.
        up, step = (run, 1) if run.step > 0 else (run[::-1], -1)
        return source[up.start : max(up.start, up.stop) : up.step][(slice(None, None, step), *rest)]
    if np.ndim(first) == 1 and len(numbers := np.arange(length)[first]):
        rows, at = source.find(numbers)
        return rows[(at, *rest)]
    return source[:length][index]


def index_within(index: Any, length: int) -> Any:
    """Rewrite an index of NumPy's among the first rows, so that it picks the same rows of the whole array."""
    first, *rest = (index or (...,)) if isinstance(index, tuple) else (index,)
    if first is ...:
        return (slice(length), ..., *rest)
    if isinstance(first, slice):
        run = range(length)[first]
        return (slice(run.start, run.stop if run.stop >= 0 else None, run.step), *rest)
    numbers = np.arange(length)[first]
    return (numbers if isinstance(numbers, np.ndarray) else int(numbers), *rest)
