"""Finish: the bodies that end one kind of call: combine the states of all replicas, and then."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._reductions.reduction import UPDATES, combine_replicas
from .._reductions.results import ResultSpec, result_spec
from .._runtime.engine import one_by_one
from .._runtime.group import AXIS
from .._tracing.context import stateless
from .._tracing.tracer import TracedFunction
from .blocks import Blocks, fusion_barrier
from .feeding import launches
from .parts import Part
from .program import ProgramBuilder
from .traces import State


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
            for j, launch in enumerate(launches(lengths, self.call.num_slices)):  # each has its place
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
        for launch in launches(lengths, self.call.num_slices):
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
            # Else XLA makes one computation of a gradient's sum and its use, and all sums wait for each other. Those
            # that then adds up have no sum yet.
            own = {j for j, i in enumerate(self.outputs.own) if i is not None and self.outputs.leaves[i].reduced.is_own}
            there = [i for i in range(len(results)) if i not in own]
            fenced = dict(zip(there, lax.optimization_barrier([results[i] for i in there]), strict=True))
            results = [fenced.get(i, result) for i, result in enumerate(results)]
        traced, extra = self.then
        chosen = [broadcast[i] for i in extra]
        rank = jnp.asarray(part.rank, jnp.int32)
        own_leaves, known = chain(*(state[v] for v in traced.variables)), traced.known(traced.consts)

        def run(known: Sequence[Any], args: Sequence[jax.Array]) -> list[jax.Array]:
            return traced.run(*args, known=known)

        in_turn = traced.maps_in_turn and not self.call.is_composed
        run = one_by_one(self.group, run) if in_turn else run
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
