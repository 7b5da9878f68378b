"""Rows: select the rows of a call's scattered arguments, and bring each launch its rows."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import jax
import numpy as np

from .._base.partition import lengths_of
from .._base.pytree import SCALARS, narrow
from .._data.dataset import Data, abstract_rows, is_result, resident, source_of
from .._data.exchange import exchange, exchange_program
from .._data.feed import SENT, InputFeed
from .._data.overlap import widened, with_neighbours
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
from .binding import Arguments, ArgumentSpec, CallOptions, no_rows
from .parts import split_into_launches
from .plan import Site

_NO_ROWS = Selection(None, 0, 0)


class RowInput(NamedTuple):
    """One scattered argument of a call.

    Attributes:
      source: the rows on the host, or the array on the devices.
      selection: the rows that the call takes; all of them, if scattered data keeps its rows.
      feed: how the rows reach a replica's program.
      shape: the shape of one row.
      dtype: the dtype as JAX has it.
      scattered_rows: how many rows scattered data has, if replicas first exchange those that the call takes.
      rows_before: rows of the call that other processes hold before the source's.
    """

    source: Any
    selection: Selection
    feed: InputFeed
    shape: tuple[int, ...]
    dtype: np.dtype
    scattered_rows: int | None = None
    rows_before: int = 0


class RowInputs(NamedTuple):
    """The scattered arguments of a call.

    Attributes:
      each: the arguments.
      lengths: the number of rows of each replica; None as long as nothing has brought rows.
      on_replicas: what `batch_s` picks of the rows on the replicas.
      is_process_local: whether each process brings rows of its own.
    """

    each: tuple[RowInput, ...]
    lengths: tuple[int, ...] | None
    on_replicas: ReplicaSelection | None = None
    is_process_local: bool = False


def select_rows(site: Site, spec: ArgumentSpec, leaves: Sequence[Any], options: CallOptions) -> RowInputs:
    """Check the scattered arguments of a call, and select their rows by `batch` and `batch_s`."""
    name, names, block = site.function.name, spec.scattered_names, site.function.blocks
    if any([isinstance(leaf, ProcessLocalRows) for leaf in leaves]):
        return _select_process_rows(site, spec, leaves, options)
    batch, batch_s, group = options.batch, options.batch_s, site.group
    # Minibatch data brings the rows of the batch; batch_s picks from data on the replicas; batch picks from all else.
    minibatch = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Data) and leaf.is_minibatch]
    on_replicas = [i for i, leaf in enumerate(leaves) if batch_s is not None and i not in minibatch and _is_there(leaf)]
    picked = [i for i in range(len(leaves)) if i not in minibatch and i not in on_replicas]
    chosen = None
    if on_replicas:
        common_rows(name, names, leaves, on_replicas)
        lengths = lengths_of(len(leaves[on_replicas[0]]), (site.data_group or group).size)
        chosen = select_on_replicas(batch_s, lengths, name, names[on_replicas[0]])
    rows = common_rows(name, names, leaves, picked, batch=batch)
    if rows is None and batch is not None:
        raise ValueError(
            f"{name}: batch picks rows of scattered inputs, but {_nothing_to_pick(chosen, bool(minibatch))}"
        )
    selection = None if rows is None else select(batch, rows, name, names[picked[0]])
    count = None if selection is None else selection.rows
    if chosen is not None:
        count = _check_count(name, count, chosen, names[picked[0]] if picked else "")
    if minibatch:
        count = _check_minibatch(name, count, common_rows(name, names, leaves, minibatch), names[minibatch[0]])
    inputs: list[RowInput] = []
    for i, leaf in enumerate(leaves):
        overlap = spec.overlaps[i] if spec.overlaps else None
        picks = Picks(selection or _NO_ROWS, batch, False, batch_s is not None, options.num_slices > 1, overlap, block)
        if i in minibatch:
            picks = picks._replace(selection=Selection(None, 0, count or 0), batch=None)
        elif chosen is not None and i in on_replicas:
            # Another group, and a program that exchanges neighbours, take all rows that batch_s picks, in rank order.
            all_rows = merge_replicas(chosen) if site.data_group or overlap else Selection(None, 0, len(leaf))
            picks = picks._replace(selection=all_rows, batch=batch_s, is_on_replicas=overlap is None)
        inputs.append(_row_input(site, leaf, picks))
    if chosen is not None and site.data_group is None:
        return RowInputs(tuple(inputs), chosen.lengths, chosen)
    return RowInputs(tuple(inputs), None if count is None else lengths_of(count, group.size, block))


def _is_there(leaf: Any) -> bool:
    """Tell whether a leaf is data of which each replica holds rows of its own."""
    return isinstance(leaf, Data) and leaf._home.layout == "stacked"


def _row_input(site: Site, leaf: Any, picks: Picks) -> RowInput:
    """Choose how the rows of one argument come: sent from the host, or taken from where resident data lies."""
    taken, selection, overlap = None, picks.selection, picks.overlap
    is_data = isinstance(leaf, Data)
    if is_data and site.data_group is None:
        taken = leaf._home.take(site.group, source_of(leaf), len(leaf), picks)
    # The program itself exchanges neighbours where replicas take their own rows.
    if overlap is not None and not (taken and taken[0].held_rows):
        among = with_neighbours(selection.rows, overlap)
        index = among + selection.start if selection.indexes is None else selection.indexes[among]
        selection = Selection(index, 0, len(index))
    shape, dtype = leaf.shape[1:], narrow(leaf.dtype)
    if taken is None:
        feed = SENT if overlap is None else SENT._replace(overlap=overlap)
        return RowInput(source_of(leaf) if is_data else leaf, selection, feed, shape, dtype)
    array = abstract_rows(leaf, site.group) if site.is_abstract else resident(leaf, site.group)
    feed, is_exchanged = taken
    return RowInput(array, selection, feed, shape, dtype, len(leaf) if is_exchanged else None)


def _select_process_rows(site: Site, spec: ArgumentSpec, leaves: Sequence[Any], options: CallOptions) -> RowInputs:
    """Select rows that this process alone holds; the processes tell one another how many they have."""
    name, names, data_group = site.function.name, spec.scattered_names, site.data_group
    _check_process_rows(site, spec, leaves, options)
    home = data_group or site.group
    is_multi_process = home._is_multi_process
    sources: list[Any] = [leaf.source for leaf in leaves]
    try:
        rows = common_rows(name, names, sources, range(len(sources)), may_be_empty=is_multi_process)
        selection = select(options.batch, rows, name, names[0], is_part=is_multi_process) if rows else _NO_ROWS
    except Exception:
        if is_multi_process:
            refuse_together(home, name)
        raise
    lengths: tuple[int, ...] | None = None
    if is_multi_process:
        lengths = rows_of_replicas(home, selection.rows, name, _description(name, leaves, options))
        if not any(lengths):
            raise ValueError(f"{name}: argument {names[0]} has 0 rows in every process; a call needs at least one.")
        # A call on one device takes all rows, so each process brings it those of the others.
        if data_group is not None:
            sources = [rows_of_processes(home, gather_rows(source, selection, source.dtype)) for source in sources]
            selection, lengths = Selection(None, 0, len(sources[0])), None
    inputs = [_row_input(site, source, Picks(selection)) for source in sources]
    if lengths is None:
        return RowInputs(tuple(inputs), lengths_of(selection.rows, site.group.size))
    before = sum(lengths[: site.group._local_ranks.start])
    return RowInputs(tuple(row._replace(rows_before=before) for row in inputs), lengths, None, True)


def _check_process_rows(site: Site, spec: ArgumentSpec, leaves: Sequence[Any], options: CallOptions) -> None:
    """Refuse what does not go with rows that this process alone holds."""
    name, block = site.function.name, site.function.blocks
    if block is not None:
        raise ValueError(f"{name}: synk.local rows stay where they are, but blocks={block} deals them out.")
    if options.batch_s is not None:
        raise ValueError(f"{name}: batch_s picks rows that live on the replicas; batch picks from synk.local rows.")
    if any(spec.overlaps):
        raise ValueError(
            f"{name}: synk.local rows have neighbours in other processes, so they do not go with synk.Overlap. Give "
            f"every process all rows, or data that lies on the replicas."
        )
    for leaf, argument in zip(leaves, spec.scattered_names, strict=True):
        if not isinstance(leaf, ProcessLocalRows):
            raise ValueError(
                f"{name}: argument {argument} is the same in all processes, but others hold synk.local rows. Mark all "
                f"scattered arguments of a call, or none."
            )


def _description(name: str, leaves: Sequence[Any], options: CallOptions) -> str:
    """Describe a call with synk.local rows; the other processes must describe theirs alike."""
    shapes = ", ".join(f"{narrow(leaf.dtype)}{list(leaf.shape[1:])}" for leaf in leaves)
    turn = "" if options.turn is None else f", item {options.turn} of a loop"
    return f"{name}(synk.local rows of {shapes}), num_slices={options.num_slices}{turn}"


def refuse_together(group: Group, name: str) -> None:
    """Tell the other processes, which are about to count rows, that this one cannot make its call."""
    rows_of_replicas(group, None, name, "")


def _nothing_to_pick(chosen: ReplicaSelection | None, has_minibatch: bool) -> str:
    if chosen is not None:
        return "batch_s has picked from all that this call has. Give one of the two."
    return "all that this call has is minibatch data." if has_minibatch else "this call has none."


def _check_count(name: str, rows: int | None, chosen: ReplicaSelection, argument: str) -> int:
    """Check that `batch` picks as many rows of an argument as `batch_s` picks on the replicas; return how many."""
    count = sum(chosen.lengths)
    if rows is not None and rows != count:
        raise ValueError(
            f"{name}: batch_s picks {count} rows of the data on the replicas, but {argument} gives {rows} with them. "
            f"Give as many; batch picks from it."
        )
    return count


def _check_minibatch(name: str, rows: int | None, brought: int | None, argument: str) -> int | None:
    """Check that minibatch data brings as many rows as the call picks; return how many."""
    if rows is not None and brought != rows:
        raise ValueError(
            f"{name}: {argument} is minibatch data of {brought} rows, but the call picks {rows}. It has one row for "
            f"each row picked."
        )
    return brought


def common_rows(
    name: str,
    names: Sequence[str],
    leaves: Sequence[Any],
    which: Sequence[int],
    may_be_empty: bool = False,
    batch: Any = None,
) -> int | None:
    """Return the number of rows that these arguments share; None for no argument. `batch` improves the message."""
    rows: int | None = None
    for i in which:
        leaf = leaves[i]
        if isinstance(leaf, Data):
            source_of(leaf)
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
    """Say what to do with two arguments of different numbers of rows, in view of what `batch` picks."""
    for (name, count), (_, held) in itertools.permutations(rows.items()):
        # A batch that does not fit this argument picks from the other one.
        with suppress(IndexError, TypeError, ValueError):
            if batch is not None and select(batch, held, "", "").rows == count:
                return (
                    f", of which batch picks {count}. If {name} has one for each of these, pass "
                    f'synk.data({name}, minibatch=True); if it has no rows, pass it as "broadcast".'
                )
    return '. Scattered ones share their rows; pass this one as "broadcast" if it has none to share.'


def values_on_host(arguments: Arguments, rows: RowInputs) -> list[Any]:
    """Return the values that all processes must have alike: the rows picked, the picks of `batch_s`, and broadcast
    arguments. Rows of this process alone and arrays that lie on other processes too are left out."""
    sources: list[Any] = []
    if not rows.is_process_local:
        sources = [source_of(leaf) if isinstance(leaf, Data) else leaf for leaf in arguments.scattered]
    values = [
        gather_rows(np.asarray(source) if isinstance(source, jax.Array) else source, row.selection, row.dtype)
        for source, row in zip(sources, rows.each, strict=False)
        if (source.is_fully_addressable if isinstance(source, jax.Array) else not is_result(source))
    ]
    if rows.on_replicas is not None:
        values += [selection.positions(0, selection.rows) for selection in rows.on_replicas.chosen]
    broadcast = [leaf[:] if isinstance(leaf, Data) else leaf for leaf in arguments.broadcast]
    return values + [leaf for leaf in broadcast if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable]


def exchanged(group: Group, rows: RowInputs) -> RowInputs:
    """Let replicas exchange rows where a batch picks from all rows of scattered data."""
    if all([row.scattered_rows is None for row in rows.each]):
        return rows

    def bring(row: RowInput) -> RowInput:
        if row.scattered_rows is None:
            return row
        parts = _parts_wanted(rows, row)
        wanted = np.array([parts.positions(row.selection, rank) for rank in range(group.size)])
        return row._replace(source=exchange(group, row.source, row.scattered_rows, wanted), scattered_rows=None)

    return rows._replace(each=tuple(map(bring, rows.each)))


def exchange_programs(group: Group, rows: RowInputs) -> Iterator[tuple[int, Executable]]:
    """Yield the programs that `exchanged` runs, each with the number of the argument whose rows it brings."""
    for i, row in enumerate(rows.each):
        if row.scattered_rows is not None:
            data = jax.ShapeDtypeStruct(row.source.shape, row.source.dtype)
            yield i, exchange_program(group, data, row.scattered_rows, _parts_wanted(rows, row).max_rows)


def _parts_wanted(rows: RowInputs, row: RowInput) -> PartRows:
    return widened(split_into_launches(rows.lengths or (), 1)[0], row.feed.overlap)


def feed_rows(group: Group, rows: RowInputs, parts: PartRows) -> list[Any]:
    """Bring a launch its rows: for each argument an array, and an index where the program picks rows from it."""
    values: list[Any] = []
    # Arguments that share a selection share its index.
    indexes: dict[Any, Any] = {}
    for row in rows.each:
        layout, index, overlap = row.feed.layout, row.feed.index, row.feed.overlap
        if layout == "rows":
            here = widened(parts, overlap)
            if rows.is_process_local:
                here = here._replace(starts=tuple([start - row.rows_before for start in parts.starts]))
            values.append(send_rows(group, row.source, row.selection, here, row.dtype))
            continue
        values.append(row.source)
        if index is None:
            continue
        key = (layout, index, id(row.selection), overlap)
        if key not in indexes:
            has_all = layout == "replicated" or (group.size == 1 and rows.on_replicas is None)
            indexes[key] = (
                _index_of_all(group, row, widened(parts, overlap))
                if has_all
                else index_on_replicas(group, index, None if overlap else rows.on_replicas, parts)
            )
        values.append(indexes[key])
    return values


def _index_of_all(group: Group, row: RowInput, parts: PartRows) -> Any:
    """Send the index by which replicas that have all rows pick those of a launch."""
    selection = row.selection
    if row.feed.index == "slice":
        return send_index(group, np.array([selection.start + start for start in parts.starts], np.int32))
    return send_index(group, np.array([parts.positions(selection, r) for r in range(group.size)], np.int32))


def index_on_replicas(group: Group, kind: IndexKind, chosen: ReplicaSelection | None, parts: PartRows) -> Any:
    """Send the index by which replicas pick the rows of a launch from those that they hold."""
    # Without a selection a replica runs slices of all its rows, each from its offset on.
    if chosen is None:
        return constant(group, "stacked", parts.offsets, "int32")
    replicas = list(zip(chosen.chosen, parts.offsets, parts.counts, strict=True))
    if kind == "slice":
        return send_index(group, np.array([s.start + o if n else 0 for s, o, n in replicas], np.int32))
    index = np.zeros((len(replicas), parts.max_rows), np.int32)
    for row, (selection, offset, count) in zip(index, replicas, strict=True):
        row[:count] = selection.positions(offset, offset + count)
    return send_index(group, index)
