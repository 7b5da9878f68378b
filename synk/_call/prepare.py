"""Prepare: from arguments to a call that only has to run."""

from collections.abc import Callable
from time import perf_counter
from typing import Any

from .._base.partition import lengths_of
from .._runtime.dispatch import retire_finished
from .auto_slices import choose_slices, find_plan
from .binding import AUTO, BoundArguments, CallOptions
from .execute import ReadyCall
from .kinds import check_call
from .plan import Site
from .spec import FunctionSpec


def prepare(site: Site, bound: BoundArguments, options: CallOptions) -> ReadyCall:
    """Check a call's arguments and rows, and find or make its plan."""
    choice, function = None, site.function
    if function.blocks is not None:
        options = options._replace(num_slices=1)  # one block at a time runs anyway
    if options.num_slices == AUTO:
        choice = choose_slices(site, bound, options)
        options = options._replace(num_slices=choice.slices)
    while True:
        looked, slices = check_call(site, bound, options), options.num_slices
        try:
            call, plan = find_plan(site, looked, slices)
            break
        except MemoryError:  # of a device, while XLA tried kernels
            if choice is None or choice.slices == choice.most or site.group._is_multi_process:
                raise
            choice.slices = min(2 * choice.slices, choice.most)
            options = options._replace(num_slices=choice.slices)
    if plan.least_rows > 1 and not function.is_over:
        check_row_count(function.name, plan.least_rows, looked.rows.lengths)
    if plan.staying:
        _check_dealt_out(function.name, looked.rows.lengths or (), site.group.size)
    return ReadyCall(function, site.group, call, plan, looked.rows, looked.broadcast, slices, choice)


def start(function: FunctionSpec, prepare: Callable[[], ReadyCall], run: Callable[[ReadyCall], Any]) -> Any:
    """Prepare and run a call, and note how long both took."""
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
    """Some answers need so many rows in all."""
    count = sum(lengths or ())
    if count < least:
        raise ValueError(
            f"{name}: an output of it needs {least} rows, as top_k does, but this call has {count} in all."
        )


def _check_dealt_out(name: str, lengths: tuple[int, ...], size: int) -> None:
    """What stays on the replicas is data, whose rows lie as those of all data."""
    usual = lengths_of(sum(lengths), size)
    if lengths != usual:
        raise ValueError(
            f'{name}: an output of it is "scatter", for rows dealt out as {list(usual)}, but this call gives the '
            f'replicas {list(lengths)}. Use "concat".'
        )
