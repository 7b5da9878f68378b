"""Row input: how the rows of one argument reach the replicas: sent from the host, or picked where they lie."""

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np

from .._base.partition import lengths_of, split_rows
from .._base.pytree import SCALARS, narrow
from .._data.dataset import Data, abstract_rows, is_result, resident, source_of
from .._data.exchange import exchange, exchange_program
from .._data.feed import SENT, InputFeed
from .._data.overlap import Overlap, widened, with_neighbours
from .._data.places import Picks
from .._data.process_rows import ProcessLocalRows, rows_of_processes, rows_of_replicas
from .._data.selection import (
    IndexKind,
    ReplicaSelection,
    Selection,
    merge_replicas,
    select,
    select_on_replicas,
)
from .._data.transfer import PartRows, gather_rows, send_index, send_rows
from .._runtime.executable import Executable
from .._runtime.group import Group
from .._runtime.layout import constant
from .binding import Arguments, CallOptions, no_rows


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
    options: CallOptions  # which rows
    group: Group  # which runs them
    data_group: Group | None = None  # where scattered data lies in another group: that one; rows come from the host
    overlaps: Sequence[Overlap | None] = ()  # which neighbours of its rows each brings; () for none
    is_abstract: bool = False  # whether the call is compiled and not run, so that nothing is placed
    block: int | None = None  # of how many rows are the blocks that replicas get whole; None: rows are dealt out evenly


def row_input(call: RowCall, leaf: Any, picks: Picks) -> RowInput:
    """Choose how one argument's rows come: sent from the host, or taken from where resident data lies."""
    taken, selection, overlap = None, picks.selection, picks.overlap
    is_data = isinstance(leaf, Data)
    if is_data and call.data_group is None:
        taken = leaf._home.take(call.group, source_of(leaf), len(leaf), picks)
    # The program itself exchanges neighbours where replicas take their own rows.
    if overlap is not None and not (taken and taken.feed.held_rows):
        among = with_neighbours(selection.rows, overlap)
        index = among + selection.start if selection.indexes is None else selection.indexes[among]
        selection = Selection(index, 0, len(index))
    shape, dtype = leaf.shape[1:], narrow(leaf.dtype)
    if taken is None:
        feed = SENT if overlap is None else SENT._replace(overlap=overlap)
        return RowInput(source_of(leaf) if is_data else leaf, selection, feed, shape, dtype)
    array = abstract_rows(leaf, call.group) if call.is_abstract else resident(leaf, call.group)
    return RowInput(array, selection, taken.feed, shape, dtype, len(leaf) if taken.is_exchanged else None)


_NO_ROWS = Selection(None, 0, 0)


class RowInputs(NamedTuple):
    """The scattered arguments of a call, checked."""

    each: tuple[RowInput, ...]  # one an argument
    lengths: tuple[int, ...] | None  # rows of each replica; None where nothing has brought any yet
    on_replicas: ReplicaSelection | None = None  # where `batch_s` picks from rows that lie on the replicas
    is_process_local: bool = False  # whether each process brings rows of its own


def select_rows(call: RowCall) -> RowInputs:
    """Check the scattered arguments of a call and what picks their rows: values, in every call."""
    name, names, leaves, (batch, batch_s, num_slices, *_), group, data_group = call[:6]
    minibatch: list[int] = []  # brings the rows of the batch itself
    resident_ones: list[int] = []  # lies on the replicas, where batch_s picks
    picked: list[int] = []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, ProcessLocalRows):
            if call.block is not None:
                raise ValueError(
                    f"{name}: synk.local rows stay where they are, but blocks={call.block} deals them out."
                )
            return _select_process_rows(call)
        is_data = isinstance(leaf, Data)
        if is_data and leaf.is_minibatch:
            minibatch.append(i)
        elif is_data and batch_s is not None and leaf._home.layout == "stacked":
            resident_ones.append(i)
        else:
            picked.append(i)
    on_replicas = None
    if resident_ones:
        common_rows(name, names, leaves, resident_ones)
        lengths = lengths_of(len(leaves[resident_ones[0]]), (data_group or group).size)
        on_replicas = select_on_replicas(batch_s, lengths, name, names[resident_ones[0]])
    rows = common_rows(name, names, leaves, picked, batch=batch)
    if rows is None and batch is not None:
        raise ValueError(
            f"{name}: batch picks rows of scattered inputs, but {_nothing_to_pick(on_replicas, bool(minibatch))}"
        )
    selection = None if rows is None else select(batch, rows, name, names[picked[0]])
    count = None if selection is None else selection.rows
    if on_replicas is not None or minibatch:
        count = _agree_on_count(call, count, picked, on_replicas, minibatch)
    each: list[RowInput] = []
    for i, leaf in enumerate(leaves):
        overlap = call.overlaps[i] if call.overlaps else None
        chosen, picked_by, is_on_replicas = selection, batch, False
        if i in minibatch:
            chosen, picked_by = Selection(None, 0, count or 0), None
        elif on_replicas is not None and i in resident_ones:
            chosen = merge_replicas(on_replicas) if data_group or overlap else Selection(None, 0, len(leaf))
            picked_by, is_on_replicas = batch_s, overlap is None
        assert chosen is not None
        is_sliced = num_slices > 1
        picks = Picks(chosen, picked_by, is_on_replicas, batch_s is not None, is_sliced, overlap, call.block)
        each.append(row_input(call, leaf, picks))
    if on_replicas is not None and data_group is None:
        return RowInputs(tuple(each), on_replicas.lengths, on_replicas)
    return RowInputs(tuple(each), None if count is None else lengths_of(count, group.size, call.block))


def _select_process_rows(call: RowCall) -> RowInputs:
    """Rows of this process: over several they meet those of the others where the call runs."""
    name, names, group, data_group = call.name, call.names, call.group, call.data_group
    if call.options.batch_s is not None:
        raise ValueError(f"{name}: batch_s picks rows that live on the replicas; batch picks from synk.local rows.")
    if any(call.overlaps):
        raise ValueError(
            f"{name}: synk.local rows have neighbours in other processes, so they do not go with synk.Overlap. Give "
            f"every process all rows, or data that lies on the replicas."
        )
    for leaf, argument in zip(call.leaves, names, strict=True):
        if not isinstance(leaf, ProcessLocalRows):
            raise ValueError(
                f"{name}: argument {argument} is the same in all processes, but others hold synk.local rows. Mark all "
                f"scattered arguments of a call, or none."
            )
    home = data_group or group
    is_multi_process = home._is_multi_process
    sources: list[Any] = [leaf.source for leaf in call.leaves]
    try:
        rows = common_rows(name, names, sources, range(len(sources)), may_be_empty=is_multi_process)
        selection = select(call.options.batch, rows, name, names[0], is_part=is_multi_process) if rows else _NO_ROWS
    except Exception:
        if is_multi_process:
            refuse_together(home, name)
        raise
    lengths: tuple[int, ...] | None = None
    if is_multi_process:
        lengths = rows_of_replicas(home, selection.rows, name, _described(call))
        if not any(lengths):
            raise ValueError(f"{name}: argument {names[0]} has 0 rows in every process; a call needs at least one.")
        if data_group is not None:  # which takes all rows from here
            sources = [rows_of_processes(home, gather_rows(source, selection, source.dtype)) for source in sources]
            selection, lengths = Selection(None, 0, len(sources[0])), None
    each = [row_input(call, source, Picks(selection)) for source in sources]
    if lengths is None:
        return RowInputs(tuple(each), lengths_of(selection.rows, group.size))
    before = sum(lengths[: group._local_ranks.start])
    return RowInputs(tuple(one._replace(rows_before=before) for one in each), lengths, None, True)


def _described(call: RowCall) -> str:
    """A call with rows of this process, but for their number."""
    shapes = ", ".join(f"{narrow(leaf.dtype)}{list(leaf.shape[1:])}" for leaf in call.leaves)
    turn = "" if call.options.turn is None else f", item {call.options.turn} of a loop"
    return f"{call.name}(synk.local rows of {shapes}), num_slices={call.options.num_slices}{turn}"


def refuse_together(group: Group, name: str) -> None:
    """Tell the other processes, which are about to count rows, that this one cannot make its call."""
    rows_of_replicas(group, None, name, "")


def _nothing_to_pick(on_replicas: ReplicaSelection | None, has_minibatch: bool) -> str:
    if on_replicas is not None:
        return "batch_s has picked from all that this call has. Give one of the two."
    return "all that this call has is minibatch data." if has_minibatch else "this call has none."


def _agree_on_count(
    call: RowCall,
    rows: int | None,
    picked: Sequence[int],
    on_replicas: ReplicaSelection | None,
    minibatch: Sequence[int],
) -> int | None:
    """How many rows the call takes; all that picks or brings rows agrees."""
    name, names = call.name, call.names
    if on_replicas is not None:
        if rows is not None and rows != sum(on_replicas.lengths):
            raise ValueError(
                f"{name}: batch_s picks {sum(on_replicas.lengths)} rows of the data on the replicas, but "
                f"{names[picked[0]]} gives {rows} with them. Give as many; batch picks from it."
            )
        rows = sum(on_replicas.lengths)
    brought = common_rows(name, names, call.leaves, minibatch)
    if rows is not None and brought is not None and brought != rows:
        raise ValueError(
            f"{name}: {names[minibatch[0]]} is minibatch data of {brought} rows, but the call picks {rows}. "
            f"It has one row for each row picked."
        )
    return brought if rows is None else rows


def common_rows(
    name: str,
    names: Sequence[str],
    leaves: Sequence[Any],
    which: Sequence[int],
    may_be_empty: bool = False,
    batch: Any = None,
) -> int | None:
    """How many rows these arguments have, all the same; None where there are none. `batch` will pick of them."""
    rows: int | None = None
    for i in which:
        leaf = leaves[i]
        if isinstance(leaf, Data):
            source_of(leaf)  # SynkError where it was freed
        if isinstance(leaf, SCALARS) or leaf.ndim == 0:
            raise no_rows(name, names[i])
        count = leaf.shape[0]
        if rows is None:
            rows = count
        elif count != rows:
            both = {names[i]: count, names[which[0]]: rows}
            raise ValueError(
                f"{name}: argument {names[i]} has {count} rows, but {names[which[0]]} has {rows}"
                f"{_cure_of_unequal(both, batch)}"
            )
    if rows == 0 and not may_be_empty:
        raise ValueError(f"{name}: argument {names[which[0]]} has 0 rows; a call needs at least one.")
    return rows


def _cure_of_unequal(rows: dict[str, int], batch: Any) -> str:
    """What to do with two arguments of other numbers of rows; of both, where `batch` picks as many as one has."""
    for (name, count), (_, held) in itertools.permutations(rows.items()):
        try:
            is_one_each = batch is not None and select(batch, held, "", "").rows == count
        except (IndexError, TypeError, ValueError):  # it picks of the other one
            continue
        if is_one_each:
            return (
                f", of which batch picks {count}. If {name} has one for each of these, pass "
                f'synk.data({name}, minibatch=True); if it has no rows, pass it as "broadcast".'
            )
    return '. Scattered ones share their rows; pass this one as "broadcast" if it has none to share.'


def values_given(given: Arguments, rows: RowInputs) -> list[Any]:
    """What a call runs on, in host memory: rows that are picked, what picks on the replicas, and broadcast arguments.
    Rows of this process alone are not among them, nor what lies on other processes too."""
    sources: list[Any] = []
    if not rows.is_process_local:
        sources = [source_of(leaf) if isinstance(leaf, Data) else leaf for leaf in given.scattered]
    values = [
        gather_rows(np.asarray(source) if isinstance(source, jax.Array) else source, one.selection, one.dtype)
        for source, one in zip(sources, rows.each, strict=False)
        if (source.is_fully_addressable if isinstance(source, jax.Array) else not is_result(source))
    ]
    values += [] if rows.on_replicas is None else [one.positions(0, one.rows) for one in rows.on_replicas.chosen]
    broadcast = [leaf[:] if isinstance(leaf, Data) else leaf for leaf in given.broadcast]
    return values + [leaf for leaf in broadcast if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable]


@lru_cache(maxsize=1024)
def launches(lengths: tuple[int, ...], num_slices: int) -> list[PartRows]:
    """Which rows each replica runs in each launch: of each its slice with that number, of few rows none in the last.

    Example:
      >>> [parts.counts for parts in launches((3, 2), 2)]
      [(2, 1), (1, 1)]
    """
    slices = min(num_slices, max(lengths))  # further ones would have no row
    before, cuts = np.cumsum([0, *lengths]).tolist(), [split_rows(length, slices) for length in lengths]
    found: list[PartRows] = []
    for parts in zip(*cuts, strict=True):
        offsets, counts = zip(*parts, strict=True)
        starts = tuple(b + o for b, o in zip(before, offsets, strict=False))
        found.append(PartRows(max(counts), counts, starts, offsets))
    return found


def exchanged(group: Group, rows: RowInputs) -> RowInputs:
    """Where a global batch picks from scattered data, the rows picked in their place."""
    if all([one.scattered_rows is None for one in rows.each]):
        return rows

    def bring(one: RowInput) -> RowInput:
        if one.scattered_rows is None:
            return one
        parts = widened(launches(rows.lengths or (), 1)[0], one.feed.overlap)
        wanted = np.array([parts.positions(one.selection, rank) for rank in range(group.size)])
        return one._replace(source=exchange(group, one.source, one.scattered_rows, wanted), scattered_rows=None)

    return rows._replace(each=tuple(map(bring, rows.each)))


def exchange_programs(group: Group, rows: RowInputs) -> Iterator[tuple[int, Executable]]:
    """The programs that `exchanged` runs, each with the number of the argument whose rows it brings."""
    for i, one in enumerate(rows.each):
        if one.scattered_rows is not None:
            max_rows = widened(launches(rows.lengths or (), 1)[0], one.feed.overlap).max_rows
            data = jax.ShapeDtypeStruct(one.source.shape, one.source.dtype)
            yield i, exchange_program(group, data, one.scattered_rows, max_rows)


def feed_rows(group: Group, rows: RowInputs, part_rows: PartRows) -> list[Any]:
    """Bring a launch its rows, or what picks them."""
    values: list[Any] = []
    picks: dict[Any, Any] = {}
    for one in rows.each:
        layout, index, overlap = one.feed.layout, one.feed.index, one.feed.overlap
        if layout == "rows":
            here = widened(part_rows, overlap)
            if rows.is_process_local:
                here = here._replace(starts=tuple([start - one.rows_before for start in part_rows.starts]))
            values.append(send_rows(group, one.source, one.selection, here, one.dtype))
            continue
        values.append(one.source)
        if index is None:
            continue
        key = (layout, index, id(one.selection), overlap)
        if key not in picks:
            has_all = layout == "replicated" or (group.size == 1 and rows.on_replicas is None)
            picks[key] = (
                _index_of_all(group, one, widened(part_rows, overlap))
                if has_all
                else index_on_replicas(group, index, None if overlap else rows.on_replicas, part_rows)
            )
        values.append(picks[key])
    return values


def _index_of_all(group: Group, one: RowInput, rows: PartRows) -> Any:
    """What picks a launch's rows among all."""
    selection = one.selection
    if one.feed.index == "slice":
        return send_index(group, np.array([selection.start + start for start in rows.starts], np.int32))
    return send_index(group, np.array([rows.positions(selection, r) for r in range(group.size)], np.int32))


def index_on_replicas(group: Group, kind: IndexKind, chosen: ReplicaSelection | None, rows: PartRows) -> Any:
    """What picks a launch's rows among those that each replica holds."""
    if chosen is None:  # slices of all of them, each from its offset on
        return constant(group, "stacked", rows.offsets, "int32")
    parts = list(zip(chosen.chosen, rows.offsets, rows.counts, strict=True))
    if kind == "slice":
        return send_index(group, np.array([s.start + o if n else 0 for s, o, n in parts], np.int32))
    index = np.zeros((len(parts), rows.max_rows), np.int32)
    for row, (selection, offset, count) in zip(index, parts, strict=True):
        row[:count] = selection.positions(offset, offset + count)
    return send_index(group, index)
