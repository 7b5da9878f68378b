"""Feeding: which rows each launch of a call runs, and how its arrays are brought."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from .._base.partition import split_rows
from .._data.exchange import exchange, exchange_program
from .._data.overlap import widened
from .._data.selection import IndexKind, ReplicaSelection
from .._data.transfer import PartRows, send_index, send_rows
from .._runtime.executable import Executable
from .._runtime.group import Group
from .._runtime.layout import constant
from .inputs import RowInputs
from .row_input import RowInput


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
