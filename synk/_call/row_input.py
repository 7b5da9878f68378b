"""Row input: how the rows of one argument reach the replicas: sent from the host, or picked where they lie."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .._base.pytree import narrow
from .._data.dataset import Data, abstract_rows, resident, source_of
from .._data.feed import SENT, InputFeed
from .._data.overlap import Overlap, with_neighbours
from .._data.selection import IndexKind, Selection, index_kind
from .._data.sources import is_in_memory
from .._runtime.group import Group


class RowRequest(NamedTuple):
    """Which rows a call asks for, as its user gave them."""

    batch: Any = None
    batch_s: Any = None
    num_slices: Any = 1  # or "auto"
    turn: int | None = None  # which item of a loop over batches it is


class RowInput(NamedTuple):
    """One scattered argument."""

    source: Any  # on the host; or the resident array
    selection: Selection  # which rows; of scattered data that keeps its rows, all
    feed: InputFeed  # how they come
    shape: tuple[int, ...]  # of one row
    dtype: np.dtype  # as JAX has it
    scattered_rows: int | None = None  # where a batch picks from all rows of scattered data: how many there are
    rows_before: int = 0  # rows of the call that lie before the source's, in other processes


class RowCall(NamedTuple):
    """What the checks of the rows of one call share."""

    name: str  # of the function
    names: Sequence[str]  # of the scattered arguments
    leaves: Sequence[Any]  # these, looked at
    request: RowRequest  # which rows
    group: Group  # which runs them
    data_group: Group | None = None  # where scattered data lies in another group: that one; rows come from the host
    overlaps: Sequence[Overlap | None] = ()  # which neighbours of its rows each brings; () for none
    is_abstract: bool = False  # whether the call is compiled and not run, so that nothing is placed
    block: int | None = None  # of how many rows are the blocks that replicas get whole; None: rows are dealt out evenly


class Picks(NamedTuple):
    """Which rows a call takes of one argument."""

    selection: Selection
    batch: Any  # what picks them
    is_on_replicas: bool  # whether that picks on each replica
    overlap: Overlap | None = None  # which neighbours come with them
    max_rows: int = 0  # with these, rows of the longest part


def row_input(call: RowCall, leaf: Any, picks: Picks) -> RowInput:
    """How one argument's rows come: sent from the host, or picked from resident data where they lie.

    Resident data is sent too where the call has another group, where `batch_s` picks from other data, and where CPU
    devices share the host's memory. Rows of the whole scattered data that a batch names are exchanged first.
    """
    selection, batch, is_on_replicas, overlap, max_rows = picks
    is_all = isinstance(leaf, Data) and selection.indexes is None and selection.rows == len(leaf)
    is_all = is_all and call.block is None  # which are dealt out in another way than data is
    sending = SENT if overlap is None else SENT._replace(overlap=overlap)
    if overlap is not None and not _keeps_place(call, leaf, is_all):
        among = with_neighbours(selection.rows, overlap)
        index = among + selection.start if selection.indexes is None else selection.indexes[among]
        selection = Selection(index, 0, len(index))
    if not isinstance(leaf, Data):
        return RowInput(leaf, selection, sending, leaf.shape[1:], narrow(leaf.dtype))
    shape, dtype, group = leaf.shape[1:], narrow(leaf.dtype), call.group
    sent = RowInput(source_of(leaf), selection, sending, shape, dtype)
    if leaf.place == "host" or call.data_group is not None:
        return sent
    if leaf.place == "scatter" and call.request.batch_s is not None and not is_on_replicas:
        # `batch_s` gives replicas unequal rows, but scattered minibatch data is split evenly: send its rows.
        return sent
    may_differ = group.size > 1 or overlap is not None
    is_global = leaf.place == "scatter" and may_differ and not (is_on_replicas or is_all)
    if is_global and group.platform == "cpu" and is_in_memory(source_of(leaf)):
        return sent  # which these devices' rows lie in, too
    array = abstract_rows(leaf, group) if call.is_abstract else resident(leaf, group)

    def at(feed: InputFeed, scattered_rows: int | None = None) -> RowInput:
        return RowInput(array, selection, feed, shape, dtype, scattered_rows)

    kind: IndexKind = index_kind(batch) if overlap is None else "gather"
    if leaf.place == "broadcast":
        return at(InputFeed("replicated", kind, len(leaf), overlap))
    of_slice: IndexKind | None = "slice" if call.request.num_slices > 1 else None
    if is_all and not is_on_replicas:
        # Whole, each part begins where its replica's rows do, unless it is a slice of those.
        held = 0 if overlap is None else len(leaf)
        return at(InputFeed("stacked", of_slice, array.shape[1], overlap, held))
    if not is_global:  # picked on its replica; one replica has all rows
        return at(InputFeed("stacked", kind, array.shape[1]))
    max_rows = max_rows or -(-selection.rows // group.size)
    return at(InputFeed("stacked", of_slice, max_rows, overlap), len(leaf))


def _keeps_place(call: RowCall, leaf: Any, is_all: bool) -> bool:
    """Is it all of scattered data, whose replicas bring each other the neighbours?"""
    return is_all and leaf.place == "scatter" and call.data_group is None and call.request.batch_s is None
