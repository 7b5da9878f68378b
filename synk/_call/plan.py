"""Plan: how calls of one kind run: compiled programs, their arguments and results. Plans are made without values."""

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from time import perf_counter
from typing import Any, Literal, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary, ref

import jax
import numpy as np

from .._base.bounded_cache import BoundedCache
from .._base.errors import warn
from .._data.transfer import PartRows
from .._reductions.outputs import OutputSpec, ResultSpec
from .._runtime.executable import Executable, translate_error
from .._runtime.group import Group
from .._runtime.way import Layout
from .._tracing.fingerprint import without_objects
from .._tracing.names import Names
from .._variables.state import AbstractState, VariableState, with_layout
from .._variables.variable import Shared, newest, state_in
from .._variables.views import ShapesAlone, View, view_from
from .compiler import COMMUNICATES, Compiler, why_alone
from .parts import split_into_launches
from .program import Epilogue
from .rows import InputSpec
from .spec import CallSpec, FunctionSpec, Repeat
from .states import TracedCall
from .traces import TELLING_ROWS_APART, CallTraces, NeedsAllRows, rows_not_in_blocks

# Groups for which a function keeps plans that refer to it.
MAX_GROUPS = 4


class UpdateSlice(NamedTuple):
    """Update of one variable by a call.

    Attributes:
      start: number of its first new leaf among the results of the last program.
      stop: number behind its last new leaf.
      abstract: shapes and layout of the new state.
      depends_on: the variables that must be equal on all replicas for the new value to be equal; None if it never is.
    """

    variable: Shared
    start: int
    stop: int
    abstract: AbstractState
    depends_on: tuple[Shared, ...] | None


@dataclass(frozen=True, eq=False)
class CallPlan:
    """Plan of one kind of call.

    Attributes:
      programs: the programs that run `fn`, by the sizes of their parts or, where programs depend on them, by the rows
        of each replica. A call in one launch has one, which ends it.
      start: the program that makes the states before the first of several launches.
      finish: the program that combines the states of several launches, and ends the call.
      reads: the variables that `programs` take, and those that the last program takes.
      accepts: for each variable that the call touches, the states for which the plan is made.
      held: the variables that hold rows.
      must_be_equal: the variables that must be equal on all replicas: those that blocks read, and those that a `then`
        which adds up itself updates.
      scattered: indexes of the leaves of the result that stay on the replicas that made them.
      has_flag: whether the last program also tells that a number is not finite, and then updates nothing.
      narrowest: the narrowest dtype of the floats that `fn` computes.
      whole: the operations of `fn` that move numbers along the rows, where XLA divides the work.
      flops: flops of `fn` over so many rows, in matrix products and convolutions.
      uses_rank: what `fn` and `then` use that tells parts of equal rows apart, as `synk.rank`.
      alone: why a program cannot run several such calls in a row; "" if it can.
      compiler: for `f.over`, the compiler of the program that ends it, which depends on what has been kept. Otherwise
        None, since it refers to the function.
    """

    programs: dict[Any, Executable]
    start: Executable | None
    finish: Executable | None
    reads: tuple[tuple[Shared, ...], tuple[Shared, ...]]
    accepts: Mapping[Shared, tuple[AbstractState, ...]]
    held: tuple[Shared, ...]
    must_be_equal: tuple[Shared, ...]
    layouts: dict[Shared, Layout]
    updates: tuple[UpdateSlice, ...]
    result: ResultSpec
    scattered: tuple[int, ...]
    outputs: OutputSpec
    has_flag: bool
    narrowest: np.dtype | None
    whole: Sequence[str]
    flops: Mapping[int | None, int]
    flops_of_then: int
    least_rows: int
    uses_rank: set[str]
    communicates: bool
    alone: str
    compiler: Compiler | None

    def program_of(self, parts: PartRows) -> Executable:
        return self.programs.get(parts.counts) or self.programs[parts.sizes]

    @cached_property
    def num_updated(self) -> int:
        """Return how many arrays the new values of variables are. The results of the call follow them."""
        return self.updates[-1].stop if self.updates else 0

    @cached_property
    def last(self) -> Executable:
        return self.finish or next(iter(self.programs.values()))


# A plan that was compiled: the plan, its group in words, the key of its calls, and the states of its variables.
Compiled = tuple[ref[Any], str, CallSpec, WeakKeyDictionary[Shared, tuple[AbstractState, ...]]]


class Traced(NamedTuple):
    """Trace of a kind of call.

    Attributes:
      accepts: for each variable that the function reads or writes, the states for which the trace is right.
      record: what identifies the trace: equal records make the same programs.
    """

    accepts: Mapping[Shared, tuple[AbstractState, ...]]
    record: tuple[Any, ...]
    finish: Callable[[], Any]


@dataclass(eq=False)
class Reached:
    """Surroundings of a plan's trace. They refer to no variable, since variables refer to groups.

    Attributes:
      made: the number of the newest variable at the time of the trace.
      names: the objects under the function's own names.
    """

    made: int
    names: Names
    record: tuple[Any, ...]


class Kept:
    """A plan that is kept.

    Attributes:
      accepts: the states of variables for which it was made.
      reached: returns the surroundings of its trace; None if only serial runs may take the plan, and once it is
        dropped. They refer to the function, which plans in a group must not.
      values: of names with a number or an array, how many values have made such a plan, each after another one.
    """

    __slots__ = ("__weakref__", "accepts", "plan", "reached", "values")

    def __init__(self, plan: Any, accepts: Mapping[Shared, tuple[AbstractState, ...]]) -> None:
        self.plan, self.accepts = plan, accepts
        self.reached: Callable[[], Reached | None] = lambda: None
        self.values: dict[str, int] = {}

    def fits(self, site: "Site") -> bool:
        """Tell whether the state of each variable is one of those for which the plan was made."""
        for variable, states in self.accepts.items():
            # Most variables live in the site's group: asking them directly saves a call of `state` for each in a warm
            # step.
            is_seen_as_is = site.view is None and variable._group is site.group
            state = variable._state if is_seen_as_is else site.state(variable)
            if state.abstract not in states:
                return False
        return True

    def states_now(self, site: "Site") -> dict[Shared, VariableState] | None:
        """Return the states that a live call finds, if the plan is as the function would make it now and fits them.

        None where a variable is to be brought to the group, or was lost.
        """
        reached, group = self.reached(), site.group
        # Of the newest variable first, since that takes the least time.
        if reached is None or reached.made < newest() or not reached.names.are_same():
            return None
        states: dict[Shared, VariableState] = {}
        for variable, accepted in self.accepts.items():
            states[variable] = state = variable._state
            if variable._group is not group or state.failure is not None or state.abstract not in accepted:
                return None
        return states


class PlanCache:
    """Plans of one function: for each kind of call a list, with a plan for each state of the variables that it touches.

    Attributes:
      owner: the owner of plans in groups, which go with it. It holds those that refer to the function, for few groups.
      compiled: the newest plans, from which explain tells why a plan had to be made.
    """

    def __init__(self) -> None:
        # Plans live in their group, and go with it or with the function. If a variable was made after a plan's trace,
        # or a name of the function has another object, the call is traced once more. The plan stays if the trace is the
        # same.
        self.owner = BoundedCache(MAX_GROUPS)
        self.compiled: deque[Compiled] = deque(maxlen=64)
        # Not in the group, which would keep the function alive.
        self._reached: WeakKeyDictionary[Kept, Reached] = WeakKeyDictionary()
        self._touched: WeakKeyDictionary[Shared, None] = WeakKeyDictionary()
        # Numbers of rows for which one replica of all devices has programs.
        self._totals: set[int] = set()
        # What the newest call asked for, and its kind: the next one is recognised by it sooner.
        self.newest: tuple[Any, Any, Any] = None, None, None

    def variables(self) -> tuple[Shared, ...]:
        """Return the variables that plans have touched so far, and that still exist."""
        return tuple([variable for ref in self._touched.keyrefs() if (variable := ref()) is not None])

    def find(self, site: "Site", key: Any, trace: Callable[[], Traced], *, holds_function: bool = False) -> Any:
        """Return the plan for a key; make it if there is none, and always for a site that runs afresh."""
        group, is_afresh = site.group, site.purpose == "afresh"
        entries: list[Kept] = self.kept(group, key, list, holds_function)
        if (entry := self.current(entries, site)) is not None:
            return entry.plan
        # The number is read before the trace: a variable that the trace, or another thread, makes meanwhile is newer
        # than the plan.
        made, traced = newest(), trace()
        # Names are read after the trace, in which a function may count its traces.
        now = Reached(made, Names(site.function.by_user), traced.record)
        same = [each for each in entries if (reached := self._reached.get(each)) and reached.record == now.record]
        # Plans of serial runs are their own: calls go on with what they run, whatever a serial run has met since.
        others = [each for each in entries if each not in same and (each.reached() is None) == is_afresh]
        # An entry for another state of its variables is looked at again when they are in that state.
        replaced = {each for each in others if each.fits(site)}
        self._forget({*same, *others} - replaced, now, {*traced.accepts})
        if (entry := next((each for each in same if each.fits(site)), None)) is None:
            entry = Kept(traced.finish(), traced.accepts)
            if isinstance(entry.plan, CallPlan):
                self.compiled.append((ref(entry.plan), repr(group), key[0], WeakKeyDictionary(entry.accepts)))
                entry.values = self._count_values(site.function.name, replaced)
        for each in (entry, *same):
            if not (is_afresh and each.reached() is None):
                each.reached = ref(now)
            self._reached[each] = now
        self._touched.update(dict.fromkeys(entry.accepts))
        left = [each for each in entries if each in self._reached and each not in {entry, *replaced}]
        # Plans that calls may take come first: a warm call looks at no others.
        left = sorted([entry, *left], key=lambda each: each.reached() is None)
        # Asked for again, since `_forget` may have put another owner in the place of the one whose list was read. 64
        # states of variables are more than calls alternate between.
        self.kept(group, key, list, holds_function)[:] = left[:64]
        return entry.plan

    def _count_values(self, function: str, replaced: set[Kept]) -> dict[str, int]:
        """Count the values of each captured number for which plans were made. Warn at the third."""
        # A value that has changed once may be set-up; one that has changed twice probably changes in each step.
        counts: dict[str, int] = {}
        for each in [each for each in replaced if each in self._reached]:
            new = {name: each.values.get(name, 1) + 1 for name in self._reached[each].names.new_numbers()}
            counts |= each.values | new
            for name in [name for name, count in new.items() if count == 3]:
                warn(
                    f"{function}: it compiles for the third time since the value of {name!r} has changed: what a "
                    f'function captures is a constant of its program. Pass {name!r} as an argument, "broadcast" in '
                    f"inputs=."
                )
        return counts

    def count_rows(self, name: str, rows: int) -> None:
        """Warn when calls of a third number of rows compile, each of which has a program of its own."""
        before = len(self._totals)
        self._totals.add(rows)
        if before < len(self._totals) == 3:
            warn(
                f"{name}: it has compiled for {', '.join(map(str, sorted(self._totals)))} rows: where all devices make "
                f"one replica, each number of rows is a program. The last batch of synk.minibatches is shorter "
                f"(drop_last=True leaves it out); synk.init(cache=...) keeps programs for later runs."
            )

    def is_stale(self, site: "Site", key: Any, trace: Callable[[], Traced]) -> bool:
        """Tell whether the function would make another program now than the one that calls of this kind run."""
        entry = self.current(self.kept(site.group, key, list, holds_function=False), site)
        if entry is None or (now := trace().record) == (before := self._reached[entry].record):
            return False
        # The function may make new objects in each trace, such as lists that its callbacks hold.
        return now == trace().record or without_objects(now) != without_objects(before)

    def current(self, entries: Sequence[Kept], site: "Site") -> Kept | None:
        """Return the first plan that is as the function would make it now; None for a site that runs afresh."""
        for entry in () if site.purpose == "afresh" else entries:
            reached = entry.reached()
            # Of the newest variable first, since that takes the least time.
            if reached is not None and reached.made >= newest() and reached.names.are_same() and entry.fits(site):
                return entry
        return None

    def _forget(self, spared: set[Kept], now: Reached, touched: set[Shared]) -> None:
        """Drop the plans of earlier traces that touch other variables, but for those spared."""
        # Copies, since another thread may drop entries meanwhile.
        known = [each for each in list(self._reached.items()) if each[0].accepts.keys() - touched]
        old = [entry for entry, reached in known if reached.made < now.made or not reached.names.are_same()]
        stale = [entry for entry in old if entry not in spared]
        for entry in stale:
            self._reached.pop(entry, None)
        left = touched.union(*[entry.accepts for entry in list(self._reached)])
        # Programs refer to the variables that they take, so without a plan for a variable they would keep its memory.
        if gone := {variable for entry in stale for variable in entry.accepts} - left:
            self.owner = BoundedCache(MAX_GROUPS)
        for variable in gone:
            self._touched.pop(variable, None)

    def kept(self, group: Group, key: Any, make: Callable[[], Any], holds_function: bool = True) -> Any:
        """Return what `make` has made for a key."""
        # The group keeps what goes with it. What refers to the function is kept here, for a few groups: the group would
        # keep the function alive.
        if not holds_function:
            return group._cached(self.owner, key, make)
        return self.owner.get(group, BoundedCache).get(key, make)


Purpose: TypeAlias = Literal["live", "trial", "afresh", "absent"]


class Site(NamedTuple):
    """A function, the group that runs it, and the purpose of its calls.

    Attributes:
      purpose: "live"; "trial" if old values of variables must stay; "afresh" if also the function is to be traced as it
        is now, whatever it captured before; "absent" if calls are compiled and not run, so that shapes are enough.
      home: the group in which variables and data live, if that is another group.
      view: gives the state of a variable that lives in another group.
    """

    function: FunctionSpec
    plans: PlanCache
    group: Group
    purpose: Purpose = "live"
    home: Group | None = None
    view: View | None = None

    def as_one(self) -> "Site":
        """Return the site of the same calls where all devices make one replica."""
        home, group = self.home or self.group, self.group._as_one
        view = ShapesAlone(group) if self.purpose == "absent" else view_from(home, group)
        return self._replace(group=group, home=home, view=view)

    def state(self, variable: Shared) -> VariableState:
        return state_in(variable, self.group) if self.view is None else self.view(variable)

    def abstract(self, variable: Shared) -> AbstractState:
        return self.state(variable).abstract


def site_of(function: FunctionSpec, plans: PlanCache, group: Group, purpose: Purpose = "live") -> Site:
    """Return where calls of a function run: on the replicas of a group, or on one that all its devices make."""
    site = Site(function, plans, group, purpose)
    return site.as_one() if function.engine == "jit" else site


def plan_key(function: FunctionSpec, call: CallSpec) -> Hashable:
    """Return the key of a plan: the kind of call, and how `f.check` or a later `then` has changed the function."""
    flags = function.then is None, function.per_part, function.gathers_all, function.refuses_nan
    return call, *flags, function.wires is None


@dataclass(eq=False)
class SliceChoice:
    """Choice of the number of slices for one kind of call.

    Attributes:
      most: the most slices that there can be: the rows of the longest part.
      has_run: whether such a call has ended without running out of memory.
    """

    slices: int
    most: int
    has_run: bool = False


class Instead(NamedTuple):
    """Answer that calls get in the place of a plan: they run in another form.

    Attributes:
      form: "as one": in one replica that all devices make, since the function communicates and rows do not divide; "by
        lengths": by a plan for the rows of each replica; "apart": not several by one program.
      why: in words.
    """

    form: Literal["as one", "by lengths", "apart"]
    why: str = ""


class Form:
    """Calls of one kind that pick as many rows in the same way.

    Attributes:
      call: the key of their plan.
      inputs: how the rows of each scattered argument reach the replicas.
      lengths: the rows of each replica; None if nothing brings rows.
      is_plain: whether every replica has one part of equally many rows.
      exchanges: whether replicas exchange rows before the call.
      newest: the plan that the newest live call of this form had and the form of its key, once they were checked.
    """

    __slots__ = (
        "_base", "_exact", "_holders", "_kept", "_repeated", "_slices", "call", "exchanges", "inputs", "is_plain",
        "lengths", "newest",
    )  # fmt: skip

    def __init__(
        self, base: CallSpec, call: CallSpec, inputs: Sequence[InputSpec], lengths: tuple[int, ...] | None, slices: int
    ) -> None:
        self.call, self.inputs, self.lengths = call, inputs, lengths
        self.is_plain = call.is_plain
        self.exchanges = any(spec.scattered_rows is not None for spec in inputs)
        # The key without parts, by which a variable that brings rows is found.
        self._base, self._slices = base, slices
        self.newest: tuple[Callable[[], Kept | None], Form] | None = None
        self._exact: Form | None = None
        self._repeated: dict[Repeat, Form] = {}
        self._kept: list[Kept] = []
        self._holders: list[Kept] = []

    def with_call(self, call: CallSpec) -> "Form":
        return Form(self._base, call, self.inputs, self.lengths, self._slices)

    def of_lengths(self) -> "Form":
        """Return the same calls with the key of plans that depend on the rows of each replica."""
        if self._exact is None:
            # Without lengths in the key programs know only whether there are several slices. With lengths they know how
            # many.
            count = len(split_into_launches(self.lengths or (), self._slices))
            self._exact = self.with_call(self.call._replace(lengths=self.lengths, num_slices=count))
        return self._exact

    def repeated(self, repeat: Repeat) -> "Form":
        if repeat not in self._repeated:
            self._repeated[repeat] = self.with_call(self.call._replace(repeat=repeat))
        return self._repeated[repeat]

    def with_plan(self, site: Site) -> tuple["Form", CallPlan | Instead]:
        """Return the plan of these calls, and the form that has its key; make the plan if there is none."""
        kept = site.plans.current(self._kept, site)
        if kept is None:
            plan: CallPlan | Instead = find_plan(site, self.call)
            self._kept = site.plans.kept(site.group, plan_key(site.function, self.call), list, self.call.is_over)
        else:
            plan = kept.plan
        is_final = isinstance(plan, CallPlan) or plan.form != "by lengths"
        return (self, plan) if is_final else self.of_lengths().with_plan(site)

    def note_plan(self, site: Site, form: "Form") -> None:
        """Note the plan that a live call of this form has, under the key of another form, so that the next one asks for
        no other."""
        if site.purpose == "live" and site.view is None:
            kept = site.plans.current(form._kept, site)
            # Weakly: a plan that was dropped goes with its programs.
            self.newest = None if kept is None else (ref(kept), form)

    def holder(self, site: Site) -> Shared | None:
        """Return the variable that brings rows to these calls, if there is one."""
        kept = site.plans.current(self._holders, site)
        if kept is not None:
            return kept.plan
        base, function, taken = self._base, site.function, None if self.lengths is None else self.lengths[0]

        def trace() -> Traced:
            traces = CallTraces(function, site.group, base._replace(held_index=None), site.view)
            traced = traces.of_rows(taken)
            holder = next((v for v in traced.variables if traces.holds_rows(v)), None)
            record = (*traces.record, None if holder is None else holder._number)
            return Traced(traces.accepts, record, lambda: holder)

        key = ("holder", base, taken, function.per_part)
        holder = site.plans.find(site, key, trace)
        self._holders = site.plans.kept(site.group, key, list, False)
        return holder


def find_plan(site: Site, call: CallSpec) -> CallPlan | Instead:
    """Return the plan for a key, made if there is none, or what such calls get in its place."""
    function = site.function

    def trace() -> Traced:
        start = perf_counter()
        traced = trace_plan(site, call)
        function.stats.dispatching += perf_counter() - start
        return traced._replace(finish=partial(_compile, traced, function))

    return site.plans.find(site, plan_key(function, call), trace, holds_function=call.is_over)


def _compile(traced: Traced, function: FunctionSpec) -> Any:
    start = perf_counter()
    try:
        return traced.finish()
    except jax.errors.JaxRuntimeError as error:
        # XLA tries kernels on a GPU while it compiles, for which memory may not do.
        translated = translate_error(error, function.name)
        if translated is error:
            raise
        raise translated from error
    finally:
        function.stats.dispatching += perf_counter() - start


def trace_plan(site: Site, call: CallSpec) -> Traced:
    """Trace a kind of call, for a `CallPlan` or an `Instead`."""
    traces = CallTraces(site.function, site.group, call, site.view)
    try:
        traced = TracedCall(traces)
    except NeedsAllRows as needed:
        instead = Instead("as one", str(needed)) if call.repeat is None else Instead("apart", COMMUNICATES)
        return _instead(traces, instead)
    if call.lengths is None and not call.is_plain and traced.needs_lengths:
        return _instead(traces, Instead("by lengths"))
    epilogue = Epilogue(traced)
    if call.repeat is not None and (why := why_alone(epilogue)):
        return _instead(traces, Instead("apart", why))
    if site.function.blocks is not None:
        _check_blocks(traced)
    depends_on = _equality_dependencies(epilogue)
    differing = _diverging(traces, depends_on) if site.group.size > 1 else set[Shared]()
    layouts: dict[Shared, Layout] = {
        v: "stacked" if v in differing else traces.abstract(v).layout for v in traces.touched
    }
    # A state in the layout that programs take needs no other plan.
    accepts = {
        v: tuple(dict.fromkeys((state, with_layout(state, layouts[v])))) for v, (state,) in traces.accepts.items()
    }
    return Traced(accepts, traces.record, lambda: _make_plan(epilogue, depends_on, layouts, site.plans, accepts))


def _instead(traces: CallTraces, instead: Instead) -> Traced:
    return Traced(traces.accepts, traces.record, lambda: instead)


def _make_plan(
    epilogue: Epilogue,
    depends_on: dict[Shared, tuple[Shared, ...] | None],
    layouts: dict[Shared, Layout],
    plans: PlanCache,
    accepts: Mapping[Shared, tuple[AbstractState, ...]],
) -> CallPlan:
    traced, traces, call, result = epilogue.traced, epilogue.traces, epilogue.call, epilogue.result
    if traced.group._way.is_one and call.has_rows:
        plans.count_rows(traced.function.name, max(size or 0 for size in traced.by_size))
    compiler = Compiler(epilogue, tuple(depends_on), layouts)
    programs, start, finish = compiler.compile(plans.owner)
    updates: list[UpdateSlice] = []
    at = 0
    for variable in compiler.updates:
        state, needed = accepts[variable][-1], depends_on[variable]
        stop = at + len(state.shapes)
        updates.append(UpdateSlice(variable, at, stop, state, needed))
        at = stop
    # A `then` that adds up itself has a plain one, which serial runs take.
    users = [traced.first, *([epilogue.then[0]] if epilogue.then and epilogue.function.plain is None else [])]
    return CallPlan(
        programs=programs,
        start=start,
        finish=finish,
        reads=compiler.reads,
        accepts=accepts,
        held=tuple(v for v in traces.touched if traces.holds_rows(v)),
        must_be_equal=_must_be_equal(traces, depends_on),
        layouts=layouts,
        updates=tuple(updates),
        result=result,
        scattered=tuple(j for j, i in enumerate(result.picked) if i in epilogue.scattered),
        outputs=traced.outputs,
        has_flag=compiler.refuses_nan,
        narrowest=traced.first.narrowest,
        whole=traced.first.whole,
        flops={size: each.flops(traced.used) for size, each in traced.by_size.items()},
        flops_of_then=epilogue.flops_of_then,
        least_rows=traced.outputs.least_rows(traced.combined),
        uses_rank=set().union(*(traced.uses_rank for traced in users)) - TELLING_ROWS_APART,
        communicates=traced.first.communicates,
        alone=why_alone(epilogue),
        compiler=compiler if call.is_over else None,
    )


def _check_blocks(traced: TracedCall) -> None:
    traces = traced.traces
    name, block = traces.function.name, traces.function.blocks
    if traces.call.block is None:
        raise ValueError(f"{name}: blocks={block} are blocks of rows, but no argument of this call is scattered.")
    for variable in filter(traces.holds_rows, traces.touched):
        raise rows_not_in_blocks(name, variable.name, block)
    if traced.uneven.takes_turns and traces.are_in_shards(traces.touched):
        raise ValueError(
            f"{name}: blocks={block} runs simulated replicas one by one, so they do not gather variables in shards. "
            f"Use devices, or whole variables."
        )


def _must_be_equal(traces: CallTraces, depends_on: Mapping[Shared, tuple[Shared, ...] | None]) -> tuple[Shared, ...]:
    """Return the variables that must be equal on all replicas when a call begins."""
    # An answer that depends on no replica needs the same variables on all.
    if traces.call.block is not None:
        return tuple(traces.touched)
    needed = dict.fromkeys(chain(*(depends_on[v] or () for v in depends_on if traces.are_in_shards([v]))))
    if any(variable._may_differ for variable in depends_on):
        needed |= dict.fromkeys(variable for variable in depends_on if not variable._may_differ)
    return tuple(needed)


def _equality_dependencies(epilogue: Epilogue) -> dict[Shared, tuple[Shared, ...] | None]:
    """Return for each updated variable the variables that must be equal for its new value to be; None if never."""
    depends_on: dict[Shared, tuple[Shared, ...] | None] = {}
    first, is_one = epilogue.traced.first, epilogue.traced.group._way.is_one
    for variable, _ in first.writes:
        # Replicas see other rows, so what `fn` writes differs, whatever it computes: equality is derived and never
        # compared.
        differs = (epilogue.call.has_rows or first.uses_rank) and not is_one
        depends_on[variable] = None if differs else first.variables
    if epilogue.then is None:
        return depends_on
    then, _ = epilogue.then
    equal = tuple(variable for variable in then.variables if not variable._may_differ)
    # Only synk's own `then`s update variables with a value for each replica. These leave all others equal.
    leaves_equal = any(variable._may_differ for variable, _ in then.writes)
    for variable, _ in then.writes:
        if variable._spec.storage.is_sharded and then.uses_rank and not leaves_equal:
            raise ValueError(
                f"{epilogue.function.name}.then: it asks for its rank and updates {variable.name}, which lies in "
                f"shards of one value that all replicas share. Leave the rank out."
            )
        may_differ = variable._may_differ and epilogue.traced.group.size > 1
        differs = may_differ or (then.uses_rank and not (leaves_equal or is_one))
        depends_on[variable] = None if differs else equal
    return depends_on


def _diverging(traces: CallTraces, depends_on: dict[Shared, tuple[Shared, ...] | None]) -> set[Shared]:
    """Return the updated variables of which replicas have different values from now on."""
    differing = {v for v, needed in depends_on.items() if needed is None}
    # A variable that differs makes those differ that are computed from it, and so on.
    while True:
        unequal = [v for v in traces.touched if not v._spec.storage.is_sharded]
        stacked = differing | {v for v in unequal if traces.abstract(v).layout == "stacked"}
        more = {v for v, needed in depends_on.items() if any(u in stacked for u in needed or ())} - differing
        if not more:
            return differing
        differing |= more
