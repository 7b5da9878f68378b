"""Per launch: lists of consecutive calls of a loop, of which one program runs those of one kind."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from math import prod
from time import perf_counter
from typing import Any

from .._base.jax_context import checks_floats
from .._base.pytree import PyTree, as_data
from .._call.binding import BoundArguments, CallOptions
from .._call.compiler import EXCHANGES, LOCAL, NANS, SLICES, NotTogether, RunsAlone
from .._call.execute import ReadyCall, execute_calls
from .._call.kinds import Kind, check_row_count, recognise
from .._call.plan import Form, Instead, Site
from .._call.rows import Rows
from .._call.spec import Repeat
from .._data.process_rows import ProcessLocalRows
from .._runtime.dispatch import retire_finished
from .iterate import Batches, LoopCall
from .minibatches import Minibatches, behind_bar
from .prefetch import Stopped, length
from .stream import Items

# Arguments and options of a call.
Call = tuple[BoundArguments, CallOptions]
# Fewer calls than these run alone, by the program of one call.
FEWEST = 3
FEW = f"a program runs {FEWEST} calls of one kind or more"

# Rows and leaves of each of several calls.
Several = Sequence[tuple[Rows, Sequence[Any]]]
# A program of `f.over` runs so many calls, if all have so few bytes together.
MOST, SMALL = 16, 1 << 22


class CallLists(Iterator[list[LoopCall]]):
    """The calls of a loop in lists, each of as many calls as may be. A list ends where an epoch does.

    Attributes:
      most: how many calls a list has at most.
      collected: the calls of a list whose next call is asked for.
      repeats: whether a program can run several calls in a row, as far as it is known.
    """

    repeats = True

    def __init__(self, items: Batches | Items, calls: Iterator[LoopCall], source: Any, most: int) -> None:
        self.items, self._calls, self.collected, order = items, calls, list[LoopCall](), behind_bar(source)
        self._epoch, self._at = (order.per_epoch, order.start) if isinstance(order, Minibatches) else (None, 0)
        # A program costs as much to compile as it may have calls.
        self.most = min(most, self._epoch or length(order) or most)
        # Whether no code of the user's runs when the next call is asked for.
        self._is_alone, self._left = _is_alone(source), length(order)
        # The error that came in the place of the next call.
        self._error: BaseException | None = None

    def __len__(self) -> int:
        """Return how many lists are left, if the number of calls is known."""
        if self._left is None:
            raise TypeError("The number of lists is not known: what gives their items has no len().")
        epoch = self._epoch or self._left or 1
        # The first epoch may have begun, by `start` or by items that are left out.
        first = min(self._left, epoch - self._at % epoch)
        return -(-first // self.most) + (self._left - first) // epoch * -(-epoch // self.most)

    def __next__(self) -> list[LoopCall]:
        if self._error is not None:
            raise self._error
        try:
            for _ in range(self._room):
                # The source may make the next item where this one lies.
                self.collected.append(self.items.keep(next(self._calls), self._is_alone))
        except Exception as error:
            if not self.collected:
                raise
            # It comes behind the results of these calls.
            self._error = error
        finally:
            calls = [*self.collected]
            self.collected.clear()
        self._at += len(calls)
        return calls

    @property
    def _room(self) -> int:
        return self.most if self._epoch is None else min(self.most, self._epoch - self._at % self._epoch)

    def leave_out(self, n: int) -> tuple[int, int]:
        """Leave out the first n calls. Return how many of them there were, and how many lists they make."""
        there = lists = 0
        while there < n and (taken := sum(1 for _ in islice(self._calls, min(n - there, self._room)))):
            there, lists, self._at = there + taken, lists + 1, self._at + taken
        self._left = None if self._left is None else self._left - there
        return there, lists


def small_lists(items: Batches | Items, source: Any) -> tuple[int, Iterator[Sequence[LoopCall]]]:
    """Put small calls of `f.over` in lists if no code of the user's runs between. Return the longest length too."""
    calls, order = iter(items.calls(source)), behind_bar(source)
    # The shapes of one call tell the bytes of all. A generator is not asked: it would run code of the user's ahead of
    # the loop.
    first = next(calls, None) if _is_alone(source) else None
    if first is not None:
        calls = chain([first], calls)
        each = [as_data(first.leaves[i]) for i in first.arguments.spec.scattered]
        # Batches in a list may pick all rows.
        rows = [order.batch_size] if isinstance(order, Minibatches) else []
        shapes = [(leaf, [*rows, *leaf.shape[len(rows) :]]) for leaf in each if hasattr(leaf, "dtype")]
        most = min(MOST, SMALL // max(1, sum(prod(shape) * leaf.dtype.itemsize for leaf, shape in shapes)))
        if most > 1 and not items.own(first.arguments):
            lists = CallLists(items, calls, source, most)
            return lists.most, lists
    return 1, map(_alone, calls)


def _is_alone(source: Any) -> bool:
    """Tell whether no code of the user's runs when a source is asked for its next item."""
    return isinstance(behind_bar(source), Minibatches | list | tuple)


def _alone(call: LoopCall) -> list[LoopCall]:
    return [call]


def launch_list(
    lists: CallLists,
    one: Callable[[BoundArguments, CallOptions], PyTree],
    several: Callable[[Sequence[Call], Repeat], list[PyTree]],
    due: Callable[[LoopCall], Call],
    pace: Callable[[int], int],
    these: Sequence[LoopCall],
) -> list[PyTree]:
    """Launch the calls of a list, as many in a row as may be, and return their results."""
    # `one` launches a call, and `several` calls in a row. `due` makes the arguments and options of a call that is due.
    # `pace` is told how many calls have run, and returns how many may run now: local steps stop for their average.
    results: list[PyTree] = []
    try:
        calls, room = [due(call) for call in these], pace(0)
        while left := calls[len(results) :][:room]:
            new: list[PyTree] = []
            if lists.repeats:
                try:
                    new = several(left, Repeat(lists.most, lists.items.own(left[0][0])))
                except RunsAlone as alone:
                    # What the function does, and the options of the loop, are the same in all calls.
                    lists.repeats = isinstance(alone, NotTogether)
            new = new or [one(*left[0])]
            results, room = [*results, *new], pace(len(new))
    # Results before an error belong to the loop, which gets them first.
    except Stopped as stopped:
        pace(len(stopped.results))
        raise Stopped([*results, *stopped.results], stopped.error) from None
    except Exception as error:
        raise Stopped(results, error) from None
    return results


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
