"""Rows: check which rows a call picks, and bring each replica its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import numpy as np

from . import _sources
from ._engine import sent, sharding
from ._group import Group
from ._sources import Reader, Rows, Source
from ._staging import aligned, aligned_parts

How: TypeAlias = Literal["window", "take"]


class Selection(NamedTuple):
    """Which rows are taken, in order: those at `indexes`, or (None) consecutive ones from `start` on."""

    indexes: np.ndarray | None
    start: int
    rows: int

    def positions(self, start: int, stop: int) -> np.ndarray:
        """Where rows `start` to `stop` of the selection lie in the source."""
        return (
            self.indexes[start:stop] if self.indexes is not None else np.arange(self.start + start, self.start + stop)
        )

    def into(self, buffer: np.ndarray, source: np.ndarray | Reader, at: int) -> Rows:
        """Fill a buffer with rows of the selection, from `at` on."""
        return Rows(buffer, source, self.indexes, at if self.indexes is not None else self.start + at)


class LocalRows(NamedTuple):
    """Which of the rows that it holds each replica takes."""

    held: tuple[int, ...]
    chosen: tuple[Selection, ...]
    lengths: tuple[int, ...]


def select(batch: Any, rows: int, function: str, name: str, option: str = "batch", is_part: bool = False) -> Selection:
    """Check a `batch` against an input of so many rows; one that is part of a selection may be empty."""
    if batch is None:
        return Selection(None, 0, rows)
    if isinstance(batch, slice):
        chosen = range(*batch.indices(rows))
        if chosen.step == 1:
            found = Selection(None, chosen.start, len(chosen))
        else:
            found = Selection(np.arange(chosen.start, chosen.stop, chosen.step), 0, len(chosen))
    else:
        index = _index_array(batch, function, option)
        if index.ndim == 0:
            found = _first(int(index), rows, function, name, option)
        elif index.dtype == bool:
            if len(index) != rows:
                raise ValueError(
                    f"{function}: {option} is a mask of length {len(index)}, but {name} has {rows} rows. "
                    f"Give one entry a row."
                )
            found = selected(np.flatnonzero(index))
        else:
            found = selected(_in_range(index, rows, function, name, option))
    if found.rows == 0 and not is_part:
        shown = f"{option}={batch}" if isinstance(batch, slice | int) else f"the {option}"
        raise ValueError(f"{function}: {shown} selects no rows. A call needs at least one.")
    return found


def _index_array(batch: Any, function: str, option: str) -> np.ndarray:
    wanted = "give a number of rows, a slice, a boolean mask or integer indexes"
    if isinstance(batch, bool | np.bool_):
        raise TypeError(f"{function}: {option} is {batch}; {wanted}.")
    index = np.asarray(batch)
    if index.size == 0 and not hasattr(batch, "dtype"):
        index = index.astype(np.int64)  # the dtype of [] says nothing
    if index.dtype.kind not in "iub":
        raise TypeError(f"{function}: {option} has dtype {index.dtype}; {wanted}.")
    if index.ndim > 1:
        raise ValueError(f"{function}: {option} has shape {index.shape}; give indexes or a mask of one dimension.")
    return index


def _first(count: int, rows: int, function: str, name: str, option: str) -> Selection:
    if not 0 <= count <= rows:
        raise IndexError(
            f"{function}: {option}={count} asks for the first {count} rows, but {name} has {rows}. "
            f"Give 1 to {rows}, or a slice, which is cut to what there is."
        )
    return Selection(None, 0, count)


def _in_range(index: np.ndarray, rows: int, function: str, name: str, option: str) -> np.ndarray:
    """Indexes from 0 on."""
    if index.size == 0:
        return index.astype(np.int64)
    wide = index.astype(np.int64, copy=False)
    if index.dtype != np.uint64 and are_below(wide, rows):
        return wide
    if not (-rows <= int(index.min()) and int(index.max()) < rows):
        wrong = next(int(i) for i in index if not -rows <= int(i) < rows)
        raise IndexError(
            f"{function}: {option} holds the index {wrong}, but {name} has {rows} rows. Indexes run from {-rows} "
            f"to {rows - 1}."
        )
    return np.where(wide < 0, wide + rows, wide)


def are_below(index: np.ndarray, rows: int) -> bool:
    """Are these signed integers, at least one, all from 0 on and less than `rows`? One pass over them."""
    wide = index.astype(np.int64, copy=False).view(np.uint64)  # negative ones are huge there
    return wide.item(wide.argmax()) < rows  # quicker than max, which goes through a ufunc's reduction


def selected(index: np.ndarray) -> Selection:
    """A selection of these rows; consecutive ones need no index."""
    count = len(index)
    if count and index[-1] - index[0] == count - 1 and (count == 1 or (np.diff(index) == 1).all()):
        return Selection(None, int(index[0]), count)
    return Selection(index, 0, count)


def select_local(batch_s: Any, held: Sequence[int], function: str, name: str) -> LocalRows:
    """Check a `batch_s` against the rows that replicas hold: one selection for all, or one for each."""
    each = [batch_s] * len(held)
    if not _is_one_each(batch_s):
        if len(set(held)) == 1:  # so is what it picks
            one = select(batch_s, held[0], function, f"{name} on each replica", "batch_s")
            return LocalRows(tuple(held), (one,) * len(held), (one.rows,) * len(held))
    else:
        each = list(batch_s)
        if len(each) != len(held):
            raise ValueError(
                f"{function}: batch_s has {len(each)} selections, but there are {len(held)} replicas. Give one for all "
                f"or one for each."
            )
    chosen = tuple(
        select(one, rows, function, f"{name} on replica {rank}", "batch_s", is_part=True)
        for rank, (one, rows) in enumerate(zip(each, held, strict=True))
    )
    lengths = tuple(selection.rows for selection in chosen)
    if not any(lengths):
        raise ValueError(f"{function}: batch_s selects no rows on any replica. A call needs at least one.")
    return LocalRows(tuple(held), chosen, lengths)


def _is_one_each(batch_s: Any) -> bool:
    if isinstance(batch_s, list | tuple):
        return any(isinstance(item, slice | list | tuple) or np.ndim(item) for item in batch_s)
    return not isinstance(batch_s, slice) and np.ndim(batch_s) == 2


def how_picked(batch: Any) -> How:
    """Are the rows consecutive, as far as the form tells? Programs differ in this, and never in the rows themselves."""
    if isinstance(batch, slice):
        is_run = batch.step in (None, 1)
    elif isinstance(batch, list | tuple):
        is_run = bool(batch) and all(isinstance(item, slice) and item.step in (None, 1) for item in batch)
    else:
        is_run = batch is None or np.ndim(batch) == 0
    return "window" if is_run else "take"


def taken_together(local: LocalRows) -> Selection:
    """The same rows of all replicas' rows one after another."""
    base = np.cumsum([0, *local.held])
    index = np.concatenate([s.positions(0, s.rows) + b for s, b in zip(local.chosen, base, strict=False)])
    return selected(index)


def place(
    group: Group,
    source: Source,
    selection: Selection,
    starts: Sequence[int],
    rows: int,
    dtype: np.dtype,
    is_argument: bool = False,
) -> Any:
    """Bring each replica `rows` rows of the selection, beginning at its start, as one array over the group.

    The result never shares memory with an array of the user's, unless it is that `jax.Array` itself, in its place. As a
    program's argument, aligned memory for one device is as good and needs no array made of it.
    """
    if isinstance(source, jax.Array):
        is_all = selection.indexes is None and len(source) == selection.rows == rows * group.size
        if is_all and source.dtype == dtype:
            return source if source.sharding == group.stacked else sent(group, source, "stacked")
        host = on_host(group, source)
        if host is None:
            return _place_on_device(group, source, selection, starts, rows, dtype)
        source = host
    shape = (rows * group.size, *source.shape[1:])
    if group.is_on_one:
        whole = aligned(shape, dtype)
        parts = [whole[rank * rows : (rank + 1) * rows] for rank in range(group.size)]
    else:
        whole = None
        parts = aligned_parts(len(group.mine), (rows, *shape[1:]), dtype)
        starts = [starts[rank] for rank in group.mine]
    fill(parts, source, selection, starts)
    if whole is not None and is_argument:
        return whole

    def part_at(index: Any) -> np.ndarray:
        return whole if whole is not None else parts[(index[0].start or 0) // rows - group.mine.start]

    return jax.make_array_from_callback(shape, sharding(group, "rows"), part_at)


def fill(parts: Iterable[np.ndarray], source: np.ndarray | Reader, selection: Selection, starts: Sequence[int]) -> None:
    """Copy rows of the selection into each part, beginning at its start."""
    _sources.copy([selection.into(part, source, start) for part, start in zip(parts, starts, strict=True)])


def on_host(group: Group, source: Source) -> np.ndarray | Reader | None:
    """A source as what threads can copy from; None where that would bring it from a device."""
    if not isinstance(source, jax.Array):
        return source
    is_here = source.is_fully_addressable or source.is_fully_replicated
    return np.asarray(source) if is_here and (group.platform == "cpu" or group.spans) else None  # a view, on CPU


def gather_rows(source: np.ndarray | Reader, selection: Selection, dtype: np.dtype) -> np.ndarray:
    """The rows of a selection in host memory of their own."""
    buffer = aligned((selection.rows, *source.shape[1:]), dtype)
    _sources.copy([selection.into(buffer, source, 0)])
    return buffer


def put(group: Group, values: np.ndarray) -> Any:
    """Small numbers of one entry a replica on axis 0, each in its place; they must stay as they are."""
    if group.is_on_one:
        return values  # a program's own handling of what is not there yet is quickest
    return jax.make_array_from_callback(values.shape, group.stacked, values.__getitem__)


def _place_on_device(
    group: Group, source: jax.Array, selection: Selection, starts: Sequence[int], rows: int, dtype: np.dtype
) -> jax.Array:
    """Pick rows where they are, and send each replica its own."""
    index = np.concatenate([selection.positions(start, start + rows) for start in starts])
    picked = _take(source, index.astype(np.int32)).astype(dtype)
    return sent(group, picked, "stacked")


@jax.jit
def _take(source: jax.Array, index: jax.Array) -> jax.Array:
    return source.at[index].get(mode="promise_in_bounds")
