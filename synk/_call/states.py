"""States: the partial results of parts: which ones there are, how they add up, and how replicas combine them."""

from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import cached_property
from itertools import chain
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._base.partition import RowRange, split_rows
from .._reductions.outputs import OutputSpec, result_spec
from .._reductions.reduction import ELEMENTWISE, REDUCTIONS, UPDATES, Reduction, combine_replicas, prepare_part
from .._runtime.shards import Shard, shard_shape, sum_to_shards
from .._runtime.way import replica_axis
from .._tracing.context import stateless
from .._tracing.tracer import TracedFunction
from .._variables.variable import Shared
from .parts import Blocks, Part, choose_uneven, pad_rows, split_into_launches
from .traces import CallTraces, State

_NOTHING: Mapping[int, tuple[int, ...]] = MappingProxyType({})


class TracedCall:
    """Traces of `fn` for one kind of call, and what the call wants of the results of `fn`.

    Attributes:
      blocks: the blocks in which replicas run their rows, if they do.
      by_size: the trace of `fn` for each number of rows that parts have, most first.
      outputs: the structure of what `fn` returns.
      combined: indexes of the wanted outputs that combine.
      reduced: how each of the combined outputs combines.
      updates: the variables that `fn` writes, and how slices of each combine.
      reads_shards: whether `fn` reads variables in shards, so that replicas communicate while they run it.
      uneven: how a program runs replicas whose parts have two sizes.
    """

    def __init__(self, traces: CallTraces) -> None:
        self.traces, self.function, self.group, self.call = traces, traces.function, traces.group, traces.call
        self.blocks = None if self.call.block is None else Blocks(self.call)
        self.by_size: dict[int | None, TracedFunction] = {}
        for size in self._sizes():
            self.by_size[size] = traces.of_rows(size)
            self._check_like_first(size, self.by_size[size])
        self.outputs: OutputSpec = self.first.outputs
        self._check_entries()
        self._check_present()
        self.combined = self._wanted()
        self.reduced = [
            leaf if leaf.weight is None else leaf._replace(weight=self.combined.index(leaf.weight))
            for leaf in (self.outputs.leaves[i] for i in self.combined)
        ]
        self.updates: list[tuple[Shared, Reduction]] = [
            (v, UPDATES[slices if slices and self.call.is_sliced else "last"]) for v, slices in self.first.writes
        ]
        self.reads_shards = traces.are_in_shards(self.reads)
        self.uneven = choose_uneven(traces, self.by_size.values(), self.reads_shards)

    @property
    def first(self) -> TracedFunction:
        """Return the trace of `fn` over the most rows."""
        return next(iter(self.by_size.values()))

    @property
    def reads(self) -> dict[Shared, None]:
        """Return the variables that `fn` reads, as keys."""
        return dict.fromkeys(chain(*(traced.variables for traced in self.by_size.values())))

    @property
    def used(self) -> list[int]:
        """Return the indexes of the results of `fn` that are needed, updates among them."""
        return [*self.combined, *range(len(self.outputs.leaves), len(self.first.shapes))]

    @property
    def needs_lengths(self) -> bool:
        """Tell whether programs depend on the rows of each replica, if these differ or a replica has several parts."""
        # The place of an entry a row depends on the rows of all replicas.
        kinds = ("gather", "scatter") if self.call.is_sliced else ("gather",)
        reductions = [leaf.reduction for leaf in self.outputs.leaves]
        return self.uneven.takes_turns or any(op.has_row_entries and op.collective in kinds for op in reductions)

    def slices(self, rows: int | None) -> list[RowRange]:
        """Cut a replica's rows into the slices that one traced program runs."""
        return split_rows(rows or 1, min(self.call.num_slices, rows or 1))

    def _sizes(self) -> Iterable[int | None]:
        if self.blocks is not None:
            return self.blocks.sizes
        sizes = [size for sizes in self.call.part_sizes for size in sizes if size != 0]
        if self.call.is_composed and self.call.is_sliced:
            sizes = [part.rows for size in sizes for part in self.slices(size)]
        return dict.fromkeys(sizes)

    def _wanted(self) -> list[int]:
        """Return the indexes of the outputs that are needed: all, unless `output_subset` leaves some out."""
        outputs, function, subset = self.outputs, self.function, self.call.asked.output_subset
        # `then` takes all outputs, and nan="raise" looks at all.
        if subset is None or function.then is not None or function.refuses_nan:
            return list(range(len(outputs.leaves)))
        return outputs.needed_for(result_spec(outputs.treedef, outputs.keys, subset, function.name).picked)

    def _check_like_first(self, rows: int | None, other: TracedFunction, which: Container[int] | None = None) -> None:
        """Check that a part of so many rows is like the first: in all, or in the shapes of the outputs `which`."""
        name, first, most = self.function.name, self.first, next(iter(self.by_size))
        for i, (leaf, *parts) in enumerate(zip(first.outputs.leaves, first.shapes, other.shapes, strict=False)):
            one, two = (part.shape for part in parts)
            if one != two and not leaf.reduction.has_row_entries and (which is None or i in which):
                op = "a callable" if leaf.reduction.name == "callable" else leaf.reduction.name
                raise ValueError(
                    f"{name}: {self.function.name_of_output(leaf.path)[0]} has shape {one} in a part of length {most}, "
                    f"{two} in one of {rows}, but parts under {op!r} need equal shapes. Combine the rows inside, as "
                    f'jnp.mean(..., axis=0) does, or use "concat" for an entry a row.'
                )
        if which is None and (first.writes != other.writes or first.outputs.treedef != other.outputs.treedef):
            raise ValueError(
                f"{name}: what it returns or which shared variables it assigns depends on its number of rows, "
                f"which differs between parts. Make it the same for all."
            )

    def _check_entries(self) -> None:
        """Refuse an output with an entry a row under an op that combines parts entry by entry."""
        # An axis as long as the part need not follow the rows, as those of a gradient do not. A second trace, over
        # twice as many rows, tells.
        rows, name_of = next(iter(self.by_size)), self.function.name_of_output
        suspects = [
            i
            for i, (leaf, struct) in enumerate(zip(self.outputs.leaves, self.first.shapes, strict=False))
            if rows in struct.shape and leaf.reduction.is_lawful and leaf.reduction.name in ELEMENTWISE
            and name_of(leaf.path)[1]
        ]  # fmt: skip
        if rows is not None and suspects and len(self.by_size) == 1:
            other = self.first
            # The function may refuse other numbers of rows.
            with suppress(Exception):
                other = CallTraces(self.function, self.group, self.call, self.traces.view).of_rows(2 * rows)
            self._check_like_first(2 * rows, other, suspects)

    def _check_present(self) -> None:
        """Check that every replica has rows, if an output is to be the same on all of them."""
        for leaf in self.outputs.leaves if any(0 in sizes for sizes in self.call.part_sizes) else ():
            if leaf.reduction == REDUCTIONS["same"]:
                raise ValueError(
                    f"{self.function.name}: output{leaf.path} is to be equal on all replicas, but a replica without "
                    f"rows does not make it. Give at least {self.group.size} rows."
                )


class States:
    """States (partial results) of a replica: a flat list of the outputs to combine, then of the leaves of updates.

    Attributes:
      reductions: how slices of each state combine.
      kept: indexes of the states with an entry a row or part, which `f.over` joins on the host, batch by batch.
      summed_in_shards: indexes of the states that are added up over the replicas while `fn` runs: each replica gets its
        shard of the sum.
    """

    def __init__(self, traced: TracedCall, summed_in_shards: frozenset[int] = frozenset()) -> None:
        self.traced, self._call, self._traces = traced, traced.call, traced.traces
        self.summed_in_shards = summed_in_shards
        of_updates = [op for variable, op in traced.updates for _ in traced.traces.abstract(variable).shapes]
        self.reductions = [*(leaf.reduction for leaf in traced.reduced), *of_updates]
        self.kept = [i for i, op in enumerate(self.reductions) if self._call.is_over and op.collective == "gather"]

    @cached_property
    def slots(self) -> dict[bool, int]:
        """Return how many entries a replica has of outputs with an entry a row (True) or a part (False)."""
        if self.traced.blocks is not None:
            return self.traced.blocks.slots
        call = self._call
        rows = max(call.lengths) if call.lengths else call.part_sizes[0][0] or 1
        return {True: rows, False: 1 if call.is_over else min(call.num_slices, rows)}

    def shapes(self, entries: dict[bool, int]) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes of all states, with so many entries of rows (True) and of parts (False)."""
        traced = self.traced
        combined = [traced.first.shapes[i] for i in traced.combined]
        shapes = [
            *jax.eval_shape(lambda *values: prepare_part(values, traced.reduced, 1.0, True), *combined),
            *(
                jax.eval_shape(reduction.prepare, shape, 1.0)
                for variable, reduction in traced.updates
                for shape in self._traces.abstract(variable).shapes
            ),
        ]
        for i, reduction in enumerate(self.reductions):
            # States in shards are added up over the replicas while `fn` runs, so the state is the shard of the sum.
            if i in self.summed_in_shards:
                shapes[i] = shard_shape(shapes[i], traced.group.size)
            if reduction.collective in ("gather", "scatter") and self._call.has_rows:
                shape = (entries[reduction.has_row_entries], *shapes[i].shape[1:])
                shapes[i] = jax.ShapeDtypeStruct(shape, shapes[i].dtype)
        return shapes

    def empty(self, entries: dict[bool, int] | None = None) -> list[jax.Array]:
        """Return the states of a replica before its first part: zeros."""
        return [jnp.zeros(shape.shape, shape.dtype) for shape in self.shapes(entries or self.slots)]

    def without_rows(self, state: State, max_rows: int | None) -> list[jax.Array]:
        """Return the states of a replica without rows: identities of the ops, and the old values of variables."""
        olds = [*(None for _ in self.traced.reduced), *chain(*(state[variable] for variable, _ in self.traced.updates))]
        # All branches of a switch return the same shapes.
        shapes = self.shapes(self.slots if self._call.is_composed else {True: max_rows or 0, False: 1})
        return [
            jnp.full(shape.shape, reduction.identity(shape.dtype), shape.dtype)
            if old is None or reduction is not UPDATES["last"]
            else old
            for old, shape, reduction in zip(olds, shapes, self.reductions, strict=True)
        ]

    def of_part(self, results: Sequence[Any], state: State, part: Part, is_first: Any) -> list[jax.Array]:
        """Return the states that the results of `fn` over one part make; `is_first` of all parts that have rows."""
        outputs = [results[i] for i in self.traced.combined]
        return [
            *prepare_part(outputs, self.traced.reduced, part.weight, is_first),
            *self._of_updates(results[len(self.traced.outputs.leaves) :], state, part),
        ]

    def _of_updates(self, written: Iterable[jax.Array], state: State, part: Part) -> Iterable[jax.Array]:
        new = self._traces.leaves_of([variable for variable, _ in self.traced.updates], written)
        for variable, reduction in self.traced.updates:
            for i, (leaf, shape) in enumerate(zip(new[variable], self._traces.abstract(variable).shapes, strict=True)):
                if self._traces.holds_rows(variable):
                    # Rows are stored padded to those of the longest part.
                    leaf = pad_rows(leaf, shape.shape[0])
                if reduction is UPDATES["add"]:
                    leaf = leaf - state[variable][i]
                yield reduction.prepare(leaf, part.share)

    def padded(self, states: Sequence[jax.Array], max_rows: int | None) -> list[jax.Array]:
        """Pad states with an entry a row to `max_rows` entries."""
        pairs = zip(states, self.reductions, strict=True)
        return [pad_rows(leaf, max_rows) if reduction.has_row_entries else leaf for leaf, reduction in pairs]

    def accumulate(self, before: Sequence[jax.Array], new: Sequence[jax.Array], part: Part) -> list[jax.Array]:
        """Add the states of one more part to those so far, which may have an axis of size 1 in front."""
        states: list[jax.Array] = []
        merged = self._merge(before, new, part)
        for i, (leaf, reduction) in enumerate(zip(new, self.reductions, strict=True)):
            front = before[i].ndim - leaf.ndim
            # The axis in front is that of the replicas: removing it would be a copy, see `Compiler._arguments`.
            leaf = lax.expand_dims(leaf, range(front))
            if i in merged:
                states.append(merged[i])
            elif i in self.kept:
                states.append(leaf)
            elif reduction.collective in ("gather", "scatter"):
                slot = part.row_slot if reduction.has_row_entries else part.part_slot
                states.append(lax.dynamic_update_slice_in_dim(before[i], leaf, slot, front))
            else:
                both = reduction.accumulate(before[i], leaf)
                # States begin with zeros, which is the identity of sums alone.
                if reduction.collective in ("max", "min", "prod"):
                    both = jnp.where(part.seen > 0, both, leaf)
                # A shard holds the parts of all replicas, so also one without rows takes it.
                is_new = True if i in self.summed_in_shards else part.count > 0
                states.append(jnp.where(is_new, both, before[i]))
        return states

    def _merge(self, before: Sequence[jax.Array], new: Sequence[jax.Array], part: Part) -> dict[int, jax.Array]:
        """Merge the states of Monoids of the parts before, if there were any, and of one more, if it has rows."""
        states: dict[int, jax.Array] = {}
        for merge in self.traced.outputs.merges:
            if merge.leaves.start not in self.traced.combined:
                continue
            places = [self.traced.combined.index(i) for i in merge.leaves]
            if all(self.reductions[i].collective == "merge" for i in places):
                pair = [before[i].reshape(new[i].shape) for i in places], [new[i] for i in places]
                both = merge.merge_present(*pair, part.seen > 0, part.count > 0)
                states |= {i: state.reshape(before[i].shape) for i, state in zip(places, both, strict=True)}
        return states

    def of_present(self, states: Sequence[jax.Array], is_present: Any) -> list[jax.Array]:
        """Return the states of a replica after its last part; identities if it had no rows."""
        return [
            # Sums begin with zeros, which are their identity already.
            jnp.where(is_present, state, jnp.asarray(reduction.identity(state.dtype), state.dtype))
            if reduction.collective in ("max", "min", "prod")
            else state
            for state, reduction in zip(states, self.reductions, strict=True)
        ]


class Combination:
    """Combination of the states of all replicas into outputs.

    Attributes:
      in_shards: the shapes of sums of which each replica gets its shard, by the indexes of their states.
    """

    def __init__(self, states: States, in_shards: Mapping[int, tuple[int, ...]] = _NOTHING) -> None:
        self.states, self.in_shards, self._traced = states, in_shards, states.traced
        self._call, self._reduced, self._outputs = states.traced.call, states.traced.reduced, states.traced.outputs

    def combine(self, states: Sequence[jax.Array], present: Any = None) -> list[Any]:
        """Combine states into whole outputs, or this replica's shards; `present` tells which replicas have rows."""
        states, reduced = list(states), list(self._reduced)
        for i in self.in_shards:
            states[i] = states[i] if i in self.states.summed_in_shards else sum_to_shards(states[i]).array
            # Nothing is left to travel.
            reduced[i] = reduced[i]._replace(reduction=replace(reduced[i].reduction, collective="scatter"))
        if self._call.lengths is not None and present is not None:
            # Lengths that are compiled in make the mask a constant.
            present = np.array(self._call.lengths) > 0
        with self._parts_alone():
            whole = combine_replicas(
                states, reduced, self._valid, self._call.is_composed, per_process=self._traced.group._per_process
            )
        if self._outputs.scattered and self._call.is_sliced:
            where = jnp.asarray(self._own_order)[lax.axis_index(replica_axis())]
            for i, leaf in enumerate(self._reduced):
                if leaf.reduction.collective == "scatter":
                    whole[i] = whole[i].at[where].get(mode="promise_in_bounds")
        whole = [Shard(array, self.in_shards[i]) if i in self.in_shards else array for i, array in enumerate(whole)]
        leaves = dict(zip(self._traced.combined, whole, strict=True))
        with self._parts_alone():
            return self._outputs.finish(leaves, present)

    def combine_batches(self, states: Sequence[jax.Array], rows: jax.Array, present: jax.Array) -> list[Any]:
        """Combine the states of `f.over` over so many rows into whole outputs; None for those of kept states."""
        kept, valid = self.states.kept, [None for _ in states]
        # No kept state travels here.
        reduced = [x._replace(reduction=REDUCTIONS["same"]) if i in kept else x for i, x in enumerate(self._reduced)]
        with self._parts_alone():
            whole = combine_replicas(states, reduced, valid, rows=rows, per_process=self._traced.group._per_process)
            leaves = {self._traced.combined[i]: leaf for i, leaf in enumerate(whole) if i not in kept}
            return self._outputs.finish(leaves, present)

    def finish_joined(self, entries: Mapping[int, np.ndarray]) -> list[Any]:
        """Return the outputs that are made of kept states, whose entries `f.over` has joined; None for all others."""
        combined, reduced = self._traced.combined, self._reduced
        with self._parts_alone():
            # Joined entries are on the host, where no collective is needed: only what the op does at its end is left.
            wholes = {combined[i]: reduced[i].reduction.finalize(joined, None) for i, joined in entries.items()}
            return self._outputs.finish(wholes, None)

    def _parts_alone(self) -> AbstractContextManager[None]:
        """Return a context in which ops of the user's see parts alone, and no variable."""
        # Traces note what `fn` and `then` read. What an op reads would go unnoticed, so an op may read no variable.
        name = f"{self._traced.function.name}: an op, or the merge or finish of a Monoid,"
        return stateless(name, "It combines parts alone: return the value beside them, or use it in then.")

    @property
    def _valid(self) -> list[np.ndarray | None]:
        """Return the indexes of the valid entries of each gathered output, in row order; None if all are valid."""
        call, blocks = self._call, self._traced.blocks
        if call.lengths is None or (call.is_even and not call.is_sliced):
            return [None for _ in self._reduced]
        index = self._valid_of_slices(call.lengths) if blocks is None else blocks.valid
        return [index[leaf.reduction.has_row_entries] for leaf in self._reduced]

    def _valid_of_slices(self, lengths: tuple[int, ...]) -> dict[bool, np.ndarray]:
        slots, launches = self.states.slots, split_into_launches(lengths, self._call.num_slices)
        own = enumerate(zip(self._own_order, lengths, strict=True))
        rows = [rank * slots[True] + order[:length].astype(np.int64) for rank, (order, length) in own]
        ranks = range(self._traced.group.size)
        parts = [rank * slots[False] + j for rank in ranks for j, each in enumerate(launches) if each.counts[rank]]
        return {True: np.concatenate(rows), False: np.array(parts, np.int64)}

    @property
    def _own_order(self) -> np.ndarray:
        """Return where each replica's rows lie among those of its slices: (replicas, rows of the longest part)."""
        lengths = self._call.lengths or ()
        order = np.zeros((self._traced.group.size, max(lengths)), np.int32)
        slot = 0
        for launch in split_into_launches(lengths, self._call.num_slices):
            for row, offset, count in zip(order, launch.offsets, launch.counts, strict=True):
                row[offset : offset + count] = slot + np.arange(count)
            slot += launch.max_rows
        return order
