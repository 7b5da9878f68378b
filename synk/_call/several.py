"""Several: prepare consecutive calls of a loop that one program runs, and start them."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from time import perf_counter
from typing import Any

from .._base.jax_context import checks_floats
from .._data.process_rows import ProcessLocalRows
from .._runtime.dispatch import retire_finished
from .binding import BoundArguments, CallOptions
from .execute import ReadyCall, execute_calls
from .kinds import Kind, check_row_count, recognise
from .plan import Form, Instead, Site
from .repeat import EXCHANGES, LOCAL, NANS, SLICES, NotTogether, RunsAlone
from .rows import Rows
from .spec import Repeat

# Arguments and options of a call.
Call = tuple[BoundArguments, CallOptions]


# Fewer calls than these run alone, by the program of one call.
FEWEST = 3
FEW = f"a program runs {FEWEST} calls of one kind or more"

# Rows and leaves of each of several calls.
Several = Sequence[tuple[Rows, Sequence[Any]]]


def start_calls(
    site: Site,
    calls: Sequence[Call],
    repeat: Repeat,
    run: Callable[[ReadyCall, Several, Repeat], list[Any]] = execute_calls,
) -> tuple[list[Any], bool]:
    """Start the first of these calls, and all behind it that the same program runs.

    `run` takes the first, rows and leaves of each, and `repeat`. It returns the results, perhaps not all.

    Returns:
      The results, one a call; and whether the next call is refused, since its numbers are not finite.

    Raises:
      NotTogether: too few calls are alike.
      RunsAlone: no program runs several such calls.
      Other errors: as of the first call.
    """
    stats, function = site.function.stats, site.function
    retire_finished()
    begun, compiling, sending = perf_counter(), stats.dispatching, stats.sending
    if len(calls) < FEWEST:
        raise NotTogether(FEW)
    if any(isinstance(leaf, ProcessLocalRows) for leaf in calls[0][0].leaves):
        raise RunsAlone(LOCAL)
    if calls[0][1].num_slices != 1:
        raise RunsAlone(SLICES)
    if checks_floats():
        raise RunsAlone(NANS)
    kind, form, alike = _alike(site, calls)
    if form.exchanges:
        raise RunsAlone(EXCHANGES)
    form, plan = form.repeated(repeat).with_plan(site)
    if isinstance(plan, Instead):
        raise RunsAlone(plan.why)
    rows, leaves = alike[0]
    if not function.is_over:
        check_row_count(function.name, plan.least_rows, rows.lengths)
    if kind.is_new:
        function.on_first_call(site, *calls[0], plan)
        kind.is_new = False
    broadcast = kind.place_broadcast(site.group, leaves)
    ready = ReadyCall(function, site.group, form, plan, rows, broadcast, 1)
    prepared = perf_counter()
    stats.selecting += prepared - begun - (stats.dispatching - compiling)
    results = run(ready, alike, repeat)
    stats.rows += len(results) * sum(rows.lengths or ())
    stats.slices = 1
    stats.dispatching += perf_counter() - prepared - (stats.sending - sending)
    return results, len(results) < len(alike)


def _alike(site: Site, calls: Sequence[Call]) -> tuple[Kind, Form, list[tuple[Rows, Sequence[Any]]]]:
    """Recognise the first call, and those behind it of the same kind: kind, form, and rows and leaves of each."""
    (first, options), *others = calls
    kind, leaves = recognise(site, first, options)
    form, rows = kind.select(site, leaves, options)
    alike = [(rows, leaves)]
    for bound, options in others:
        # An error is raised when the loop comes to this call.
        with suppress(Exception):
            # Calls of `iterate` without values of their own have the same arguments.
            is_known = bound is first
            other, leaves = (kind, leaves) if is_known else recognise(site, bound, options)
            found, more = other.select(site, leaves, options, rows.sources if is_known else None)
            if (other, found) == (kind, form) and _share_data(rows, more):
                alike.append((more, leaves))
                continue
        break
    if len(alike) < FEWEST:
        raise NotTogether(FEW)
    if site.group._is_multi_process:
        remedy, what = "Give each process the same arguments and batch.", f"the arguments of {site.function.name}"
        site.group._peers.compare_values(
            what, lambda: [*chain(*(kind.values_on_host(*each) for each in alike))], remedy
        )
    return kind, form, alike


def _share_data(one: Rows, other: Rows) -> bool:
    """Tell whether two calls pick rows from the same data on the devices."""
    triples = zip(one.inputs, one.sources, other.sources, strict=True)
    # A program takes one array of data for all of its calls; rows from the host come stacked.
    return all(a is b or spec.feed.layout == "rows" for spec, a, b in triples)
