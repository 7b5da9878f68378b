"""Program: the bodies that one kind of call compiles: map the parts, combine them, and then.

`step` does it all in one launch. Where rows are sliced, `accumulate` runs one slice of every replica and adds to
states that stay on the devices, and `finish` combines these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._base.partition import RowRange, split_rows
from .._data.feed import read_rows
from .._reductions.outputs import OutputSpec
from .._reductions.reduction import UPDATES, PartInfo, Reduction, combine_replicas, prepare_parts
from .._runtime.group import AXIS
from .._runtime.layout import Layout
from .._tracing.tracer import TracedFunction
from .._variables.variable import Shared
from .feeding import launches
from .parts import Part, PartArrays, pad_rows, run_slices
from .spec import Programmed
from .traces import CallTraces

State = dict[Shared, list[jax.Array]]  # stored leaves on one replica


@dataclass
class ProgramBuilder:
    """Builds the programs of one kind of call.

    Attributes:
      program: the function, the group and the kind of call.
      traces: what was traced for it.
      layout_of: of a variable, as programs take and give it.
    """

    program: Programmed
    traces: CallTraces
    layout_of: Callable[[Shared], Layout]

    def __post_init__(self) -> None:
        self.call, self.group, self.function = self.program.call, self.program.group, self.program.function
        self.first: TracedFunction = self.traces.of_rows(self.sizes()[0])
        self.outputs: OutputSpec = self.first.outputs
        # The first replica's own value lies on its device alone; what follows needs it on all.
        has_devices = not (self.group.is_multi_process or self.group.is_simulated or self.call.is_composed)
        is_own = has_devices and self.function.then is None
        leaves = self.outputs.reduced
        self.own = [i for i, leaf in enumerate(leaves) if is_own and leaf.reduction.name == "first"]
        self.combined = [i for i in range(len(leaves)) if i not in self.own]
        at = {old: new for new, old in enumerate(self.combined)}
        self.reduced = [
            leaf if leaf.weight is None else leaf._replace(weight=at[leaf.weight])
            for leaf in (leaves[i] for i in self.combined)
        ]
        self.writes = self.first.writes

    def sizes(self) -> list[int | None]:
        """All numbers of rows that `fn` runs over."""
        sizes = [size for sizes in self.call.part_sizes for size in sizes if size != 0]
        if self.call.is_composed and self.call.is_sliced:
            sizes = [part.rows for size in sizes for part in self._slices(size or 0)]
        return list(dict.fromkeys(sizes))

    def _slices(self, rows: int) -> list[RowRange]:
        """Where one program runs the slices of a replica's rows."""
        return split_rows(rows, min(self.call.num_slices, rows))

    def check_parts(self) -> None:
        """Trace all parts: what combines needs equal shapes and updates, whatever their rows."""
        name = self.function.name
        for size in self.sizes():
            other = self.traces.of_rows(size)
            for leaf, one, two in zip(self.outputs.leaves, self.first.shapes, other.shapes, strict=False):
                if not leaf.reduced.reduction.has_row_entries and one.shape != two.shape:
                    op = "a callable" if leaf.op == "callable" else leaf.op
                    raise ValueError(
                        f"{name}: output{leaf.path} has shape {one.shape} on one part, {two.shape} on another, but "
                        f'parts under {op!r} need equal shapes. For one row an input row, use "concat".'
                    )
            if self.writes != other.writes or self.outputs.treedef != other.outputs.treedef:
                raise ValueError(
                    f"{name}: what it returns or which shared variables it assigns depends on its number of rows, "
                    f"which differs between parts. Make it the same for all."
                )

    # The state of parts.

    @cached_property
    def updates(self) -> list[tuple[Shared, Reduction | None]]:
        """What `fn` writes, and how slices of that combine; None where there is one part."""
        return [(v, UPDATES[slices or "last"] if self.call.is_sliced else None) for v, slices in self.writes]

    def part(self, meta: jax.Array | None, rows: int | None, rank: jax.Array | None = None) -> Part:
        """This replica's part."""
        rank = lax.axis_index(AXIS) if rank is None else rank
        if meta is None:  # all replicas have as many rows
            first_row = rank if rows is None else rank * rows
            return Part(rank, rows, first_row, 0, 1.0 / self.group.size, 1.0, 0, 0)
        counts, offsets, lengths, row_slots, part_slots = meta
        real = jnp.result_type(float)
        before = jnp.where(jnp.arange(self.group.size, dtype=jnp.int32) < rank, lengths, 0).sum(dtype=jnp.int32)
        count, length = counts[rank], lengths[rank]
        weight = count.astype(real) / lengths.sum(dtype=jnp.int32).astype(real)
        share = count.astype(real) / jnp.maximum(length, 1).astype(real)
        return Part(
            rank, count, before + offsets[rank], offsets[rank], weight, share, row_slots[rank], part_slots[rank]
        )

    def states(
        self, sizes: Sequence[int | None], state: State, arrays: PartArrays, part: Part, tall: int | None
    ) -> list[jax.Array]:
        """This replica's states: of its own outputs, of combined ones, of updates; of a part of one of these sizes."""
        run: Callable[..., list[jax.Array]] = partial(self.run_part, state=state, arrays=arrays, part=part, tall=tall)
        if self.call.is_composed and self.call.is_sliced:
            run = partial(run_slices, self, arrays=arrays, part=part)
        if len(sizes) == 1 and sizes[0] != 0:
            return run(sizes[0])
        like = jax.eval_shape(lambda: run(tall))
        if len(sizes) == 1:
            return self._no_rows(state, like)
        branches = [partial(run, size) if size else partial(self._no_rows, state, like) for size in sizes]
        number = jnp.argmax(part.count == jnp.array(sizes, jnp.int32)).astype(jnp.int32)
        return _select(number, branches) if self.selects_branches() else lax.switch(number, branches)

    def selects_branches(self) -> bool:
        """Shall all branches run, and one be selected?

        XLA's CPU backend compiles convolutions inside a branch or a loop to naive loops, 30 to 57 times slower
        (jax-ml/jax#12868, open; jaxlib 0.12 still does).
        """
        traced = [self.traces.of_rows(size) for size in self.sizes()]
        has_effects = any(each.has_effects for each in traced)
        return self.group.platform == "cpu" and not has_effects and any(each.has_convolution for each in traced)

    @cached_property
    def runs_each_rank(self) -> bool:
        """Must simulated replicas run one by one? Mapped together all run every branch, also what prints."""
        traced = [self.traces.of_rows(size) for size in self.sizes()]
        is_mapped = self.group.is_simulated and not self.call.is_plain and not self.call.is_composed
        return is_mapped and any(each.has_effects for each in traced)

    def run_part(
        self, size: int | None, *, state: State, arrays: PartArrays, part: Part, tall: int | None
    ) -> list[jax.Array]:
        """Run `fn` over a part of so many rows; what is gathered is filled up to `tall` entries."""
        traced = self.traces.of_rows(size)
        rows = [read_rows(array, index, size or 0) for array, index in arrays.arrays]
        seen = {v: self._part_rows(v, leaves, arrays, part, size) for v, leaves in state.items()}
        leaves = self.call.arguments.in_tree_order(rows, arrays.broadcast)
        first_row = jnp.asarray(part.first_row, jnp.int32)
        results = traced.run(*chain(*(seen[v] for v in traced.variables)), *leaves, part.rank, first_row)
        outs, new = results[: len(self.outputs.leaves)], results[len(self.outputs.leaves) :]
        info = PartInfo(part.weight, (first_row == 0) & (part.count is None or part.count > 0))
        states = prepare_parts([outs[i] for i in self.combined], self.reduced, info)
        states = [
            pad_rows(each, tall) if leaf.reduction.has_row_entries else each
            for each, leaf in zip(states, self.reduced, strict=True)
        ]
        return [*(outs[i] for i in self.own), *states, *self._prepare_updates(state, new, part)]

    def _prepare_updates(self, state: State, new: list[jax.Array], part: Part) -> list[jax.Array]:
        """The states of what one part has written."""
        rest, found = list(new), list[jax.Array]()
        for variable, reduction in self.updates:
            for i, shape in enumerate(self.traces.abstract(variable).shapes):
                leaf = rest.pop(0)
                if reduction is None:
                    found.append(pad_rows(leaf, shape.shape[0]) if self.traces.holds_rows(variable) else leaf)
                    continue
                if reduction is UPDATES["add"]:
                    leaf = leaf - state[variable][i]
                found.append(reduction.prepare(leaf, PartInfo(part.share, True)))
        return found

    def _part_rows(
        self, variable: Shared, leaves: list[jax.Array], arrays: PartArrays, part: Part, size: int | None
    ) -> list[jax.Array]:
        """This part's rows of a variable that holds rows, or the whole value."""
        if not self.traces.holds_rows(variable) or size is None:
            return leaves
        index = arrays.held_index
        if index is None and self.call.is_sliced:
            index = part.offset
        return [read_rows(leaf, index, size) for leaf in leaves]

    def _no_rows(self, state: State, like: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
        """The states of no part: identities; and old values of what would be written."""
        reductions: list[Reduction | None] = [None for _ in self.own]
        reductions += [leaf.reduction for leaf in self.reduced]
        found = [
            jnp.full(shape.shape, 0 if reduction is None else reduction.identity(shape.dtype), shape.dtype)
            for reduction, shape in zip(reductions, like, strict=False)
        ]
        rest = list(like[len(found) :])
        for variable, reduction in self.updates:
            for old in state[variable]:
                shape = rest.pop(0)
                is_kept = reduction is None or reduction.name == "last"
                found.append(old if is_kept else jnp.full(shape.shape, reduction.identity(shape.dtype), shape.dtype))  # type: ignore[union-attr]
        return found

    def accumulate_states(self, before: Sequence[jax.Array], new: Sequence[jax.Array], part: Part) -> list[jax.Array]:
        """The states of this replica's parts so far and of one more; where that has no rows, those so far."""
        reductions = [leaf.reduction for leaf in self.reduced]
        reductions += [
            r for variable, r in self.updates if r is not None for _ in self.traces.abstract(variable).shapes
        ]
        found: list[jax.Array] = []
        for old, one, reduction in zip(before, new, reductions, strict=True):
            if reduction.collective == "gather":
                slot = part.row_slot if reduction.has_row_entries else part.part_slot
                found.append(lax.dynamic_update_slice_in_dim(old, one, slot, 0))
            else:
                found.append(jnp.where(part.count > 0, reduction.accumulate(old, one), old))
        return found

    def first_states(self, new: Sequence[jax.Array]) -> list[jax.Array]:
        """The states of the first slices, with room for what others gather."""
        padded = [
            pad_rows(state, self.slots(leaf.reduction.has_row_entries))
            if leaf.reduction.collective == "gather"
            else state
            for state, leaf in zip(new, self.reduced, strict=False)
        ]
        return [*padded, *new[len(padded) :]]

    def slots(self, is_rows: bool) -> int:
        """How many entries of what is gathered a replica has: each launch has its place."""
        if self.call.is_composed:
            tall = self.call.part_sizes[0][0] or 1
            return tall if is_rows else min(self.call.num_slices, tall)
        if not self.call.is_sliced:
            return (self.call.part_sizes[0][0] or 1) if is_rows else 1
        by_launch = launches(self.call.lengths or (), self.call.num_slices)
        return sum(parts.tall for parts in by_launch) if is_rows else len(by_launch)

    # Combining, and then.

    def valid_entries(self) -> list[np.ndarray | None]:
        """Of what is gathered, which entries count, in row order; None for all of them."""
        lengths = self.call.lengths
        if lengths is None or (self.call.is_even and not self.call.is_sliced):
            return [None for _ in self.reduced]
        by_launch = launches(lengths, self.call.num_slices)
        rows: list[np.ndarray] = []
        parts: list[int] = []
        for rank in range(self.group.size):
            slot = 0
            for j, launch in enumerate(by_launch):
                start = launch.offsets[rank] if self.call.is_composed else slot
                rows.append(rank * self.slots(True) + start + np.arange(launch.counts[rank]))
                parts += [rank * self.slots(False) + j] * bool(launch.counts[rank])
                slot += launch.tall
        index = {True: np.concatenate(rows), False: np.array(parts, np.int64)}
        return [index[leaf.reduction.has_row_entries] for leaf in self.reduced]

    def combine(self, states: Sequence[jax.Array]) -> list[jax.Array]:
        """Whole outputs from the states of all replicas, the first replica's own ones first."""
        own, rest = list(states[: len(self.own)]), states[len(self.own) :]
        whole = combine_replicas(rest, self.reduced, self.valid_entries(), has_gradients=self.call.is_composed)
        by_leaf = dict(zip(self.combined, whole, strict=True))
        by_leaf |= dict(zip(self.own, own, strict=True))
        return [by_leaf[i] for i in self.outputs.keep]

    @cached_property
    def then(self) -> tuple[TracedFunction, list[int]] | None:
        """`then` on the combined outputs."""
        if self.function.then is None:
            return None
        info = PartInfo(1.0, True)
        outs = self.first.shapes[: len(self.outputs.leaves)]
        chosen = [outs[i] for i in self.combined]
        states = jax.eval_shape(lambda *values: prepare_parts(values, self.reduced, info), *chosen)
        states = [
            jax.ShapeDtypeStruct((self.slots(leaf.reduction.has_row_entries), *s.shape[1:]), s.dtype)
            if leaf.reduction.collective == "gather" and self.call.is_sliced
            else s
            for s, leaf in zip(states, self.reduced, strict=True)
        ]
        axes = [(AXIS, self.group.size)]
        whole = jax.make_jaxpr(lambda *values: self.combine(values), axis_env=axes, return_shape=True)(*states)[1]
        return self.traces.then(self.outputs, whole)

    def finish_values(
        self, states: Sequence[jax.Array], state: State, broadcast: Sequence[jax.Array], part: Part
    ) -> tuple[list[jax.Array], State]:
        """The call's results, and new values on this replica, from all states."""
        count = len(self.own) + len(self.reduced)
        results = self.combine(states[:count])
        new = self._finish_updates(states[count:], state, part)
        if self.then is None:
            return results, new
        traced, extra = self.then
        chosen = [broadcast[i] for i in extra]
        rank = jnp.asarray(part.rank, jnp.int32)
        values = traced.run(*chain(*(state[v] for v in traced.variables)), *results, *chosen, rank, rank)
        written = values[len(traced.shapes) - sum(len(state_shapes(self.traces, v)) for v, _ in traced.writes) :]
        results = values[: len(values) - len(written)]
        for variable, _ in traced.writes:
            n = len(state_shapes(self.traces, variable))
            new[variable], written = written[:n], written[n:]
        return results, new

    def _finish_updates(self, states: Sequence[jax.Array], state: State, part: Part) -> State:
        new: State = {}
        rest = list(states)
        for variable, reduction in self.updates:
            shapes = self.traces.abstract(variable).shapes
            leaves, rest = rest[: len(shapes)], rest[len(shapes) :]
            if reduction is not None:
                olds = state[variable]
                if reduction is UPDATES["add"]:
                    leaves = [old.astype(leaf.dtype) + leaf for old, leaf in zip(olds, leaves, strict=True)]
                leaves = [
                    jnp.where(part.count > 0, leaf.astype(old.dtype), old)
                    for old, leaf in zip(olds, leaves, strict=True)
                ]
            new[variable] = leaves
        return new


def state_shapes(traces: CallTraces, variable: Shared) -> Sequence[jax.ShapeDtypeStruct]:
    """Shapes of a variable's stored leaves on one replica."""
    return traces.abstract(variable).shapes


def _select(number: jax.Array, branches: Sequence[Callable[[], list[jax.Array]]]) -> list[jax.Array]:
    each = [branch() for branch in branches]
    return [lax.select_n(number, *leaves) for leaves in zip(*each, strict=True)]
