"""Parts: the rows that one replica runs on in one launch, and how a program runs parts of two sizes."""

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._base.partition import split_rows
from .._data.feed import read_rows
from .._data.transfer import PartRows
from .._reductions.collectives import all_gather
from .._runtime.constants import Constant
from .._tracing.tracer import TracedFunction
from .spec import CallSpec, FunctionSpec
from .traces import CallTraces

# Rows of a call have numbers in int32.
MOST_ROWS = 2**31 - 1


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


class Blocks:
    """Blocks of one call. Each replica gets whole blocks; the last block of all may be shorter.

    Attributes:
      size: rows of a block.
      lengths: rows of each replica.
      full: number of whole blocks of each replica.
      most: largest number of whole blocks that a replica has.
      rest: rows of the shorter block, or 0.
      owner: the replica that has the shorter block.
    """

    def __init__(self, call: CallSpec) -> None:
        assert call.block is not None and call.lengths is not None
        self.size, self.lengths = call.block, np.array(call.lengths)
        self.full, self.rest = self.lengths // self.size, int(self.lengths.sum() % self.size)
        self.most, self.owner = int(self.full.max()), int(np.flatnonzero(self.lengths).max())

    @property
    def sizes(self) -> list[int]:
        """Return the numbers of rows that blocks have, most first."""
        return [*[self.size] * (self.most > 0), *[self.rest] * (self.rest > 0)]

    @property
    def sizes_of_longest(self) -> list[int]:
        return [
            min(self.size, int(self.lengths.max()) - first) for first in range(0, int(self.lengths.max()), self.size)
        ]

    @property
    def slots(self) -> dict[bool, int]:
        """Return how many entries a replica has, one a row (True) or one a block (False); the shorter block is last."""
        return {True: self.most * self.size + self.rest, False: self.most + (self.rest > 0)}

    @cached_property
    def valid(self) -> dict[bool, np.ndarray]:
        """Return the indexes of the valid entries of all replicas, in row order."""
        valid: dict[bool, list[np.ndarray]] = {True: [], False: []}
        for rank, (length, full) in enumerate(zip(self.lengths, self.full, strict=True)):
            for kind, whole, last in ((True, full * self.size, self.rest), (False, full, 1)):
                first, size = rank * self.slots[kind], self.most * (self.size if kind else 1)
                valid[kind] += [first + np.arange(whole), first + size + np.arange(last * (length % self.size > 0))]
        return {kind: np.concatenate(numbers) for kind, numbers in valid.items()}


def with_parts(function: FunctionSpec, call: CallSpec, lengths: tuple[int, ...] | None, slices: int) -> CallSpec:
    """Return the key of a call whose replicas have so many rows each, in so many slices."""
    if lengths is None:
        return call
    rows = sum(lengths)
    if rows > MOST_ROWS:
        raise ValueError(
            f"{function.name}: a call has at most {MOST_ROWS} rows, whose numbers are int32; this one has {rows}. Give "
            f"them in batches to {function.name}.over."
        )
    if function.blocks is not None:
        # Programs know which replica has which blocks, so that they need no branches.
        return call._replace(part_sizes=((max(lengths),),), lengths=lengths, is_even=False, block=function.blocks)
    # Programs take the number of rows of each replica as data, and part sizes are compiled in. Where outputs have an
    # entry a row or a part, programs of unequal parts know all lengths.
    part_sizes, is_even, count = _part_sizes(lengths, slices)
    is_data = not function.gathers or function.is_over or (is_even and count == 1)
    num_slices = 1 if count == 1 else 2 if is_data else count
    return call._replace(
        part_sizes=part_sizes, lengths=None if is_data else lengths, is_even=is_even, num_slices=num_slices
    )


@lru_cache(maxsize=1024)
def _part_sizes(lengths: tuple[int, ...], slices: int) -> tuple[tuple[tuple[int, ...], ...], bool, int]:
    """Return the sizes of parts of each kind of launch, whether replicas have equally many rows, and the launches."""
    first, *later = [parts.sizes for parts in split_into_launches(lengths, slices)]
    return (first, *dict.fromkeys(later)), len(set(lengths)) == 1, 1 + len(later)


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


def rows_from(array: jax.Array, index: jax.Array | None, first: Any, rows: int) -> jax.Array:
    """Return so many of a replica's rows, from number `first` on; if it has fewer, earlier rows fill them up."""
    # lax.dynamic_slice moves the start towards the front where rows are missing: a replica without such a block reads
    # other real rows, whose results are dropped.
    if index is None or not index.ndim:
        return lax.dynamic_slice_in_dim(array, first if index is None else index + first, rows)
    return read_rows(array, lax.dynamic_slice_in_dim(index, first, rows), rows)


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


# Runs a part of one size, and returns its states.
Branch = Callable[[], list[Any]]


class Uneven(NamedTuple):
    """Rule by which one program runs replicas whose parts have two sizes. It is chosen once for a kind of call.

    Attributes:
      way: "branch": each replica takes the branch of its size. "mapped": the same, but `jax.vmap` makes a select of the
        branches, so all of them run. "all": each replica runs all sizes, and selects the states of its own. "turns":
        replicas that share a device run one after another, each by its own number of rows, which is compiled in.
      is_flat: whether nothing runs in a branch or a loop, blocks and slices neither.
    """

    way: Literal["branch", "mapped", "all", "turns"]
    is_flat: bool

    @property
    def takes_turns(self) -> bool:
        return self.way == "turns"

    def runs_all(self, sizes: Sequence[int | None]) -> bool:
        """Tell whether each replica runs parts of all these sizes, so that real rows must fill up its own."""
        return len(sizes) > 1 and self.way in ("mapped", "all")

    def run(self, count: Any, branches: Mapping[int | None, Branch], added_up: Container[int]) -> list[Any]:
        """Return the states of the branch of a replica's size; those `added_up` hold the parts of all replicas."""
        first, *others = branches
        if not others:
            return branches[first]()
        number = sum(i * (count == size).astype(jnp.int32) for i, size in enumerate(others, 1))
        if self.way != "all":
            return lax.switch(number, [*branches.values()])
        pairs = enumerate(zip(*(branch() for branch in branches.values()), strict=True))
        return [sum(leaves) if i in added_up else lax.select_n(number, *leaves) for i, leaves in pairs]


def choose_uneven(traces: CallTraces, traced: Collection[TracedFunction], reads_shards: bool) -> Uneven:
    """Choose how parts of two sizes run by what `fn` does; `traced` are its traces.

    Raises:
      ValueError: no way runs them.
    """
    call, shares_device = traces.call, traces.group._way.shares_device
    has_callbacks = any(each.has_callbacks for each in traced)
    if reads_shards and has_callbacks and any(len(sizes) > 1 for sizes in call.part_sizes):
        raise ValueError(
            f"{traces.function.name}: it has callbacks and reads a variable in shards. Where rows do not divide, "
            f"replicas also run it over rows that they drop. Give rows that divide, or leave the callbacks out."
        )
    # XLA's CPU backend compiles convolutions inside a branch or a loop to naive loops, 30 to 57 times slower
    # (https://github.com/jax-ml/jax/issues/12868; jaxlib 0.12 still does). Callbacks must run once, so they keep the
    # branch.
    is_flat = traces.group.platform == "cpu" and any(each.has_convolution for each in traced) and not has_callbacks
    # Mapped together, the matrix products of blocks would add up in another order.
    if (call.block is not None and shares_device) or calls_back_in_turns(traces, traced, reads_shards):
        return Uneven("turns", is_flat)
    # Replicas in different branches would wait for each other in different gathers of shards.
    if is_flat or reads_shards:
        return Uneven("all", is_flat)
    return Uneven("mapped" if shares_device else "branch", is_flat)


def calls_back_in_turns(traces: CallTraces, traced: Collection[TracedFunction], reads_shards: bool) -> bool:
    """Tell whether replicas that share a device run one after another, for the callbacks in these functions."""
    # Mapped together, all replicas would run the callbacks inside a branch of one. What communicates needs all replicas
    # at once, so it stays mapped.
    communicates = reads_shards or any(each.communicates for each in traced)
    return traces.group._way.shares_device and any(each.has_callbacks for each in traced) and not communicates


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
