"""Program: the bodies of one kind of call: run parts, add up their states, combine replicas, run `then`."""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain, compress, groupby
from types import MappingProxyType
from typing import Any

import jax
import jax.custom_batching
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._base.partition import RowRange, split_rows
from .._data.overlap import fill_beyond, halo_of
from .._reductions.outputs import OutputSpec, ResultSpec, result_spec
from .._reductions.reduction import (
    ELEMENTWISE,
    REDUCTIONS,
    UPDATES,
    Reduction,
    combine_replicas,
    constant_unless,
    prepare_part,
)
from .._runtime.constants import resolve
from .._runtime.shards import Shard, shard_shape, sum_to_shards, whole
from .._runtime.way import Layout, axis_named, replica_axis
from .._tracing.context import stateless
from .._tracing.sharded import ShardedSum
from .._tracing.tracer import TracedFunction
from .._variables.variable import Shared
from .blocks import Blocks, fusion_barrier, rows_from
from .parts import Part, PartArrays, pad_rows, spare_rows, split_into_launches
from .traces import CallTraces, State

_NOTHING: Mapping[int, tuple[int, ...]] = MappingProxyType({})


class ProgramBuilder:
    """Builder of the computation on one replica, up to the point where replicas combine.

    Running `fn` on one part produces a flat list of states, in this order: outputs to combine, updates of variables.

    Attributes:
      traced: the trace of `fn` for each number of rows that parts have, most first.
      outputs: the structure of what `fn` returns.
      combined: indexes of the wanted outputs that combine.
      reduced: how each of the combined outputs combines.
      updates: the variables that `fn` writes, and how slices of each combine.
      reductions: how slices of each state combine.
      kept: indexes of the states with an entry a row or part, which `f.over` joins on the host, batch by batch.
      reads_shards: whether `fn` reads variables in shards, so that replicas communicate while they run it.
      summed_in_shards: indexes of the states that are added up over the replicas while `fn` runs: each replica gets its
        shard of the sum.
    """

    def __init__(self, traces: CallTraces) -> None:
        self.traces, self.function, self.group, self.call = traces, traces.function, traces.group, traces.call
        self.traced: dict[int | None, TracedFunction] = {}
        for size in self._sizes():
            self.traced[size] = traces.of_rows(size)
            self._check_like_first(size, self.traced[size])
        self.outputs: OutputSpec = self.first.outputs
        self._check_entries()
        self._check_present()
        self.combined = self._wanted()
        self.reduced = [
            leaf if leaf.weight is None else leaf._replace(weight=self.combined.index(leaf.weight))
            for leaf in (self.outputs.leaves[i] for i in self.combined)
        ]
        last = UPDATES["last"]
        self.updates: list[tuple[Shared, Reduction]] = [
            (variable, UPDATES[slices] if slices and self.call.is_sliced else last)
            for variable, slices in self.first.writes
        ]
        of_updates = [reduction for variable, reduction in self.updates for _ in traces.abstract(variable).shapes]
        self.reductions = [*(leaf.reduction for leaf in self.reduced), *of_updates]
        self.kept = [i for i, op in enumerate(self.reductions) if self.call.is_over and op.collective == "gather"]
        self.reads_shards = any(traces.are_in_shards(traced.variables) for traced in self.traced.values())
        self.summed_in_shards: frozenset[int] = frozenset()
        if self.reads_shards:
            self._check_callbacks()

    @property
    def first(self) -> TracedFunction:
        """Return the trace of `fn` over the most rows."""
        return next(iter(self.traced.values()))

    def _sizes(self) -> Iterable[int | None]:
        if self.call.block is not None:
            return Blocks(self.call).sizes
        sizes = [size for sizes in self.call.part_sizes for size in sizes if size != 0]
        if self.call.is_composed and self.call.is_sliced:
            sizes = [part.rows for size in sizes for part in self._slices(size)]
        return dict.fromkeys(sizes)

    def _wanted(self) -> list[int]:
        """Return the indexes of the outputs that are needed: all, unless `output_subset` leaves some out."""
        outputs, function, subset = self.outputs, self.function, self.call.asked.output_subset
        # `then` takes all outputs, and nan="raise" looks at all.
        if subset is None or function.then is not None or function.refuses_nan:
            return list(range(len(outputs.leaves)))
        return outputs.needed_for(result_spec(outputs.treedef, outputs.keys, subset, function.name).picked)

    @property
    def used(self) -> list[int]:
        """Return the indexes of the results of `fn` that are needed, updates among them."""
        return [*self.combined, *range(len(self.outputs.leaves), len(self.first.shapes))]

    def _slices(self, rows: int | None) -> list[RowRange]:
        """Cut a replica's rows into the slices that one traced program runs."""
        return split_rows(rows or 1, min(self.call.num_slices, rows or 1))

    def _check_like_first(self, rows: int | None, other: TracedFunction, which: Container[int] | None = None) -> None:
        """Check that a part of so many rows is like the first: in all, or in the shapes of the outputs `which`."""
        name, first, most = self.function.name, self.first, next(iter(self.traced))
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
        rows, name_of = next(iter(self.traced)), self.function.name_of_output
        suspects = [
            i
            for i, (leaf, struct) in enumerate(zip(self.outputs.leaves, self.first.shapes, strict=False))
            if rows in struct.shape and leaf.reduction.is_lawful and leaf.reduction.name in ELEMENTWISE
            and name_of(leaf.path)[1]
        ]  # fmt: skip
        if rows is not None and suspects and len(self.traced) == 1:
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

    def _check_callbacks(self) -> None:
        """Refuse callbacks where replicas communicate in `fn` and rows do not divide."""
        if self._has_callbacks and any(len(sizes) > 1 for sizes in self.call.part_sizes):
            raise ValueError(
                f"{self.function.name}: it has callbacks and reads a variable in shards. Where rows do not divide, "
                f"replicas also run it over rows that they drop. Give rows that divide, or leave the callbacks out."
            )

    # The states of parts.

    def states(
        self, sizes: Sequence[int | None], state: State, arrays: PartArrays, part: Part, max_rows: int | None
    ) -> list[Any]:
        """Run a replica's part, which has one of these sizes, and return its states (partial results).

        Outputs with an entry a row get `max_rows` entries.
        """
        if self.call.block is not None:
            return self._run_blocks(state, arrays, part)
        # jax.vmap turns a switch into a select, so simulated replicas run the branches of all sizes. `fn` must not see
        # padding there: sent rows are filled up with real rows already, resident ones are here.
        # Replicas in different branches would wait for each other in different gathers of shards.
        runs_all_sizes = self.selects_branches or self.reads_shards
        if runs_all := len(sizes) > 1 and (runs_all_sizes or self.group.is_simulated):
            sent = [i for i, feed in enumerate(self.call.feeds) if feed.layout != "stacked"]
            rows = {i: row for i, row in enumerate(self._read(1, state, arrays, part)) if i not in sent}
            arrays = arrays._replace(spares=spare_rows(rows, part.count > 0, 0 in sizes))

        known = {size: resolve(traced.known(), arrays.constants) for size, traced in self.traced.items()}

        def run(size: int | None) -> list[jax.Array]:
            # A branch that is not selected must not give gradients: NaN times 0 is NaN.
            stops_gradients = runs_all and self.call.is_composed
            inputs = arrays.map(partial(constant_unless, part.count == size)) if stops_gradients else arrays
            if self.call.is_composed and self.call.is_sliced:
                return self._run_slices(size, inputs, part, known)
            return self.run_part(size, state=state, arrays=inputs, part=part, max_rows=max_rows, known=known[size])

        branches = [partial(self._no_rows, state, max_rows) if size == 0 else partial(run, size) for size in sizes]
        if len(branches) == 1:
            return branches[0]()
        number = sum(i * (part.count == size).astype(jnp.int32) for i, size in enumerate(sizes[1:], 1))
        if runs_all_sizes:
            # What is added up already holds the parts of the replicas that have this size.
            pairs = enumerate(zip(*(branch() for branch in branches), strict=True))
            return [sum(leaves) if i in self.summed_in_shards else lax.select_n(number, *leaves) for i, leaves in pairs]
        return lax.switch(number, branches)

    @cached_property
    def selects_branches(self) -> bool:
        """Tell whether all branches run, one is selected, and nothing runs in a loop."""
        # XLA's CPU backend compiles convolutions inside a branch or a loop to naive loops, 30 to 57 times slower
        # (https://github.com/jax-ml/jax/issues/12868; jaxlib 0.12 still does). Callbacks must run once, so they keep
        # the branch.
        has_convolution = any(traced.has_convolution for traced in self.traced.values())
        return self.group.platform == "cpu" and has_convolution and not self._has_callbacks

    @cached_property
    def _has_callbacks(self) -> bool:
        return any(traced.has_callbacks for traced in self.traced.values())

    @property
    def gathers_rows(self) -> bool:
        """Tell whether an output has an entry a row, whose place depends on the rows of all replicas."""
        kinds = ("gather", "scatter") if self.call.is_sliced else ("gather",)
        reductions = [leaf.reduction for leaf in self.outputs.leaves]
        return any(op.has_row_entries and op.collective in kinds for op in reductions)

    @cached_property
    def runs_each_rank(self) -> bool:
        """Check whether simulated replicas run one after another, and not mapped together by `jax.vmap`."""
        # Mapped together, the matrix products of blocks would add up in another order, and all replicas would run every
        # branch with the callbacks in it. What communicates needs all replicas at once, so it stays mapped.
        communicates = self.reads_shards or any(traced.communicates for traced in self.traced.values())
        needs_turns = self.call.block is not None or (self._has_callbacks and not communicates)
        return self.group.is_simulated and needs_turns

    def run_part(
        self,
        size: int | None,
        *,
        state: State,
        arrays: PartArrays,
        part: Part,
        max_rows: int | None,
        known: Sequence[Any],
    ) -> list[jax.Array]:
        """Run `fn` over a part of so many rows, and return its states; `known` is computed of captured arrays."""
        traced = self.traced[size]
        first_row = jnp.asarray(part.first_row, jnp.int32)
        seen = iter(self._read(size, state, arrays, part))
        rows = [fill_beyond(next(seen), overlap, first_row, part.total) for overlap in self.call.arguments.overlaps]
        leaves = self.call.arguments.in_tree_order(rows, arrays.broadcast)
        state_seen = state | self.traces.leaves_of(self._held, seen)
        held = [*chain(*map(state_seen.__getitem__, traced.variables))]
        sums = {self.combined[i]: self._sum_in_shards(i, size, part) for i in self.summed_in_shards}

        def run(leaves: Sequence[jax.Array]) -> Sequence[Any]:
            results = traced.run(*held, *leaves, part.rank, first_row, known=known, sums=sums)
            return [result if i in sums else whole(result) for i, result in enumerate(results)]

        results = self._without_weightless(run, leaves) if self.call.is_composed else run(leaves)
        if self.call.block is not None:
            results = self._fence_weights(results, part)
        is_first = (first_row == 0) & (part.count is None or part.count > 0)
        states = [
            *prepare_part([results[i] for i in self.combined], self.reduced, part.weight, is_first),
            *self._prepare_updates(state, results[len(self.outputs.leaves) :], part),
        ]
        pairs = zip(states, self.reductions, strict=True)
        return [pad_rows(leaf, max_rows) if reduction.has_row_entries else leaf for leaf, reduction in pairs]

    def _sum_in_shards(self, i: int, size: int | None, part: Part) -> ShardedSum:
        """Say how a state is added up in shards while replicas run a part of this size, that they may not have."""
        leaf = self.reduced[i]

        def prepare(value: jax.Array, weight: Any) -> jax.Array:
            state = leaf.reduction.prepare(value, part.weight if weight is None else weight)
            return state if part.count is None else jnp.where(part.count == size, state, jnp.zeros((), state.dtype))

        return ShardedSum(prepare, None if leaf.weight is None else self.combined[leaf.weight])

    @cached_property
    def _held(self) -> list[Shared]:
        read = dict.fromkeys(chain(*(traced.variables for traced in self.traced.values())))
        return list(filter(self.traces.holds_rows, read))

    def _read(self, size: int | None, state: State, arrays: PartArrays, part: Part) -> Sequence[jax.Array]:
        """Read the rows of a part: those of arguments, with their neighbours, then those of variables."""
        where = part.offset if arrays.held_index is None and self.call.is_sliced else arrays.held_index
        held = [(leaf, where) for variable in self._held for leaf in state[variable]]
        halos = [*map(halo_of, self.call.arguments.overlaps), *(0 for _ in held)]
        return self.group._way.divided(
            arrays._replace(arrays=[*arrays.arrays, *held]).read(size or 0, halos, part.count)
        )

    def _without_weightless(
        self, run: Callable[[Sequence[jax.Array]], Sequence[jax.Array]], leaves: Sequence[jax.Array]
    ) -> Sequence[jax.Array]:
        """Run `fn` so that no gradient flows into values of weight 0."""
        # A value of weight 0 is often divided by its weight, and the gradient of 0 / 0 is NaN. So a second run takes
        # the arguments as constants where the weight is 0. XLA removes all of the first run but the weights.
        results = run(leaves)
        weights = [leaf.weight for leaf in self.outputs.leaves]
        has_effects = any(traced.has_effects for traced in self.traced.values())
        for weight in dict.fromkeys(weights):
            if weight is None or has_effects:
                continue
            again = run([constant_unless(results[weight] != 0, leaf) for leaf in leaves])
            results = [again[i] if number == weight else results[i] for i, number in enumerate(weights)]
        return results

    def _prepare_updates(self, state: State, written: Iterable[jax.Array], part: Part) -> Iterable[jax.Array]:
        new = self.traces.leaves_of([variable for variable, _ in self.updates], written)
        for variable, reduction in self.updates:
            for i, (leaf, shape) in enumerate(zip(new[variable], self.traces.abstract(variable).shapes, strict=True)):
                if self.traces.holds_rows(variable):
                    # Rows are stored padded to those of the longest part.
                    leaf = pad_rows(leaf, shape.shape[0])
                if reduction is UPDATES["add"]:
                    leaf = leaf - state[variable][i]
                yield reduction.prepare(leaf, part.share)

    def state_shapes(self, entries: dict[bool, int]) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes of a replica's states, with so many entries of rows (True) and of parts (False)."""
        outs = self.first.shapes
        combined = [outs[i] for i in self.combined]
        shapes = [
            *jax.eval_shape(lambda *values: prepare_part(values, self.reduced, 1.0, True), *combined),
            *(
                jax.eval_shape(reduction.prepare, shape, 1.0)
                for variable, reduction in self.updates
                for shape in self.traces.abstract(variable).shapes
            ),
        ]
        for i, reduction in enumerate(self.reductions):
            # States in shards are added up over the replicas while `fn` runs, so the state is the shard of the sum.
            if i in self.summed_in_shards:
                shapes[i] = shard_shape(shapes[i], self.group.size)
            if reduction.collective in ("gather", "scatter") and self.call.has_rows:
                shape = (entries[reduction.has_row_entries], *shapes[i].shape[1:])
                shapes[i] = jax.ShapeDtypeStruct(shape, shapes[i].dtype)
        return shapes

    def _no_rows(self, state: State, max_rows: int | None) -> list[jax.Array]:
        """Return the states of a replica without rows: identities of the ops, and the old values of variables."""
        olds = [
            *(None for _ in self.reduced),
            *chain(*(state[variable] for variable, _ in self.updates)),
        ]
        # All branches of a switch return the same shapes.
        shapes = self.state_shapes(self.slots if self.call.is_composed else {True: max_rows or 0, False: 1})
        return [
            jnp.full(shape.shape, reduction.identity(shape.dtype), shape.dtype)
            if old is None or reduction is not UPDATES["last"]
            else old
            for old, shape, reduction in zip(olds, shapes, self.reductions, strict=True)
        ]

    # Slices.

    @cached_property
    def slots(self) -> dict[bool, int]:
        """Return how many entries a replica has of outputs with an entry a row (True) or a part (False)."""
        rows = max(self.call.lengths) if self.call.lengths else self.call.part_sizes[0][0] or 1
        if self.call.block is not None:
            return Blocks(self.call).slots
        return {True: rows, False: 1 if self.call.is_over else min(self.call.num_slices, rows)}

    def empty_states(self) -> list[jax.Array]:
        """Return the states of a replica before its first part: zeros."""
        return [jnp.zeros(shape.shape, shape.dtype) for shape in self.state_shapes(self.slots)]

    def states_of_present(self, states: Sequence[jax.Array], is_present: Any) -> list[jax.Array]:
        """Return the states of a replica after its last part; identities if it had no rows."""
        return [
            # Sums begin with zeros, which are their identity already.
            jnp.where(is_present, state, jnp.asarray(reduction.identity(state.dtype), state.dtype))
            if reduction.collective in ("max", "min", "prod")
            else state
            for state, reduction in zip(states, self.reductions, strict=True)
        ]

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
        for merge in self.outputs.merges:
            if merge.leaves.start not in self.combined:
                continue
            places = [self.combined.index(i) for i in merge.leaves]
            if all(self.reductions[i].collective == "merge" for i in places):
                pair = [before[i].reshape(new[i].shape) for i in places], [new[i] for i in places]
                both = merge.merge_present(*pair, part.seen > 0, part.count > 0)
                states |= {i: state.reshape(before[i].shape) for i, state in zip(places, both, strict=True)}
        return states

    def _run_slices(
        self, size: int | None, arrays: PartArrays, part: Part, known: Mapping[int | None, Sequence[Any]]
    ) -> list[jax.Array]:
        """Run `fn` over the slices of a part of a traced call in a loop. A traced call has no variables."""
        total = sum(self.call.lengths or ())
        # Entries of a slice go where the longest part has them, so that all replicas agree.
        places = np.array([cut.start for cut in self._slices(self.slots[True])], np.int32)
        states = self.empty_states()
        # Slices differ by at most one row: one loop for each of the two sizes.
        for rows, cuts in groupby(enumerate(self._slices(size)), key=lambda numbered: numbered[1].rows):
            numbers, starts = np.array([(number, cut.start) for number, cut in cuts], np.int32).T
            index = [starts[:, None] + np.arange(rows + halo_of(overlap)) for overlap in self.call.arguments.overlaps]
            pairs = zip(arrays.arrays, index, strict=True)
            # Gathered in advance, since the loop divides along its axis; halos overlap, so a reshape would not do.
            chunks = [array.at[which].get(mode="promise_in_bounds") for (array, _), which in pairs]

            def add(before: list[jax.Array], chunk: Any, rows: int = rows) -> tuple[list[jax.Array], None]:
                row_arrays, number, start, row_slot = chunk
                first_row = jnp.asarray(part.first_row, jnp.int32) + start
                cut = Part(part.rank, rows, first_row, start, start, rows / total, 1.0, row_slot, number, total=total)
                inputs = PartArrays([(array, None) for array in row_arrays], None, arrays.broadcast)
                new = self.run_part(rows, state={}, arrays=inputs, part=cut, max_rows=rows, known=known[rows])
                return self.accumulate(before, new, cut), None

            states, _ = lax.scan(add, states, (chunks, numbers, starts, places[numbers]), unroll=self.selects_branches)
        return states

    # Blocks.

    def _run_blocks(self, state: State, arrays: PartArrays, part: Part) -> list[jax.Array]:
        """Run `fn` over a replica's blocks one by one, each by the same computation on whichever replica it lies."""
        blocks, states = Blocks(self.call), self.empty_states()
        # Replicas without a block run nothing, so all gather before what `fn` reads.
        state = {v: [*map(whole, state[v])] for traced in self.traced.values() for v in traced.variables}
        # XLA folds constants on one device and not on several, so they come from behind a barrier.
        known = {
            size: fusion_barrier(self.group, resolve(self.traced[size].known(), arrays.constants), part)
            for size in blocks.sizes
        }

        def add(before: list[jax.Array], chunk: Any, size: int = blocks.size) -> tuple[list[jax.Array], None]:
            slot, first, is_there = chunk
            block = Part(
                rank=part.rank,
                count=jnp.where(is_there, size, 0),
                first_row=part.first_row + first,
                offset=first,
                seen=first,
                weight=size / int(blocks.lengths.sum()),
                share=1.0,
                row_slot=slot * blocks.size,
                part_slot=slot,
                total=part.total,
            )
            return self.accumulate(before, self._run_block(size, state, arrays, block, known[size]), block), None

        if blocks.most:
            slots = np.arange(blocks.most, dtype=np.int32)
            chunks = (slots, slots * blocks.size, slots < part.count // blocks.size)
            if self.selects_branches:
                # lax.scan makes a loop of a single step in spite of unroll=True.
                for number in slots:
                    states, _ = add(states, jax.tree.map(lambda values, number=number: values[number], chunks))
            else:
                states, _ = lax.scan(add, states, chunks)
        if blocks.rest:
            first = np.int32(blocks.full[blocks.owner] * blocks.size)
            states, _ = add(states, (np.int32(blocks.most), first, part.count % blocks.size > 0), blocks.rest)
        return self.states_of_present(states, part.count > 0)

    def _run_block(
        self, size: int, state: State, arrays: PartArrays, block: Part, known: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Run `fn` over one block, behind barriers; return zeros if this replica has no such block."""
        seen = [rows_from(array, index, block.offset, size) for array, index in arrays.arrays]

        def run(seen: Any, others: Any) -> list[jax.Array]:
            leaves, block_known, broadcast = others
            inputs = PartArrays([(rows, None) for rows in seen], None, broadcast)
            block_state = dict(zip(state, leaves, strict=True))
            return self.run_part(size, state=block_state, arrays=inputs, part=block, max_rows=size, known=block_known)

        others = (list(state.values()), known, arrays.broadcast)
        if self.selects_branches:
            states = run(*fusion_barrier(self.group, (seen, others), block))
            return fusion_barrier(self.group, states, block)
        # XLA fuses nothing into a branch or out of it.
        shapes = self.state_shapes({True: size, False: 1})
        nothing = [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]
        return lax.cond(block.count > 0, run, lambda *_: nothing, seen, others)

    def _fence_weights(self, results: Sequence[jax.Array], part: Part) -> list[jax.Array]:
        """Keep XLA from fusing weights, and the values that they multiply, with the divisions inside `fn`."""
        pairs = [(i, leaf.weight) for i, leaf in zip(self.combined, self.reduced, strict=True)]
        weighted = sorted({number for i, w in pairs if w is not None for number in (i, self.combined[w])})
        values = fusion_barrier(self.group, [results[i] for i in weighted], part)
        fenced = dict(zip(weighted, values, strict=True))
        return [fenced.get(i, result) for i, result in enumerate(results)]


class Epilogue:
    """The end of a call of one kind: combine the states of all replicas, and run `then`."""

    def __init__(self, builder: ProgramBuilder) -> None:
        self.builder, self.call, self.function, self.group = builder, builder.call, builder.function, builder.group
        self.traces, self.outputs, self.reduced = builder.traces, builder.outputs, builder.reduced
        self.scattered = self.outputs.scattered
        self._check_scattered()
        # The shapes of sums that go to `then` in shards, by the indexes of their states. A part adds them up itself if
        # replicas communicate there anyway; so slices accumulate shards.
        self.in_shards = self._sums_in_shards()
        if builder.reads_shards:
            builder.summed_in_shards = frozenset(self.in_shards)

    def _check_scattered(self) -> None:
        if self.scattered and not self.call.has_rows:
            raise ValueError(
                f'{self.function.name}: "scatter" keeps rows where they were made, but this call has no rows.'
            )
        if self.scattered and self.function.then is not None:
            path = self.outputs.results[self.scattered[0]].path
            raise ValueError(
                f'{self.function.name}: output{path} is "scatter", so it stays in parts, but then takes whole outputs. '
                f'Use "concat", or make what follows a function of its own.'
            )

    def _sums_in_shards(self) -> dict[int, tuple[int, ...]]:
        """Find the sums for `then` that have the shape of a leaf in shards of a variable that it reads or writes."""
        if self.then is None or self.call.block is not None or not self.traces.are_in_shards(self.then_variables):
            return {}
        # A gradient has the shape of its leaf. Another sum of that shape is right in shards too.
        shapes = {shape for v in self.then_variables for shape in v._spec.storage.shapes_in_shards}
        found: dict[int, tuple[int, ...]] = {}
        for i, leaf in enumerate(self.reduced):
            shape = self.builder.first.shapes[self.builder.combined[i]].shape
            if leaf.reduction.name in ("sum", "mean") and leaf.reduction.collective == "sum" and leaf.wire is None:
                found |= {i: shape} if shape in shapes else {}
        return found

    @cached_property
    def then_variables(self) -> list[Shared]:
        traced, _ = self.then or (None, ())
        return [] if traced is None else list(dict.fromkeys((*traced.variables, *(v for v, _ in traced.writes))))

    def _valid_entries(self) -> list[np.ndarray | None]:
        """Return the indexes of the valid entries of each gathered output, in row order; None if all are valid."""
        lengths = self.call.lengths
        if lengths is None or (self.call.is_even and not self.call.is_sliced):
            return [None for _ in self.reduced]
        index = self._index_of_slices(lengths) if self.call.block is None else Blocks(self.call).valid
        return [index[leaf.reduction.has_row_entries] for leaf in self.reduced]

    def _index_of_slices(self, lengths: tuple[int, ...]) -> dict[bool, np.ndarray]:
        rows: list[np.ndarray] = []
        parts: list[int] = []
        for rank in range(self.group.size):
            slot = 0
            for j, launch in enumerate(split_into_launches(lengths, self.call.num_slices)):
                rows.append(rank * self.builder.slots[True] + slot + np.arange(launch.counts[rank]))
                parts += [rank * self.builder.slots[False] + j] * bool(launch.counts[rank])
                slot += launch.max_rows
        return {True: np.concatenate(rows), False: np.array(parts, np.int64)}

    def combine(
        self, states: Sequence[jax.Array], present: Any = None, in_shards: Mapping[int, tuple[int, ...]] = _NOTHING
    ) -> list[Any]:
        """Combine the states of all replicas into whole outputs, or this replica's shards of some; `present` tells
        which replicas have rows."""
        states, reduced = list(states), list(self.reduced)
        for i in in_shards:
            states[i] = states[i] if i in self.builder.summed_in_shards else sum_to_shards(states[i]).array
            # Nothing is left to travel.
            reduced[i] = reduced[i]._replace(reduction=replace(reduced[i].reduction, collective="scatter"))
        if self.call.lengths is not None and present is not None:
            # Lengths that are compiled in make the mask a constant.
            present = np.array(self.call.lengths) > 0
        with self._parts_alone():
            whole = combine_replicas(
                states, reduced, self._valid_entries(), self.call.is_composed, per_process=self.group._per_process
            )
        if self.scattered and self.call.is_sliced:
            where = jnp.asarray(self._own_order)[lax.axis_index(replica_axis())]
            for i, leaf in enumerate(self.reduced):
                if leaf.reduction.collective == "scatter":
                    whole[i] = whole[i].at[where].get(mode="promise_in_bounds")
        whole = [Shard(array, in_shards[i]) if i in in_shards else array for i, array in enumerate(whole)]
        leaves = dict(zip(self.builder.combined, whole, strict=True))
        with self._parts_alone():
            return self.outputs.finish(leaves, present)

    def combine_batches(self, states: Sequence[jax.Array], rows: jax.Array, present: jax.Array) -> list[Any]:
        """Combine the states of `f.over` over so many rows into whole outputs; None for those of kept states."""
        kept, valid = self.builder.kept, [None for _ in states]
        # No kept state travels here.
        reduced = [x._replace(reduction=REDUCTIONS["same"]) if i in kept else x for i, x in enumerate(self.reduced)]
        with self._parts_alone():
            whole = combine_replicas(states, reduced, valid, rows=rows, per_process=self.group._per_process)
            leaves = {self.builder.combined[i]: leaf for i, leaf in enumerate(whole) if i not in kept}
            return self.outputs.finish(leaves, present)

    def finish_joined(self, entries: Mapping[int, np.ndarray]) -> list[Any]:
        """Return the outputs that are made of kept states, whose entries `f.over` has joined; None for all others."""
        combined, reduced = self.builder.combined, self.reduced
        with self._parts_alone():
            # Joined entries are on the host, where no collective is needed: only what the op does at its end is left.
            wholes = {combined[i]: reduced[i].reduction.finalize(joined, None) for i, joined in entries.items()}
            return self.outputs.finish(wholes, None)

    def _parts_alone(self) -> AbstractContextManager[None]:
        """Return a context in which ops of the user's see parts alone, and no variable."""
        # Traces note what `fn` and `then` read. What an op reads would go unnoticed, so an op may read no variable.
        name = f"{self.function.name}: an op, or the merge or finish of a Monoid,"
        return stateless(name, "It combines parts alone: return the value beside them, or use it in then.")

    @property
    def _own_order(self) -> np.ndarray:
        """Return where each replica's rows lie among those of its slices: (replicas, rows of the longest part)."""
        lengths = self.call.lengths or ()
        order = np.zeros((self.group.size, max(lengths)), np.int32)
        slot = 0
        for launch in split_into_launches(lengths, self.call.num_slices):
            for row, offset, count in zip(order, launch.offsets, launch.counts, strict=True):
                row[offset : offset + count] = slot + np.arange(count)
            slot += launch.max_rows
        return order

    @cached_property
    def result(self) -> ResultSpec:
        treedef, keys = self.outputs.treedef, self.outputs.keys
        if self.then is not None:
            treedef, keys = self.then[0].outputs
        return result_spec(treedef, keys, self.call.asked.output_subset, self.function.name)

    @cached_property
    def then(self) -> tuple[TracedFunction, list[int]] | None:
        """Trace `then` on the combined outputs; also return which broadcast arguments follow them."""
        if self.function.then is None:
            return None
        # A call with `then` takes no output from the first replica.
        states = self.builder.state_shapes(self.builder.slots)[: len(self.reduced)]
        with axis_named(self.function.axis_name):
            axes = [(replica_axis(), self.group.size)]
            # Only the shapes of combined outputs are needed; the states are those of one replica, so the axis is named
            # here.
            whole = jax.make_jaxpr(lambda *values: self.combine(values), axis_env=axes, return_shape=True)(*states)[1]
        written = [variable for variable, _ in self.builder.updates]
        return self.traces.then(self.function.then, self.outputs, whole, written)

    @property
    def flops_of_then(self) -> int:
        if self.then is None:
            return 0
        count, traced = self.then[0].outputs[0].num_leaves, self.then[0]
        return traced.flops([*self.result.picked, *range(count, len(traced.shapes))])

    @property
    def _has_barrier(self) -> bool:
        may_help = self.group.platform == "gpu" and not (self.group._has_one_device or self.call.is_composed)
        return self.function.has_barrier and may_help

    def finish_values(
        self,
        states: Sequence[jax.Array],
        state: State,
        arrays: PartArrays,
        part: Part,
        layouts: Mapping[Shared, Layout],
    ) -> tuple[list[jax.Array], State]:
        """Compute the call's results, and the new values of variables on this replica, from all states."""
        count = len(self.reduced)
        results = self.combine(states[:count], part.present, self.in_shards)
        new = self._finish_updates(states[count:], state, part)
        if self.then is None:
            return results, new
        if self.call.block is not None:
            results = fusion_barrier(self.group, results, part)
        elif self._has_barrier:
            # Else XLA makes one computation of a gradient's sum and its use, and all sums wait for each other. An
            # unreduced gradient has no sum yet.
            is_fenced = [leaf.reduction.collective != "unreduced" for leaf in self.outputs.results]
            fenced = iter(lax.optimization_barrier([*compress(results, is_fenced)]))
            results = [next(fenced) if is_in else result for is_in, result in zip(is_fenced, results, strict=True)]
        traced, extra = self.then
        chosen = [arrays.broadcast[i] for i in extra]
        rank = jnp.asarray(part.rank, jnp.int32)
        state_leaves = [leaf for v in traced.variables for leaf in state[v]]
        # On shards of another number of replicas XLA would round otherwise.
        state_leaves = state_leaves if self.call.block is None else [*map(whole, state_leaves)]
        known = resolve(traced.known(), arrays.constants)

        def run(known: Sequence[Any], args: Sequence[Any]) -> list[Any]:
            return traced.run(*args, known=known, are_equal=self._are_equal(traced, layouts))

        communicates = traced.communicates or self.traces.are_in_shards(self.then_variables)
        # Mapped together, simulated replicas would all run the callbacks inside a branch of one.
        if self.group.is_simulated and traced.has_callbacks and not (communicates or self.call.is_composed):
            run = jax.custom_batching.sequential_vmap(run)
        # `then` runs as if each replica had one row, so the rank is also the number of the first row.
        values = run(known, [*state_leaves, *results, *chosen, rank, rank])
        count = traced.outputs[0].num_leaves
        written = self.traces.leaves_of([variable for variable, _ in traced.writes], values[count:])
        new |= {v: v._spec.storage.to_store(leaves, layouts[v]) for v, leaves in written.items()}
        return [*map(whole, values[:count])], new

    def _are_equal(self, traced: TracedFunction, layouts: Mapping[Shared, Layout]) -> bool:
        """Tell whether all that `then` sees is equal on all replicas, or becomes so before it meets a shard."""
        stacked = [v for v in traced.variables if layouts[v] == "stacked"]
        differing = traced.uses_rank or not all(v._spec.storage.is_sharded for v in stacked)
        # Only synk's own `then`s update variables with a value for each replica. All else that they make is equal.
        return not differing or any(v._may_differ for v, _ in traced.writes)

    def _finish_updates(self, states: Sequence[jax.Array], state: State, part: Part) -> State:
        new = self.traces.leaves_of([variable for variable, _ in self.builder.updates], states)
        for variable, reduction in self.builder.updates if self.call.is_sliced else ():
            olds, leaves = state[variable], new[variable]
            if reduction is UPDATES["add"]:
                leaves = [old.astype(leaf.dtype) + leaf for old, leaf in zip(olds, leaves, strict=True)]
            pairs = zip(olds, leaves, strict=True)
            new[variable] = [jnp.where(part.count > 0, leaf.astype(old.dtype), old) for old, leaf in pairs]
        return new
