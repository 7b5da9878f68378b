"""Plan: how calls of one kind run: compiled programs, their arguments and results. Plans are made without values."""

from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet, ref

import numpy as np

from .._base.bounded_cache import BoundedCache
from .._data.transfer import PartRows
from .._reductions.outputs import OutputSpec
from .._reductions.results import ResultSpec
from .._runtime.executable import Executable
from .._runtime.group import Group
from .._runtime.layout import Layout
from .._tracing.names import Names
from .._variables.state import AbstractState, VariableState, with_layout
from .._variables.variable import Shared, newest, state_in
from .compiler import Compiler
from .program import Epilogue, ProgramBuilder
from .spec import CallSpec, FunctionSpec
from .traces import CallTraces, View, rows_not_in_blocks

# Groups for which a function keeps plans that refer to it.
MAX_GROUPS = 4


class UpdateSlice(NamedTuple):
    """Update of one variable by a call.

    Attributes:
      variable: the variable.
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
      layouts: the layout of each variable as programs take it.
      updates: the updates of variables.
      result: the structure of what the call returns.
      from_first: numbers of the leaves of the result that are taken from the first replica.
      staying: numbers of the leaves of the result that stay on the replicas that made them.
      outputs: the structure of what `fn` returned.
      has_flag: whether the last program also tells that a number is not finite, and then updates nothing.
      narrowest: the narrowest dtype of the floats that `fn` computes.
      flops: flops of `fn` over so many rows, in matrix products and convolutions.
      flops_of_then: flops of `then`.
      least_rows: the number of rows in all that the outputs need.
      compiler: for `f.over`, the compiler of the program that ends it, which depends on what has been kept. Otherwise
        None, since it refers to the function.
    """

    programs: dict[Any, Executable]
    start: Executable | None
    finish: Executable | None
    reads: tuple[tuple[Shared, ...], tuple[Shared, ...]]
    accepts: dict[Shared, tuple[AbstractState, ...]]
    held: tuple[Shared, ...]
    layouts: dict[Shared, Layout]
    updates: tuple[UpdateSlice, ...]
    result: ResultSpec
    from_first: tuple[int, ...]
    staying: tuple[int, ...]
    outputs: OutputSpec
    has_flag: bool
    narrowest: np.dtype | None
    flops: Mapping[int | None, int]
    flops_of_then: int
    least_rows: int
    compiler: Compiler | None

    def program_of(self, parts: PartRows) -> Executable:
        """Return the program of one launch of several."""
        return self.programs.get(parts.counts) or self.programs[parts.sizes]

    @property
    def last(self) -> Executable:
        """Return the program that ends a call."""
        return self.finish or next(iter(self.programs.values()))


# A plan that was compiled: the plan, its group in words, the key of its calls, and the states of its variables.
Compiled = tuple[ref[Any], str, CallSpec, WeakKeyDictionary[Shared, tuple[AbstractState, ...]]]


class Traced(NamedTuple):
    """Trace of a kind of call.

    Attributes:
      touched: the variables that the function reads or writes.
      record: what identifies the trace: equal records make the same programs.
      finish: makes the plan.
    """

    touched: Collection[Shared]
    record: tuple[Any, ...]
    finish: Callable[[], Any]


class Reached(NamedTuple):
    """Surroundings of a plan's trace. They refer to no variable, since variables refer to groups.

    Attributes:
      made: the number of the newest variable at the time of the trace.
      names: the objects under the function's own names.
      record: the record of the trace.
    """

    made: int
    names: Names
    record: tuple[Any, ...]

    def is_current(self) -> bool:
        """Tell whether no variable was made since, and the function's own names have the same objects."""
        return self.made >= newest() and self.names.are_same()


class PlanCache:
    """Plans of one function: for each kind of call one for each state of the variables that it touches.

    Plans live in their group, and go with it or with the function. Plans that refer to the function live here.
    If a variable was made after a plan's trace, or a name of the function has another object, the call is traced once
    more. The plan stays if the trace is the same.
    """

    def __init__(self) -> None:
        self._touched: WeakKeyDictionary[Shared, None] = WeakKeyDictionary()
        # Not in the group, which would keep the function alive.
        self._reached: WeakKeyDictionary[Any, Reached] = WeakKeyDictionary()
        self._holding = BoundedCache(MAX_GROUPS)
        self._groups: WeakSet[Group] = WeakSet()
        # The newest plans, from which explain tells why a plan had to be made.
        self.compiled: deque[Compiled] = deque(maxlen=64)

    def variables(self) -> tuple[Shared, ...]:
        """Return the variables that plans have touched so far, and that still exist."""
        return tuple([variable for ref in self._touched.keyrefs() if (variable := ref()) is not None])

    def find(
        self,
        site: "Site",
        key: Any,
        trace: Callable[[], Traced],
        *,
        holds_function: bool = False,
    ) -> Any:
        """Return the plan for a key; make it if there is none.

        Where `site.retraces` the function is always traced, since what it captures may have changed.
        """
        function, group, abstract, retraces = site.function, site.group, site.abstract, site.retraces
        self._groups.add(group)
        plans: list[Any] = self.kept(group, key, list, holds_function)
        if not retraces and (plan := self._current(plans, abstract)) is not None:
            return plan
        made, traced = newest(), trace()
        # Names are read after the trace, in which a function may count its traces.
        names = Names([function.fn, function.then])
        # Plans of serial runs are kept apart: calls go on with what they run, whatever a serial run has met since.
        now = self.kept(group, ("as it is now", key), list, holds_function)
        # A copy, since another thread may drop plans meanwhile.
        known, touched = dict(list(self._reached.items())), set(traced.touched)
        same = [plan for plan in (*plans, *now) if plan in known and known[plan].record == traced.record]
        plans = now if retraces else plans
        # A plan for another state of its variables is looked at again when they are in that state.
        others = [plan for plan in plans if plan in known and plan not in same and not _fits(plan, abstract)]
        stale = {plan for plan, reached in known.items() if plan.accepts.keys() - touched and not reached.is_current()}
        dropped = stale if retraces else {*plans, *stale}
        self._forget(dropped.difference(same, others), touched)
        plan = next((plan for plan in same if _fits(plan, abstract)), None) or traced.finish()
        is_new = plan not in same
        self._reached.update(dict.fromkeys((plan, *same), Reached(made, names, traced.record)))
        self._touched.update(dict.fromkeys(plan.accepts))
        if isinstance(plan, CallPlan) and is_new:
            states = WeakKeyDictionary(plan.accepts)
            self.compiled.append((ref(plan), repr(group), key[0], states))
        if retraces and not is_new:
            return plan
        plans = self.kept(group, ("as it is now", key) if retraces else key, list, holds_function)
        plans[:] = [plan, *(other for other in (*same, *others) if other is not plan)][:64]
        return plan

    def is_stale(self, site: "Site", key: Any, trace: Callable[[], Traced]) -> bool:
        """Tell whether the function would make another program now than the one that calls of this kind run."""
        plan = self._current(self.kept(site.group, key, list, holds_function=False), site.abstract)
        return plan is not None and self._reached[plan].record != trace().record

    def _current(self, plans: list[Any], abstract: Callable[[Shared], AbstractState]) -> Any:
        for plan in plans:
            # Another thread may have dropped the plan.
            reached = self._reached.get(plan)
            if reached is not None and reached.is_current() and _fits(plan, abstract):
                return plan
        return None

    def _forget(self, stale: Set[Any], touched: Set[Shared]) -> None:
        """Drop stale plans. If no plan is left for a variable, drop all programs too, which refer to it."""
        for plan in stale:
            self._reached.pop(plan, None)
        gone = {variable for plan in stale for variable in plan.accepts} - touched
        gone.difference_update(*[plan.accepts for plan in list(self._reached)])
        for variable in gone:
            self._touched.pop(variable, None)
        if gone:
            for group in list(self._groups):
                group._caches.pop(self, None)
            self._holding = BoundedCache(MAX_GROUPS)

    def kept(self, group: Group, key: Any, make: Callable[[], Any], holds_function: bool = True) -> Any:
        """Return what `make` has made for a key.

        It is kept in the group. What refers to the function is kept here instead, for a few groups: the group would
        keep the function alive.
        """
        if not holds_function:
            return group._cached(self, key, make)
        return self._holding.get(group, BoundedCache).get(key, make)


@dataclass(frozen=True, eq=False)
class Site:
    """A function, the group that runs it, and how its calls see variables and data of another group.

    Attributes:
      function: the function.
      plans: the plans of the function's calls.
      group: the group that runs the calls.
      view: gives the state of a variable that lives in another group.
      data_group: the group in which scattered data lies, if that is another group.
      may_donate: whether old values of variables may be overwritten.
      is_abstract: whether shapes are enough, since calls are compiled and not run.
      retraces: whether the function runs as it is now, whatever it captured when it was traced.
    """

    function: FunctionSpec
    plans: PlanCache
    group: Group
    view: View | None = None
    data_group: Group | None = None
    may_donate: bool = True
    is_abstract: bool = False
    retraces: bool = False

    def state(self, variable: Shared) -> VariableState:
        """Return the state of a variable, as the calls see it."""
        return state_in(variable, self.group) if self.view is None else self.view(variable)

    def abstract(self, variable: Shared) -> AbstractState:
        """Return the shapes, layout and rows of a variable."""
        return self.state(variable).abstract

    def find(self, key: Any, trace: Callable[[], Traced], **options: Any) -> Any:
        """Return the plan for a key, as `PlanCache.find` does."""
        return self.plans.find(self, key, trace, **options)


def _fits(plan: Any, abstract: Callable[[Shared], AbstractState]) -> bool:
    """Tell whether the variables are in states for which the plan is made."""
    return all([abstract(variable) in accepted for variable, accepted in plan.accepts.items()])


def plan_key(function: FunctionSpec, call: CallSpec) -> Hashable:
    """Return the key of a plan: the kind of call, and how `f.check` or a later `then` has changed the function."""
    flags = function.then is None, function.per_part, function.gathers_all, function.refuses_nan
    return call, *flags, function.wires is None


@dataclass(eq=False)
class SliceChoice:
    """Choice of the number of slices for one kind of call.

    Attributes:
      slices: the number of slices.
      most: the most slices that there can be: the rows of the longest part.
      accepts: the states of variables for which it is made.
      has_run: whether such a call has ended without running out of memory.
    """

    slices: int
    most: int
    accepts: dict[Shared, tuple[AbstractState, ...]]
    has_run: bool = False


@dataclass(eq=False)
class NeedsLengths:
    """Answer in place of a plan: calls of this kind need a plan for the exact rows of each replica."""

    accepts: dict[Shared, tuple[AbstractState, ...]]


def trace_plan(site: Site, call: CallSpec) -> Traced:
    """Trace a kind of call, to be finished as a `CallPlan` or as `NeedsLengths`."""
    traces = CallTraces(site.function, site.group, call, site.view)
    builder = ProgramBuilder(traces)
    if call.lengths is None and not call.is_plain and (builder.runs_each_rank or builder.gathers_rows):
        needs = NeedsLengths({v: (traces.abstract(v),) for v in traces.touched})
        return Traced(traces.touched, traces.record, lambda: needs)
    epilogue = Epilogue(builder)
    if site.function.blocks is not None:
        _check_blocks(traces)
    depends_on = _equality_dependencies(epilogue)
    return Traced(traces.touched, traces.record, partial(_make_plan, epilogue, depends_on, site.plans))


def _make_plan(epilogue: Epilogue, depends_on: dict[Shared, tuple[Shared, ...] | None], plans: PlanCache) -> CallPlan:
    """Lower and compile a kind of call."""
    builder, traces, call = epilogue.builder, epilogue.traces, epilogue.call
    differing = _diverging(traces, depends_on) if epilogue.group.size > 1 else set[Shared]()
    layouts: dict[Shared, Layout] = {
        v: "stacked" if v in differing else traces.abstract(v).layout for v in traces.touched
    }
    result = epilogue.result
    compiler = Compiler(epilogue, tuple(depends_on), layouts)
    programs, start, finish = compiler.compile(plans)
    updates: list[UpdateSlice] = []
    at = len(result.picked)
    for variable, needed in depends_on.items():
        state = traces.abstract(variable)
        stop = at + len(state.shapes)
        updates.append(UpdateSlice(variable, at, stop, with_layout(state, layouts.get(variable)), needed))
        at = stop
    first = {j for j, i in enumerate(builder.outputs.source_leaf) if i in builder.from_first}
    return CallPlan(
        programs=programs,
        start=start,
        finish=finish,
        reads=compiler.reads,
        accepts={
            v: tuple(dict.fromkeys((traces.abstract(v), with_layout(traces.abstract(v), layouts.get(v)))))
            for v in traces.touched
        },
        held=tuple(v for v in traces.touched if traces.holds_rows(v)),
        layouts=layouts,
        updates=tuple(updates),
        result=result,
        from_first=tuple(j for j, i in enumerate(result.picked) if i in first),
        staying=tuple(j for j, i in enumerate(result.picked) if i in epilogue.staying),
        outputs=builder.outputs,
        has_flag=compiler.refuses_nan,
        narrowest=builder.first.narrowest,
        flops={size: traced.flops(builder.used) for size, traced in builder.traced.items()},
        flops_of_then=epilogue.flops_of_then,
        least_rows=builder.outputs.least_rows(builder.combined),
        compiler=compiler if call.is_over else None,
    )


def _check_blocks(traces: CallTraces) -> None:
    """Refuse a call with blocks that has no rows, or touches a variable that holds rows."""
    name, block = traces.function.name, traces.function.blocks
    if traces.call.block is None:
        raise ValueError(f"{name}: blocks={block} are blocks of rows, but no argument of this call is scattered.")
    for variable in filter(traces.holds_rows, traces.touched):
        raise rows_not_in_blocks(name, variable.name, block)


def _equality_dependencies(epilogue: Epilogue) -> dict[Shared, tuple[Shared, ...] | None]:
    """Return for each updated variable the variables that must be equal for its new value to be; None if never."""
    depends_on: dict[Shared, tuple[Shared, ...] | None] = {}
    first = epilogue.builder.first
    for variable, _ in first.writes:
        depends_on[variable] = None if epilogue.call.has_rows or first.uses_rank else first.variables
    if epilogue.then is None:
        return depends_on
    then, _ = epilogue.then
    equal = tuple(variable for variable in then.variables if not variable._is_per_replica)
    # Only synk's own `then`s update variables with a value for each replica. These leave all others equal.
    leaves_equal = any(variable._is_per_replica for variable, _ in then.writes)
    for variable, _ in then.writes:
        may_differ = variable._may_differ and epilogue.builder.group.size > 1
        depends_on[variable] = None if may_differ or (then.uses_rank and not leaves_equal) else equal
    return depends_on


def _diverging(traces: CallTraces, depends_on: dict[Shared, tuple[Shared, ...] | None]) -> set[Shared]:
    """Return the updated variables of which replicas have different values from now on."""
    differing = {v for v, needed in depends_on.items() if needed is None}
    while True:
        stacked = differing | {v for v in traces.touched if traces.abstract(v).layout == "stacked"}
        more = {v for v, needed in depends_on.items() if any(u in stacked for u in needed or ())} - differing
        if not more:
            return differing
        differing |= more
