"""Blocks: which rows each replica's blocks have, where these go among what is gathered, and how they run."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._base.pytree import PyTree, key_of
from .._data.feed import read_rows
from .._runtime.group import Group
from .._tracing.tracer import TracedFunction
from .parts import Part, PartArrays
from .spec import CallSpec


class Blocks:
    """The blocks of one call, of which replicas get whole ones; the last may be shorter.

    Attributes:
      size: rows of a block.
      lengths: rows of each replica.
      full: whole blocks of each.
      most: the largest of these.
      rest: rows of the block that is shorter, or 0.
      owner: the replica that has that.
    """

    def __init__(self, call: CallSpec) -> None:
        assert call.block is not None and call.lengths is not None
        self.size, self.lengths = call.block, np.array(call.lengths)
        self.full, self.rest = self.lengths // self.size, int(self.lengths.sum() % self.size)
        self.most, self.owner = int(self.full.max()), int(np.flatnonzero(self.lengths).max())

    @property
    def sizes(self) -> list[int]:
        """The numbers of rows that blocks have, most first."""
        return [*[self.size] * (self.most > 0), *[self.rest] * (self.rest > 0)]

    @property
    def sizes_of_longest(self) -> list[int]:
        """The rows of each block of the replica with the most of them."""
        return [
            min(self.size, int(self.lengths.max()) - first) for first in range(0, int(self.lengths.max()), self.size)
        ]

    @property
    def slots(self) -> dict[bool, int]:
        """Entries of a replica of what has one a row (True) or a block (False); the shorter block's come last."""
        return {True: self.most * self.size + self.rest, False: self.most + (self.rest > 0)}

    @cached_property
    def valid(self) -> dict[bool, np.ndarray]:
        """Which of all replicas' entries count, in row order."""
        found: dict[bool, list[np.ndarray]] = {True: [], False: []}
        for rank, (length, full) in enumerate(zip(self.lengths, self.full, strict=True)):
            for kind, whole, last in ((True, full * self.size, self.rest), (False, full, 1)):
                first, size = rank * self.slots[kind], self.most * (self.size if kind else 1)
                found[kind] += [first + np.arange(whole), first + size + np.arange(last * (length % self.size > 0))]
        return {kind: np.concatenate(each) for kind, each in found.items()}


class Builder(Protocol):
    """What runs parts; a `ProgramBuilder`."""

    call: CallSpec
    group: Group
    traced: dict[int | None, TracedFunction]
    combined: list[int]  # which outputs combine
    reduced: list[Any]  # and how each does

    selects_branches: Any  # whether blocks run one after the other in no loop

    def empty_states(self) -> list[jax.Array]: ...
    def state_shapes(self, entries: dict[bool, int]) -> list[jax.ShapeDtypeStruct]: ...
    def run_part(
        self,
        size: int | None,
        *,
        state: Any,
        arrays: PartArrays,
        part: Part,
        max_rows: int | None,
        known: Sequence[Any],
    ) -> list[jax.Array]: ...
    def accumulate(self, before: Sequence[jax.Array], new: Sequence[jax.Array], part: Part) -> list[jax.Array]: ...
    def states_of_present(self, states: Sequence[jax.Array], is_present: Any) -> list[jax.Array]: ...


def run_blocks(builder: Builder, state: dict[Any, list[jax.Array]], arrays: PartArrays, part: Part) -> list[jax.Array]:
    """Run `fn` over this replica's blocks, one after the other: each by the same computation wherever it runs."""
    # How many blocks a replica has is data, not a constant: see `fusion_barrier`.
    blocks, states = Blocks(builder.call), builder.empty_states()
    total, full = int(blocks.lengths.sum()), part.count // blocks.size
    # What XLA knows it computes with beforehand, on one device and not on several.
    consts = {size: fusion_barrier(builder.group, list(builder.traced[size].consts), part) for size in blocks.sizes}

    def add(before: list[jax.Array], chunk: Any, size: int = blocks.size) -> tuple[list[jax.Array], None]:
        slot, first, is_there = chunk
        seen = [_rows_from(array, index, first, size) for array, index in arrays.arrays]
        own, count = (list(state.values()), consts[size], arrays.broadcast), jnp.where(is_there, size, 0)
        first_row, row_slot = part.first_row + first, slot * blocks.size
        its = Part(part.rank, count, first_row, first, first, size / total, 1.0, row_slot, slot, total=part.total)

        def run(seen: Any, own: Any) -> list[jax.Array]:
            leaves, its_consts, broadcast = own
            its_rows = PartArrays([(each, None) for each in seen], None, broadcast)
            its_state = dict(zip(state, leaves, strict=True))
            known = builder.traced[size].known(its_consts)
            return builder.run_part(size, state=its_state, arrays=its_rows, part=its, max_rows=size, known=known)

        if builder.selects_branches:
            new = fusion_barrier(builder.group, run(*fusion_barrier(builder.group, (seen, own), part)), part)
        else:  # nothing is fused into a branch, or out of it
            new = lax.cond(is_there, run, lambda *_: _nothing(builder, size), seen, own)
        return builder.accumulate(before, new, its), None

    if blocks.most:
        slots = np.arange(blocks.most, dtype=np.int32)
        several = (slots, slots * blocks.size, slots < full)
        if builder.selects_branches:  # by hand, since lax.scan makes a loop of a single step in spite of unroll=True
            for number in slots:
                states, _ = add(states, jax.tree.map(lambda each, number=number: each[number], several))
        else:
            states, _ = lax.scan(add, states, several)
    if blocks.rest:
        first = np.int32(blocks.full[blocks.owner] * blocks.size)
        states, _ = add(states, (np.int32(blocks.most), first, part.count % blocks.size > 0), blocks.rest)
    return builder.states_of_present(states, part.count > 0)


def weighted_apart(builder: Builder, results: Sequence[jax.Array], part: Part) -> list[jax.Array]:
    """The same results of `fn`: weights, and what they are to multiply, do not meet the divisions that `fn` made."""
    pairs = [(i, leaf.weight) for i, leaf in zip(builder.combined, builder.reduced, strict=True)]
    weighted = sorted({each for i, weight in pairs if weight is not None for each in (i, builder.combined[weight])})
    apart = dict(zip(weighted, fusion_barrier(builder.group, [results[i] for i in weighted], part), strict=True))
    return [apart.get(i, result) for i, result in enumerate(results)]


def fusion_barrier(group: Group, values: PyTree, part: Part) -> PyTree:
    """The same values, behind what no fusion crosses: else bits depend on what is around, as where a product and a
    sum become one operation."""
    if group.platform != "cpu":
        return lax.optimization_barrier(values)
    # XLA's CPU backend drops barriers before it fuses, but not a branch that it cannot foresee.
    leaves, treedef = jax.tree.flatten(values)
    plain = [i for i, leaf in enumerate(leaves) if key_of(leaf) is None]
    apart = lax.cond(
        part.total > 0,
        lambda given: given,
        lambda given: [jnp.zeros_like(leaf) for leaf in given],
        [jnp.asarray(leaves[i]) for i in plain],
    )
    found = dict(zip(plain, apart, strict=True))
    return treedef.unflatten([found.get(i, leaf) for i, leaf in enumerate(leaves)])


def _nothing(builder: Builder, size: int) -> list[jax.Array]:
    """In the place of the states of a block that is not there."""
    return [jnp.zeros(shape.shape, shape.dtype) for shape in builder.state_shapes({True: size, False: 1})]


def _rows_from(array: jax.Array, index: jax.Array | None, first: Any, rows: int) -> jax.Array:
    """So many of a replica's rows, from one of them on; where it has fewer, others in their place."""
    if index is None or not index.ndim:
        return lax.dynamic_slice_in_dim(array, first if index is None else index + first, rows)
    return read_rows(array, lax.dynamic_slice_in_dim(index, first, rows), rows)
