"""Several: prepare consecutive calls of a loop that one program runs, and start them."""

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

from .._base.jax_context import checks_floats
from .._data.process_rows import ProcessLocalRows
from .._runtime.dispatch import retire_finished
from .binding import BoundArguments, CallOptions
from .execute import ReadyCall, execute_calls
from .kinds import Kind, check_row_count, recognise
from .plan import Form, Site
from .repeat import EXCHANGES, LOCAL, RunsAlone
from .rows import Rows
from .spec import Repeat

# Arguments and options of a call.
Call = tuple[BoundArguments, CallOptions]


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
      RunsAlone: no program runs several such calls.
      Other errors: as of the first call.
    """
    stats, function = site.function.stats, site.function
    retire_finished()
    begun, compiling, sending = perf_counter(), stats.dispatching, stats.sending
    if any(isinstance(leaf, ProcessLocalRows) for leaf in calls[0][0].leaves):
        raise RunsAlone(LOCAL)
    if checks_floats():
        raise RunsAlone("jax_debug_nans looks at single calls")
    kind, form, alike = _alike(site, calls)
    if form.exchanges:
        raise RunsAlone(EXCHANGES)
    form, plan = form.repeated(repeat).with_plan(site)
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
    alike: list[tuple[Rows, Sequence[Any]]] = []
    first: tuple[Kind, Form] | None = None
    for bound, options in calls:
        try:
            # Calls of `iterate` without values of their own have the same arguments.
            sources = alike[0][0].sources if alike and bound is calls[0][0] else None
            if sources is None:
                kind, leaves = recognise(site, bound, options)
            form, rows = kind.select(site, leaves, options, sources)
            if first is None:
                first = kind, form
            elif first != (kind, form) or not _share_data(rows, alike[0][0]):
                break
            if site.group._is_multi_process:
                remedy = "Give each process the same arguments and batch."
                what = f"the arguments of {site.function.name}"
                site.group._peers.compare_values(what, partial(kind.values_on_host, rows, leaves), remedy)
        except Exception:
            # Raised again when the loop comes to this call.
            if not alike:
                raise
            break
        alike.append((rows, leaves))
    assert first is not None
    return *first, alike


def _share_data(one: Rows, other: Rows) -> bool:
    """Tell whether two calls pick rows from the same data on the devices."""
    triples = zip(one.inputs, one.sources, other.sources, strict=True)
    return all(a is b or spec.feed.layout == "rows" for spec, a, b in triples)
