"""Rows: select the rows of a call's scattered arguments, and bring each launch its rows."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .._base.partition import lengths_of
from .._base.pytree import narrow
from .._data.dataset import Data, abstract_rows, is_result, resident, source_of
from .._data.exchange import exchange, exchange_program
from .._data.feed import SENT, InputFeed
from .._data.overlap import widened, with_neighbours
from .._data.places import Picks
from .._data.process_rows import ProcessLocalRows, rows_of_processes, rows_of_replicas
from .._data.selection import IndexKind, ReplicaSelection, Selection, merge_replicas, select, select_on_replicas
from .._data.transfer import PartRows, gather_rows, send_index, send_rows
from .._runtime.executable import Executable
from .._runtime.group import Group
from .._runtime.layout import constant
from .binding import ArgumentSpec, CallOptions, no_rows
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
    """

    source: Any
    selection: Selection
    feed: InputFeed
    shape: tuple[int, ...]
    dtype: np.dtype
    scattered_rows: int | None = None


class RowInputs(NamedTuple):
    """The scattered arguments of a call.

    Attributes:
      each: the arguments.
      lengths: the number of rows of each replica; None as long as nothing has brought rows.
      on_replicas: what `batch_s` picks of the rows on the replicas.
      rows_before: if each process brings rows of its own, how many rows of the call the processes before this one hold.
    """

    each: tuple[RowInput, ...]
    lengths: tuple[int, ...] | None
    on_replicas: ReplicaSelection | None = None
    rows_before: int | None = None


def select_rows(site: Site, spec: ArgumentSpec, leaves: Sequence[Any], options: CallOptions) -> RowInputs:
    """Check the scattered arguments of a call, and select their rows by `batch` and `batch_s`."""
    name, names, block = site.function.name, spec.scattered_names, site.function.blocks
    batch, batch_s, group = options.batch, options.batch_s, site.group
    if ProcessLocalRows in map(type, leaves):
        return _select_process_rows(site, spec, leaves, options)
    minibatch, on_replicas, picked = _sort_by_rows(leaves, batch_s is not None)
    selection, chosen, counts = _NO_ROWS, None, dict[str, int]()
    if on_replicas:
        rows = common_rows(name, names, leaves, on_replicas)
        lengths = lengths_of(rows, (site.data_group or group).size)
        chosen = select_on_replicas(batch_s, lengths, name, names[on_replicas[0]])
        counts[names[on_replicas[0]]] = sum(chosen.lengths)
    if picked:
        selection = select(batch, common_rows(name, names, leaves, picked), name, names[picked[0]])
        counts[names[picked[0]]] = selection.rows
    elif batch is not None:
        raise ValueError(
            f"{name}: batch picks rows of scattered arguments, but this call has none to pick from. Minibatch data is "
            f"taken whole, and batch_s picks from data on the replicas."
        )
    if minibatch:
        counts[names[minibatch[0]]] = common_rows(name, names, leaves, minibatch)
    check_equal_counts(name, counts)
    count = next(iter(counts.values()), None)
    inputs: list[RowInput] = []
    for i, leaf in enumerate(leaves):
        overlap = spec.overlaps[i]
        picks = Picks(selection, batch, False, batch_s is not None, options.num_slices > 1, overlap, block)
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


def _sort_by_rows(leaves: Sequence[Any], has_batch_s: bool) -> tuple[list[int], list[int], list[int]]:
    """Return the numbers of the arguments that bring the rows of the batch, from which batch_s picks, and from which
    batch picks."""
    minibatch: list[int] = []
    on_replicas: list[int] = []
    picked: list[int] = []
    for i, leaf in enumerate(leaves):
        is_data = isinstance(leaf, Data)
        if is_data and leaf.is_minibatch:
            minibatch.append(i)
        elif is_data and has_batch_s and leaf._home.layout == "stacked":
            on_replicas.append(i)
        else:
            picked.append(i)
    return minibatch, on_replicas, picked


def _row_input(site: Site, leaf: Any, picks: Picks) -> RowInput:
    """Choose how the rows of one argument come: sent from the host, or taken from where resident data lies."""
    source, taken = leaf, None
    selection, overlap, shape = picks.selection, picks.overlap, leaf.shape
    if isinstance(leaf, Data):
        source = source_of(leaf)
        if site.data_group is None:
            taken = leaf._home.take(site.group, source, shape[0], picks)
    # The program itself exchanges neighbours where replicas take their own rows.
    if overlap is not None and not (taken and taken[0].held_rows):
        among = with_neighbours(selection.rows, overlap)
        index = among + selection.start if selection.indexes is None else selection.indexes[among]
        selection = Selection(index, 0, len(index))
    if taken is None:
        feed = SENT if overlap is None else SENT._replace(overlap=overlap)
        return RowInput(source, selection, feed, shape[1:], narrow(leaf.dtype))
    array = abstract_rows(leaf, site.group) if site.is_abstract else resident(leaf, site.group)
    feed, is_exchanged = taken
    return RowInput(array, selection, feed, shape[1:], array.dtype, shape[0] if is_exchanged else None)


def _select_process_rows(site: Site, spec: ArgumentSpec, leaves: Sequence[Any], options: CallOptions) -> RowInputs:
    """Select rows that this process alone holds; the processes tell one another how many they have."""
    name, names, data_group = site.function.name, spec.scattered_names, site.data_group
    if site.function.blocks is not None or options.batch_s is not None or any(spec.overlaps):
        raise ValueError(
            f"{name}: synk.local rows stay in their process, so they do not go with blocks=, batch_s or synk.Overlap."
        )
    if not all(isinstance(leaf, ProcessLocalRows) for leaf in leaves):
        raise ValueError(
            f"{name}: some scattered arguments are synk.local rows, and others are the same in all processes. Mark all "
            f"of a call, or none."
        )
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
        # The other processes must describe their calls alike.
        shapes = ", ".join(f"{narrow(leaf.dtype)}{list(leaf.shape[1:])}" for leaf in leaves)
        turn = "" if options.turn is None else f", item {options.turn} of a loop"
        call = f"{name}(synk.local rows of {shapes}), num_slices={options.num_slices}{turn}"
        lengths = rows_of_replicas(home, selection.rows, name, call)
        if not any(lengths):
            raise ValueError(f"{name}: argument {names[0]} has 0 rows in every process; a call needs at least one.")
        # A call on one device takes all rows, so each process brings it those of the others.
        if data_group is not None:
            sources = [rows_of_processes(home, gather_rows(source, selection, source.dtype)) for source in sources]
            selection, lengths = Selection(None, 0, len(sources[0])), None
    inputs = tuple([_row_input(site, source, Picks(selection)) for source in sources])
    if lengths is None:
        return RowInputs(inputs, lengths_of(selection.rows, site.group.size))
    return RowInputs(inputs, lengths, rows_before=sum(lengths[: site.group._local_ranks.start]))


def refuse_together(group: Group, name: str) -> None:
    """Tell the other processes, which are about to count rows, that this one cannot make its call."""
    rows_of_replicas(group, None, name, "")


def check_equal_counts(name: str, counts: dict[str, int]) -> None:
    """Check that all arguments bring as many rows to a call; `counts` has the number of rows by argument."""
    if len(set(counts.values())) > 1:
        text = ", ".join(f"{rows} of {argument}" for argument, rows in counts.items())
        raise ValueError(
            f"{name}: this call gets different numbers of rows: {text}. batch and batch_s must pick as many, and "
            f"minibatch data has one row for each row that they pick."
        )


def common_rows(
    name: str, names: Sequence[str], leaves: Sequence[Any], which: Sequence[int], may_be_empty: bool = False
) -> int:
    """Return the number of rows that these arguments share; 0 for no argument."""
    rows = 0
    for i in which:
        leaf = leaves[i]
        shape = getattr(leaf, "shape", ())
        if not shape:
            raise no_rows(name, names[i])
        if not shape[0] and isinstance(leaf, Data):
            # This raises if the data was freed.
            source_of(leaf)
        if i == which[0]:
            rows = shape[0]
        if shape[0] != rows:
            raise ValueError(
                f"{name}: argument {names[i]} has {shape[0]} rows, but {names[which[0]]} has {rows}. Scattered ones "
                f'share their rows. Pass an argument without rows as "broadcast", and one with a row for each row that '
                f"batch picks as synk.data(..., minibatch=True)."
            )
    if which and not rows and not may_be_empty:
        raise ValueError(f"{name}: argument {names[which[0]]} has 0 rows; a call needs at least one.")
    return rows


def values_on_host(scattered: Sequence[Any], broadcast: Sequence[Any], rows: RowInputs) -> list[Any]:
    """Return the values that all processes must have alike: the rows picked, the picks of `batch_s`, and broadcast
    arguments. Rows of this process alone and arrays that lie on other processes too are left out."""
    sources: list[Any] = []
    if rows.rows_before is None:
        sources = [source_of(leaf) if isinstance(leaf, Data) else leaf for leaf in scattered]
    values = [
        gather_rows(np.asarray(source) if isinstance(source, jax.Array) else source, row.selection, row.dtype)
        for source, row in zip(sources, rows.each, strict=False)
        if (source.is_fully_addressable if isinstance(source, jax.Array) else not is_result(source))
    ]
    if rows.on_replicas is not None:
        values += [selection.positions(0, selection.rows) for selection in rows.on_replicas.chosen]
    whole = [leaf[:] if isinstance(leaf, Data) else leaf for leaf in broadcast]
    return values + [leaf for leaf in whole if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable]


def exchanged(group: Group, rows: RowInputs) -> RowInputs:
    """Let replicas exchange rows where a batch picks from all rows of scattered data."""
    for i, row in enumerate(rows.each):
        if row.scattered_rows is not None:
            parts = _parts_wanted(rows, row)
            wanted = np.array([parts.positions(row.selection, rank) for rank in range(group.size)])
            array = exchange(group, row.source, row.scattered_rows, wanted)
            row = row._replace(source=array, scattered_rows=None)
            rows = rows._replace(each=(*rows.each[:i], row, *rows.each[i + 1 :]))
    return rows


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
            if rows.rows_before is not None:
                here = here._replace(starts=tuple([start - rows.rows_before for start in parts.starts]))
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
