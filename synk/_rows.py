"""Rows: pick rows of arrays in host memory or on devices, and bring each replica its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ._engine import sharding
from ._group import Group

Source = np.ndarray | jax.Array


class Selection(NamedTuple):
    """Which rows a call takes, in order, and how many they are."""

    chosen: slice | np.ndarray | None
    rows: int


def select(batch: Any, rows: int, function: str, name: str) -> Selection:
    """Check a `batch` against an input of so many rows."""
    if batch is None:
        return Selection(None, rows)
    if isinstance(batch, slice):
        return _counted(slice(*_bounds(batch, rows)), len(range(*batch.indices(rows))), batch, function)
    index = _index_array(batch, function)
    if index.ndim == 0:
        return _first(int(index), rows, function, name)
    if index.ndim != 1:
        raise ValueError(f"{function}: batch has shape {index.shape}; give indexes or a mask of one dimension.")
    if index.dtype == bool:
        if len(index) != rows:
            raise ValueError(
                f"{function}: batch is a mask of length {len(index)}, but {name} has {rows} rows. Give one entry a row."
            )
        index = np.flatnonzero(index)
        return _counted(index, len(index), batch, function)
    return _counted(_in_range(index, rows, function, name), len(index), batch, function)


def _bounds(batch: slice, rows: int) -> tuple[int | None, int | None, int]:
    start, stop, step = batch.indices(rows)
    return start, None if stop < 0 else stop, step  # indices() gives -1 for "to the start", which means another thing


def _index_array(batch: Any, function: str) -> np.ndarray:
    if isinstance(batch, bool | np.bool_):
        raise TypeError(f"{function}: batch is {batch}; give a number of rows, a slice, a mask or indexes.")
    index = np.asarray(batch)
    if index.size == 0 and not hasattr(batch, "dtype"):
        index = index.astype(np.int64)  # the dtype of [] says nothing
    if index.dtype.kind not in "iub":
        raise TypeError(
            f"{function}: batch has dtype {index.dtype}; give a number of rows, a slice, a boolean mask or integer "
            f"indexes."
        )
    return index


def _first(count: int, rows: int, function: str, name: str) -> Selection:
    if count == 0:
        return _counted(slice(0, 0), 0, count, function)
    if not 0 < count <= rows:
        raise IndexError(
            f"{function}: batch={count} asks for the first {count} rows, but {name} has {rows}. "
            f"Give 1 to {rows}, or a slice, which is cut to what there is."
        )
    return Selection(slice(0, count), count)


def _in_range(index: np.ndarray, rows: int, function: str, name: str) -> np.ndarray:
    if len(index) and not (-rows <= int(index.min()) and int(index.max()) < rows):
        wrong = next(int(i) for i in index if not -rows <= int(i) < rows)
        raise IndexError(
            f"{function}: batch holds the index {wrong}, but {name} has {rows} rows. Indexes run from {-rows} "
            f"to {rows - 1}."
        )
    index = index.astype(np.int64, copy=False)
    return np.where(index < 0, index + rows, index) if len(index) and index.min() < 0 else index


def _counted(index: slice | np.ndarray, count: int, batch: Any, function: str) -> Selection:
    if count == 0:
        shown = batch if isinstance(batch, slice | int) else "the batch"
        raise ValueError(f"{function}: {shown} selects no rows. A call needs at least one.")
    return Selection(index, count)


def place(group: Group, source: Source, selection: Selection, starts: Sequence[int], rows: int) -> jax.Array:
    """Bring each replica `rows` rows of the selection, beginning at its start, as one array over the group.

    The result never shares memory with an array of the user's, unless it is that `jax.Array` itself, in its place.
    """
    whole = selection.chosen is None and len(source) == rows * group.size
    if isinstance(source, jax.Array):
        if whole and source.sharding == group.stacked:
            return source
        if whole:
            return jax.device_put(source, group.stacked)
        if group.platform == "cpu" and source.is_fully_addressable:
            source = np.asarray(source)  # a view
        else:
            return _place_on_device(group, source, selection, starts, rows)
    shape = (rows * group.size, *source.shape[1:])
    dtype = jax.dtypes.canonicalize_dtype(source.dtype)
    if group.is_simulated:
        buffer = aligned(shape, dtype)
        for rank, start in enumerate(starts):
            fill(buffer[rank * rows : (rank + 1) * rows], source, selection, start)
        return jax.device_put(buffer, group.stacked)

    def part(index: Any) -> np.ndarray:
        buffer = aligned((rows, *shape[1:]), dtype)
        fill(buffer, source, selection, starts[(index[0].start or 0) // rows])
        return buffer

    return jax.make_array_from_callback(shape, sharding(group, "rows"), part)


def fill(buffer: np.ndarray, source: np.ndarray, selection: Selection, start: int) -> None:
    """Copy rows of the selection, from `start` on, until the buffer is full."""
    stop = start + len(buffer)
    index = selection.chosen
    if index is None:
        buffer[...] = source[start:stop]
    elif isinstance(index, slice):
        buffer[...] = source[index][start:stop]
    elif source.dtype == buffer.dtype:
        # The indexes were checked once; "clip" is the mode that neither checks nor copies again.
        np.take(source, index[start:stop], axis=0, out=buffer, mode="clip")
    else:
        buffer[...] = source[index[start:stop]]


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Uninitialised memory that JAX takes over without a copy on CPU: 64-byte aligned."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)


def _place_on_device(
    group: Group, source: jax.Array, selection: Selection, starts: Sequence[int], rows: int
) -> jax.Array:
    """Pick rows where they are, and send each replica its own."""
    index = np.concatenate([_positions(selection, len(source), start, rows) for start in starts])
    picked = _take(source, index.astype(np.int32))
    return jax.device_put(picked, group.stacked)


def _positions(selection: Selection, length: int, start: int, rows: int) -> np.ndarray:
    if isinstance(selection.chosen, np.ndarray):
        return selection.chosen[start : start + rows]
    if selection.chosen is None:
        return np.arange(start, start + rows)
    return np.arange(length)[selection.chosen][start : start + rows]


@jax.jit
def _take(source: jax.Array, index: jax.Array) -> jax.Array:
    return source.at[index].get(mode="promise_in_bounds")
