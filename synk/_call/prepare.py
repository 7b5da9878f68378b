"""Prepare: turn the arguments of a call into a call that only has to run."""

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

from .._base.partition import lengths_of
from .._runtime.dispatch import retire_finished
from .auto_slices import choose_slices
from .binding import AUTO, BoundArguments, CallOptions
from .execute import ReadyCall
from .kinds import check_call, find_plan
from .parts import split_into_launches
from .plan import Site, plan_key, trace_plan
from .spec import FunctionSpec


def prepare(site: Site, bound: BoundArguments, options: CallOptions) -> ReadyCall:
    """Check a call's arguments and rows, and find or make its plan."""
    choice, function = None, site.function
    # Blocks run one at a time anyway.
    if function.blocks is not None:
        options = options._replace(num_slices=1)
    if options.num_slices == AUTO:
        choice = choose_slices(site, bound, options)
        options = options._replace(num_slices=choice.slices)
    while True:
        checked, slices = check_call(site, bound, options), options.num_slices
        try:
            call, plan = find_plan(site, checked, slices)
            break
        except MemoryError:
            # The device had too little memory for kernels that XLA tried.
            if choice is None or choice.slices == choice.most or site.group._is_multi_process:
                raise
            choice.slices = min(2 * choice.slices, choice.most)
            options = options._replace(num_slices=choice.slices)
    if plan.least_rows > 1 and not function.is_over:
        check_row_count(function.name, plan.least_rows, checked.rows.lengths)
    if plan.staying:
        _check_dealt_out(function.name, checked.rows.lengths or (), site.group.size)
    return ReadyCall(function, site.group, call, plan, checked.rows, checked.broadcast, slices, choice)


def start(function: FunctionSpec, prepare: Callable[[], ReadyCall], run: Callable[[ReadyCall], Any]) -> Any:
    """Prepare and run a call, and count rows and seconds in the function's stats."""
    stats = function.stats
    # A variable that a dead program was to write raises now, before anything is checked.
    retire_finished()
    begun, sending, compiling = perf_counter(), stats.sending, stats.dispatching
    ready = prepare()
    prepared = perf_counter()
    stats.selecting += prepared - begun - (stats.dispatching - compiling)
    result = run(ready)
    stats.rows += sum(ready.rows.lengths or ())
    stats.dispatching += perf_counter() - prepared - (stats.sending - sending)
    return result


def check_row_count(name: str, least: int, lengths: tuple[int, ...] | None) -> None:
    """Check that a call has as many rows in all as its outputs need."""
    count = sum(lengths or ())
    if count < least:
        raise ValueError(
            f"{name}: an output of it needs {least} rows, as top_k does, but this call has {count} in all."
        )


def _check_dealt_out(name: str, lengths: tuple[int, ...], size: int) -> None:
    """Check that rows which stay on their replicas are dealt out as the rows of `synk.data` are."""
    usual = lengths_of(sum(lengths), size)
    if lengths != usual:
        raise ValueError(
            f'{name}: an output of it is "scatter", for rows dealt out as {list(usual)}, but this call gives the '
            f'replicas {list(lengths)}. Use "concat".'
        )


def is_stale(site: Site, bound: BoundArguments, options: CallOptions) -> bool:
    """Tell whether calls run another program than the function would make now, since what it captures has changed."""
    if options.num_slices == AUTO:
        options = options._replace(num_slices=choose_slices(site, bound, options).slices)
    checked, slices = check_call(site, bound, options), options.num_slices
    lengths = checked.rows.lengths
    calls = [checked.in_slices(slices, site.function)]
    if lengths is not None:
        calls.append(calls[0]._replace(lengths=lengths, num_slices=len(split_into_launches(lengths, slices))))
    return any(
        site.plans.is_stale(site, plan_key(site.function, call), partial(trace_plan, site, call)) for call in calls
    )
