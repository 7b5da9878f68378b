"""Memory: what the programs of a call need of a device, and the most rows for which that is little enough."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from .._runtime.executable import Executable
from .._runtime.group import Group
from .._variables.variable import Shared
from .inputs import RowInputs
from .plan import CallPlan

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
