"""Program: what the program of one kind of call runs on each replica: its part of the rows, and the end of the call."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain, compress, groupby
from typing import Any, NamedTuple

import jax
import jax.custom_batching
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._base.pytree import PyTree, key_of
from .._data.overlap import fill_beyond, halo_of
from .._reductions.outputs import ResultSpec, result_spec
from .._reductions.reduction import UPDATES, constant_unless
from .._runtime.constants import resolve
from .._runtime.group import Group
from .._runtime.shards import whole
from .._runtime.way import Layout, axis_named, replica_axis
from .._tracing.sharded import ShardedSum
from .._tracing.tracer import TracedFunction
from .._variables.variable import Shared
from .parts import Part, PartArrays, calls_back_in_turns, rows_from, spare_rows
from .states import Combination, States, TracedCall
from .traces import State


class Inputs(NamedTuple):
    """Values that `fn` takes on one replica.

    Attributes:
      known: for each number of rows that parts have, what `fn` has computed of captured arrays.
    """

    state: State
    arrays: PartArrays
    known: Mapping[int | None, Sequence[Any]]


class PartRunner:
    """Runner of `fn` over the part of one replica, at once or in slices or blocks. It returns the part's states."""

    def __init__(self, states: States) -> None:
        self.states, self.traced = states, states.traced
        self.call, self.traces = states.traced.call, states.traced.traces

    def run(
        self, sizes: Sequence[int | None], state: State, arrays: PartArrays, part: Part, max_rows: int | None
    ) -> list[Any]:
        """Run the part, which has one of these sizes. Outputs with an entry a row get `max_rows` entries."""
        traced, uneven = self.traced, self.traced.uneven
        if traced.blocks is not None:
            return self._run_blocks(state, arrays, part)
        if runs_all := uneven.runs_all(sizes):
            # `fn` must not see padding: sent rows are filled up with real rows already, resident ones are here.
            sent = [i for i, feed in enumerate(self.call.feeds) if feed.layout != "stacked"]
            rows = {i: row for i, row in enumerate(self._read(1, state, arrays, part)) if i not in sent}
            arrays = arrays._replace(spares=spare_rows(rows, part.count > 0, 0 in sizes))
        known = {size: resolve(each.known(), arrays.constants) for size, each in traced.by_size.items()}

        def run(size: int | None) -> list[jax.Array]:
            # A branch that is not selected must not give gradients: NaN times 0 is NaN.
            stops_gradients = runs_all and self.call.is_composed
            read = arrays.map(partial(constant_unless, part.count == size)) if stops_gradients else arrays
            if self.call.is_composed and self.call.is_sliced:
                return self._run_slices(size, Inputs(state, read, known), part)
            return self.states.padded(self._run_part(size, Inputs(state, read, known), part), max_rows)

        nothing = partial(self.states.without_rows, state, max_rows)
        branches = {size: nothing if size == 0 else partial(run, size) for size in sizes}
        return uneven.run(part.count, branches, self.states.summed_in_shards)

    def _run_part(self, size: int | None, inputs: Inputs, part: Part) -> list[jax.Array]:
        """Run `fn` over a part of so many rows."""
        traced, (state, arrays, known) = self.traced.by_size[size], inputs
        first_row = jnp.asarray(part.first_row, jnp.int32)
        seen = iter(self._read(size, state, arrays, part))
        rows = [fill_beyond(next(seen), overlap, first_row, part.total) for overlap in self.call.arguments.overlaps]
        leaves = self.call.arguments.in_tree_order(rows, arrays.broadcast)
        state_seen = state | self.traces.leaves_of(self._held, seen)
        held = [*chain(*map(state_seen.__getitem__, traced.variables))]
        sums = {self.traced.combined[i]: self._sum_in_shards(i, size, part) for i in self.states.summed_in_shards}

        def run(leaves: Sequence[jax.Array]) -> Sequence[Any]:
            results = traced.run(*held, *leaves, part.rank, first_row, known=known[size], sums=sums)
            return [result if i in sums else whole(result) for i, result in enumerate(results)]

        results = self._without_weightless(run, leaves) if self.call.is_composed else run(leaves)
        if self.traced.blocks is not None:
            results = self._fence_weights(results, part)
        is_first = (first_row == 0) & (part.count is None or part.count > 0)
        return self.states.of_part(results, state, part, is_first)

    def _sum_in_shards(self, i: int, size: int | None, part: Part) -> ShardedSum:
        """Say how a state is added up in shards while replicas run a part of this size, that they may not have."""
        leaf = self.traced.reduced[i]

        def prepare(value: jax.Array, weight: Any) -> jax.Array:
            state = leaf.reduction.prepare(value, part.weight if weight is None else weight)
            return state if part.count is None else jnp.where(part.count == size, state, jnp.zeros((), state.dtype))

        return ShardedSum(prepare, None if leaf.weight is None else self.traced.combined[leaf.weight])

    @cached_property
    def _held(self) -> list[Shared]:
        return list(filter(self.traces.holds_rows, self.traced.reads))

    def _read(self, size: int | None, state: State, arrays: PartArrays, part: Part) -> Sequence[jax.Array]:
        """Read the rows of a part: those of arguments, with their neighbours, then those of variables."""
        where = part.offset if arrays.held_index is None and self.call.is_sliced else arrays.held_index
        held = [(leaf, where) for variable in self._held for leaf in state[variable]]
        halos = [*map(halo_of, self.call.arguments.overlaps), *(0 for _ in held)]
        every = arrays._replace(arrays=[*arrays.arrays, *held])
        return self.traced.group._way.divided(every.read(size or 0, halos, part.count))

    def _without_weightless(
        self, run: Callable[[Sequence[jax.Array]], Sequence[jax.Array]], leaves: Sequence[jax.Array]
    ) -> Sequence[jax.Array]:
        """Run `fn` so that no gradient flows into values of weight 0."""
        # A value of weight 0 is often divided by its weight, and the gradient of 0 / 0 is NaN. So a second run takes
        # the arguments as constants where the weight is 0. XLA removes all of the first run but the weights.
        results = run(leaves)
        weights = [leaf.weight for leaf in self.traced.outputs.leaves]
        has_effects = any(traced.has_effects for traced in self.traced.by_size.values())
        for weight in dict.fromkeys(weights):
            if weight is None or has_effects:
                continue
            again = run([constant_unless(results[weight] != 0, leaf) for leaf in leaves])
            results = [again[i] if number == weight else results[i] for i, number in enumerate(weights)]
        return results

    def _run_slices(self, size: int | None, inputs: Inputs, part: Part) -> list[jax.Array]:
        """Run the slices of a part of a traced call, which has no variables, in a loop."""
        traced, states, total = self.traced, self.states, sum(self.call.lengths or ())
        # Entries of a slice go where the longest part has them, so that all replicas agree.
        places = np.array([cut.start for cut in traced.slices(states.slots[True])], np.int32)
        so_far = states.empty()
        # Slices differ by at most one row: one loop for each of the two sizes.
        for rows, cuts in groupby(enumerate(traced.slices(size)), key=lambda numbered: numbered[1].rows):
            numbers, starts = np.array([(number, cut.start) for number, cut in cuts], np.int32).T
            index = [starts[:, None] + np.arange(rows + halo_of(overlap)) for overlap in self.call.arguments.overlaps]
            pairs = zip(inputs.arrays.arrays, index, strict=True)
            # Gathered in advance, since the loop divides along its axis; halos overlap, so a reshape would not do.
            chunks = [array.at[which].get(mode="promise_in_bounds") for (array, _), which in pairs]

            def add(before: list[jax.Array], chunk: Any, rows: int = rows) -> tuple[list[jax.Array], None]:
                row_arrays, number, start, row_slot = chunk
                first_row = jnp.asarray(part.first_row, jnp.int32) + start
                cut = Part(part.rank, rows, first_row, start, start, rows / total, 1.0, row_slot, number, total=total)
                arrays = PartArrays([(array, None) for array in row_arrays], None, inputs.arrays.broadcast)
                new = self._run_part(rows, inputs._replace(arrays=arrays), cut)
                return states.accumulate(before, new, cut), None

            each = (chunks, numbers, starts, places[numbers])
            so_far, _ = lax.scan(add, so_far, each, unroll=traced.uneven.is_flat)
        return so_far

    def _run_blocks(self, state: State, arrays: PartArrays, part: Part) -> list[jax.Array]:
        """Run a replica's blocks one by one, each by the same computation on whichever replica it lies."""
        traced, states, blocks = self.traced, self.states.empty(), self.traced.blocks
        assert blocks is not None
        # Replicas without a block run nothing, so all gather before what `fn` reads.
        state = {v: [*map(whole, state[v])] for v in traced.reads}
        # XLA folds constants on one device and not on several, so they come from behind a barrier.
        known: dict[int | None, Any] = {
            size: fusion_barrier(traced.group, resolve(traced.by_size[size].known(), arrays.constants), part)
            for size in blocks.sizes
        }
        inputs = Inputs(state, arrays, known)

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
            return self.states.accumulate(before, self._run_block(size, inputs, block), block), None

        if blocks.most:
            slots = np.arange(blocks.most, dtype=np.int32)
            chunks = (slots, slots * blocks.size, slots < part.count // blocks.size)
            if traced.uneven.is_flat:
                # lax.scan makes a loop of a single step in spite of unroll=True.
                for number in slots:
                    states, _ = add(states, jax.tree.map(lambda values, number=number: values[number], chunks))
            else:
                states, _ = lax.scan(add, states, chunks)
        if blocks.rest:
            first = np.int32(blocks.full[blocks.owner] * blocks.size)
            states, _ = add(states, (np.int32(blocks.most), first, part.count % blocks.size > 0), blocks.rest)
        return self.states.of_present(states, part.count > 0)

    def _run_block(self, size: int, inputs: Inputs, block: Part) -> list[jax.Array]:
        """Run one block, behind barriers; return zeros if this replica has no such block."""
        group, (state, arrays, known) = self.traced.group, inputs
        seen = [rows_from(array, index, block.offset, size) for array, index in arrays.arrays]

        def run(seen: Any, others: Any) -> list[jax.Array]:
            leaves, block_known, broadcast = others
            read = PartArrays([(rows, None) for rows in seen], None, broadcast)
            block_state = dict(zip(state, leaves, strict=True))
            return self._run_part(size, Inputs(block_state, read, {size: block_known}), block)

        others = (list(state.values()), known[size], arrays.broadcast)
        if self.traced.uneven.is_flat:
            return fusion_barrier(group, run(*fusion_barrier(group, (seen, others), block)), block)
        # XLA fuses nothing into a branch or out of it.
        nothing = self.states.empty({True: size, False: 1})
        return lax.cond(block.count > 0, run, lambda *_: nothing, seen, others)

    def _fence_weights(self, results: Sequence[jax.Array], part: Part) -> list[jax.Array]:
        """Keep XLA from fusing weights, and the values that they multiply, with the divisions inside `fn`."""
        combined = self.traced.combined
        pairs = [(i, leaf.weight) for i, leaf in zip(combined, self.traced.reduced, strict=True)]
        weighted = sorted({number for i, w in pairs if w is not None for number in (i, combined[w])})
        values = fusion_barrier(self.traced.group, [results[i] for i in weighted], part)
        fenced = dict(zip(weighted, values, strict=True))
        return [fenced.get(i, result) for i, result in enumerate(results)]


class Epilogue:
    """End of a call of one kind: combine the states of all replicas, run `then`, and update variables.

    Attributes:
      then: the trace of `then` on the combined outputs, and which broadcast arguments follow them.
      scattered: indexes of the outputs that stay on the replicas that made them.
    """

    def __init__(self, traced: TracedCall) -> None:
        self.traced, self.call, self.function, self.group = traced, traced.call, traced.function, traced.group
        self.traces, self.scattered = traced.traces, traced.outputs.scattered
        self._check_scattered()
        self.then = self._trace_then()
        in_shards = self._sums_in_shards()
        # A part adds up sums in shards itself if replicas communicate there anyway; so slices accumulate shards.
        self.states = States(traced, frozenset(in_shards if traced.reads_shards else ()))
        self.combination = Combination(self.states, in_shards)

    def _check_scattered(self) -> None:
        if self.scattered and not self.call.has_rows:
            raise ValueError(
                f'{self.function.name}: "scatter" keeps rows where they were made, but this call has no rows.'
            )
        if self.scattered and self.function.then is not None:
            path = self.traced.outputs.results[self.scattered[0]].path
            raise ValueError(
                f'{self.function.name}: output{path} is "scatter", so it stays in parts, but then takes whole outputs. '
                f'Use "concat", or make what follows a function of its own.'
            )

    def _trace_then(self) -> tuple[TracedFunction, list[int]] | None:
        if self.function.then is None:
            return None
        # Only the shapes of whole outputs are needed. A call with `then` takes no output from the first replica.
        states = States(self.traced)
        shapes, combine = states.shapes(states.slots)[: len(self.traced.reduced)], Combination(states).combine
        with axis_named(self.function.axis_name):
            # The states are those of one replica, so the axis is named here.
            axes = [(replica_axis(), self.group.size)]
            outputs = jax.make_jaxpr(lambda *values: combine(values), axis_env=axes, return_shape=True)(*shapes)[1]
        written = [variable for variable, _ in self.traced.updates]
        return self.traces.then(self.function.then, self.traced.outputs, outputs, written)

    def _sums_in_shards(self) -> dict[int, tuple[int, ...]]:
        """Find the sums for `then` that have the shape of a leaf in shards of a variable that it reads or writes.

        Return their shapes, by the indexes of their states.
        """
        if self.call.block is not None or not self.traces.are_in_shards(self.then_variables):
            return {}
        # A gradient has the shape of its leaf. Another sum of that shape is right in shards too.
        shapes = {shape for v in self.then_variables for shape in v._spec.storage.shapes_in_shards}
        found: dict[int, tuple[int, ...]] = {}
        for i, leaf in enumerate(self.traced.reduced):
            shape = self.traced.first.shapes[self.traced.combined[i]].shape
            if leaf.reduction.name in ("sum", "mean") and leaf.reduction.collective == "sum" and leaf.wire is None:
                found |= {i: shape} if shape in shapes else {}
        return found

    @property
    def then_variables(self) -> Sequence[Shared]:
        return () if self.then is None else (*self.then[0].variables, *(v for v, _ in self.then[0].writes))

    @cached_property
    def result(self) -> ResultSpec:
        treedef, keys = self.traced.outputs.treedef, self.traced.outputs.keys
        if self.then is not None:
            treedef, keys = self.then[0].outputs
        return result_spec(treedef, keys, self.call.asked.output_subset, self.function.name)

    @property
    def flops_of_then(self) -> int:
        if self.then is None:
            return 0
        count, traced = self.then[0].outputs[0].num_leaves, self.then[0]
        return traced.flops([*self.result.picked, *range(count, len(traced.shapes))])

    def finish_values(
        self,
        states: Sequence[jax.Array],
        state: State,
        arrays: PartArrays,
        part: Part,
        layouts: Mapping[Shared, Layout],
    ) -> tuple[list[jax.Array], State]:
        """Compute the call's results, and the new values of variables on this replica, from all states."""
        count = len(self.traced.reduced)
        results = self.combination.combine(states[:count], part.present)
        new = self._finish_updates(states[count:], state, part)
        if self.then is None:
            return results, new
        results = self._fenced(results, part)
        traced, extra = self.then
        chosen = [arrays.broadcast[i] for i in extra]
        rank = jnp.asarray(part.rank, jnp.int32)
        state_leaves = [leaf for v in traced.variables for leaf in state[v]]
        # On shards of another number of replicas XLA would round otherwise.
        state_leaves = state_leaves if self.call.block is None else [*map(whole, state_leaves)]
        known = resolve(traced.known(), arrays.constants)

        def run(known: Sequence[Any], args: Sequence[Any]) -> list[Any]:
            return traced.run(*args, known=known, are_equal=self._are_equal(traced, layouts))

        reads_shards = self.traces.are_in_shards(self.then_variables)
        if calls_back_in_turns(self.traces, [traced], reads_shards) and not self.call.is_composed:
            run = jax.custom_batching.sequential_vmap(run)
        # `then` runs as if each replica had one row, so the rank is also the number of the first row.
        values = run(known, [*state_leaves, *results, *chosen, rank, rank])
        count = traced.outputs[0].num_leaves
        written = self.traces.leaves_of([variable for variable, _ in traced.writes], values[count:])
        new |= {v: v._spec.storage.to_store(leaves, layouts[v]) for v, leaves in written.items()}
        return [*map(whole, values[:count])], new

    def _fenced(self, results: list[Any], part: Part) -> list[Any]:
        """Keep XLA from fusing what combines replicas with `then`, where that would change bits or cost time."""
        if self.call.block is not None:
            return fusion_barrier(self.group, results, part)
        may_help = self.group.platform == "gpu" and not (self.group._has_one_device or self.call.is_composed)
        if not (self.function.has_barrier and may_help):
            return results
        # Else XLA makes one computation of a gradient's sum and its use, and all sums wait for each other. An
        # unreduced gradient has no sum yet.
        is_fenced = [leaf.reduction.collective != "unreduced" for leaf in self.traced.outputs.results]
        fenced = iter(lax.optimization_barrier([*compress(results, is_fenced)]))
        return [next(fenced) if is_in else result for is_in, result in zip(is_fenced, results, strict=True)]

    def _are_equal(self, traced: TracedFunction, layouts: Mapping[Shared, Layout]) -> bool:
        """Tell whether all that `then` sees is equal on all replicas, or becomes so before it meets a shard."""
        stacked = [v for v in traced.variables if layouts[v] == "stacked"]
        differing = traced.uses_rank or not all(v._spec.storage.is_sharded for v in stacked)
        # Only synk's own `then`s update variables with a value for each replica. All else that they make is equal.
        return not differing or any(v._may_differ for v, _ in traced.writes)

    def _finish_updates(self, states: Sequence[jax.Array], state: State, part: Part) -> State:
        new = self.traces.leaves_of([variable for variable, _ in self.traced.updates], states)
        for variable, reduction in self.traced.updates if self.call.is_sliced else ():
            olds, leaves = state[variable], new[variable]
            if reduction is UPDATES["add"]:
                leaves = [old.astype(leaf.dtype) + leaf for old, leaf in zip(olds, leaves, strict=True)]
            pairs = zip(olds, leaves, strict=True)
            new[variable] = [jnp.where(part.count > 0, leaf.astype(old.dtype), old) for old, leaf in pairs]
        return new


def fusion_barrier(group: Group, values: PyTree, part: Part) -> PyTree:
    """Return values that XLA cannot fuse with what computes them."""
    # Fused, a product and a sum become one operation with other bits, so the bits would depend on the code around.
    if group.platform != "cpu":
        return lax.optimization_barrier(values)
    # XLA's CPU backend removes barriers before it fuses, but not a branch whose condition it does not know.
    leaves, treedef = jax.tree.flatten(values)
    # Typed keys hold no floats, so nothing of them is fused.
    plain = [i for i, leaf in enumerate(leaves) if key_of(leaf) is None]
    apart = lax.cond(
        # A call with blocks has rows, so the condition always holds. XLA cannot know: the number comes from the table
        # of parts.
        part.total > 0,
        lambda leaves: leaves,
        lambda leaves: [jnp.zeros_like(leaf) for leaf in leaves],
        [jnp.asarray(leaves[i]) for i in plain],
    )
    fenced = dict(zip(plain, apart, strict=True))
    return treedef.unflatten([fenced.get(i, leaf) for i, leaf in enumerate(leaves)])
