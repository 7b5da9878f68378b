"""Plan: how calls of one kind run: compiled programs, what goes in, what comes out. Made without any value."""

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

MAX_GROUPS = 4  # for which a function keeps plans that hold on to it


class UpdateSlice(NamedTuple):
    """What a call writes."""

    variable: Shared  # whose new leaves are `results[start:stop]` of the last program
    start: int
    stop: int
    abstract: AbstractState  # of its new state
    depends_on: tuple[Shared, ...] | None  # they are equal on all replicas if every one of these is; None: never


@dataclass(frozen=True, eq=False)
class CallPlan:
    """How calls of one kind run."""

    # The programs that run `fn`, by the sizes of its parts (or, where programs depend on those, the rows of each
    # replica); of a call in one launch the only one, which ends it.
    launches: dict[Any, Executable]
    start: Executable | None  # the program that makes the states before the first of several
    finish: Executable | None  # the program that combines the states of several, and ends the call
    # The variables that each program of `launches` takes, and those of the last one.
    reads: tuple[tuple[Shared, ...], tuple[Shared, ...]]
    # The states of variables that it is for; of each touched variable those that it was made for.
    accepts: dict[Shared, tuple[AbstractState, ...]]
    held: tuple[Shared, ...]  # the variables that hold rows
    layouts: dict[Shared, Layout]  # of the variables as programs take them
    updates: tuple[UpdateSlice, ...]  # what the call writes
    result: ResultSpec  # the structure of what it returns
    from_first: tuple[int, ...]  # which leaves of the result are taken from the first replica
    staying: tuple[int, ...]  # and which stay on the replicas that made them
    outputs: OutputSpec  # the structure of what `fn` returned
    has_flag: bool  # whether the last program also tells that something is not finite, and updates nothing then
    narrowest: np.dtype | None  # of the floats that `fn` computes
    flops: Mapping[int | None, int]  # of `fn` over so many rows, in matrix products and convolutions
    flops_of_then: int
    least_rows: int  # fewer in all would not do
    # Of `f.over`, what compiles the program that ends it, which depends on how much has been kept; else none, since it
    # holds on to what a call has seen.
    compiler: Compiler | None

    def program_of(self, parts: PartRows) -> Executable:
        """The program of one launch of several."""
        return self.launches.get(parts.counts) or self.launches[parts.sizes]

    @property
    def last(self) -> Executable:
        """The program that ends a call."""
        return self.finish or next(iter(self.launches.values()))


# A plan that was compiled: the plan, its group in words, the key of its calls, and the states of its variables.
Compiled = tuple[ref[Any], str, CallSpec, WeakKeyDictionary[Shared, tuple[AbstractState, ...]]]


class Traced(NamedTuple):
    """A kind of call as it is now."""

    touched: Collection[Shared]
    record: tuple[Any, ...]  # equal ones make the same programs
    finish: Callable[[], Any]


class Reached(NamedTuple):
    """Record what a plan's trace depended on outside its function. It holds no variable: variables hold their group."""

    made: int  # the number of the newest variable there was
    names: Names  # the function's own
    record: tuple[Any, ...]  # of what was traced

    def is_current(self) -> bool:
        """Was no variable made since, and do the function's own names have the same objects?"""
        return self.made >= newest() and self.names.are_same()


class PlanCache:
    """Plans of one function: for each kind of call those made for different states of the variables they touch.

    They live in their group, and go with it or with the function; those that hold on to the function go with it alone.
    Where a variable was made since a plan's trace, or a name of the function has another object, the call is traced
    once more, and the plan stays if that makes the same programs.
    """

    def __init__(self) -> None:
        self._touched: WeakKeyDictionary[Shared, None] = WeakKeyDictionary()
        self._reached: WeakKeyDictionary[Any, Reached] = WeakKeyDictionary()  # of each plan: here, for it holds `fn`
        self._holding = BoundedCache(MAX_GROUPS)  # for a group
        self._groups: WeakSet[Group] = WeakSet()  # in which plans live
        self.compiled: deque[Compiled] = deque(maxlen=64)  # the newest plans, to tell why one had to be made

    def variables(self) -> tuple[Shared, ...]:
        """All that plans have touched so far, and that are still somewhere."""
        return tuple([variable for each in self._touched.keyrefs() if (variable := each()) is not None])

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
        made, traced = newest(), trace()  # a failure is not kept
        names = Names([function.fn, function.then])  # after the trace, in which a function may count its traces
        # What calls run stays what they run, whatever the serial run has met since.
        now = self.kept(group, ("as it is now", key), list, holds_function)
        known, touched = dict(list(self._reached.items())), set(traced.touched)  # another thread may find some stale
        same = [plan for plan in (*plans, *now) if plan in known and known[plan].record == traced.record]
        plans = now if retraces else plans
        # One for another state of its variables is asked again when they are in that state.
        others = [plan for plan in plans if plan in known and plan not in same and not _fits(plan, abstract)]
        stale = {plan for plan, reached in known.items() if plan.accepts.keys() - touched and not reached.is_current()}
        dropped = stale if retraces else {*plans, *stale}  # calls may share what the serial run had
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
        plans[:] = [plan, *(each for each in (*same, *others) if each is not plan)][:64]
        return plan

    def is_stale(self, site: "Site", key: Any, trace: Callable[[], Traced]) -> bool:
        """Would the function make another program now than the one that calls of this kind run?"""
        plan = self._current(self.kept(site.group, key, list, holds_function=False), site.abstract)
        return plan is not None and self._reached[plan].record != trace().record

    def _current(self, plans: list[Any], abstract: Callable[[Shared], AbstractState]) -> Any:
        for plan in plans:
            reached = self._reached.get(plan)  # none where another thread has found it stale
            if reached is not None and reached.is_current() and _fits(plan, abstract):
                return plan
        return None

    def _forget(self, stale: Set[Any], touched: Set[Shared]) -> None:
        """Drop plans, and variables that no plan is left for, with all programs, which hold them."""
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
        """What `make` gives, a pure function of `key`. What holds on to the function would not go before the group, if
        that kept it: so the function does, for a few groups, which live as long then."""
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
    """Are the variables in a state that the plan is for?"""
    return all([abstract(variable) in accepted for variable, accepted in plan.accepts.items()])


def plan_key(function: FunctionSpec, call: CallSpec) -> Hashable:
    """Of a kind of call; `f.check` also runs functions without then, and for parts, and then may come after a trace."""
    flags = function.then is None, function.per_part, function.gathers_all, function.refuses_nan
    return call, *flags, function.wires is None


@dataclass(eq=False)
class SliceChoice:
    """In how many slices calls of one kind run, where synk chooses."""

    slices: int
    most: int  # the rows of the longest part, which can be no more slices
    accepts: dict[Shared, tuple[AbstractState, ...]]  # the states of variables that it is for
    has_run: bool = False  # whether such a call has ended well; out of memory it is twice as many


@dataclass(eq=False)
class NeedsLengths:
    """In place of a plan: calls of this kind need one for the very lengths of their replicas."""

    accepts: dict[Shared, tuple[AbstractState, ...]]


def trace_plan(site: Site, call: CallSpec) -> Traced:
    """Trace a kind of call; what is not known yet is made as a `CallPlan`, or `NeedsLengths`."""
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
    apart = _diverging(traces, depends_on) if epilogue.group.size > 1 else set[Shared]()
    layouts: dict[Shared, Layout] = {v: "stacked" if v in apart else traces.abstract(v).layout for v in traces.touched}
    result = epilogue.result
    compiler = Compiler(epilogue, tuple(depends_on), layouts)
    launches, start, finish = compiler.compile(plans)
    updates: list[UpdateSlice] = []
    at = len(result.picked)
    for variable, needed in depends_on.items():
        state = traces.abstract(variable)
        stop = at + len(state.shapes)
        updates.append(UpdateSlice(variable, at, stop, with_layout(state, layouts.get(variable)), needed))
        at = stop
    first = {j for j, i in enumerate(builder.outputs.source_leaf) if i in builder.from_first}
    return CallPlan(
        launches=launches,
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
    """What a function over blocks may not touch."""
    name, block = traces.function.name, traces.function.blocks
    if traces.call.block is None:
        raise ValueError(f"{name}: blocks={block} are blocks of rows, but no argument of this call is scattered.")
    for variable in filter(traces.holds_rows, traces.touched):
        raise rows_not_in_blocks(name, variable.name, block)


def _equality_dependencies(epilogue: Epilogue) -> dict[Shared, tuple[Shared, ...] | None]:
    """For each updated variable, those that must be equal for its new value to be; None where it never is."""
    depends_on: dict[Shared, tuple[Shared, ...] | None] = {}
    first = epilogue.builder.first
    for variable, _ in first.writes:
        depends_on[variable] = None if epilogue.call.has_rows or first.uses_rank else first.variables
    if epilogue.then is None:
        return depends_on
    then, _ = epilogue.then
    equal = tuple(variable for variable in then.variables if not variable._is_per_replica)
    # A `then` of synk's own that updates what each replica has for itself leaves all other variables equal, whatever it
    # communicates.
    leaves_equal = any(variable._is_per_replica for variable, _ in then.writes)
    for variable, _ in then.writes:
        may_differ = variable._may_differ and epilogue.builder.group.size > 1
        depends_on[variable] = None if may_differ or (then.uses_rank and not leaves_equal) else equal
    return depends_on


def _diverging(traces: CallTraces, depends_on: dict[Shared, tuple[Shared, ...] | None]) -> set[Shared]:
    """The updated variables of which each replica keeps a value of its own from now on."""
    apart = {v for v, needed in depends_on.items() if needed is None}
    while True:
        stacked = apart | {v for v in traces.touched if traces.abstract(v).layout == "stacked"}
        more = {v for v, needed in depends_on.items() if any(u in stacked for u in needed or ())} - apart
        if not more:
            return apart
        apart |= more
