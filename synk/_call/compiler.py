"""Compiler: lower the programs of one kind of call from shapes, or of several such calls in a row, and compile them."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, islice
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._base.pytree import bits_of
from .._data.feed import InputFeed, index_shape
from .._data.overlap import with_halos
from .._reductions.collectives import all_gather
from .._runtime.constants import Constant
from .._runtime.executable import Executable, ProgramSpec
from .._runtime.group import Group
from .._runtime.layout import layouts
from .._runtime.way import Layout, Layouts, axis_named, replica_axis
from .._tracing.tracer import TracedFunction
from .._variables.state import AbstractState, with_layout
from .._variables.variable import Shared
from .parts import TABLE_ROWS, Part, PartArrays, any_not_finite, arrays_of, part_of, part_table, split_into_launches
from .program import Epilogue, PartRunner
from .spec import Repeat
from .traces import State

# Why calls run alone, as far as that is known before they are traced.
SLICES = "its rows run in slices"
LOCAL = "its rows are those of one process (synk.local)"
EXCHANGES = "replicas exchange rows of scattered data before the call"
COMMUNICATES = "it communicates inside"
NANS = "jax_debug_nans looks at single calls"
# Bytes of entries of rows that a program returns for each of several batches of `f.over`.
LARGE = 1 << 18
Arrays = Sequence[jax.Array]
Body = Callable[..., list[jax.Array]]
# Arguments of a program: layout and global shape of each.
Placed = list[tuple[Layout, jax.ShapeDtypeStruct]]


class RunsAlone(ValueError):
    """Calls do not run in a row, by one program. The message says why."""


class NotTogether(RunsAlone):
    """Calls do not run in a row, but others of the loop may."""


class Repetition(NamedTuple):
    """Rule by which the calls of a program share arguments, hand them on or have their own, told by number.

    Attributes:
      most: how many calls there may be.
      carried: for each result that the next call takes, in the order of the results, the argument that it becomes.
      own: the arguments of which each call has its own.
      lists: how many lists of arguments there are before captured arrays. Behind them comes an argument that tells for
        each call whether it is there.
      refuses_nan: whether the last result is a flag, by which a call and all that follow it change nothing.
    """

    most: int
    carried: Sequence[int]
    own: Sequence[int]
    lists: int
    refuses_nan: bool


class _Launch(NamedTuple):
    """Task of one program: run parts, then combine the states of all replicas or add to the states so far.

    Attributes:
      sizes: the numbers of rows of its parts, most first; empty if it only combines states.
      counts: the rows of each replica's part, where programs depend on them.
      carry: shapes of a replica's states so far; empty in the only launch of a call.
    """

    sizes: tuple[int | None, ...]
    counts: tuple[int | None, ...]
    is_last: bool
    carry: tuple[jax.ShapeDtypeStruct, ...] = ()


# Arguments of a program on one replica: leaves of variables; states so far; rows or indexes of rows, broadcast
# arguments and captured arrays; and the part that the replica runs.
_Taken = tuple[State, list[jax.Array], PartArrays, Part]


class Compiler:
    """Compiler of one kind of call.

    Attributes:
      updates: the variables that the call writes, in the order of the results: new values come first.
      layouts: the layout of each variable, as programs take and return it.
      shapes: shapes of a replica's states between launches.
      carried: indexes of the states that travel from launch to launch.
      kept: indexes of the states that each launch of `f.over` returns, whose entries it joins on the host.
      reads: the variables that programs which run `fn` take, and those of the program that ends the call.
    """

    def __init__(self, epilogue: Epilogue, updates: Sequence[Shared], layouts: dict[Shared, Layout]) -> None:
        self.epilogue, self.traced, self.states, self.layouts = epilogue, epilogue.traced, epilogue.states, layouts
        traced, self.runner = epilogue.traced, PartRunner(epilogue.states)
        self.call, self.group, self.traces = traced.call, traced.group, traced.traces
        self.refuses_nan = traced.function.refuses_nan and not (self.call.is_over or self.call.is_composed)
        self.shapes = tuple(epilogue.states.shapes(epilogue.states.slots)) if self.call.is_sliced else ()
        # States without elements do not travel: with one, jaxlib 0.10.2 fails to partition the program ("func.call op
        # expected at least one operand ... produced by a GlobalToLocalShape").
        self.carried = [i for i, state in enumerate(self.shapes) if state.size and i not in self.states.kept]
        self.kept = [i for i in self.states.kept if self.shapes[i].size]
        self.carry = tuple([self.shapes[i] for i in self.carried])
        written = [variable for variable, _ in traced.updates]
        # A replica without rows returns old values of the variables, so its program takes them even if `fn` reads none.
        has_gaps = any(0 in sizes for sizes in self.call.part_sizes)
        launch = tuple(dict.fromkeys((*traced.reads, *(written if has_gaps else ()))))
        of_then = epilogue.then[0].variables if epilogue.then else ()
        # A call in one launch has one program, which runs `fn` and ends the call.
        last = (*of_then, *written) if self.call.is_sliced else (*launch, *of_then)
        # A value that was infinite before the call may stay so: the flag compares with the old values. Of several calls
        # each takes the values that the one before has left.
        last = (*last, *updates) if self.refuses_nan or self.call.repeat else last
        self.reads = (launch, tuple(dict.fromkeys(last)))
        # JAX lets a result take the memory of the next donated argument of its shape. In another order than the
        # arguments, each new value would take the memory of another old one, and XLA would copy them all.
        places = {variable: place for place, variable in enumerate(self.reads[1])}
        self.updates = tuple(sorted(updates, key=lambda variable: places.get(variable, len(places))))

    def compile(self, owner: Any) -> tuple[dict[Any, Executable], Executable | None, Executable | None]:
        """Compile the programs that run `fn`; of a sliced call also those that make first states and combine."""
        traced, call = self.traced, self.call
        if not call.is_sliced:
            return {call.part_sizes[0]: self._compile(self._only_launch)}, None, None
        # Sliced calls whose other launches differ share programs, so each is kept by all that it is made of.
        touched = tuple((v, self._abstract(v)) for v in self.traces.touched)
        has_then, writes = traced.function.then is not None, traced.first.writes
        about = (call._replace(part_sizes=()), has_then, traced.outputs, writes, touched, self.shapes, self.reads)
        about = (*about, self.refuses_nan, traced.function.wires is None)

        def cached(launch: _Launch) -> Executable:
            fingerprints = tuple([each.fingerprint for each in self._traced_in(launch)])
            key = ("program", launch, fingerprints, *about)
            return self.group._cached(owner, key, partial(self._compile, launch))

        kinds: list[tuple[Any, Any]] = [(sizes, ()) for sizes in call.part_sizes]
        if traced.uneven.takes_turns and call.lengths:
            # Replicas that run one after another in one program have their numbers of rows compiled in.
            kinds = [(parts.sizes, parts.counts) for parts in split_into_launches(call.lengths, call.num_slices)]
        programs = {counts or sizes: cached(_Launch(sizes, counts, False, self.carry)) for sizes, counts in kinds}
        start = self.group._cached(owner, ("start", self.carry), self._compile_start)
        return programs, start, None if call.is_over else cached(_Launch((), (), True, self.carry))

    @property
    def _only_launch(self) -> _Launch:
        sizes = self.call.part_sizes[0]
        return _Launch(sizes, self.call.lengths or sizes * self.group.size, True)

    def inlined(self) -> Callable[..., Arrays]:
        """Return the program of a traced call: it takes equal blocks of rows and broadcast arguments."""
        call, spec = self.call, self._spec(self._only_launch)
        # A traced call is one launch without variables, also if a replica runs slices; so table and captured arrays are
        # all that is left.
        own: list[Any] = [constant.value for constant in spec.constants]
        if not call.is_plain:
            assert call.lengths is not None
            own.insert(0, np.array(part_table(split_into_launches(call.lengths, 1)[0], call.lengths), np.int32))
        ins: list[Layout] = [*chain(*spec.ins)]
        mapped = spec.body if spec.takes_all_replicas else self.group._way.map(spec.body, ins, spec.outs)
        return lambda *values: mapped(*values, *own)

    def _traced_in(self, launch: _Launch) -> list[TracedFunction]:
        traced = self.traced.by_size
        # Blocks have other sizes than the parts that they make.
        sizes = traced if self.call.block is not None else [size for size in launch.sizes if size in traced]
        of_then = [self.epilogue.then[0]] if launch.is_last and self.epilogue.then else []
        return [*(traced[size] for size in sizes), *of_then]

    def _constants(self, launch: _Launch) -> list[Constant]:
        known = chain(*(traced.known() for traced in self._traced_in(launch)))
        # Two functions of a program may have captured the same array: it is one argument.
        return list(dict.fromkeys(value for value in known if isinstance(value, Constant)))

    def _compile_start(self) -> Executable:
        """Compile the program that makes the states of all replicas before the first launch."""
        # Zeros and not the identities of the ops, of which some are infinite: jax_debug_infs would refuse them.
        function, carry, size = self.traced.function, self.carry, self.group.size

        def body() -> list[jax.Array]:
            return [jnp.zeros((size, *state.shape), state.dtype) for state in carry]

        outs = layouts("stacked", len(carry))
        return self._executable(ProgramSpec(body, [], [], outs, name=function.name, takes_all_replicas=True))

    def _executable(self, spec: ProgramSpec) -> Executable:
        """Compile a program in which the replicas' axis has the function's name for it."""
        # The axis has the function's own name while JAX lowers the program, so that lax collectives of the user's find
        # it.
        with axis_named(self.traced.function.axis_name):
            program = Executable(self.group, spec)
        self.traced.function.stats.compilations += 1
        return program

    def _compile(self, launch: _Launch) -> Executable:
        return self._executable(self._spec(launch))

    def _spec(self, launch: _Launch) -> ProgramSpec:
        function, takes_all_replicas = self.traced.function, self.traced.uneven.takes_turns and bool(launch.sizes)
        arguments = self._arguments(launch)
        given: list[Layout] = [layout for layout, _ in chain(*arguments)]

        def body(*values: jax.Array) -> list[jax.Array]:
            taken = self._unpack(launch, self._with_halos(launch, values))
            return self._finish(launch, taken, self._run(launch, taken, launch.sizes))

        whole, outs = self._each_rank(launch, given) if takes_all_replicas else body, self._outs(launch)
        if self.call.repeat is not None:
            rule, takes_all_replicas = self._repetition(launch, self.call.repeat), True
            whole, arguments, outs = repeated(self.group, function.engine, body, arguments, outs, rule)
        return ProgramSpec(
            body=whole,
            ins=[[layout for layout, _ in each] for each in arguments],
            shapes=[[shape for _, shape in each] for each in arguments],
            outs=outs,
            donate=self._donated(launch),
            engine=function.engine,
            options=function.compiler_options,
            name=function.name,
            variables=tuple(variable._given_name for variable in self.traces.touched),
            takes_all_replicas=takes_all_replicas,
            has_fixed_kernels=self.call.block is not None,
            constants=self._constants(launch),
        )

    def _repetition(self, launch: _Launch, repeat: Repeat) -> Repetition:
        """Say which arguments of a program the calls that it runs in a row hand on, and which each has for itself."""
        call, reads, bounds = self.call, self.reads[launch.is_last], [0]
        for variable in reads:
            bounds.append(bounds[-1] + len(self._abstract(variable).shapes))
        places, at = dict(zip(reads, bounds, strict=False)), bounds[-1]
        carried = [places[v] + i for v in self.updates for i in range(len(self._abstract(v).shapes))]
        # A batch of `f.over` writes no variable: its calls hand on the states so far.
        own, at, carried = list[int](), at + len(launch.carry), carried or [at + i for i in range(len(launch.carry))]
        for feed in call.feeds:
            own += [at] * (feed.layout == "rows") + [at + 1] * (feed.index is not None)
            at += 1 + (feed.index is not None)
        own += [at + i for i in repeat.own]
        if call.is_over:
            # The table of parts tells which rows came before those of a batch.
            own.append(at + len(call.broadcast))
        return Repetition(repeat.most, carried, own, len(reads) + 2, self.refuses_nan)

    def _unpack(self, launch: _Launch, values: Arrays, rank: jax.Array | None = None) -> _Taken:
        arguments = iter(values)
        state = self.traces.leaves_of(self.reads[launch.is_last], arguments)
        # A function is traced with whole leaves; a variable in shards brings its shard in their place.
        state = {v: v._spec.storage.on_replica(leaves, self.layouts[v]) for v, leaves in state.items()}
        carry, rest, constants = list(islice(arguments, len(launch.carry))), list(arguments), self._constants(launch)
        rest, placed = rest[: len(rest) - len(constants)], rest[len(rest) - len(constants) :]
        table = None if self.call.is_plain else rest.pop()
        max_rows = launch.sizes[0] if launch.sizes else None
        # Replicas with blocks all have the size of the longest part.
        count = max_rows if len(launch.sizes) == 1 and self.call.block is None else None
        part = part_of(table, self.group._way.rank() if rank is None else rank, max_rows, self.group.size, count)
        # How many rows there will be in all is not known yet, so a part weighs its rows.
        if self.call.is_over:
            part = part._replace(weight=jnp.asarray(part.count, jnp.result_type(float)))
        arrays = arrays_of(self.call, rest) if launch.sizes else PartArrays([], None, rest)
        return state, carry, arrays._replace(constants=dict(zip(constants, placed, strict=True))), part

    def _run(self, launch: _Launch, taken: _Taken, sizes: Sequence[int | None]) -> list[jax.Array]:
        """Run the part of a replica, which has one of these sizes, and return its states."""
        state, carry, arrays, part = taken
        if not launch.sizes:
            # The launch that only combines gets states with the axis of replicas in front, of size 1.
            return self._all_states([leaf[0] for leaf in carry])
        return self.runner.run(sizes, state, arrays, part, launch.sizes[0])

    def _finish(self, launch: _Launch, taken: _Taken, states: Arrays) -> list[jax.Array]:
        """Return what a program returns: the results of the call in the last launch, else the states so far."""
        state, carry, arrays, part = taken
        if launch.is_last:
            return self._results(states, state, arrays, part)
        states = self.states.accumulate(self._all_states(carry), states, part)
        kept = [states[i] for i in self.kept]
        # Each process joins the entries of all replicas on its own host, so over processes they are gathered.
        return [*(states[i] for i in self.carried), *(all_gather(kept) if self.group._is_multi_process else kept)]

    def _each_rank(self, launch: _Launch, given: Sequence[Layout]) -> Body:
        """Make a body of all replicas' arrays that runs simulated replicas one by one, and maps the rest."""

        def run(rank: int, part: list[jax.Array]) -> list[jax.Array]:
            return self._run(launch, self._unpack(launch, part, jnp.int32(rank)), [launch.counts[rank]])

        def body(*values: jax.Array) -> list[jax.Array]:
            states = self.group._way.in_turns(run, self._with_all_halos(launch, values, given), given)
            # What communicates needs all replicas at once, so the end of the program is mapped again.
            ins: list[Layout] = [*layouts("stacked", len(states)), *given]

            def finish(*values: jax.Array) -> list[jax.Array]:
                return self._finish(launch, self._unpack(launch, values[len(states) :]), values[: len(states)])

            return list(self.group._way.map(finish, ins, self._outs(launch))(*states, *values))

        return body

    def _with_halos(self, launch: _Launch, values: Arrays) -> list[jax.Array]:
        """Extend the rows of arguments with an overlap, on one replica, by neighbour rows from other replicas."""
        arguments = list(values)
        for at, feed in self._exchanging(launch, len(values)).items():
            assert feed.overlap is not None
            arguments[at] = with_halos(arguments[at], feed.held_rows, self.group.size, feed.overlap)
        return arguments

    def _with_all_halos(self, launch: _Launch, values: Arrays, given: Layouts) -> list[jax.Array]:
        arguments, places = list(values), list(self._exchanging(launch, len(values)))
        if places:
            outs = layouts("stacked", len(places))
            extend = self.group._way.map(lambda *v: [self._with_halos(launch, v)[at] for at in places], given, outs)
            for at, extended in zip(places, extend(*values), strict=True):
                arguments[at] = extended
        return arguments

    def _exchanging(self, launch: _Launch, count: int) -> dict[int, InputFeed]:
        """Find the arguments, of `count`, that are rows whose neighbours lie on other replicas."""
        feeds: dict[int, InputFeed] = {}
        # Counted from the end, since the leaves of variables in front differ in number from program to program.
        at = count - len(self.call.broadcast) - (not self.call.is_plain) - (self.call.held_index is not None)
        at -= len(self._constants(launch))
        for feed in reversed(self.call.feeds if launch.sizes else ()):
            at -= 1 + (feed.index is not None)
            if feed.held_rows:
                feeds[at] = feed
        return feeds

    def _abstract(self, variable: Shared) -> AbstractState:
        return with_layout(self.traces.abstract(variable), self.layouts[variable])

    def _arguments(self, launch: _Launch) -> list[Placed]:
        """List the arguments of a program: the leaves of each variable; the states so far; and all else."""
        call, size = self.call, self.group.size
        leaves: list[Placed] = [
            [(self.layouts[variable], shape) for shape in self._abstract(variable).global_shapes(size)]
            for variable in self.reads[launch.is_last]
        ]
        # A program sees states so far with the axis of replicas, of size 1. Without it, XLA copies each of them: a
        # reshape between a donated argument and the result that takes its place keeps the two apart.
        carry: Placed = [(self._carried_in, jax.ShapeDtypeStruct((size, *s.shape), s.dtype)) for s in launch.carry]
        rest: Placed = []
        if launch.sizes:
            max_rows = launch.sizes[0] or 0
            for row, feed in zip(call.row_shapes, call.feeds, strict=True):
                rest += feed.arrays(row, max_rows, self.group)
            if call.held_index is not None:
                rest.append(("stacked", index_shape(call.held_index, max_rows, size)))
        rest.extend(("replicated", shape) for shape in call.broadcast_shapes)
        if not call.is_plain:
            rest.append(("replicated", jax.ShapeDtypeStruct((TABLE_ROWS, size), np.int32)))
        constants: Placed = [
            ("replicated", jax.ShapeDtypeStruct(constant.value.shape, constant.value.dtype))
            for constant in self._constants(launch)
        ]
        return [*leaves, carry, rest, *([constants] if constants else [])]

    @property
    def _carried_in(self) -> Layout:
        """Return the layout of states so far; rows of one replica may be divided among devices, its states are not."""
        return "rows" if self.group.size > 1 else "replicated"

    def _outs(self, launch: _Launch) -> list[Layout]:
        if not launch.is_last:
            # Each process reads the entries of all replicas.
            kept = layouts("replicated" if self.group._is_multi_process else "stacked", len(self.kept))
            return [*layouts(self._carried_in, len(self.carry)), *kept]
        new: list[Layout] = [self.layouts[v] for v in self.updates for _ in self.traces.abstract(v).shapes]
        scattered = self.epilogue.scattered
        flag: list[Layout] = ["replicated"] * self.refuses_nan
        return [*new, *("stacked" if i in scattered else "replicated" for i in self.epilogue.result.picked), *flag]

    def _donated(self, launch: _Launch) -> tuple[int, ...]:
        """Return which lists of arguments a program may overwrite: the states so far, or old values of variables."""
        # Each launch is the only reader of the states before it. Data and arguments are the user's and never donated.
        if not launch.is_last:
            return (len(self.reads[0]),)
        return tuple(i for i, v in enumerate(self.reads[1]) if v in self.updates) if self.call.donate else ()

    def _results(self, states: Arrays, state: State, arrays: PartArrays, part: Part) -> list[jax.Array]:
        """Compute the results of the program that ends a call: new values, outputs and perhaps a flag."""
        if self.call.is_sliced:
            states = self.states.of_present(states, part.count > 0)
        results, new = self.epilogue.finish_values(states, state, arrays, part, self.layouts)
        picked = [results[i] for i in self.epilogue.result.picked]
        if not self.refuses_nan:
            return [*chain(*(new[v] for v in self.updates)), *picked]
        leaves = [*chain(*(new[v] for v in self.updates))]
        # A value that was infinite and stays so is not the fault of this call: an optimizer's best loss so far.
        before = dict(enumerate(chain(*(state.get(v, [None] * len(new[v])) for v in self.updates))))
        before = {i: getattr(leaf, "array", leaf) for i, leaf in before.items() if leaf is not None}
        is_bad = any_not_finite(results) | any_not_finite(leaves, before)
        # Replicas with values of their own may differ in the flag; all must refuse the call together.
        differs = any(layout == "stacked" for layout in self._outs(_Launch((), (), True)))
        flag = lax.psum(is_bad.astype(jnp.int32), replica_axis()) > 0 if differs else is_bad
        return [*leaves, *picked, flag]

    def _all_states(self, carry: Arrays) -> list[jax.Array]:
        """Return the carried states (partial results), and zeros for all others."""
        states = dict(zip(self.carried, carry, strict=False))
        return [states[i] if i in states else jnp.zeros(x.shape, x.dtype) for i, x in enumerate(self.shapes)]

    def compile_over(self, made: Sequence[int]) -> Executable:
        """Compile the program that ends `f.over` and makes these outputs, of carried states and numbers of rows."""
        # Compiled at the end of the loop: which outputs it makes depends on what has been kept.
        size, count = self.group.size, len(self.carry)

        def body(*values: jax.Array) -> list[jax.Array]:
            rows, present = values[count:]
            states = self.states.of_present(self._all_states(values[:count]), present[lax.axis_index(replica_axis())])
            outputs = self.epilogue.combination.combine_batches(states, rows, present)
            return [outputs[i] for i in made]

        function = self.traced.function
        others = [jax.ShapeDtypeStruct((), jnp.result_type(float)), jax.ShapeDtypeStruct((size,), np.bool_)]
        spec = ProgramSpec(
            body=body,
            ins=[layouts("stacked", count), layouts("replicated", len(others))],
            shapes=[[jax.ShapeDtypeStruct((size, *state.shape), state.dtype) for state in self.carry], others],
            outs=layouts("replicated", len(made)),
            engine=function.engine,
            options=function.compiler_options,
            name=function.name,
        )
        return self._executable(spec)

    @property
    def uses_rank(self) -> bool:
        """Tell whether results of `fn` depend on the numbers of its rows, or on the rank."""
        return any(traced.uses_rank for traced in self.traced.by_size.values())


def repeated(
    group: Group, engine: str, single: Body, arguments: list[Placed], outs: list[Layout], rule: Repetition
) -> tuple[Body, list[Placed], list[Layout]]:
    """Return body, arguments and layouts of results of a program that runs the calls of another one in a row.

    Its body takes the arrays of all replicas. Its results are what the last call hands on, and then the results of one
    call after the other.
    """
    given_layouts: list[Layout] = [layout for layout, _ in chain(*arguments)]
    flags = sum(map(len, arguments[: rule.lists]))

    def of_each(i: int, value: jax.Array) -> jax.Array:
        """Return what the calls have of an argument, in the shapes that programs of one call take."""
        if given_layouts[i] == "replicated":
            return value
        # Sent with the axis of replicas in front, as all arrays are; the loop divides along the axis of calls.
        value = jnp.moveaxis(value, 1, 0)
        return value.reshape(rule.most, -1, *value.shape[3:]) if given_layouts[i] == "rows" else value

    def body(*values: jax.Array) -> list[jax.Array]:
        # The axis of the replicas has its name while the program is traced.
        mapped = group._way.map(single, given_layouts, outs, engine)
        is_there, given = values[flags], [*values[:flags], *values[flags + 1 :]]
        own = [of_each(i, given[i]) for i in rule.own]

        def run(state: list[jax.Array], own: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
            now = dict(zip((*rule.carried, *rule.own), (*state, *own), strict=True))
            results = list(mapped(*(now.get(i, value) for i, value in enumerate(given))))
            return results[: len(state)], results[len(state) :]

        state = [given[i] for i in rule.carried]
        # The branch of a call that is not there returns results of the same shapes, which nobody reads.
        shapes = jax.eval_shape(run, state, [leaf[0] for leaf in own])[1]

        def keep(state: list[jax.Array], own: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
            return state, [*map(_ones, shapes)]

        def step(carry: Any, call: Any) -> tuple[Any, list[jax.Array]]:
            (state, goes_on), (is_there, own) = carry, call
            # Inside a branch XLA computes the bits of a program of one call. In the body of a loop alone it does not.
            new, results = lax.cond(_both(group, is_there, goes_on), run, keep, state, own)
            if rule.refuses_nan:
                # Inside the branch XLA would compute the new values by other kernels.
                new = [jnp.where(results[-1], old, leaf) for old, leaf in zip(state, new, strict=True)]
                goes_on &= ~results[-1]
            return (new, goes_on), results

        (state, _), results = lax.scan(step, (state, jnp.ones((), bool)), (is_there, own), length=rule.most)
        return [*state, *(leaf[call] for call in range(rule.most) for leaf in results)]

    placed = iter(
        [_of_each(*each, rule.most, group.size) if i in rule.own else each for i, each in enumerate(chain(*arguments))]
    )
    of_all: list[Placed] = [[next(placed) for _ in each] for each in arguments]
    of_all[rule.lists - 1].append(("replicated", jax.ShapeDtypeStruct((rule.most,), np.bool_)))
    return body, of_all, [*outs[: len(rule.carried)], *outs[len(rule.carried) :] * rule.most]


def _ones(like: jax.ShapeDtypeStruct) -> jax.Array:
    """Return ones that are as weak as what they stand for, which a branch would lose otherwise."""
    return lax.full(like.shape, like.dtype.type(1).item()) if like.weak_type else jnp.ones(like.shape, like.dtype)


def _both(group: Group, a: jax.Array, b: jax.Array) -> jax.Array:
    """Return `a & b`, in a way that keeps a loop around it from being compiled as one kernel."""
    if group.platform != "cpu":
        return a & b
    # XLA's CPU compiler makes one kernel of a small loop, unless it sorts (small_while_loop_hoisting_pass.cc). That
    # kernel computes other bits.
    return lax.sort(jnp.stack([a, b]).astype(jnp.int32))[0] > 0


def _of_each(layout: Layout, shape: jax.ShapeDtypeStruct, most: int, size: int) -> tuple[Layout, jax.ShapeDtypeStruct]:
    """Return layout and global shape of an argument of which each call has its own."""
    if layout == "replicated":
        return layout, shape.update(shape=(most, *shape.shape))
    each = shape.shape[1:] if layout == "stacked" else (shape.shape[0] // size, *shape.shape[1:])
    return "stacked", shape.update(shape=(size, most, *each))


def why_alone(epilogue: Epilogue) -> str:
    """Say why a program cannot run several calls in a row; "" if it can."""
    group, call, entries = epilogue.group, epilogue.call, epilogue.states
    states = entries.shapes(entries.slots) if entries.kept else []
    kept = sum(prod(states[i].shape) * bits_of(states[i].dtype) // 8 for i in entries.kept)
    traced = [*epilogue.traced.by_size.values(), *([epilogue.then[0]] if epilogue.then else [])]
    reasons = {
        'engine="jit" runs it': group._way.is_one,
        SLICES: call.num_slices > 1,
        "its rows run in blocks": call.block is not None,
        "neighbours of its rows lie on other replicas": any(feed.held_rows for feed in call.feeds),
        "its entries of rows are large": kept > LARGE,
        'an output is "scatter"': bool(epilogue.scattered),
        "it has callbacks": any(each.has_callbacks for each in traced),
        "XLA's CPU backend compiles convolutions inside a loop to slow ones": group.platform == "cpu"
        and any(each.has_convolution for each in traced),
    }
    return next((reason for reason, is_so in reasons.items() if is_so), "")
