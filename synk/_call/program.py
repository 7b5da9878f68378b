"""Program: the bodies that one kind of call compiles: run the parts, and add up their states on each replica."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from itertools import chain, compress, groupby
from typing import Any

import jax
import jax.custom_batching
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._base.partition import RowRange, split_rows
from .._data.overlap import fill_beyond, halo_of
from .._reductions.outputs import OutputSpec
from .._reductions.reduction import UPDATES, PartInfo, Reduction, combine_replicas, constant_unless, prepare_parts
from .._reductions.results import ResultSpec, result_spec
from .._runtime.group import AXIS
from .._tracing.context import stateless
from .._tracing.tracer import TracedFunction
from .._variables.variable import Shared
from .blocks import Blocks, fusion_barrier, run_blocks, weighted_apart
from .parts import Part, PartArrays, pad_rows, spare_rows, split_into_launches
from .traces import CallTraces, State


class ProgramBuilder:
    """What the programs of one kind of call do on one replica.

    A part gives states: its own outputs, then those of what is combined, then those of updates.

    Attributes:
      traced: `fn` over each number of rows that it runs over, most first.
      outputs: the structure of what `fn` returns.
      own: which of its outputs that somebody wants are the first replica's own.
      combined: which of these are not.
      reduced: how these combine.
      updates: what `fn` writes, and how slices of that combine.
      reductions: how the states of slices combine, one a state.
      kept: which states are not combined before the end.
    """

    def __init__(self, traces: CallTraces) -> None:
        self.traces, self.function, self.group, self.call = traces, traces.function, traces.group, traces.call
        self.traced: dict[int | None, TracedFunction] = {}
        for size in self._sizes():
            self.traced[size] = traces.of_rows(size)
            self._check_like_first(self.traced[size])
        self.outputs: OutputSpec = self.first.outputs
        # The first replica's own value lies on its device alone; what follows needs it on all.
        has_devices = not (self.group._is_multi_process or self.group.is_simulated or self.call.is_composed)
        is_own = has_devices and self.function.then is None
        leaves, wanted = self.outputs.reduced, self._wanted()
        self.own = [i for i in wanted if is_own and leaves[i].reduction.name == "first"]
        self.combined = [i for i in wanted if i not in self.own]
        self.reduced = [
            leaf if leaf.weight is None else leaf._replace(weight=self.combined.index(leaf.weight))
            for leaf in (leaves[i] for i in self.combined)
        ]
        last = UPDATES["last"]
        self.updates: list[tuple[Shared, Reduction]] = [
            (variable, UPDATES[slices] if slices and self.call.is_sliced else last)
            for variable, slices in self.first.writes
        ]
        of_updates = [reduction for variable, reduction in self.updates for _ in traces.abstract(variable).shapes]
        self.reductions = [*(last for _ in self.own), *(leaf.reduction for leaf in self.reduced), *of_updates]
        # Those of `f.over` that have an entry a row or a part stay as they are; how many there will be is not known.
        self.kept = [i for i, each in enumerate(self.reductions) if self.call.is_over and each.collective == "gather"]

    @property
    def first(self) -> TracedFunction:
        """`fn` over the most rows."""
        return next(iter(self.traced.values()))

    def _sizes(self) -> Iterable[int | None]:
        """All numbers of rows that `fn` runs over."""
        if self.call.block is not None:
            return Blocks(self.call).sizes
        sizes = [size for sizes in self.call.part_sizes for size in sizes if size != 0]
        if self.call.is_composed and self.call.is_sliced:
            sizes = [part.rows for size in sizes for part in self._slices(size)]
        return dict.fromkeys(sizes)

    def _wanted(self) -> list[int]:
        """Which of what `fn` returns is looked at: all, unless `output_subset` leaves some of it out."""
        outputs, function, subset = self.outputs, self.function, self.call.subset
        if subset is None or function.then is not None or function.refuses_nan:
            return list(range(len(outputs.leaves)))
        return outputs.needed_for(result_spec(outputs.treedef, outputs.keys, subset, function.name).picked)

    @property
    def used(self) -> list[int]:
        """Which results of a run of `fn` are looked at, updates among them."""
        return [*self.own, *self.combined, *range(len(self.outputs.leaves), len(self.first.shapes))]

    def _slices(self, rows: int | None) -> list[RowRange]:
        """Where one program runs the slices of a replica's rows."""
        return split_rows(rows or 1, min(self.call.num_slices, rows or 1))

    def _check_like_first(self, other: TracedFunction) -> None:
        """What combines needs equal shapes and updates, whatever the rows of a part."""
        name, first = self.function.name, self.first
        for leaf, one, two in zip(first.outputs.leaves, first.shapes, other.shapes, strict=False):
            if not leaf.reduced.reduction.has_row_entries and one.shape != two.shape:
                op = "a callable" if leaf.op == "callable" else leaf.op
                raise ValueError(
                    f"{name}: output{leaf.path} has shape {one.shape} on one part, {two.shape} on another, but "
                    f'parts under {op!r} need equal shapes. For one row an input row, use "concat".'
                )
        if first.writes != other.writes or first.outputs.treedef != other.outputs.treedef:
            raise ValueError(
                f"{name}: what it returns or which shared variables it assigns depends on its number of rows, "
                f"which differs between parts. Make it the same for all."
            )

    # The states of parts.

    def states(
        self, sizes: Sequence[int | None], state: State, arrays: PartArrays, part: Part, max_rows: int | None
    ) -> list[jax.Array]:
        """This replica's states, of a part of one of these sizes; of what is gathered, `max_rows` entries."""
        if self.call.block is not None:
            return run_blocks(self, state, arrays, part)
        # Over simulated replicas JAX maps a switch to a select.
        if runs_all := len(sizes) > 1 and (self.selects_branches or self.group.is_simulated):
            sent = [i for i, feed in enumerate(self.call.feeds) if feed.layout != "stacked"]  # filled up with real rows
            rows = {i: row for i, row in enumerate(self._read(1, state, arrays, part)) if i not in sent}
            arrays = arrays._replace(spares=spare_rows(rows, part.count > 0, 0 in sizes))

        # Outside branches and loops, where XLA computes with constants beforehand.
        known = {size: traced.known(traced.consts) for size, traced in self.traced.items()}

        def run(size: int | None) -> list[jax.Array]:
            is_cut = runs_all and self.call.is_composed
            its = arrays.map(partial(constant_unless, part.count == size)) if is_cut else arrays
            if self.call.is_composed and self.call.is_sliced:
                return self._run_slices(size, its, part, known)
            return self.run_part(size, state=state, arrays=its, part=part, max_rows=max_rows, known=known[size])

        branches = [partial(self._no_rows, state, max_rows) if size == 0 else partial(run, size) for size in sizes]
        if len(branches) == 1:
            return branches[0]()
        number = sum(i * (part.count == size).astype(jnp.int32) for i, size in enumerate(sizes[1:], 1))
        if self.selects_branches:
            return [lax.select_n(number, *leaves) for leaves in zip(*(branch() for branch in branches), strict=True)]
        return lax.switch(number, branches)

    @cached_property
    def selects_branches(self) -> bool:
        """Shall all branches run, and one be selected, and nothing run in loops?

        XLA's CPU backend compiles convolutions inside a branch or a loop to naive loops, 30 to 57 times slower
        (jax-ml/jax#12868, open; jaxlib 0.12 still does).
        """
        has_convolution = any(each.has_convolution for each in self.traced.values())
        return self.group.platform == "cpu" and has_convolution and not self._has_callbacks

    @cached_property
    def _has_callbacks(self) -> bool:
        return any(each.has_callbacks for each in self.traced.values())

    @property
    def gathers_rows(self) -> bool:
        """Do some outputs keep an entry a row, in places that depend on all lengths?"""
        kinds = ("gather", "stay") if self.call.is_sliced else ("gather",)
        reductions = [leaf.reduced.reduction for leaf in self.outputs.leaves]
        return any(each.has_row_entries and each.collective in kinds for each in reductions)

    @cached_property
    def runs_each_rank(self) -> bool:
        """Check whether simulated replicas run one after another, and not mapped together by `jax.vmap`."""
        # Mapped together, the matrix products of blocks would add up in another order, and all replicas would run every
        # branch with the callbacks in it. What communicates needs all replicas at once, so it stays mapped.
        communicates = any(traced.communicates for traced in self.traced.values())
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
        """Run `fn` over a part of so many rows; `known` is what its captured arrays determine."""
        traced = self.traced[size]
        first_row = jnp.asarray(part.first_row, jnp.int32)
        seen = iter(self._read(size, state, arrays, part))
        rows = [fill_beyond(next(seen), each, first_row, part.total) for each in self.call.arguments.overlaps]
        leaves = self.call.arguments.in_tree_order(rows, arrays.broadcast)
        state_seen = state | self.traces.leaves_of(self._held, seen)
        held = [*chain(*map(state_seen.__getitem__, traced.variables))]

        def run(leaves: Sequence[jax.Array]) -> Sequence[jax.Array]:
            return traced.run(*held, *leaves, part.rank, first_row, known=known)

        results = self._without_weightless(run, leaves) if self.call.is_composed else run(leaves)
        if self.call.block is not None:
            results = weighted_apart(self, results, part)
        info = PartInfo(part.weight, (first_row == 0) & (part.count is None or part.count > 0))
        states = [
            *(results[i] for i in self.own),
            *prepare_parts([results[i] for i in self.combined], self.reduced, info),
            *self._prepare_updates(state, results[len(self.outputs.leaves) :], part),
        ]
        pairs = zip(states, self.reductions, strict=True)
        return [pad_rows(each, max_rows) if reduction.has_row_entries else each for each, reduction in pairs]

    @cached_property
    def _held(self) -> list[Shared]:
        """The variables of which `fn` reads a replica's own rows."""
        read = dict.fromkeys(chain(*(traced.variables for traced in self.traced.values())))
        return list(filter(self.traces.holds_rows, read))

    def _read(self, size: int | None, state: State, arrays: PartArrays, part: Part) -> list[jax.Array]:
        """The rows that a part of so many sees: of arguments with their neighbours, then of variables."""
        where = part.offset if arrays.held_index is None and self.call.is_sliced else arrays.held_index
        held = [(leaf, where) for variable in self._held for leaf in state[variable]]
        halos = [*map(halo_of, self.call.arguments.overlaps), *(0 for _ in held)]
        return arrays._replace(arrays=[*arrays.arrays, *held]).read(size or 0, halos, part.count)

    def _without_weightless(
        self, run: Callable[[Sequence[jax.Array]], Sequence[jax.Array]], leaves: Sequence[jax.Array]
    ) -> Sequence[jax.Array]:
        """Results of `fn`, where no gradient flows back into values of weight 0: what they are divided by is often 0
        as well, which makes NaN of a gradient of 0. Of the first run the weights alone are left once it is compiled."""
        results = run(leaves)
        weights = [leaf.reduced.weight for leaf in self.outputs.leaves]
        has_effects = any(each.has_effects for each in self.traced.values())
        for weight in dict.fromkeys(weights):
            if weight is None or has_effects:
                continue
            again = run([constant_unless(results[weight] != 0, leaf) for leaf in leaves])
            results = [again[i] if own == weight else results[i] for i, own in enumerate(weights)]
        return results

    def _prepare_updates(self, state: State, written: Iterable[jax.Array], part: Part) -> Iterable[jax.Array]:
        """The states of what one part has written."""
        new = self.traces.leaves_of([variable for variable, _ in self.updates], written)
        for variable, reduction in self.updates:
            for i, (leaf, shape) in enumerate(zip(new[variable], self.traces.abstract(variable).shapes, strict=True)):
                if self.traces.holds_rows(variable):
                    leaf = pad_rows(leaf, shape.shape[0])
                if reduction is UPDATES["add"]:
                    leaf = leaf - state[variable][i]
                yield reduction.prepare(leaf, PartInfo(part.share, True))

    def state_shapes(self, entries: dict[bool, int]) -> list[jax.ShapeDtypeStruct]:
        """Shapes of a replica's states with so many entries of what is gathered."""
        info = PartInfo(1.0, True)
        outs = self.first.shapes
        combined = [outs[i] for i in self.combined]
        shapes = [
            *(outs[i] for i in self.own),
            *jax.eval_shape(lambda *values: prepare_parts(values, self.reduced, info), *combined),
            *(
                jax.eval_shape(reduction.prepare, shape, info)
                for variable, reduction in self.updates
                for shape in self.traces.abstract(variable).shapes
            ),
        ]
        for i, reduction in enumerate(self.reductions):
            if reduction.collective in ("gather", "stay") and self.call.has_rows:
                shape = (entries[reduction.has_row_entries], *shapes[i].shape[1:])
                shapes[i] = jax.ShapeDtypeStruct(shape, shapes[i].dtype)
        return shapes

    def _no_rows(self, state: State, max_rows: int | None) -> list[jax.Array]:
        """The states of no part: identities; and old values of what would be written."""
        olds = [*(None for _ in (*self.own, *self.reduced)), *chain(*(state[variable] for variable, _ in self.updates))]
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
        """How many entries a replica has of what is gathered an entry a row (True) or a part (False)."""
        rows = max(self.call.lengths) if self.call.lengths else self.call.part_sizes[0][0] or 1
        if self.call.block is not None:
            return Blocks(self.call).slots
        return {True: rows, False: 1 if self.call.is_over else min(self.call.num_slices, rows)}

    def empty_states(self) -> list[jax.Array]:
        """The states of a replica before its first part, where it has several: zeros, as of `Compiler`'s start."""
        return [jnp.zeros(shape.shape, shape.dtype) for shape in self.state_shapes(self.slots)]

    def states_of_present(self, states: Sequence[jax.Array], is_present: Any) -> list[jax.Array]:
        """The states of a replica after its last part; what changes nothing where it had none."""
        return [
            jnp.where(is_present, state, jnp.asarray(reduction.identity(state.dtype), state.dtype))
            if reduction.collective in ("max", "min", "prod")
            else state
            for state, reduction in zip(states, self.reductions, strict=True)
        ]

    def accumulate(self, before: Sequence[jax.Array], new: Sequence[jax.Array], part: Part) -> list[jax.Array]:
        """The states of this replica's parts so far and of one more; where that has no rows, those so far."""
        found: list[jax.Array] = []
        merged = self._merge(before, new, part)
        for i, (one, reduction) in enumerate(zip(new, self.reductions, strict=True)):
            if i in merged:
                found.append(merged[i])
            elif i in self.kept:
                found.append(one)
            elif reduction.collective in ("gather", "stay"):
                slot = part.row_slot if reduction.has_row_entries else part.part_slot
                found.append(lax.dynamic_update_slice_in_dim(before[i], one, slot, 0))
            else:
                both = reduction.accumulate(before[i], one)
                if reduction.collective in ("max", "min", "prod"):
                    both = jnp.where(part.seen > 0, both, one)
                found.append(jnp.where(part.count > 0, both, before[i]))
        return found

    def _merge(self, before: Sequence[jax.Array], new: Sequence[jax.Array], part: Part) -> dict[int, jax.Array]:
        """The states of Monoids, of parts before, if there were any, and of one more, if it has rows."""
        found: dict[int, jax.Array] = {}
        for each in self.outputs.merged:
            if each.first not in self.combined:
                continue
            places = [len(self.own) + self.combined.index(each.first + i) for i in range(each.size)]
            if all(self.reductions[i].collective == "merge" for i in places):
                pair = [before[i] for i in places], [new[i] for i in places]
                found |= zip(places, each.merge.merge_present(*pair, part.seen > 0, part.count > 0), strict=True)
        return found

    def _run_slices(
        self, size: int | None, arrays: PartArrays, part: Part, known: Mapping[int | None, Sequence[Any]]
    ) -> list[jax.Array]:
        """Run `fn` over the slices of a part, one after the other; there are no variables."""
        total = sum(self.call.lengths or ())
        # Where each slice has its entries: that of the longest part, so that all replicas agree.
        places = np.array([each.start for each in self._slices(self.slots[True])], np.int32)
        states = self.empty_states()
        for rows, group in groupby(enumerate(self._slices(size)), key=lambda numbered: numbered[1].rows):
            numbers, starts = np.array([(number, each.start) for number, each in group], np.int32).T
            index = [starts[:, None] + np.arange(rows + halo_of(each)) for each in self.call.arguments.overlaps]
            pairs = zip(arrays.arrays, index, strict=True)
            chunks = [array.at[which].get(mode="promise_in_bounds") for (array, _), which in pairs]

            def add(before: list[jax.Array], chunk: Any, rows: int = rows) -> tuple[list[jax.Array], None]:
                blocks, number, start, row_slot = chunk
                first_row = jnp.asarray(part.first_row, jnp.int32) + start
                its = Part(part.rank, rows, first_row, start, start, rows / total, 1.0, row_slot, number, total=total)
                its_rows = PartArrays([(block, None) for block in blocks], None, arrays.broadcast)
                new = self.run_part(rows, state={}, arrays=its_rows, part=its, max_rows=rows, known=known[rows])
                return self.accumulate(before, new, its), None

            states, _ = lax.scan(add, states, (chunks, numbers, starts, places[numbers]), unroll=self.selects_branches)
        return states


class Finisher:
    """What ends calls of one kind, from the states that a builder's programs give."""

    def __init__(self, builder: ProgramBuilder) -> None:
        self.builder, self.call, self.function, self.group = builder, builder.call, builder.function, builder.group
        self.traces, self.outputs, self.reduced = builder.traces, builder.outputs, builder.reduced
        self.staying = self.outputs.staying
        if self.staying and not self.call.has_rows:
            raise ValueError(
                f'{self.function.name}: "scatter" keeps rows where they were made, but this call has no rows.'
            )
        if self.staying and self.function.then is not None:
            path = self.outputs.results[self.staying[0]].path
            raise ValueError(
                f'{self.function.name}: output{path} is "scatter", so it stays in parts, but then takes whole outputs. '
                f'Use "concat", or make what follows a function of its own.'
            )

    def _valid_entries(self) -> list[np.ndarray | None]:
        """Of what is gathered, which entries count, in row order; None for all of them."""
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
            for j, launch in enumerate(split_into_launches(lengths, self.call.num_slices)):  # each has its place
                rows.append(rank * self.builder.slots[True] + slot + np.arange(launch.counts[rank]))
                parts += [rank * self.builder.slots[False] + j] * bool(launch.counts[rank])
                slot += launch.max_rows
        return {True: np.concatenate(rows), False: np.array(parts, np.int64)}

    def combine(self, states: Sequence[jax.Array], present: Any = None) -> list[jax.Array]:
        """Whole outputs from the states of all replicas; `present` says which have rows, None for all."""
        if self.call.lengths is not None and present is not None:
            present = np.array(self.call.lengths) > 0
        return self._whole(states, self._valid_entries(), present)

    def combine_batches(
        self, states: Sequence[jax.Array], index: Mapping[bool, jax.Array], rows: jax.Array, present: jax.Array
    ) -> list[jax.Array]:
        """Whole outputs of `f.over`: also given are which entries there are of rows (True) and of parts (False), in row
        order, and how many rows in all."""
        valid = [index.get(leaf.reduction.has_row_entries) for leaf in self.reduced]
        return self._whole(states, valid, present, rows)

    def _whole(
        self, states: Sequence[jax.Array], valid: Sequence[Any], present: Any, rows: Any = None
    ) -> list[jax.Array]:
        builder, count, has_gradients = self.builder, len(self.builder.own), self.call.is_composed
        with self._parts_alone():
            whole = combine_replicas(
                states[count:], self.reduced, valid, has_gradients, rows, per_process=self.group._per_process
            )
        if self.staying and self.call.is_sliced:
            where = jnp.asarray(self._own_order)[lax.axis_index(AXIS)]
            for i, leaf in enumerate(self.reduced):
                if leaf.reduction.collective == "stay":
                    whole[i] = whole[i].at[where].get(mode="promise_in_bounds")
        leaves = dict(zip((*builder.own, *builder.combined), (*states[:count], *whole), strict=True))
        with self._parts_alone():
            return self.outputs.finish(leaves, present)

    def _parts_alone(self) -> AbstractContextManager[None]:
        """While ops of the user's combine parts: they see these alone."""
        name = f"{self.function.name}: an op, or the merge or finish of a Monoid,"
        return stateless(name, "It combines parts alone: return the value beside them, or use it in then.")

    @property
    def _own_order(self) -> np.ndarray:
        """Where each replica's rows lie among those of its slices: (replicas, rows of the longest part)."""
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
        """The structure of what the call returns."""
        treedef, keys = self.outputs.treedef, self.outputs.keys
        if self.then is not None:
            treedef, keys = self.then[0].outputs
        return result_spec(treedef, keys, self.call.subset, self.function.name)

    @cached_property
    def then(self) -> tuple[TracedFunction, list[int]] | None:
        """`then` on the combined outputs, and which broadcast arguments follow them."""
        if self.function.then is None:
            return None
        # Before then no output is the first replica's own.
        states = self.builder.state_shapes(self.builder.slots)[: len(self.reduced)]
        axes = [(AXIS, self.group.size)]
        whole = jax.make_jaxpr(lambda *values: self.combine(values), axis_env=axes, return_shape=True)(*states)[1]
        return self.traces.then(self.function.then, self.outputs, whole)

    @property
    def flops_of_then(self) -> int:
        """Of matrix products and convolutions, for what the call returns and what is written."""
        if self.then is None:
            return 0
        count, traced = self.then[0].outputs[0].num_leaves, self.then[0]
        return traced.flops([*self.result.picked, *range(count, len(traced.shapes))])

    def finish_values(
        self, states: Sequence[jax.Array], state: State, broadcast: Sequence[jax.Array], part: Part
    ) -> tuple[list[jax.Array], State]:
        """The call's results, and new values on this replica, from all states."""
        count = len(self.builder.own) + len(self.reduced)
        results = self.combine(states[:count], part.present)
        new = self._finish_updates(states[count:], state, part)
        if self.then is None:
            return results, new
        if self.call.block is not None:
            results = fusion_barrier(self.group, results, part)
        elif self.group.platform == "gpu" and not self.call.is_composed:
            # Else XLA makes one computation of a gradient's sum and its use, and all sums wait for each other. An
            # unreduced gradient has no sum yet.
            is_fenced = [leaf.reduced.reduction.collective != "unreduced" for leaf in self.outputs.results]
            fenced = iter(lax.optimization_barrier([*compress(results, is_fenced)]))
            results = [next(fenced) if is_in else result for is_in, result in zip(is_fenced, results, strict=True)]
        traced, extra = self.then
        chosen = [broadcast[i] for i in extra]
        rank = jnp.asarray(part.rank, jnp.int32)
        own_leaves, known = chain(*(state[v] for v in traced.variables)), traced.known(traced.consts)

        def run(known: Sequence[Any], args: Sequence[jax.Array]) -> list[jax.Array]:
            return traced.run(*args, known=known)

        # Mapped together, simulated replicas would all run the callbacks inside a branch of one.
        if self.group.is_simulated and traced.has_callbacks and not (traced.communicates or self.call.is_composed):
            run = jax.custom_batching.sequential_vmap(run)
        values = run(known, [*own_leaves, *results, *chosen, rank, rank])  # as if each replica had one row
        count = traced.outputs[0].num_leaves
        return values[:count], new | self.traces.leaves_of([variable for variable, _ in traced.writes], values[count:])

    def _finish_updates(self, states: Sequence[jax.Array], state: State, part: Part) -> State:
        new = self.traces.leaves_of([variable for variable, _ in self.builder.updates], states)
        for variable, reduction in self.builder.updates if self.call.is_sliced else ():
            olds, leaves = state[variable], new[variable]
            if reduction is UPDATES["add"]:
                leaves = [old.astype(leaf.dtype) + leaf for old, leaf in zip(olds, leaves, strict=True)]
            pairs = zip(olds, leaves, strict=True)
            new[variable] = [jnp.where(part.count > 0, leaf.astype(old.dtype), old) for old, leaf in pairs]
        return new
