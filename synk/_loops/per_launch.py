"""Per launch: consecutive calls of a loop, of which one program runs those of one kind."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from math import prod
from time import perf_counter
from typing import Any

from .._base.jax_context import checks_floats
from .._base.pytree import as_data
from .._call.binding import CallOptions
from .._call.compiler import COMMUNICATES, EXCHANGES, LOCAL, NANS, SLICES, NotTogether, RunsAlone
from .._call.execute import execute_calls
from .._call.feed import Fed, check_row_count
from .._call.plan import Instead
from .._call.spec import Repeat
from .._data.process_rows import ProcessLocalRows
from .._runtime.dispatch import retire_finished
from .iterate import Batches
from .minibatches import Minibatches, behind_bar
from .stream import Items
from .waiting import Waiting

# Fewer calls than these run alone, by the program of one call.
FEWEST = 3
FEW = f"a program runs {FEWEST} calls of one kind or more"

# A program of `f.over` runs so many calls, if all have so few bytes together.
MOST, SMALL = 16, 1 << 22


def small_lists(items: Batches | Items, source: Any, options: CallOptions) -> tuple[int, Iterator[list[Waiting]]]:
    """Put small calls of `f.over` in lists if no code of the user's runs between. Return the longest length too."""
    calls, order, most = iter(items.calls(source, options)), behind_bar(source), 1
    # The shapes of one call tell the bytes of all. A generator is not asked: it would run code of the user's ahead of
    # the loop.
    first = next(calls, None) if is_alone(source) else None
    if first is not None:
        calls, bound = chain([first], calls), first.bound
        each = [as_data(bound.leaves[i]) for i in bound.spec.scattered]
        # Batches in a list may pick all rows.
        rows = [order.batch_size] if isinstance(order, Minibatches) else []
        shapes = [(leaf, [*rows, *leaf.shape[len(rows) :]]) for leaf in each if hasattr(leaf, "dtype")]
        small = SMALL // max(1, sum(prod(shape) * leaf.dtype.itemsize for leaf, shape in shapes))
        # A program costs as much to compile as it may have calls.
        whole = order.per_epoch if isinstance(order, Minibatches) else len(order)
        most = 1 if items.own(bound) else max(1, min(MOST, small, whole))
    return most, iter(lambda: list(islice(calls, most)), [])


def is_alone(source: Any) -> bool:
    """Tell whether no code of the user's runs when a source is asked for its next item."""
    inside = behind_bar(source)
    is_bar = inside is source or type(source).__module__.partition(".")[0] == "tqdm"
    return is_bar and type(inside) in (Minibatches, list, tuple)


def launch_several(
    calls: Iterable[Fed],
    count: int,
    repeat: Repeat,
    run: Callable[[Sequence[Fed], Repeat], list[Any]] = execute_calls,
) -> tuple[list[Any], bool]:
    """Launch the first of these calls, and all behind it that the same program runs; `count` is how many there are.

    `run` takes the calls, of which the first has the plan, and `repeat`. It returns the results, perhaps not all.

    Returns:
      The results, one a call; and whether the next call is refused, since its numbers are not finite.

    Raises:
      NotTogether: too few calls are alike.
      RunsAlone: no program runs several such calls.
      Other errors: as of the first call.
    """
    retire_finished()
    if count < FEWEST:
        raise NotTogether(FEW)
    calls = iter(calls)
    first = next(calls)
    stats, function = first.function.stats, first.function
    begun, compiling, sending, selecting = perf_counter(), stats.dispatching, stats.sending, stats.selecting
    for why, is_so in (
        (LOCAL, any(isinstance(leaf, ProcessLocalRows) for leaf in first.leaves)),
        (SLICES, first.num_slices != 1 or first.choice is not None),
        (NANS, checks_floats()),
        (EXCHANGES, first.form.exchanges),
        # Uneven rows of a function that communicates run on all devices as one.
        (COMMUNICATES, first.site.home is not None and function.engine != "jit"),
    ):
        if is_so:
            raise RunsAlone(why)
    alike = _alike(first, calls, repeat)
    first.placed()
    form, plan = first.form.repeated(repeat).with_plan(first.site)
    if isinstance(plan, Instead):
        raise RunsAlone(plan.why)
    if not function.is_over:
        check_row_count(function.name, plan.least_rows, first.rows.lengths)
    if first.kind.is_new and first.given is not None:
        function.on_first_call(first.site, *first.given, plan)
        first.kind.is_new = False
    of_one, first.form, first.plan = first.form, form, plan
    prepared = perf_counter()
    stats.selecting = selecting + prepared - begun - (stats.dispatching - compiling)
    try:
        results = run(alike, repeat)
    finally:
        # The call may run alone after all.
        first.form = of_one
    stats.rows += len(results) * sum(first.rows.lengths or ())
    stats.slices = 1
    stats.dispatching += perf_counter() - prepared - (stats.sending - sending)
    return results, len(results) < len(alike)


def _alike(first: Fed, calls: Iterator[Fed], repeat: Repeat) -> list[Fed]:
    """Return the first call, and those behind it that pick as many rows in the same way from the same data."""
    alike = [first]
    # An error is raised when the loop comes to its call.
    with suppress(Exception):
        for other in calls:
            if other.kind is not first.kind or other.form is not first.form or not _share_data(first, other, repeat):
                break
            alike.append(other)
    if len(alike) < FEWEST:
        raise NotTogether(FEW)
    if first.group._is_multi_process:
        remedy, what = "Give each process the same arguments and batch.", f"the arguments of {first.function.name}"
        values = [(fed.kind.values_on_host, fed.rows, fed.leaves) for fed in alike]
        first.group._peers.compare_values(
            what, lambda: [*chain(*(of_call(rows, leaves) for of_call, rows, leaves in values))], remedy
        )
    return alike


def _share_data(one: Fed, other: Fed, repeat: Repeat) -> bool:
    """Tell whether two calls pick rows from the same data on the devices, and share broadcast data."""
    triples = zip(one.rows.inputs, one.rows.sources, other.rows.sources, strict=True)
    # A program takes one array of data for all of its calls; rows from the host come stacked.
    is_same = all(a is b or spec.feed.layout == "rows" for spec, a, b in triples)
    return is_same and all(one.seen[i] == other.seen[i] for i in one.seen if i not in repeat.own)
