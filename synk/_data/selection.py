"""Selection: the rows that a call picks, checked against the rows of its inputs."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

IndexKind: TypeAlias = Literal["slice", "gather"]


class Selection(NamedTuple):
    """Rows to take, in order.

    Attributes:
      indexes: the rows; None for consecutive rows.
      start: the first of consecutive rows, else 0.
      rows: how many rows there are.
    """

    indexes: np.ndarray | None
    start: int
    rows: int

    def positions(self, start: int, stop: int) -> np.ndarray:
        """Return the places of rows `start` to `stop` of the selection in the source."""
        return np.arange(self.start + start, self.start + stop) if self.indexes is None else self.indexes[start:stop]

    def with_copied_indexes(self) -> "Selection":
        # The indexes may be the user's own array, which a loop writes anew for its next batch.
        return self if self.indexes is None else self._replace(indexes=self.indexes.copy())


class ReplicaSelection(NamedTuple):
    held: tuple[int, ...]
    chosen: tuple[Selection, ...]
    lengths: tuple[int, ...]


def select(batch: Any, rows: int, function: str, name: str, option: str = "batch", is_part: bool = False) -> Selection:
    """Check a `batch` against an input of `rows` rows. A part of a larger selection may be empty."""
    if batch is None:
        return Selection(None, 0, rows)
    if isinstance(batch, slice):
        start, stop, step = batch.indices(rows)
        count = max(0, stop - start)
        selection = Selection(None, start, count) if step == 1 else selection_of(np.arange(start, stop, step))
    else:
        what = f"{function}: {option}"
        index = _index_array(batch, what)
        if index.ndim == 0:
            count = int(index)
            if not 0 <= count <= rows:
                raise IndexError(
                    f"{what}={count} asks for the first {count} rows, but {name} has {rows}. Give 1 to {rows}, or a "
                    f"slice, which is cut to what there is."
                )
            selection = Selection(None, 0, count)
        elif index.dtype == bool:
            if len(index) != rows:
                raise ValueError(
                    f"{what} is a mask of length {len(index)}, but {name} has {rows} rows. Give one entry a row."
                )
            selection = selection_of(np.flatnonzero(index))
        else:
            selection = selection_of(_from_0_on(index, rows, what, name))
    if selection.rows == 0 and not is_part:
        shown = f"{option}={batch}" if isinstance(batch, slice | int) else f"the {option}"
        raise ValueError(f"{function}: {shown} selects no rows. A call needs at least one.")
    return selection


def _index_array(batch: Any, what: str) -> np.ndarray:
    wanted = "give a number of rows, a slice, a boolean mask or integer indexes"
    try:
        index = np.asarray(batch)
    except ValueError:
        raise ValueError(f"{what} is a list of lists; give indexes or a mask of one dimension.") from None
    if index.dtype == bool and index.ndim == 0:
        raise TypeError(f"{what} is {index}, a single boolean; {wanted}.")
    if index.size == 0 and not hasattr(batch, "dtype"):
        # NumPy takes an empty list for floats.
        index = index.astype(np.int64)
    if index.dtype.kind not in "iub" and (hasattr(batch, "dtype") or not all(type(i) is int for i in index.flat)):
        raise TypeError(f"{what} has dtype {index.dtype}; {wanted}.")
    if index.ndim > 1:
        raise ValueError(f"{what} has shape {index.shape}; give indexes or a mask of one dimension.")
    return index


def _from_0_on(index: np.ndarray, rows: int, what: str, name: str) -> np.ndarray:
    """Check indexes, and count negative ones from the end."""
    # An object array holds Python integers of more than 64 bits.
    if index.dtype != object:
        wide = index.astype(np.int64, copy=False)
        # As unsigned numbers negative indexes are huge, so one pass checks both ends. argmax is quicker than max, which
        # goes through a ufunc's reduction.
        bits = wide.view(np.uint64)
        if index.size == 0 or bits.item(bits.argmax()) < rows:
            return wide
        if -rows <= int(index.min()) and int(index.max()) < rows:
            return np.where(wide < 0, wide + rows, wide)
    wrong = next(int(i) for i in index if not -rows <= int(i) < rows)
    raise IndexError(
        f"{what} holds the index {wrong}, but {name} has {rows} rows. Indexes run from {-rows} to {rows - 1}."
    )


def selection_of(index: np.ndarray) -> Selection:
    """Return a selection of rows. Consecutive rows need no index."""
    count = len(index)
    # Consecutive rows are one copy on the host, and a slice in programs. The ends tell most others apart at once.
    if count and index[-1] - index[0] == count - 1 and (count == 1 or (np.diff(index) == 1).all()):
        return Selection(None, int(index[0]), count)
    return Selection(index, 0, count)


def select_on_replicas(batch_s: Any, held: Sequence[int], function: str, name: str) -> ReplicaSelection:
    """Check a `batch_s` against the rows that replicas hold: one selection for all, or one for each."""
    held, size = tuple(held), len(held)
    is_one_each = _is_one_each(batch_s)
    # If all replicas hold as many rows, one check is enough.
    if not is_one_each and len(set(held)) == 1:
        selection = select(batch_s, held[0], function, f"{name} on each replica", "batch_s")
        return ReplicaSelection(held, (selection,) * size, (selection.rows,) * size)
    batches = list(batch_s) if is_one_each else [batch_s] * size
    if len(batches) != size:
        raise ValueError(
            f"{function}: batch_s has {len(batches)} selections, but there are {size} replicas. Give one for all "
            f"or one for each."
        )
    chosen = tuple(
        select(batch, rows, function, f"{name} on replica {rank}", "batch_s", is_part=True)
        for rank, (batch, rows) in enumerate(zip(batches, held, strict=True))
    )
    lengths = tuple(selection.rows for selection in chosen)
    if not any(lengths):
        raise ValueError(f"{function}: batch_s selects no rows on any replica. A call needs at least one.")
    return ReplicaSelection(held, chosen, lengths)


def _is_one_each(batch_s: Any) -> bool:
    if isinstance(batch_s, list | tuple):
        return any(isinstance(item, slice | list | tuple) or np.ndim(item) for item in batch_s)
    return not isinstance(batch_s, slice) and np.ndim(batch_s) == 2


def index_kind(batch: Any) -> IndexKind:
    """Return the form of an index for a batch, which depends on its form alone. Programs differ in this form only."""
    if isinstance(batch, slice):
        is_run = batch.step in (None, 1)
    elif isinstance(batch, list | tuple):
        is_run = bool(batch) and all(isinstance(item, slice) and item.step in (None, 1) for item in batch)
    else:
        is_run = batch is None or np.ndim(batch) == 0
    return "slice" if is_run else "gather"


def merge_replicas(local: ReplicaSelection) -> Selection:
    """Return the same rows as a selection of all replicas' rows, one replica after another."""
    base = np.cumsum([0, *local.held])
    # One replica after another, as rows of all replicas are numbered.
    index = np.concatenate([s.positions(0, s.rows) + b for s, b in zip(local.chosen, base, strict=False)])
    return selection_of(index)
