"""Auto slices: double the slices of a call until its compiled programs fit into a device's memory."""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple
from weakref import ref

from .._base.units import size_text
from .._runtime.executable import Executable
from .._runtime.group import Group
from .._variables.variable import Shared
from .plan import CallPlan, Site, SliceChoice, Traced
from .rows import Rows


def choose_slices(site: Site, key: Hashable, rows: Rows, plan_of: Callable[[int], CallPlan]) -> SliceChoice:
    """Return the number of slices in which a call runs; `key` is the key of its plan in one launch."""
    if rows.lengths is None:
        return SliceChoice(1, 1)
    most = max(rows.lengths)

    def trace() -> Traced:
        limit, slices = max(0, _limit(site.group, site.function.name) - data_beside(rows, site.group)), 1
        while (plan := _fitting_plan(site, plan_of, slices, most, limit)) is None:
            # Doubling compiles few programs; each finer step would cost a compilation.
            slices = min(2 * slices, most)
        return Traced(plan.accepts, (ref(plan),), lambda: SliceChoice(slices, most))

    return site.plans.find(site, ("slices", key, rows.lengths), trace)


def _fitting_plan(
    site: Site, plan_of: Callable[[int], CallPlan], slices: int, most: int, limit: int
) -> CallPlan | None:
    """Return the plan for so many slices; None if its programs need more than `limit` bytes, or more than there is to
    be compiled. For `most` slices raise MemoryError then."""
    group, name = site.group, site.function.name
    try:
        plan = plan_of(slices)
    except MemoryError:
        # The other processes would not know what this process has met.
        if slices == most or group._is_multi_process:
            raise
        return None
    needed = _memory_needed(plan, group, name)
    if needed <= limit:
        return plan
    if slices < most:
        return None
    raise MemoryError(
        f"{name}: in slices of one row it still needs {size_text(needed)} of a device, results and variables included, "
        f"but programs may use {size_text(limit)}. Make these or a row smaller, or raise memory=."
    )


def _limit(group: Group, name: str) -> int:
    """Return how many bytes programs may use on a device, as process 0 has it, so that all processes choose alike."""
    # All processes must choose alike, since slices are launches in which they communicate: process 0 tells its own
    # limit.
    limit = int(group._peers.from_process_0(f"the memory of {group}", lambda: str(group.memory or 0)))
    if not limit:
        raise ValueError(
            f'{name}: num_slices="auto" fits programs into the memory of a device, which a {group.platform} does not '
            f'tell. Name it: synk.init(memory="14GB"), or give a number of slices.'
        )
    return limit


def _memory_needed(plan: CallPlan, group: Group, name: str) -> int:
    programs = [*plan.programs.values(), *([] if plan.finish is None else [plan.finish])]
    totals = [total for program in programs if (total := memory_of(program, plan).total) is not None]
    if len(totals) < len(programs):
        raise ValueError(
            f'{name}: num_slices="auto" needs to know what programs need, which JAX does not tell for a '
            f"{group.platform}. Give a number of slices."
        )
    # Launches run one after another, so the largest program counts and not their sum.
    return max(totals)


class ProgramMemory(NamedTuple):
    """Bytes of one device while a program runs; None where the backend does not tell.

    Attributes:
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
        if self.arguments is None or self.temporary is None or self.results is None or self.aliased is None:
            return None
        return self.arguments + self.temporary + self.results - self.aliased + self.resident


def memory_of(program: Executable, plan: CallPlan) -> ProgramMemory:
    # Variables that a program does not take still lie on the device while it runs.
    read = plan.reads[program is plan.finish or plan.start is None]
    resident = sum(_device_bytes(v, plan, program.group) for v in plan.accepts if v not in read)
    return sizes_of(program)._replace(resident=resident)


def sizes_of(program: Executable) -> ProgramMemory:
    analysis: Any = program.compiled.memory_analysis()
    kinds = ("argument", "temp", "output", "alias")
    return ProgramMemory(*(getattr(analysis, f"{kind}_size_in_bytes", None) for kind in kinds), resident=0)


def variable_bytes(plan: CallPlan, group: Group) -> int:
    return sum(_device_bytes(variable, plan, group) for variable in plan.accepts)


def data_beside(rows: Rows, group: Group) -> int:
    """Return a device's bytes of data from which rows are exchanged. The call's programs do not take this data."""
    pairs = zip(rows.inputs, rows.sources, strict=True)
    return sum(bytes_on_device(source, group) for spec, source in pairs if spec.scattered_rows is not None)


def bytes_on_device(stacked: Any, group: Group) -> int:
    return stacked.size * stacked.dtype.itemsize // (1 if group._way.shares_device else group.size)


def _device_bytes(variable: Shared, plan: CallPlan, group: Group) -> int:
    # All simulated replicas share one device.
    once = sum(shape.size * shape.dtype.itemsize for shape in plan.accepts[variable][0].shapes)
    return once * (group.size if group._way.shares_device and plan.layouts[variable] == "stacked" else 1)
