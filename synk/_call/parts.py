"""Parts: the rows that one replica runs on in one launch."""

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
from .._runtime.constants import Constant
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
    # Cached, with tuples for parts: a loop asks for the same lengths in each call, and parts are keys of tables.
    launches: list[PartRows] = []
    for parts in zip(*cuts, strict=True):
        offsets, counts = zip(*parts, strict=True)
        starts = tuple(b + o for b, o in zip(before, offsets, strict=False))
        launches.append(PartRows(max(counts), counts, starts, offsets))
    return launches


class Part(NamedTuple):
    """Part that a replica runs: Python numbers where all replicas run equally many rows, else traced numbers.

    Attributes:
      first_row: number of its first row in the selection.
      offset: number of its first row among the replica's rows.
      seen: more than 0 if the replica had rows in earlier parts.
      weight: its share of the rows of all replicas; under `f.over`, its rows.
      share: its share of the replica's rows.
      row_slot: place of its first row among the gathered rows of all slices.
      part_slot: place of its entry in outputs with an entry a part.
      present: which replicas have rows; None for all.
    """

    rank: jax.Array
    count: Any
    first_row: Any
    offset: Any
    seen: Any
    weight: Any
    share: Any
    row_slot: Any
    part_slot: Any
    present: Any = None
    total: Any = None


class PartArrays(NamedTuple):
    """Arrays from which a replica reads the rows of its parts.

    Attributes:
      arrays: for each scattered argument an array, and an index of the rows in it or None.
      held_index: the index of rows in variables that hold rows.
      spares: a real row for each array that has none behind the replica's rows, by the array's index. The row
        fills parts that a replica runs although it has fewer rows.
      constants: the arguments that captured arrays are.
    """

    arrays: list[tuple[jax.Array, jax.Array | None]]
    held_index: jax.Array | None
    broadcast: list[jax.Array]
    spares: Mapping[int, jax.Array] = MappingProxyType({})
    constants: Mapping[Constant, jax.Array] = MappingProxyType({})

    def read(self, size: int, halos: Sequence[int], count: Any) -> list[jax.Array]:
        """Read the rows of a part of this size, with so many neighbours, from each array; the replica has `count`."""
        pairs = zip(self.arrays, halos, strict=True)
        rows = [read_rows(array, index, size + halo) for (array, index), halo in pairs]
        for i, spare in self.spares.items():
            rows[i] = fill_up(rows[i], jnp.where(count > 0, count + halos[i], 0), spare)
        return rows

    def map(self, function: Callable[[jax.Array], jax.Array]) -> "PartArrays":
        arrays = [(function(array), index) for array, index in self.arrays]
        return self._replace(arrays=arrays, broadcast=[function(leaf) for leaf in self.broadcast])


# Rows of the table of parts, and the row that holds the lengths of replicas.
TABLE_ROWS, LENGTHS = 7, 3


def part_table(parts: PartRows, lengths: tuple[int, ...], row_slot: int = 0, part_slot: int = 0) -> tuple[Any, ...]:
    """Return the table that tells a program about the parts of one launch, with a column for each replica.

    Its rows are: counts, first rows, offsets, rows of the call, rows of earlier parts, row slots and part slots.
    """
    slots = [(slot,) * len(lengths) for slot in (row_slot, part_slot)]
    return (parts.counts, parts.starts, parts.offsets, lengths, parts.offsets, *slots)


@lru_cache(maxsize=1024)
def table_of_batch(
    parts: PartRows, lengths: tuple[int, ...], first_row: int, has_seen: tuple[bool, ...]
) -> tuple[Any, ...]:
    """Return the table for one launch of a batch of `f.over`, as a part of one call over the rows of all batches.

    `first_row` is the number of the batch's first row; `has_seen` tells which replicas had rows of earlier batches.
    """
    # Instead of a number of rows seen, the table holds 1: few tables differ, so most of them are placed already.
    counts, starts, offsets, lengths, _, *slots = part_table(parts, lengths)
    first_rows = starts if not first_row else tuple([first_row + start for start in starts])
    seen = tuple([int(had or offset > 0) for had, offset in zip(has_seen, offsets, strict=True)])
    return (counts, first_rows, offsets, lengths, seen, *slots)


def part_of(
    table: jax.Array | np.ndarray | None, rank: jax.Array, rows: int | None, replicas: int, count: int | None = None
) -> Part:
    """Read the part of a replica from the table; without a table all replicas have `rows` rows.

    `count` is the number of rows of each part, if all have as many.
    """
    # Python numbers: XLA folds weights and masks that do not depend on the replica.
    if table is None:
        first_row, total = (rank, None) if rows is None else (rank * rows, rows * replicas)
        return Part(rank, rows, first_row, 0, 0, 1.0 / replicas, 1.0, 0, 0, total=total)
    table, real = jnp.asarray(table), jnp.result_type(float)
    # One look-up for all rows of the table: JAX takes a millisecond to trace each `numbers[rank]`.
    column = lax.split(lax.dynamic_index_in_dim(table, rank, 1, keepdims=False), (1,) * TABLE_ROWS)
    own_count, first_row, offset, length, seen, row_slot, part_slot = (number.reshape(()) for number in column)
    float_count, lengths = own_count.astype(real), table[LENGTHS]
    total = lengths.sum(dtype=jnp.int32)
    return Part(
        rank=rank,
        count=own_count if count is None else count,
        first_row=first_row,
        offset=offset,
        seen=seen,
        weight=float_count / total.astype(real),
        # A replica without rows would divide by 0, and NaN times its zeros is NaN.
        share=float_count / jnp.maximum(length, 1).astype(real),
        row_slot=row_slot,
        part_slot=part_slot,
        present=lengths > 0,
        total=total,
    )


def arrays_of(call: CallSpec, values: Sequence[jax.Array]) -> PartArrays:
    rest = list(values)
    arrays = [(rest.pop(0), rest.pop(0) if feed.index is not None else None) for feed in call.feeds]
    held_index = rest.pop(0) if call.held_index is not None else None
    return PartArrays(arrays, held_index, rest)


def any_not_finite(leaves: Sequence[jax.Array], before: Mapping[int, jax.Array] = MappingProxyType({})) -> jax.Array:
    """Tell whether a leaf holds NaN or infinity, other than those that `before` had in its place."""
    flags = [jnp.zeros((), bool)]
    for i, leaf in enumerate(leaves):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            is_fine = jnp.isfinite(leaf)
            if i in before and before[i].shape == leaf.shape:
                is_fine |= (leaf == before[i]) | (jnp.isnan(leaf) & jnp.isnan(before[i]))
            flags.append(~is_fine.all())
    return jnp.any(jnp.array(flags)) if len(flags) > 1 else flags[0]


def spare_rows(rows: Mapping[int, jax.Array], has_rows: Any, may_lack: bool) -> dict[int, jax.Array]:
    """Return the first row of each array, of shape (1, ...); a replica without rows takes those of another replica."""
    firsts = [array[:1] for array in rows.values()]
    if may_lack and firsts:
        # A replica without rows has no real row of its own, and `fn` of zeros may divide by 0.
        *firsts, there = all_gather([*firsts, has_rows])
        firsts = [array[jnp.argmax(there)] for array in firsts]
    return dict(zip(rows, firsts, strict=True))


def fill_up(rows: jax.Array, count: Any, spare: jax.Array) -> jax.Array:
    is_real = jnp.arange(rows.shape[0], dtype=jnp.int32) < count
    return jnp.where(is_real.reshape(-1, *[1] * (rows.ndim - 1)), rows, spare)


def pad_rows(array: jax.Array, rows: int | None) -> jax.Array:
    if rows is None or array.shape[0] == rows:
        return array
    return jnp.pad(array, [(0, rows - array.shape[0])] + [(0, 0)] * (array.ndim - 1))
