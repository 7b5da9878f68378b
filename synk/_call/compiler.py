"""Compiler: the programs of one kind of call, lowered from shapes and compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._data.feed import index_shape
from .._reductions.outputs import ResultSpec
from .._runtime.engine import spmd
from .._runtime.executable import Executable, ProgramSpec
from .._runtime.group import AXIS
from .._runtime.layout import Layout, layouts
from .._variables.state import AbstractState, with_layout
from .._variables.variable import Shared
from .feeding import launches
from .parts import Part, PartArrays
from .program import ProgramBuilder, State

Arrays = Sequence[jax.Array]
Placed = list[tuple[Layout, jax.ShapeDtypeStruct]]  # arguments: layout and global shape


class _Launch(NamedTuple):
    """What one program runs on.

    Attributes:
      sizes: numbers of rows of its parts, most first.
      counts: rows of each replica's part, where programs depend on them.
      variables: whose leaves come first, a list each.
      rest: a list of states, and one of all else.
      outs: layouts of its results.
      donate: lists that may be overwritten.
      has_meta: whether the last argument says which parts they are.
    """

    sizes: Sequence[int | None]
    counts: Sequence[int]
    variables: Sequence[Shared]
    rest: list[Placed]
    outs: list[Layout]
    donate: Sequence[int] = ()
    has_meta: bool = True


class Compiler:
    """Compiles the programs of a builder.

    Attributes:
      reads: the variables that programs that run `fn` take, and those of the one that ends the call.
      compiled: how many programs were.
    """

    def __init__(self, builder: ProgramBuilder, result: ResultSpec, updates: tuple[Shared, ...], owner: Any) -> None:
        self.builder, self.result, self.updates, self.owner = builder, result, updates, owner
        self.compiled = 0
        call, traces = builder.call, builder.traces
        reads = dict.fromkeys(chain(*(traces.of_rows(size).variables for size in builder.sizes())))
        written = [variable for variable, _ in builder.writes]
        has_gaps = any(0 in sizes for sizes in call.part_sizes)
        launch = tuple(dict.fromkeys((*reads, *(written if has_gaps else ()))))
        of_then = builder.then[0].variables if builder.then else ()
        # In one launch the program that runs `fn` ends the call.
        last = (*of_then, *written) if call.is_sliced else (*launch, *of_then)
        self.reads = (launch, tuple(dict.fromkeys(last)))

    def compile(self) -> tuple[dict[Any, Executable], Executable | None]:
        """The programs that run `fn`, by `launch_key`, and the one that ends a call of several launches."""
        call = self.builder.call
        if not call.is_sliced:
            counts = launches(call.lengths, 1)[0].counts if call.lengths else ()
            return {True: self._step(call.part_sizes[0], counts)}, None
        states = self._state_shapes(call.part_sizes[0])
        first, *later = call.part_sizes
        kinds: list[tuple[bool, Any, Any]] = [(True, first, ()), *((False, sizes, ()) for sizes in later)]
        if self.builder.runs_each_rank and call.lengths:
            parts = enumerate(launches(call.lengths, call.num_slices))
            kinds = list(dict.fromkeys((j == 0, each.sizes, each.counts) for j, each in parts))
        programs = {
            (is_first, counts or sizes): self._cached(
                (is_first, sizes, counts, tuple(states)), partial(self._accumulate, sizes, counts, states, is_first)
            )
            for is_first, sizes, counts in kinds
        }
        return programs, self._cached(("finish", tuple(states)), lambda: self._finish(states))

    def _cached(self, kind: Any, make: Callable[[], Executable]) -> Executable:
        """A program of a sliced call, which serves calls whose other launches differ; its key is all it is made of."""
        builder, call = self.builder, self.builder.call._replace(part_sizes=())
        touched = tuple((v, self._abstract(v)) for v in builder.traces.touched)
        key = ("program", kind, call, builder.function.then is None, builder.outputs, builder.writes, touched)
        return builder.group.cached(self.owner, key, make)

    # The three programs.

    def _step(self, sizes: Sequence[int | None], counts: Sequence[int]) -> Executable:
        """One launch: map, combine and then."""
        has_meta = not self.builder.call.is_plain

        def end(state: State, before: Arrays, values: Arrays, states: Arrays, part: Part) -> list[jax.Array]:
            return self._end(states, state, self._arrays(values).broadcast, part)

        rest = [[], self._inputs(sizes[0], has_meta)]
        donate = self._donated(self.reads[1])
        return self._compile(_Launch(sizes, counts, self.reads[1], rest, self._outs(), donate, has_meta), end)

    def _accumulate(
        self, sizes: Sequence[int | None], counts: Sequence[int], states: Sequence[Any], is_first: bool
    ) -> Executable:
        """One slice of every replica, added to the states so far."""

        def end(state: State, before: Arrays, values: Arrays, new: Arrays, part: Part) -> list[jax.Array]:
            if is_first:
                found = self.builder.first_states(new)
            else:
                found = self.builder.accumulate_states(_with_empty(before, states), new, part)
            return [state for state in found if state.size]

        held = [] if is_first else _without_empty(states)
        outs = layouts("stacked", len(_without_empty(states)))
        donate = () if is_first else (len(self.reads[0]),)
        rest = [held, self._inputs(sizes[0], True)]
        return self._compile(_Launch(sizes, counts, self.reads[0], rest, outs, donate), end)

    def _finish(self, states: Sequence[jax.ShapeDtypeStruct]) -> Executable:
        """The states of all slices across the replicas, and then."""
        variables = self.reads[1]

        def body(*values: jax.Array) -> list[jax.Array]:
            state, rest = self._state(variables, values)
            count = len(_without_empty(states))
            held, rest = _with_empty(rest[:count], states), rest[count:]
            return self._end(held, state, rest[:-1], self.builder.part(rest[-1], None))

        rest = [_without_empty(states), self._tail(True)]
        return self._executable(body, _Launch((), (), variables, rest, self._outs(), self._donated(variables)))

    # What they are made of.

    def _compile(self, launch: _Launch, end: Callable[..., list[jax.Array]]) -> Executable:
        """Compile what runs the parts of a launch and hands their states to `end`."""
        builder, count = self.builder, len(launch.rest[0])
        placed_as: list[Layout] = [layout for layout, _ in self._placed(launch)]

        def unpack(values: Arrays) -> tuple[State, list[jax.Array], Any]:
            state, rest = self._state(launch.variables, values)
            return state, rest, rest.pop() if launch.has_meta else None

        def run(values: Arrays, sizes: Sequence[int | None], rank: jax.Array | None = None) -> list[jax.Array]:
            state, rest, meta = unpack(values)
            part = builder.part(meta, launch.sizes[0], rank)
            return builder.states(sizes, state, self._arrays(rest[count:]), part, launch.sizes[0])

        def finish(values: Arrays, states: Arrays) -> list[jax.Array]:
            state, rest, meta = unpack(values)
            return end(state, rest[:count], rest[count:], states, builder.part(meta, launch.sizes[0]))

        def body(*values: jax.Array) -> list[jax.Array]:
            return finish(values, run(values, launch.sizes))

        def each_rank(*values: jax.Array) -> list[jax.Array]:
            """All replicas' arrays: run simulated replicas one after another, and map what follows."""
            size = builder.group.size
            parts = [
                [_of_rank(v, layout, r, size) for v, layout in zip(values, placed_as, strict=True)] for r in range(size)
            ]
            each = [run(part, [n], jnp.int32(r)) for r, (part, n) in enumerate(zip(parts, launch.counts, strict=True))]
            states = [jnp.stack(leaves) for leaves in zip(*each, strict=True)]
            ins: list[Layout] = [*layouts("stacked", len(states)), *placed_as]
            mapped = spmd(builder.group, lambda *v: finish(v[len(states) :], v[: len(states)]), ins, [*launch.outs])
            return list(mapped(*states, *values))

        return self._executable(each_rank if builder.runs_each_rank else body, launch, builder.runs_each_rank)

    def _executable(self, body: Callable[..., list[jax.Array]], launch: _Launch, is_mapped: bool = False) -> Executable:
        """Compile a body that takes the leaves of variables, and two lists of other arguments."""
        abstracts = [self._abstract(v) for v in launch.variables]
        size = self.builder.group.size
        self.compiled += 1
        spec = ProgramSpec(
            body=body,
            ins=[
                *(layouts(a.layout, len(a.shapes)) for a in abstracts),
                *([at for at, _ in each] for each in launch.rest),
            ],
            shapes=[*(a.global_shapes(size) for a in abstracts), *([s for _, s in each] for each in launch.rest)],
            outs=launch.outs,
            donate=tuple(launch.donate),
            engine=self.builder.function.engine,
            name=self.builder.function.name,
            is_mapped=is_mapped,
        )
        return Executable(self.builder.group, spec)

    def _abstract(self, variable: Shared) -> AbstractState:
        return with_layout(self.builder.traces.abstract(variable), self.builder.layout_of(variable))

    def _placed(self, launch: _Launch) -> Placed:
        """All arguments of a launch."""
        size = self.builder.group.size
        of_variables: Placed = [
            (a.layout, s) for v in launch.variables for a in [self._abstract(v)] for s in a.global_shapes(size)
        ]
        return [*of_variables, *chain(*launch.rest)]

    def _inputs(self, tall: int | None, has_meta: bool) -> Placed:
        """What a launch takes beside variables and states."""
        call, size = self.builder.call, self.builder.group.size
        found: Placed = []
        for row, feed in zip(call.row_shapes, call.feeds, strict=True):
            found += feed.arrays(row, tall or 0, size)
        if call.held_index is not None:
            found.append(("stacked", index_shape(call.held_index, tall or 0, size)))
        return [*found, *self._tail(has_meta)]

    def _tail(self, has_meta: bool) -> Placed:
        meta = jax.ShapeDtypeStruct((5, self.builder.group.size), np.int32)
        found: Placed = [("replicated", s) for s in self.builder.call.broadcast_shapes]
        return [*found, ("replicated", meta)] if has_meta else found

    def _arrays(self, values: Arrays) -> PartArrays:
        """What brings a replica its rows, and broadcast arguments."""
        call, rest = self.builder.call, list(values)
        arrays = [(rest.pop(0), rest.pop(0) if feed.index is not None else None) for feed in call.feeds]
        held_index = rest.pop(0) if call.held_index is not None else None
        return PartArrays(arrays, held_index, rest)

    def _state(self, variables: Sequence[Shared], values: Arrays) -> tuple[State, list[jax.Array]]:
        """The leaves of variables, and what follows them."""
        state: State = {}
        rest = list(values)
        for variable in variables:
            n = len(self.builder.traces.abstract(variable).shapes)
            state[variable], rest = rest[:n], rest[n:]
        return state, rest

    def _outs(self) -> list[Layout]:
        replicated = layouts("replicated", len(self.result.picked))
        return [*replicated, *(a.layout for a in map(self._abstract, self.updates) for _ in a.shapes)]

    def _end(self, states: Arrays, state: State, broadcast: Arrays, part: Part) -> list[jax.Array]:
        """What the program that ends a call returns."""
        results, new = self.builder.finish_values(states, state, broadcast, part)
        return [*(results[i] for i in self.result.picked), *chain(*(new[v] for v in self.updates))]

    def _donated(self, variables: Sequence[Shared]) -> list[int]:
        return [i for i, v in enumerate(variables) if v in self.updates] if self.builder.call.donate else []

    def _state_shapes(self, sizes: Sequence[int | None]) -> list[jax.ShapeDtypeStruct]:
        """Global shapes of the states of slices: what the first launch returns."""
        builder, size = self.builder, self.builder.group.size
        launch = _Launch(sizes, (), self.reads[0], [[], self._inputs(sizes[0], True)], [])

        def body(*values: jax.Array) -> list[jax.Array]:
            state, rest = self._state(launch.variables, values)
            part = builder.part(rest.pop(), sizes[0])
            return builder.first_states(builder.states(sizes, state, self._arrays(rest), part, sizes[0]))

        shapes = [_shape_of_rank(shape, layout, size) for layout, shape in self._placed(launch)]
        found = jax.make_jaxpr(body, axis_env=[(AXIS, size)], return_shape=True)(*shapes)[1]
        return [jax.ShapeDtypeStruct((size, *s.shape), s.dtype) for s in found]


def _without_empty(states: Sequence[jax.ShapeDtypeStruct]) -> Placed:
    """States as arguments. Where one has no size, jaxlib 0.10.2 fails to partition: "func.call op expected at least one
    operand ... produced by a GlobalToLocalShape"; so those of no size are made anew."""
    return [("stacked", state) for state in states if state.size]


def _with_empty(held: Arrays, states: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    """All states of a replica, from those that have a size."""
    rest = iter(held)
    return [next(rest) if state.size else jnp.zeros(state.shape[1:], state.dtype) for state in states]


def _shape_of_rank(shape: jax.ShapeDtypeStruct, layout: Layout, size: int) -> jax.ShapeDtypeStruct:
    front = {"rows": (shape.shape[0] // size if shape.shape else 0, *shape.shape[1:]), "stacked": shape.shape[1:]}
    return jax.ShapeDtypeStruct(front.get(layout, shape.shape), shape.dtype)


def _of_rank(array: jax.Array, layout: Layout, rank: int, size: int) -> jax.Array:
    """One replica's part of a global array."""
    if layout == "replicated":
        return array
    return array[rank] if layout == "stacked" else array.reshape(size, -1, *array.shape[1:])[rank]
