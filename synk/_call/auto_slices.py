"""Slices: the plan of a call in so many slices, or in the fewest whose programs fit into a device's memory."""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple
from weakref import ref

import jax
import numpy as np

from .._base.units import size_text
from .._runtime.dispatch import drain
from .._runtime.executable import Executable, relayout
from .._runtime.group import Group
from .._runtime.layout import put
from .._variables.access import bind
from .._variables.state import VariableState
from .._variables.variable import Shared
from .binding import AUTO, BoundArguments, CallOptions
from .execute import ReadyCall, execute, translate_error
from .kinds import FORM_FIELDS, Looked, check_call
from .plan import CallPlan, NeedsLengths, Site, SliceChoice, Traced, plan_key, trace_plan
from .rows import RowInputs, launches
from .spec import CallSpec


def find_plan(site: Site, looked: Looked, slices: int, is_probe: bool = False) -> tuple[CallSpec, CallPlan]:
    """The plan of a call in so many slices, and its key; made where there is none.

    A probe shows what memory programs need: of those that run slices it has one alone, whose parts differ if any do,
    since that may run both sizes.
    """
    call, lengths = looked.call(slices, site.function), looked.rows.lengths
    if is_probe:
        call = call._replace(part_sizes=(max(call.part_sizes, key=lambda sizes: (len(sizes), sizes)),))
    plan = _find(site, call)
    if isinstance(plan, NeedsLengths):
        call = call._replace(lengths=lengths, num_slices=len(launches(lengths or (), slices)))
        plan = _find(site, call)
    assert isinstance(plan, CallPlan)
    return call, plan


def _find(site: Site, call: CallSpec) -> CallPlan | NeedsLengths:
    function = site.function

    def timed(act: Callable[[], Any]) -> Any:
        start = perf_counter()
        found = act()
        function.stats.dispatching += perf_counter() - start
        return found

    def trace() -> Traced:
        traced: Traced = timed(partial(trace_plan, site, call))

        def compile() -> CallPlan | NeedsLengths:
            try:
                return timed(traced.finish)
            except jax.errors.JaxRuntimeError as error:  # XLA tries kernels on a GPU, which may not do for them
                found = translate_error(error, function.name)
                if found is error:
                    raise
                raise found from error

        return traced._replace(finish=compile)

    def twin(plan: CallPlan | NeedsLengths) -> Hashable:
        """What updates nothing donates nothing."""
        is_one = isinstance(plan, CallPlan) and not plan.updates
        return plan_key(function, call._replace(donate=not call.donate)) if is_one else None

    key = plan_key(function, call)
    return site.find(key, trace, holds_function=call.is_over, twin=twin)


def is_stale(site: Site, bound: BoundArguments, options: CallOptions) -> bool:
    """Do calls run another program than the function would make now, since what it captures has changed?"""
    if options.num_slices == AUTO:
        options = options._replace(num_slices=choose_slices(site, bound, options).slices)
    looked, slices = check_call(site, bound, options), options.num_slices
    lengths = looked.rows.lengths
    calls = [looked.call(slices, site.function)]
    if lengths is not None:
        calls.append(calls[0]._replace(lengths=lengths, num_slices=len(launches(lengths, slices))))
    return any(
        site.plans.is_stale(site, plan_key(site.function, call), partial(trace_plan, site, call)) for call in calls
    )


def choose_slices(site: Site, bound: BoundArguments, options: CallOptions) -> SliceChoice:
    """In how many slices a call runs: the fewest whose programs fit, remembered with its plans."""
    site = replace(site, is_abstract=True)

    def ask(slices: int) -> Looked:
        return check_call(site, bound, options._replace(num_slices=slices))

    whole = ask(1)
    lengths = whole.rows.lengths
    if lengths is None:
        return SliceChoice(1, 1, {})
    key = ("slices", plan_key(site.function, CallSpec(*whole.form)), lengths)

    def trace() -> Traced:
        first = _fewest_that_compile(site, ask, max(lengths))
        choose = partial(_choose, site, ask, max(lengths), first)
        return Traced(first.plan.accepts, (ref(first.plan),), choose)

    return site.find(key, trace)


class _Sliced(NamedTuple):
    """A call in so many slices.

    Attributes:
      slices: how many.
      plan: how such calls run.
    """

    slices: int
    plan: CallPlan


def _fewest_that_compile(site: Site, ask: Callable[[int], Looked], max_rows: int) -> _Sliced:
    """Return the fewest slices, 1 or doubled, for which a device's memory does to compile programs."""
    slices = 1
    while True:
        try:
            return _Sliced(slices, find_plan(site, ask(slices), slices)[1])
        except MemoryError:
            if slices == max_rows or site.group._is_multi_process:  # which would not know what the others found
                raise
            slices = min(2 * slices, max_rows)


def _choose(site: Site, ask: Callable[[int], Looked], max_rows: int, first: _Sliced) -> SliceChoice:
    """Choose for replicas that have up to `max_rows` rows; fewer slices than `first` has do not compile."""
    group, name = site.group, site.function.name
    limit = _limit(group, name)
    limit = max(0, limit - data_beside(ask(1).rows, group))
    needs: dict[int, int] = {}

    def need(rows: int) -> int:
        slices = -(-max_rows // rows)
        if slices == first.slices == 1:
            plan = first.plan
        else:
            plan = find_plan(site, ask(slices), slices, is_probe=True)[1]
        needs[rows] = _bytes(plan, group, name)
        return needs[rows]

    # Rows as slices cut them: 10 in slices of 4 or fewer are three slices, the longest of which has 4; of 6, 5.
    most, fixed = -(-max_rows // first.slices), variable_bytes(first.plan, group)
    rows = most_rows(need, limit, most, fixed, lambda rows: -(-max_rows // -(-max_rows // rows)))
    if not rows:
        raise MemoryError(
            f"{name}: in slices of one row it still needs {size_text(needs[1])} of a device, results and variables "
            f"included, but programs may use {size_text(limit)}. Make these or a row smaller, or raise memory=."
        )
    slices = -(-max_rows // rows)
    while slices < max_rows and _bytes(find_plan(site, ask(slices), slices)[1], group, name) > limit:
        slices += 1  # parts of very different lengths, of which a probe showed one alone
    return SliceChoice(slices, max_rows, first.plan.accepts)


def _limit(group: Group, name: str) -> int:
    """Bytes of a device; over processes those of the first, so that all choose alike."""
    limit = int(group._peers.from_process_0(f"the memory of {group}", lambda: str(group.memory or 0)))
    if not limit:
        raise ValueError(
            f'{name}: num_slices="auto" fits programs into the memory of a device, which a {group.platform} does not '
            f'tell. Name it: synk.init(memory="14GB"), or give a number of slices.'
        )
    return limit


def _bytes(plan: CallPlan, group: Group, name: str) -> int:
    found = memory_needed(plan)
    if found is None:
        raise ValueError(
            f'{name}: num_slices="auto" needs to know what programs need, which JAX does not tell for a '
            f"{group.platform}. Give a number of slices."
        )
    return found


def rows_that_fit(ready: ReadyCall, site: Site) -> int | None:
    """How many rows such a call may have in all for a device's memory; None where it is not known."""
    group, lengths = ready.group, ready.rows.lengths
    if (
        lengths is None
        or ready.call.block
        or ready.plan.held
        or any(feed.layout != "rows" for feed in ready.call.feeds)
    ):
        return None  # programs take all the rows that lie on the devices, however many of these run
    if group.memory is None or memory_needed(ready.plan) is None:
        return None

    def need(max_rows: int) -> int:
        if max_rows == max(lengths):
            return memory_needed(ready.plan) or 0
        looked = Looked(ready.rows._replace(lengths=(max_rows,) * group.size), [], ready.call[:FORM_FIELDS])
        plan = find_plan(site, looked, ready.num_slices, is_probe=True)[1]
        return memory_needed(plan) or 0

    max_rows = most_rows(need, group.memory, max(lengths), variable_bytes(ready.plan, group))
    return min(max_rows * group.size, sum(lengths))


def execute_fitting(ready: ReadyCall, prepare: Callable[[], ReadyCall]) -> Any:
    """Run a call; where synk has chosen its slices and memory does not do, in twice as many, with nothing lost."""
    while True:
        choice, lengths = ready.choice, ready.rows.lengths
        ready.function.stats.slices = len(launches(lengths, ready.num_slices)) if lengths else 1
        if choice is None or ready.group._is_multi_process:  # of which one cannot know what the others found
            return execute(ready)
        try:
            return execute(ready) if choice.has_run else _execute_first(ready, choice)
        except MemoryError:
            is_lost = any(update.variable._state.failure for update in ready.plan.updates)
            if is_lost or choice.slices == choice.most:
                raise
            choice.slices, choice.has_run = min(2 * choice.slices, choice.most), False
        ready = prepare()


def _execute_first(ready: ReadyCall, choice: SliceChoice) -> Any:
    """Run a call whose slices are new, and wait. Out of memory, variables get their old values back: a copy on the host
    where these are donated."""
    kept: dict[Shared, tuple[VariableState, list[np.ndarray]]] = {}
    for variable in [update.variable for update in ready.plan.updates]:
        state = bind(variable, ready.group)
        kept[variable] = state, [np.array(leaf) for leaf in state.leaves] if ready.call.donate else []
    try:
        result = execute(ready)
        jax.block_until_ready((result, [update.variable._state.leaves for update in ready.plan.updates]))
    except Exception as error:
        found = translate_error(error, ready.function.name)
        if not isinstance(found, MemoryError):
            raise
        drain()  # afterwards no program marks a variable as lost
        for variable, (state, leaves) in kept.items():
            there = state.leaves
            if any(leaf.is_deleted() for leaf in there):
                placed = [put(ready.group, leaf, state.layout) for leaf in leaves]
                there = relayout(ready.group, placed, state.layout, state.layout)  # memory of their own
            variable._state = replace(state, leaves=there)
        raise found from error
    choice.has_run = True
    return result


_TRIES = 4  # further questions after the first, each of which compiles
_CLOSE = 1.1  # what is as near to the most as this is near enough


class ProgramMemory(NamedTuple):
    """Bytes of one device while a program runs. None: the backend does not tell."""

    arguments: int | None
    temporary: int | None
    results: int | None
    aliased: int | None  # of results that take the place of arguments
    resident: int  # of shared variables and data of the call that this program does not take

    @property
    def total(self) -> int | None:
        """All together."""
        if self.arguments is None or self.temporary is None or self.results is None or self.aliased is None:
            return None
        return self.arguments + self.temporary + self.results - self.aliased + self.resident


def memory_of(program: Executable, plan: CallPlan) -> ProgramMemory:
    """What one of a plan's programs needs."""
    taken = plan.reads[program is plan.finish or plan.start is None]
    resident = sum(_device_bytes(v, plan, program.group) for v in plan.accepts if v not in taken)
    return sizes_of(program)._replace(resident=resident)


def sizes_of(program: Executable) -> ProgramMemory:
    """What a program needs, whatever else there is."""
    found: Any = program.compiled.memory_analysis()
    kinds = ("argument", "temp", "output", "alias")
    return ProgramMemory(*(getattr(found, f"{kind}_size_in_bytes", None) for kind in kinds), resident=0)


def memory_needed(plan: CallPlan) -> int | None:
    """What the largest of a plan's programs needs. None: the backend does not tell."""
    totals = [memory_of(program, plan).total for program in _programs(plan)]
    return None if None in totals else max(total or 0 for total in totals)


def variable_bytes(plan: CallPlan, group: Group) -> int:
    """What all its variables take of a device."""
    return sum(_device_bytes(variable, plan, group) for variable in plan.accepts)


def data_beside(rows: RowInputs, group: Group) -> int:
    """What a device has of the data from which rows are exchanged, which the call's programs do not take."""
    return sum(bytes_on_device(one.source, group) for one in rows.each if one.scattered_rows is not None)


def bytes_on_device(stacked: Any, group: Group) -> int:
    """What a device has of a stacked array."""
    return stacked.size * stacked.dtype.itemsize // (1 if group.is_simulated else group.size)


def _programs(plan: CallPlan) -> Iterator[Executable]:
    yield from plan.launches.values()
    if plan.finish is not None:
        yield plan.finish


def _device_bytes(variable: Shared, plan: CallPlan, group: Group) -> int:
    """What a variable takes of a device, on which simulated replicas are together."""
    once = sum(shape.size * shape.dtype.itemsize for shape in plan.accepts[variable][0].shapes)
    return once * (group.size if group.is_simulated and plan.layouts[variable] == "stacked" else 1)


def most_rows(
    need: Callable[[int], int], limit: int, full: int, fixed: int = 0, snap: Callable[[int], int] = lambda rows: rows
) -> int:
    """The most rows, `full` or fewer, that need at most `limit` bytes, near enough. 0: one row needs more.

    It asks for what `full` rows need and then interpolates downward, since from few rows upward one underestimates.

    Args:
      need: bytes for so many rows.
      limit: bytes that there are.
      full: the most rows wanted.
      fixed: bytes that no rows would need at least.
      snap: the next number of rows downward that can be had.
    """
    known = {full: need(full)}
    if known[full] <= limit:
        return full
    good, bad = 0, full
    for left in range(_TRIES, 0, -1):
        if bad - 1 <= good or snap(bad - 1) <= good or (good and bad <= _CLOSE * good):
            break
        guess = 1 if left == 1 and not good else _guess(known, good, limit, fixed)
        below = bad - 1 if good else max(1, int(0.9 * bad))
        rows = snap(min(max(guess, good + 1), below))
        rows = rows if rows > good else snap(bad - 1)
        known[rows] = need(rows)
        good, bad = (rows, bad) if known[rows] <= limit else (good, rows)
    return good


def _guess(known: dict[int, int], good: int, limit: int, fixed: int) -> int:
    """How many rows may do, by the line through the two known numbers of rows that are nearest."""
    if len(known) == 1:
        low, low_bytes, aim = 0, fixed, 0.9 * limit  # more than what is known is fixed
    else:
        low = good or sorted(known)[0]
        low_bytes, aim = known[low], limit if good else 0.97 * limit
    high = min(rows for rows in known if rows > low)
    slope = (known[high] - low_bytes) / (high - low)
    return int(low + (aim - low_bytes) / slope) if slope > 0 else 1
