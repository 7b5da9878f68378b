"""Parts: what one replica runs on in one launch."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._base.partition import split_rows
from .._data.feed import read_rows
from .._data.transfer import PartRows
from .._reductions.collectives import all_gather
from .spec import CallSpec


@lru_cache(maxsize=1024)
def split_into_launches(lengths: tuple[int, ...], num_slices: int) -> list[PartRows]:
    """Cut each replica's rows into slices; launch number i runs slice i of every replica that has so many.

    Example:
      >>> [parts.counts for parts in split_into_launches((3, 2), 2)]
      [(2, 1), (1, 1)]
    """
    # More slices than the longest part has rows would be empty.
    slices = min(num_slices, max(lengths))
    before, cuts = np.cumsum([0, *lengths]).tolist(), [split_rows(length, slices) for length in lengths]
    launches: list[PartRows] = []
    for parts in zip(*cuts, strict=True):
        offsets, counts = zip(*parts, strict=True)
        starts = tuple(b + o for b, o in zip(before, offsets, strict=False))
        launches.append(PartRows(max(counts), counts, starts, offsets))
    return launches


class Part(NamedTuple):
    """Which part a replica runs: Python numbers where all replicas run as many rows, else traced ones."""

    rank: jax.Array
    count: Any
    first_row: Any
    offset: Any  # of its first row among the replica's own
    seen: Any  # rows that this replica's earlier parts had
    weight: Any  # its share of the rows of all replicas; of `f.over`, its rows
    share: Any  # its share of the replica's own rows
    row_slot: Any  # where its rows go among those that are gathered of all slices
    part_slot: Any  # where its one entry goes, of what has an entry a part
    present: Any = None  # which replicas have rows; None: all
    ended: Any = 0  # of `f.over`, the rows of a batch that ends with this part
    total: Any = None  # rows of the call


class PartArrays(NamedTuple):
    """What brings a replica its rows: arrays and indexes of scattered arguments, the index into variables that hold
    rows, and broadcast arguments."""

    arrays: list[tuple[jax.Array, jax.Array | None]]
    held_index: jax.Array | None
    broadcast: list[jax.Array]
    # Where a replica runs parts that it has not: by the number of an array that has no real rows behind its own, one.
    spares: Mapping[int, jax.Array] = MappingProxyType({})

    def read(self, size: int, halos: Sequence[int], count: Any) -> list[jax.Array]:
        """The rows that a part of this size sees of each array, with so many neighbours; `count` are the replica's."""
        pairs = zip(self.arrays, halos, strict=True)
        rows = [read_rows(array, index, size + halo) for (array, index), halo in pairs]
        for i, spare in self.spares.items():
            rows[i] = fill_up(rows[i], jnp.where(count > 0, count + halos[i], 0), spare)
        return rows

    def map(self, function: Callable[[jax.Array], jax.Array]) -> "PartArrays":
        """The same of other values of the arguments."""
        arrays = [(function(array), index) for array, index in self.arrays]
        return self._replace(arrays=arrays, broadcast=[function(leaf) for leaf in self.broadcast])


TABLE_ROWS, LENGTHS = 8, 3
POSITION = jax.ShapeDtypeStruct((2,), np.int32)  # of `f.over`: rows of earlier batches; whether this replica had any


def part_table(
    parts: PartRows, lengths: tuple[int, ...], row_slot: int = 0, part_slot: int = 0, ended: int = 0
) -> tuple[Any, ...]:
    """What programs are told of the parts of one launch, an entry a replica of each: rows, first rows, offsets, rows of
    the call, rows of earlier parts, places in what is gathered, and the rows of a batch of `f.over` that ends."""
    numbers = [(number,) * len(lengths) for number in (row_slot, part_slot, ended)]
    return (parts.counts, parts.starts, parts.offsets, lengths, parts.offsets, *numbers)


def part_of(table: jax.Array | np.ndarray | None, rank: jax.Array, rows: int | None, replicas: int) -> Part:
    """The part of a replica, as a table tells; without one all replicas have as many rows."""
    if table is None:
        first_row, total = (rank, None) if rows is None else (rank * rows, rows * replicas)
        return Part(rank, rows, first_row, 0, 0, 1.0 / replicas, 1.0, 0, 0, total=total)
    table, real = jnp.asarray(table), jnp.result_type(float)
    # One look-up for all: `numbers[rank]` of each takes JAX a millisecond to trace.
    own = lax.split(lax.dynamic_index_in_dim(table, rank, 1, keepdims=False), (1,) * TABLE_ROWS)
    count, first_row, offset, length, seen, row_slot, part_slot, ended = (each.reshape(()) for each in own)
    float_count, lengths = count.astype(real), table[LENGTHS]
    total = lengths.sum(dtype=jnp.int32)
    return Part(
        rank=rank,
        count=count,
        first_row=first_row,
        offset=offset,
        seen=seen,
        weight=float_count / total.astype(real),
        share=float_count / jnp.maximum(length, 1).astype(real),
        row_slot=row_slot,
        part_slot=part_slot,
        present=lengths > 0,
        ended=ended,
        total=total,
    )


def part_of_many(part: Part, position: jax.Array) -> tuple[Part, jax.Array]:
    """The same as one of many batches, which are one selection, and the position after it."""
    count = part.count.astype(jnp.result_type(float))
    part = part._replace(first_row=part.first_row + position[0], seen=position[1], weight=count)
    return part, jnp.stack([position[0] + part.ended, jnp.maximum(position[1], part.count)])


def arrays_of(call: CallSpec, values: Sequence[jax.Array]) -> PartArrays:
    """Arguments of a program as what they are."""
    rest = list(values)
    arrays = [(rest.pop(0), rest.pop(0) if feed.index is not None else None) for feed in call.feeds]
    held_index = rest.pop(0) if call.held_index is not None else None
    return PartArrays(arrays, held_index, rest)


def any_not_finite(leaves: Sequence[jax.Array], before: Mapping[int, jax.Array] = MappingProxyType({})) -> jax.Array:
    """Does one of them hold NaN or infinity, other than what was there `before`, by its number?"""
    found = [jnp.zeros((), bool)]
    for i, leaf in enumerate(leaves):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            is_fine = jnp.isfinite(leaf)
            if i in before and before[i].shape == leaf.shape:
                is_fine |= (leaf == before[i]) | (jnp.isnan(leaf) & jnp.isnan(before[i]))
            found.append(~is_fine.all())
    return jnp.any(jnp.array(found)) if len(found) > 1 else found[0]


def spare_rows(rows: Mapping[int, jax.Array], has_rows: Any, may_lack: bool) -> dict[int, jax.Array]:
    """The first row of each of a replica's arrays, of shape (1, ...); where replicas may have none, that of the first
    one that has."""
    firsts = [each[:1] for each in rows.values()]
    if may_lack and firsts:
        *firsts, there = all_gather([*firsts, has_rows])
        firsts = [each[jnp.argmax(there)] for each in firsts]
    return dict(zip(rows, firsts, strict=True))


def fill_up(rows: jax.Array, count: Any, spare: jax.Array) -> jax.Array:
    """The same with the spare row in place of all behind so many."""
    is_own = jnp.arange(rows.shape[0], dtype=jnp.int32) < count
    return jnp.where(is_own.reshape(-1, *[1] * (rows.ndim - 1)), rows, spare)


def pad_rows(array: jax.Array, rows: int | None) -> jax.Array:
    """The same with zeros after its rows, up to so many."""
    if rows is None or array.shape[0] == rows:
        return array
    return jnp.pad(array, [(0, rows - array.shape[0])] + [(0, 0)] * (array.ndim - 1))
