"""Explain: what a call would do, read from its plan: programs, memory, collectives, bytes, and why it was compiled."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax

from .._data.overlap import widened
from .._runtime.executable import Executable
from .._runtime.group import Accelerator
from .._runtime.target import known_accelerator
from .._variables.state import AbstractState
from .blocks import Blocks
from .causes import causes
from .execute import ReadyCall
from .feeding import launches
from .hlo import read_schedule
from .inputs import RowInputs
from .look import Where
from .memory import memory_of
from .plan import CallPlan, PlanCache
from .report import Explanation, InputReport, ProgramReport, VariableReport
from .slices import rows_that_fit


def explain(ready: ReadyCall, plans: PlanCache, was_compiled: bool, where: Where) -> Explanation:
    """What is known of a call that was made ready from shapes."""
    plan, group, rows = ready.plan, ready.group, ready.rows
    device = group.accelerator or known_accelerator(group.devices[0])
    programs, flops = tuple(_programs(ready)), _flops(ready)
    found = Explanation(
        function=ready.function.name,
        group=repr(group),
        platform=group.platform,
        lengths=rows.lengths or (),
        num_slices=len(launches(rows.lengths, ready.num_slices)) if rows.lengths else 1,
        programs=programs,
        inputs=tuple(_inputs(ready)),
        variables=tuple(_variables(plan)),
        flops=flops,
        why=causes(list(plans.compiled), plan),
        was_compiled=was_compiled,
        memory_limit=group.memory,
        lower_bound_seconds=_lower_bound(programs, flops, device),
    )
    return found if found.fits is not False else replace(found, rows_that_fit=rows_that_fit(ready, plans, where))


def _programs(ready: ReadyCall) -> Iterator[ProgramReport]:
    """In the order in which they are launched, one each."""
    plan, lengths = ready.plan, ready.rows.lengths
    if plan.finish is None:
        yield _program("the call", plan.last, 1, plan)
        return
    assert lengths is not None
    assert plan.start is not None
    yield _program("begin", plan.start, 1, plan)
    counts: dict[Executable, int] = {}
    for parts in launches(lengths, ready.num_slices):
        program = plan.program_of(parts)
        counts[program] = counts.get(program, 0) + 1
    for program, count in counts.items():
        yield _program("a slice", program, count, plan)
    yield _program("combine", plan.finish, 1, plan)


def _program(role: str, program: Executable, count: int, plan: CallPlan) -> ProgramReport:
    schedule = read_schedule(program.compiled.as_text() or "", program.group.platform != "cpu")
    memory = memory_of(program, plan)
    return ProgramReport(role, count, *memory, program.seconds, schedule.collectives, schedule.heavy)


def _inputs(ready: ReadyCall) -> Iterator[InputReport]:
    spec, rows, size = ready.call.arguments, ready.rows, ready.group.size
    for name, one in zip(spec.scattered_names, rows.each, strict=True):
        count = sum(rows.lengths or ())
        if one.feed.layout == "rows":
            yield InputReport(name, "rows from the host", count, _sent_rows(ready, rows, one))
            continue
        how = "rows that every replica holds" if one.feed.layout == "replicated" else "rows that lie on the replicas"
        if one.scattered_rows is not None:
            how = "rows exchanged between replicas"
        index = 4 * (size if one.feed.index == "slice" else count) if one.feed.index else 0
        yield InputReport(name, how, count, index)
    for place, leaf in zip(spec.broadcast, ready.broadcast, strict=True):
        nbytes = leaf.size * leaf.dtype.itemsize
        yield InputReport(spec.names[place], "broadcast", None, nbytes * size)


def _sent_rows(ready: ReadyCall, rows: RowInputs, one: Any) -> int:
    row = jax.ShapeDtypeStruct(one.shape, one.dtype)
    parts = launches(rows.lengths or (), ready.num_slices)
    return (
        sum(widened(each, one.feed.overlap).tall for each in parts) * ready.group.size * row.size * row.dtype.itemsize
    )


def _variables(plan: CallPlan) -> Iterator[VariableReport]:
    written = {update.variable for update in plan.updates}
    for variable, states in plan.accepts.items():
        state: AbstractState = states[0]
        nbytes = sum(shape.size * shape.dtype.itemsize for shape in state.shapes)
        yield VariableReport(variable.name, nbytes, variable in written, plan.layouts[variable] == "replicated")


def _flops(ready: ReadyCall) -> int:
    """On the replica with the most rows."""
    plan, lengths = ready.plan, ready.rows.lengths
    sizes: list[int | None] = [None] if lengths is None else [p.tall for p in launches(lengths, ready.num_slices)]
    if ready.call.block is not None:
        sizes = list(Blocks(ready.call).sizes_of_longest)
    return sum(plan.flops[size] for size in sizes) + plan.flops_of_then


def _lower_bound(programs: tuple[ProgramReport, ...], flops: int, device: Accelerator | None) -> float | None:
    """Work at the device's peak, or reading arguments and writing results once, whichever takes longer."""
    if device is None or any(program.total_bytes is None for program in programs):
        return None
    moved = sum(((each.argument_bytes or 0) + (each.result_bytes or 0)) * each.launches for each in programs)
    return max(flops / device.flops, moved / device.bandwidth)
