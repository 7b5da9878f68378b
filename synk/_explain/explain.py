"""Explain: describe a call from its plan: programs, memory, collectives, bytes, and why it was compiled; time it."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import prod
from time import perf_counter
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.profiler import TraceAnnotation

from .._base.jax_context import checks_floats
from .._base.units import seconds_text
from .._call.auto_slices import ProgramMemory, bytes_on_device, data_beside, memory_of, sizes_of, variable_bytes
from .._call.binding import BoundArguments
from .._call.compiler import EXCHANGES, LOCAL, NANS
from .._call.execute import Outcome, evaluate
from .._call.feed import Fed
from .._call.parts import Blocks, split_into_launches
from .._call.plan import CallPlan, PlanCache
from .._call.rows import InputSpec, exchange_programs
from .._data.dataset import Data
from .._data.overlap import widened
from .._data.transfer import PartRows, is_sent_by_host
from .._runtime.executable import Executable, relayout
from .._runtime.group import Group
from .._runtime.layout import is_placed
from .._variables.state import VariableState
from .._variables.variable import Shared
from .hlo import not_computing, read_collectives, whole_operations
from .report import Explanation, InputReport, Measured, ProgramReport, VariableReport
from .target import known_accelerator
from .timeline import CALL, END, profile_of, spent, split
from .why import why_compiled

_WAYS = {"replicated": "rows that every replica holds", "stacked": "rows that lie on the replicas"}


def explain(ready: Fed, bound: BoundArguments, plans: PlanCache, was_compiled: bool) -> Explanation:
    plan, group = ready.plan, ready.group
    programs = (*_exchanges(ready), *_programs(ready))
    inputs, variables = tuple(_inputs(ready, bound)), tuple(_variables(plan))
    flops, sizes = _flops(ready), [program.total_bytes for program in programs]
    memory = None if None in sizes else max(size or 0 for size in sizes)
    fits = None if memory is None or group.memory is None else memory <= group.memory
    return Explanation(
        function=ready.function.name,
        group=repr(group),
        platform=group.platform,
        lengths=ready.rows.lengths or (),
        num_slices=len(_launches(ready)) or 1,
        way=_way_to_run(ready),
        whole=_whole(ready, flops),
        per_launch=_per_launch(ready),
        was_compiled=was_compiled,
        why=why_compiled(list(plans.compiled), plan),
        flops=flops,
        sent_bytes=sum(report.sent_bytes for report in inputs),
        memory_bytes=memory,
        memory_limit=group.memory,
        fits=fits,
        lower_bound_seconds=_lower_bound(ready, flops, variables),
        programs=programs,
        inputs=inputs,
        variables=variables,
    )


def _way_to_run(ready: Fed) -> str:
    """Say whether replicas run their rows, or one replica of all devices runs all rows, and why."""
    way, home, rows = ready.group._way.in_words, ready.group._home, sum(ready.rows.lengths or ())
    if ready.group is home:
        return way
    why = 'engine="jit"' if ready.function.engine == "jit" else f"{rows} rows do not divide over {home.size} replicas"
    return f"{why}: {way}"


def _per_launch(ready: Fed) -> str:
    """Say whether a program can run several such calls, as `per_launch` asks for, and why not."""
    now = {NANS: checks_floats(), EXCHANGES: ready.form.exchanges, LOCAL: ready.rows.rows_before is not None}
    why = ready.plan.alone or next((reason for reason, is_so in now.items() if is_so), "")
    return f"one call: {why}" if why else "several calls, if a loop asks for them"


def _whole(ready: Fed, flops: int) -> list[str]:
    """Name the operations that run whole on every device where XLA divides the work, with their share of the flops."""
    rows, mesh = sum(ready.rows.lengths or ()), ready.group._way.dividing_mesh
    if mesh is None or not rows:
        return []
    text = ready.plan.last.compiled.as_text() or ""
    found = {**dict.fromkeys(ready.plan.whole), **whole_operations(text, rows, mesh.size)}
    return [name if part is None else f"{name} ({part / max(flops, 1):.0%} of flops)" for name, part in found.items()]


def _launches(ready: Fed) -> list[PartRows]:
    """Return the rows of each launch; none for a call without rows."""
    lengths = ready.rows.lengths
    return split_into_launches(lengths, ready.num_slices) if lengths else []


def _exchanges(ready: Fed) -> Iterator[ProgramReport]:
    names, group = ready.call.arguments.scattered_names, ready.group
    # Variables, data, and rows that an earlier exchange has brought are in memory meanwhile.
    resident = variable_bytes(ready.plan, group) + data_beside(ready.rows, group)
    for i, program in exchange_programs(group, ready.rows):
        source = ready.rows.sources[i]
        memory = sizes_of(program)._replace(resident=resident - bytes_on_device(source, group))
        yield _program(f"exchange of {names[i]}", program, 1, memory)
        # The rows that came wait in memory while the next exchange runs.
        resident += memory.results or 0


# The first launch of a call with slices begins the sums, one for each slice adds to them, and the last one combines the
# replicas.
def _programs(ready: Fed) -> Iterator[ProgramReport]:
    """Describe the programs that run the function, in the order in which they are launched first."""
    plan = ready.plan
    roles: Counter[tuple[str, Executable]] = Counter()
    if plan.start is None or plan.finish is None:
        roles["the call", plan.last] = 1
    else:
        roles["begin", plan.start] = 1
        roles.update(("a slice", plan.program_of(parts)) for parts in _launches(ready))
        roles["combine", plan.finish] = 1
    for (role, program), count in roles.items():
        memory = memory_of(program, plan)
        resident = memory.resident + data_beside(ready.rows, ready.group)
        yield _program(role, program, count, memory._replace(resident=resident))


def _program(role: str, program: Executable, count: int, memory: ProgramMemory) -> ProgramReport:
    """Describe a program from its compiled text and its memory."""
    # Threads of a CPU run instructions as soon as their operands are there, whatever the order of the text.
    collectives = read_collectives(program.compiled.as_text() or "", program.group.platform != "cpu")
    # One collective of which nobody knows leaves the sum unknown.
    knows = all(collective.behind is not None for collective in collectives)
    sent = [(collective.operand_bytes * (collective.times or 1), collective.behind) for collective in collectives]
    return ProgramReport(
        role,
        count,
        *memory,
        total_bytes=memory.total,
        compile_seconds=program.seconds,
        is_from_cache=program.is_from_cache,
        collective_bytes=sum(size for size, _ in sent),
        behind_bytes=sum(size for size, behind in sent if behind) if knows else None,
        collectives=collectives,
    )


def _inputs(ready: Fed, bound: BoundArguments) -> Iterator[InputReport]:
    spec, rows, group = ready.call.arguments, ready.rows, ready.group
    for i, name in enumerate(spec.scattered_names):
        how, sent = _way(ready, i)
        yield InputReport(name, how, sum(rows.lengths or ()), sent)
    for place, leaf in zip(spec.broadcast, ready.placed(), strict=True):
        # Replicas that share a device share the value.
        sent = leaf.size * leaf.dtype.itemsize * group.mesh.devices.size
        is_sent = _is_sent(group, bound.leaves[place])
        how = "broadcast" if is_sent else "broadcast, from the devices"
        yield InputReport(spec.names[place], how, None, sent if is_sent else 0)


def _is_sent(group: Group, leaf: Any) -> bool:
    if isinstance(leaf, Data):
        return leaf._home.layout != "replicated"
    return not isinstance(leaf, jax.Array) or (group._is_multi_process and not is_placed(group, leaf, "replicated"))


def _way(ready: Fed, i: int) -> tuple[str, int]:
    """Return in words how the rows of an argument reach the replicas, and the bytes that the host sends for it."""
    rows, source, selection = ready.rows.inputs[i], ready.rows.sources[i], ready.rows.selections[i]
    lengths, size, feed = ready.rows.lengths or (), ready.group.size, rows.feed
    if feed.layout == "rows":
        launches = [widened(parts, feed.overlap) for parts in _launches(ready)]
        if not is_sent_by_host(ready.group, source, selection, launches[0], rows.dtype):
            return "rows of an array on the devices", 0
        # All replicas get as many rows as the longest part has.
        sent = sum(ready.group._way.rows_sent(parts.max_rows) for parts in launches)
        return "rows from the host", sent * _row_bytes(rows)
    if rows.scattered_rows is not None:
        # Each replica is told which rows each replica wants.
        longest = widened(split_into_launches(lengths, 1)[0], feed.overlap).max_rows
        return "rows exchanged between replicas", 4 * longest * size * size
    indexes = {None: 0, "slice": size, "gather": sum(lengths)}[feed.index]
    return _WAYS[feed.layout], 4 * indexes


def _row_bytes(rows: InputSpec) -> int:
    return prod(rows.shape) * rows.dtype.itemsize


def _variables(plan: CallPlan) -> Iterator[VariableReport]:
    written = {update.variable for update in plan.updates}
    for variable, states in plan.accepts.items():
        nbytes = sum(shape.size * shape.dtype.itemsize for shape in states[0].shapes)
        is_equal = plan.layouts[variable] == "replicated" or variable._spec.storage.is_sharded
        yield VariableReport(variable.name, nbytes, variable in written, is_equal)


def _flops(ready: Fed) -> int:
    """Count the operations on the replica with the most rows."""
    plan = ready.plan
    sizes = [parts.max_rows for parts in _launches(ready)] or [None]
    if ready.call.block is not None:
        sizes = list(Blocks(ready.call).sizes_of_longest)
    return sum(plan.flops[size] for size in sizes) + plan.flops_of_then


def _lower_bound(ready: Fed, flops: int, variables: Sequence[VariableReport]) -> float | None:
    """Return the flops at the device's peak or the data once through its memory, whichever takes longer."""
    device = ready.group.accelerator or known_accelerator(ready.group.devices[0])
    if device is None:
        return None
    moved = max(ready.rows.lengths or (0,)) * sum(map(_row_bytes, ready.rows.inputs))
    moved += sum(leaf.size * leaf.dtype.itemsize for leaf in ready.placed())
    # Calls with `batch_s` read only some of the rows that variables hold.
    held = {variable.name for variable in ready.plan.held}
    # A variable that is written travels to its device's memory and back.
    moved += sum(report.bytes * (1 + report.is_written) for report in variables if report.name not in held)
    return max(flops / device.flops, moved / device.bandwidth)


def measure(prepare: Callable[[], Fed], calls: int) -> Measured:
    """Time calls, whose results and updates are dropped, and tell where the time of the median one went."""
    # The first call compiles, if nothing has before.
    rehearse(prepare)
    times: list[tuple[float, float, float]] = []
    profile = profile_of(lambda: times.extend(rehearse(prepare)[1:] for _ in range(calls)))
    ready, kinds = prepare(), dict[str, str]()
    exchanges = [program for _, program in exchange_programs(ready.group, ready.rows)]
    for program in dict.fromkeys([*exchanges, *map(ready.plan.program_of, _launches(ready)), ready.plan.last]):
        kinds |= not_computing(program.compiled.as_text() or "")
    # All processes need one order.
    travels = sorted(name for name, kind in kinds.items() if kind)
    devices = ready.group.mesh.devices.ravel()
    mine = [i for i, device in enumerate(devices) if device.process_index == jax.process_index()]
    # One table for all processes, with zeros in the rows of others, so that a gather and a sum fill it everywhere.
    table = np.zeros((len(devices), calls, 6 + 2 * len(travels)))
    table[mine, :, 0], sending = np.array(times)[:, [0, 2]].T
    table[mine, :, 1:] = split(profile, list(devices[mine]), (travels, kinds.keys() - travels), sending)
    if ready.group._is_multi_process:
        table = multihost_utils.process_allgather(table).sum(0)
    # The median call as a whole: medians of its parts would not add up to its time.
    step = int(table[..., 0].mean(0).argsort()[(calls - 1) // 2])
    lines, waited = spent(table[:, step, 1:], mine, [kinds[name] for name in travels])
    last = int(waited.argmin())
    process, most = devices[last].process_index, seconds_text(waited.max() - waited[last])
    slowest = f"device {last} of process {process}: others wait {most} longer than it does"
    return Measured(calls, *times[step][:2], lines, slowest if len(devices) > 1 else None)


class Rehearsal(NamedTuple):
    """A call on copies of its variables, which has ended.

    Attributes:
      outcome: its results and updates, which are not committed.
      seconds: how long it took.
      host_seconds: how long its part on the host took.
      sending_seconds: how long the host took of it to pick rows and to start to send them.
    """

    outcome: Outcome
    seconds: float
    host_seconds: float
    sending_seconds: float


def rehearse(prepare: Callable[[], Fed]) -> Rehearsal:
    """Run a call on copies of its variables, and wait for it; change nothing."""
    ready = prepare()
    # The call may donate what it reads, so it gets copies.
    states, stats = copied_states(ready), ready.function.stats
    # A process that copies for longer is no slow one.
    ready.group._peers.agree("the start of a call that is timed", "")
    sending, start = stats.sending, perf_counter()
    # JAX returns before the devices are done, so both moments are told.
    with TraceAnnotation(CALL):
        # Prepared again inside the mark, since a real call prepares itself too.
        outcome = evaluate(prepare(), states)
    host = perf_counter() - start
    with TraceAnnotation(END):
        jax.block_until_ready((outcome.leaves, [state.leaves for state in outcome.updates.values()]))
    return Rehearsal(outcome, perf_counter() - start, host, stats.sending - sending)


def copied_states(ready: Fed) -> dict[Shared, VariableState]:
    states = {variable: _copied(ready.state(variable), ready.group) for variable in ready.plan.accepts}
    jax.block_until_ready([state.leaves for state in states.values()])
    return states


def _copied(state: VariableState, group: Group) -> VariableState:
    return replace(state, leaves=relayout(group, state.leaves, state.layout, state.layout))
