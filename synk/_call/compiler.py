"""Compiler: the programs of one kind of call, lowered from shapes and compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._data.feed import index_shape
from .._reductions.outputs import ResultSpec
from .._runtime.engine import spmd
from .._runtime.executable import Executable, ProgramSpec
from .._runtime.group import AXIS
from .._runtime.layout import Layout, layouts
from .._variables.state import AbstractState, with_layout
from .._variables.variable import Shared
from .feeding import launches
from .parts import Part, arrays_of, part_of
from .program import ProgramBuilder
from .traces import State

Arrays = Sequence[jax.Array]
Body = Callable[..., list[jax.Array]]
Placed = list[tuple[Layout, jax.ShapeDtypeStruct]]  # arguments: layout and global shape


class _Launch(NamedTuple):
    """What one program runs on: the leaves of variables, a list each; a list of states; and one of all else.

    Attributes:
      sizes: numbers of rows of its parts, most first; none where it only ends a call.
      counts: rows of each replica's part, where programs depend on them.
      variables: that it takes.
      held: shapes of the states that it takes.
      outs: layouts of its results.
      donate: lists that may be overwritten.
    """

    sizes: Sequence[int | None]
    counts: Sequence[int]
    variables: Sequence[Shared]
    held: Sequence[jax.ShapeDtypeStruct]
    outs: Sequence[Layout]
    donate: Sequence[int]


class Compiler:
    """Compiles the programs of a builder.

    Attributes:
      reads: the variables that programs that run `fn` take, and those of the one that ends the call.
      layouts: of the variables, as programs take and give them.
    """

    def __init__(
        self, builder: ProgramBuilder, result: ResultSpec, updates: Sequence[Shared], layouts: dict[Shared, Layout]
    ) -> None:
        self.builder, self.result, self.updates, self.layouts = builder, result, updates, layouts
        self.call, self.group, self.traces = builder.call, builder.group, builder.traces
        reads = dict.fromkeys(chain(*(traced.variables for traced in builder.traced.values())))
        written = [variable for variable, _ in builder.updates]
        has_gaps = any(0 in sizes for sizes in self.call.part_sizes)
        launch = tuple(dict.fromkeys((*reads, *(written if has_gaps else ()))))
        of_then = builder.then[0].variables if builder.then else ()
        # In one launch the program that runs `fn` ends the call.
        last = (*of_then, *written) if self.call.is_sliced else (*launch, *of_then)
        self.reads = (launch, tuple(dict.fromkeys(last)))

    def compile(self, owner: Any) -> tuple[dict[Any, Executable], Executable | None]:
        """The programs that run `fn`, by first or not and parts, and the one that ends a call of several launches.

        Those of a sliced call serve calls whose other launches differ: `owner` keeps them by all that they are made of.
        """
        builder, call = self.builder, self.call
        if not call.is_sliced:
            counts = launches(call.lengths, 1)[0].counts if call.lengths else ()
            return {True: self._step(call.part_sizes[0], counts)}, None
        touched = tuple((v, self._abstract(v)) for v in self.traces.touched)
        writes = builder.first.writes
        about = (call._replace(part_sizes=()), builder.function.then is None, builder.outputs, writes, touched)
        states = tuple(builder.state_shapes(builder.slots))

        def cached(kind: Any, make: Callable[[], Executable]) -> Executable:
            return self.group.cached(owner, ("program", kind, states, *about), make)

        kinds: list[tuple[bool, Any, Any]] = [(j == 0, sizes, ()) for j, sizes in enumerate(call.part_sizes)]
        if builder.runs_each_rank and call.lengths:
            parts = enumerate(launches(call.lengths, call.num_slices))
            kinds = list(dict.fromkeys((j == 0, each.sizes, each.counts) for j, each in parts))
        programs = {
            (kind[0], kind[2] or kind[1]): cached(kind, partial(self._accumulate, *kind, states)) for kind in kinds
        }
        return programs, cached("finish", partial(self._finish, states))

    def _step(self, sizes: Sequence[int | None], counts: Sequence[int]) -> Executable:
        """One launch: map, combine and then."""

        def end(state: State, held: Arrays, new: Arrays, broadcast: Arrays, part: Part) -> list[jax.Array]:
            return self._end(new, state, broadcast, part)

        return self._compile(_Launch(sizes, counts, self.reads[1], (), self._outs(), self._donated()), end)

    def _accumulate(
        self, is_first: bool, sizes: Sequence[int | None], counts: Sequence[int], states: Sequence[Any]
    ) -> Executable:
        """One slice of every replica, added to the states so far."""

        def end(state: State, held: Arrays, new: Arrays, broadcast: Arrays, part: Part) -> list[jax.Array]:
            if is_first:
                found = self.builder.first_states(new)
            else:
                found = self.builder.accumulate_states(_with_empty(held, states), new, part)
            return _without_empty(found)

        held = () if is_first else _without_empty(states)
        outs, donate = layouts("stacked", len(_without_empty(states))), () if is_first else (len(self.reads[0]),)
        return self._compile(_Launch(sizes, counts, self.reads[0], held, outs, donate), end)

    def _finish(self, states: Sequence[jax.ShapeDtypeStruct]) -> Executable:
        """The states of all slices across the replicas, and then."""

        def end(state: State, held: Arrays, new: Arrays, broadcast: Arrays, part: Part) -> list[jax.Array]:
            return self._end(_with_empty(held, states), state, broadcast, part)

        launch = _Launch((), (), self.reads[1], _without_empty(states), self._outs(), self._donated())
        return self._compile(launch, end)

    def _compile(self, launch: _Launch, end: Body) -> Executable:
        """Compile what runs the parts of a launch and hands their states to `end`."""
        builder, size = self.builder, self.group.size
        placed = self._placed(launch)
        is_mapped = builder.runs_each_rank and bool(launch.sizes)
        tall = launch.sizes[0] if launch.sizes else None

        def unpack(values: Arrays, rank: jax.Array | None = None) -> tuple[State, Arrays, list[jax.Array], Part]:
            given = iter(values)
            state = self.traces.leaves_of(launch.variables, given)
            held, rest = list(islice(given, len(launch.held))), list(given)
            meta = None if self.call.is_plain else rest.pop()
            return state, held, rest, part_of(meta, lax.axis_index(AXIS) if rank is None else rank, tall, size)

        def run(values: Arrays, sizes: Sequence[int | None], rank: jax.Array | None = None) -> list[jax.Array]:
            state, _, rest, part = unpack(values, rank)
            return builder.states(sizes, state, arrays_of(self.call, rest), part, tall) if sizes else []

        def finish(values: Arrays, states: Arrays) -> list[jax.Array]:
            state, held, rest, part = unpack(values)
            return end(state, held, states, rest[len(rest) - len(self.call.broadcast) :], part)

        def body(*values: jax.Array) -> list[jax.Array]:
            return finish(values, run(values, launch.sizes))

        spec = ProgramSpec(
            body=self._each_rank(launch, [*chain(*placed)], run, finish) if is_mapped else body,
            ins=[[layout for layout, _ in each] for each in placed],
            shapes=[[shape for _, shape in each] for each in placed],
            outs=launch.outs,
            donate=tuple(launch.donate),
            engine=builder.function.engine,
            name=builder.function.name,
            is_mapped=is_mapped,
        )
        program = Executable(self.group, spec)
        builder.function.stats.compilations += 1
        return program

    def _each_rank(self, launch: _Launch, placed: Placed, run: Body, finish: Body) -> Body:
        """A body of all replicas' arrays: run simulated replicas one after another, and map what follows."""
        size, given = self.group.size, [layout for layout, _ in placed]

        def body(*values: jax.Array) -> list[jax.Array]:
            parts = [[_of_rank(v, at, r, size) for v, at in zip(values, given, strict=True)] for r in range(size)]
            each = [run(part, [n], jnp.int32(r)) for r, (part, n) in enumerate(zip(parts, launch.counts, strict=True))]
            states = [jnp.stack(leaves) for leaves in zip(*each, strict=True)]
            ins: list[Layout] = [*layouts("stacked", len(states)), *given]
            mapped = spmd(self.group, lambda *v: finish(v[len(states) :], v[: len(states)]), ins, launch.outs)
            return list(mapped(*states, *values))

        return body

    def _abstract(self, variable: Shared) -> AbstractState:
        return with_layout(self.traces.abstract(variable), self.layouts[variable])

    def _placed(self, launch: _Launch) -> list[Placed]:
        """The arguments of a launch, in lists."""
        call, size = self.call, self.group.size
        abstracts = [self._abstract(variable) for variable in launch.variables]
        held: Placed = [("stacked", jax.ShapeDtypeStruct((size, *s.shape), s.dtype)) for s in launch.held]
        rest: Placed = []
        if launch.sizes:
            tall = launch.sizes[0] or 0
            for row, feed in zip(call.row_shapes, call.feeds, strict=True):
                rest += zip(feed.layouts, feed.shapes(row, tall, size), strict=True)
            if call.held_index is not None:
                rest.append(("stacked", index_shape(call.held_index, tall, size)))
        rest += [("replicated", shape) for shape in call.broadcast_shapes]
        if not call.is_plain:
            rest.append(("replicated", jax.ShapeDtypeStruct((5, size), np.int32)))
        return [*([(a.layout, s) for s in a.global_shapes(size)] for a in abstracts), held, rest]

    def _outs(self) -> list[Layout]:
        replicated = layouts("replicated", len(self.result.picked))
        return [*replicated, *(a.layout for a in map(self._abstract, self.updates) for _ in a.shapes)]

    def _end(self, states: Arrays, state: State, broadcast: Arrays, part: Part) -> list[jax.Array]:
        """What the program that ends a call returns."""
        results, new = self.builder.finish_values(states, state, broadcast, part)
        return [*(results[i] for i in self.result.picked), *chain(*(new[v] for v in self.updates))]

    def _donated(self) -> list[int]:
        return [i for i, v in enumerate(self.reads[1]) if v in self.updates] if self.call.donate else []


def _without_empty(states: Sequence[Any]) -> list[Any]:
    """States, or shapes of them. Where one has no size, jaxlib 0.10.2 fails to partition: "func.call op expected at
    least one operand ... produced by a GlobalToLocalShape"; so those of no size are made anew."""
    return [state for state in states if state.size]


def _with_empty(held: Arrays, states: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    """All states of a replica, from those that have a size."""
    rest = iter(held)
    return [next(rest) if state.size else jnp.zeros(state.shape, state.dtype) for state in states]


def _of_rank(array: jax.Array, layout: Layout, rank: int, size: int) -> jax.Array:
    """One replica's part of a global array."""
    if layout == "replicated":
        return array
    return array[rank] if layout == "stacked" else array.reshape(size, -1, *array.shape[1:])[rank]
