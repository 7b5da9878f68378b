"""Explain: what a call would do, read from its plan: programs, memory, collectives, bytes, and why it was compiled."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import jax

from .._call.auto_slices import (
    ProgramMemory,
    bytes_on_device,
    data_beside,
    memory_of,
    rows_that_fit,
    sizes_of,
    variable_bytes,
)
from .._call.blocks import Blocks
from .._call.causes import causes
from .._call.execute import ReadyCall
from .._call.parts import split_into_launches
from .._call.plan import CallPlan, Site
from .._call.rows import RowInputs, exchange_programs
from .._data.overlap import widened
from .._runtime.executable import Executable
from .._runtime.group import Accelerator
from .._runtime.target import known_accelerator
from .._variables.state import AbstractState
from .hlo import read_schedule
from .report import Explanation, InputReport, ProgramReport, VariableReport


def explain(ready: ReadyCall, site: Site, was_compiled: bool) -> Explanation:
    """What is known of a call that was made ready from shapes."""
    plan, group, rows = ready.plan, ready.group, ready.rows
    device = group.accelerator or known_accelerator(group.devices[0])
    programs, flops = (*_exchanges(ready), *_programs(ready)), _flops(ready)
    found = Explanation(
        function=ready.function.name,
        group=repr(group),
        platform=group.platform,
        lengths=rows.lengths or (),
        num_slices=len(split_into_launches(rows.lengths, ready.num_slices)) if rows.lengths else 1,
        programs=programs,
        inputs=tuple(_inputs(ready)),
        variables=tuple(_variables(plan)),
        flops=flops,
        why=causes(list(site.plans.compiled), plan),
        was_compiled=was_compiled,
        memory_limit=group.memory,
        lower_bound_seconds=_lower_bound(ready, programs, flops, device),
    )
    return found if found.fits is not False else replace(found, rows_that_fit=rows_that_fit(ready, site))


def _exchanges(ready: ReadyCall) -> Iterator[ProgramReport]:
    """Of the rows that a batch picks where they lie; beside data there are variables and what was brought before."""
    names, beside = ready.call.arguments.scattered_names, variable_bytes(ready.plan, ready.group)
    beside += data_beside(ready.rows, ready.group)
    for i, program in exchange_programs(ready.group, ready.rows):
        one = ready.rows.each[i]
        memory = sizes_of(program)._replace(resident=beside - bytes_on_device(one.source, ready.group))
        yield _report(f"exchange of {names[i]}", program, 1, memory)
        beside += memory.results or 0


def _programs(ready: ReadyCall) -> Iterator[ProgramReport]:
    """In the order in which they are launched, one each."""
    plan, lengths, data = ready.plan, ready.rows.lengths, data_beside(ready.rows, ready.group)
    if plan.finish is None:
        yield _program("the call", plan.last, 1, plan, data)
        return
    assert lengths is not None
    assert plan.start is not None
    yield _program("begin", plan.start, 1, plan, data)
    counts: dict[Executable, int] = {}
    for parts in split_into_launches(lengths, ready.num_slices):
        program = plan.program_of(parts)
        counts[program] = counts.get(program, 0) + 1
    for program, count in counts.items():
        yield _program("a slice", program, count, plan, data)
    yield _program("combine", plan.finish, 1, plan, data)


def _program(role: str, program: Executable, count: int, plan: CallPlan, data: int) -> ProgramReport:
    memory = memory_of(program, plan)
    return _report(role, program, count, memory._replace(resident=memory.resident + data))


def _report(role: str, program: Executable, count: int, memory: ProgramMemory) -> ProgramReport:
    schedule = read_schedule(program.compiled.as_text() or "", program.group.platform != "cpu")
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
            max_rows = widened(split_into_launches(rows.lengths or (), 1)[0], one.feed.overlap).max_rows
            yield InputReport(name, "rows exchanged between replicas", count, 4 * max_rows * size * size)
            continue
        index = 4 * (size if one.feed.index == "slice" else count) if one.feed.index else 0
        yield InputReport(name, how, count, index)
    for place, leaf in zip(spec.broadcast, ready.broadcast, strict=True):
        nbytes = leaf.size * leaf.dtype.itemsize
        yield InputReport(spec.names[place], "broadcast", None, nbytes * size)


def _sent_rows(ready: ReadyCall, rows: RowInputs, one: Any) -> int:
    row = jax.ShapeDtypeStruct(one.shape, one.dtype)
    parts = split_into_launches(rows.lengths or (), ready.num_slices)
    return (
        sum(widened(each, one.feed.overlap).max_rows for each in parts)
        * ready.group.size
        * row.size
        * row.dtype.itemsize
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
    sizes: list[int | None] = (
        [None] if lengths is None else [p.max_rows for p in split_into_launches(lengths, ready.num_slices)]
    )
    if ready.call.block is not None:
        sizes = list(Blocks(ready.call).sizes_of_longest)
    return sum(plan.flops[size] for size in sizes) + plan.flops_of_then


def _lower_bound(
    ready: ReadyCall, programs: Sequence[ProgramReport], flops: int, device: Accelerator | None
) -> float | None:
    """Work at the device's peak, or reading arguments and writing results once, whichever takes longer. Of rows that
    lie on the device the call reads those that it picks; of an exchange nothing is known but what it gives."""
    if device is None or any(program.total_bytes is None for program in programs):
        return None
    moved = sum(((each.argument_bytes or 0) + (each.result_bytes or 0)) * each.launches for each in programs)
    moved -= sum(each.argument_bytes or 0 for each in programs if each.role.startswith("exchange"))
    # What slices add up in place need not be touched whole.
    moved -= sum(2 * (each.aliased_bytes or 0) * each.launches for each in programs if each.role == "a slice")
    runs = sum(each.launches for each in programs if each.role in ("the call", "a slice"))
    lengths, is_simulated = ready.rows.lengths or (0,), ready.group.is_simulated
    for row, whole in _lying(ready):
        moved += (sum(lengths) if is_simulated else max(lengths)) * row - runs * whole
    return max(flops / device.flops, moved / device.bandwidth)


def _lying(ready: ReadyCall) -> Iterator[tuple[int, int]]:
    """Of what programs take and pick rows from: bytes of a row, and of all that a device has."""
    plan, group = ready.plan, ready.group
    for one in ready.rows.each:
        if one.feed.layout != "rows" and one.scattered_rows is None:
            whole = one.source.size * one.source.dtype.itemsize
            is_on_each = one.feed.layout == "replicated"
            yield prod(one.shape) * one.dtype.itemsize, whole if is_on_each else bytes_on_device(one.source, group)
    for variable in plan.held if ready.call.held_index is not None else ():
        for shape in plan.accepts[variable][0].shapes:
            row = prod(shape.shape[1:]) * shape.dtype.itemsize
            yield row, row * shape.shape[0] * (group.size if group.is_simulated else 1)
