"""Auto slices: choose the fewest slices whose compiled programs fit into a device's memory."""

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import jax
import numpy as np

from .._base.units import size_text
from .._runtime.dispatch import drain
from .._runtime.executable import Executable, relayout
from .._runtime.group import Group
from .._runtime.layout import put
from .._variables.state import VariableState
from .._variables.variable import Shared
from .execute import ReadyCall, execute
from .failures import translate_error
from .parts import split_into_launches
from .plan import CallPlan, Site, SliceChoice, Traced
from .rows import Rows


def choose_slices(site: Site, key: Hashable, rows: Rows, plan_of: Callable[..., CallPlan]) -> SliceChoice:
    """Return the number of slices in which a call runs; the choice is remembered with the function's plans.

    `key` is the key of its plan in one launch; `plan_of(slices, is_probe)` makes its plan for so many slices.
    """
    if rows.lengths is None:
        return SliceChoice(1, 1)
    max_rows = max(rows.lengths)

    def trace() -> Traced:
        least, first = _fewest_that_compile(site.group, plan_of, max_rows)
        choose = partial(_choose, site, plan_of, data_beside(rows, site.group), max_rows, least, first)
        return Traced(first.accepts, (ref(first),), choose)

    return site.plans.find(site, ("slices", key, rows.lengths), trace)


def _fewest_that_compile(group: Group, plan_of: Callable[[int], CallPlan], max_rows: int) -> tuple[int, CallPlan]:
    """Return the fewest slices, 1 or doubled, for which memory is enough to compile; and their plan."""
    slices = 1
    while True:
        try:
            return slices, plan_of(slices)
        except MemoryError:
            # The other processes would not know what this process has met.
            if slices == max_rows or group._is_multi_process:
                raise
            slices = min(2 * slices, max_rows)


def _choose(
    site: Site, plan_of: Callable[..., CallPlan], data_bytes: int, max_rows: int, least: int, first: CallPlan
) -> SliceChoice:
    """Choose slices for replicas that have up to `max_rows` rows, beside so many bytes of data.

    `first` is the plan for `least` slices; fewer slices do not compile.
    """
    group, name = site.group, site.function.name
    limit = max(0, _limit(group, name) - data_bytes)
    needs: dict[int, int] = {}

    def need(rows: int) -> int:
        slices = -(-max_rows // rows)
        plan = first if slices == least == 1 else plan_of(slices, is_probe=True)
        needs[rows] = _memory_needed(plan, group, name)
        return needs[rows]

    # Not every number of rows is the longest of a cut: 10 rows in slices of at most 6 are two slices of 5.
    most, fixed = -(-max_rows // least), variable_bytes(first, group)
    rows = most_rows(need, limit, most, fixed, lambda rows: -(-max_rows // -(-max_rows // rows)))
    if not rows:
        raise MemoryError(
            f"{name}: in slices of one row it still needs {size_text(needs[1])} of a device, results and variables "
            f"included, but programs may use {size_text(limit)}. Make these or a row smaller, or raise memory=."
        )
    slices = -(-max_rows // rows)
    while slices < max_rows and _memory_needed(plan_of(slices), group, name) > limit:
        # Parts have very different lengths, and the probe had compiled one of their programs.
        slices += 1
    return SliceChoice(slices, max_rows)


def _limit(group: Group, name: str) -> int:
    """Return how many bytes programs may use on a device, as process 0 has it, so that all processes choose alike."""
    limit = int(group._peers.from_process_0(f"the memory of {group}", lambda: str(group.memory or 0)))
    if not limit:
        raise ValueError(
            f'{name}: num_slices="auto" fits programs into the memory of a device, which a {group.platform} does not '
            f'tell. Name it: synk.init(memory="14GB"), or give a number of slices.'
        )
    return limit


def _memory_needed(plan: CallPlan, group: Group, name: str) -> int:
    """Return the bytes that the largest program of a plan needs."""
    programs = [*plan.programs.values(), *([] if plan.finish is None else [plan.finish])]
    totals = [total for program in programs if (total := memory_of(program, plan).total) is not None]
    if len(totals) < len(programs):
        raise ValueError(
            f'{name}: num_slices="auto" needs to know what programs need, which JAX does not tell for a '
            f"{group.platform}. Give a number of slices."
        )
    return max(totals)


def execute_fitting(ready: ReadyCall, prepare: Callable[[], ReadyCall]) -> Any:
    """Run a call whose slices synk has chosen. If memory runs out, run it in twice as many, with nothing lost."""
    while True:
        choice, lengths = ready.choice, ready.rows.lengths
        assert choice is not None
        ready.function.stats.slices = len(split_into_launches(lengths, ready.num_slices)) if lengths else 1
        # The other processes would not know that this process has run out of memory.
        if ready.group._is_multi_process:
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
    """Run a call whose slices have not run yet, and wait. Out of memory, its variables get their old values back, from
    copies on the host if the call donates."""
    kept: dict[Shared, tuple[VariableState, list[np.ndarray]]] = {}
    for variable in [update.variable for update in ready.plan.updates]:
        state = ready.state(variable)
        kept[variable] = state, [np.array(leaf) for leaf in state.leaves] if ready.call.donate else []
    try:
        result = execute(ready)
        jax.block_until_ready((result, [update.variable._state.leaves for update in ready.plan.updates]))
    except Exception as error:
        translated = translate_error(error, ready.function.name)
        if not isinstance(translated, MemoryError):
            raise
        # Wait for the programs under way: afterwards none marks a variable as lost.
        drain()
        for variable, (state, leaves) in kept.items():
            restored = state.leaves
            if any(leaf.is_deleted() for leaf in restored):
                placed = [put(ready.group, leaf, state.layout) for leaf in leaves]
                # A copy on the devices: `put` may share the host's memory.
                restored = relayout(ready.group, placed, state.layout, state.layout)
            variable._state = replace(state, leaves=restored)
        raise translated from error
    choice.has_run = True
    return result


# Questions after the first, each of which compiles a program.
_TRIES = 4
# Stop once the smallest number of rows known to be too large is within this factor of the largest known to fit.
_CLOSE = 1.1


class ProgramMemory(NamedTuple):
    """Bytes of one device while a program runs; None where the backend does not tell.

    Attributes:
      arguments: bytes of its arguments.
      temporary: bytes of its intermediate values.
      results: bytes of its results.
      aliased: bytes of results that take the place of arguments.
      resident: bytes of variables and data of the call that the program does not take.
    """

    arguments: int | None
    temporary: int | None
    results: int | None
    aliased: int | None
    resident: int

    @property
    def total(self) -> int | None:
        """Return the sum of all."""
        if self.arguments is None or self.temporary is None or self.results is None or self.aliased is None:
            return None
        return self.arguments + self.temporary + self.results - self.aliased + self.resident


def memory_of(program: Executable, plan: CallPlan) -> ProgramMemory:
    """Return the bytes that a program of a plan needs."""
    read = plan.reads[program is plan.finish or plan.start is None]
    resident = sum(_device_bytes(v, plan, program.group) for v in plan.accepts if v not in read)
    return sizes_of(program)._replace(resident=resident)


def sizes_of(program: Executable) -> ProgramMemory:
    """Return the bytes that a program needs for itself."""
    analysis: Any = program.compiled.memory_analysis()
    kinds = ("argument", "temp", "output", "alias")
    return ProgramMemory(*(getattr(analysis, f"{kind}_size_in_bytes", None) for kind in kinds), resident=0)


def variable_bytes(plan: CallPlan, group: Group) -> int:
    """Return the bytes that all variables of a plan take on a device."""
    return sum(_device_bytes(variable, plan, group) for variable in plan.accepts)


def data_beside(rows: Rows, group: Group) -> int:
    """Return a device's bytes of data from which rows are exchanged. The call's programs do not take this data."""
    pairs = zip(rows.inputs, rows.sources, strict=True)
    return sum(bytes_on_device(source, group) for spec, source in pairs if spec.scattered_rows is not None)


def bytes_on_device(stacked: Any, group: Group) -> int:
    """Return the bytes that a device holds of a stacked array."""
    return stacked.size * stacked.dtype.itemsize // (1 if group.is_simulated else group.size)


def _device_bytes(variable: Shared, plan: CallPlan, group: Group) -> int:
    """Return the bytes that a variable takes on a device; all simulated replicas share one device."""
    once = sum(shape.size * shape.dtype.itemsize for shape in plan.accepts[variable][0].shapes)
    return once * (group.size if group.is_simulated and plan.layouts[variable] == "stacked" else 1)


def most_rows(
    need: Callable[[int], int], limit: int, full: int, fixed: int = 0, snap: Callable[[int], int] = lambda rows: rows
) -> int:
    """Return about the most rows, up to `full`, that need at most `limit` bytes; 0 if one row needs more.

    The search begins with `full` rows and interpolates downward: extrapolating from few rows underestimates.

    Args:
      need: returns the bytes that a number of rows needs; it compiles.
      limit: bytes that there are.
      full: the most rows wanted.
      fixed: bytes that even no rows would need.
      snap: rounds a number of rows down to one that slices can have.
    """
    good, good_bytes = 0, fixed
    bad, bad_bytes = full, need(full)
    if bad_bytes <= limit:
        return full
    for left in range(_TRIES, 0, -1):
        if bad - 1 <= good or snap(bad - 1) <= good or (good and bad <= _CLOSE * good):
            break
        # Nothing fits yet: aim 10 % lower, since more memory than `fixed` may not depend on rows.
        aim = limit if good else 0.9 * limit
        below = bad - 1 if good else max(1, int(0.9 * bad))
        guess = int(good + (aim - good_bytes) * (bad - good) / max(1, bad_bytes - good_bytes))
        guess = 1 if left == 1 and not good else guess
        rows = snap(min(max(guess, good + 1), below))
        rows = rows if rows > good else snap(bad - 1)
        size = need(rows)
        if size <= limit:
            good, good_bytes = rows, size
        else:
            bad, bad_bytes = rows, size
    return good
