"""Per launch: several batches of a loop in one program."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from math import prod
from typing import Any, NamedTuple

from .._base.pytree import PyTree, as_data
from .._call.binding import BoundArguments, CallOptions
from .._call.repeat import RunsAlone
from .._call.several import Call
from .._call.spec import Repeat
from .._data.minibatches import Minibatches, behind_bar
from .._data.prefetch import Stopped
from .iterate import Batches, LoopCall
from .stream import Items

# A program of `f.over` runs so many calls, if all have so few bytes together.
MOST, SMALL = 16, 1 << 22


class CallList(NamedTuple):
    """Consecutive calls of a loop that have as many rows.

    Attributes:
      calls: the calls.
      is_usual: whether they have as many rows as the first call of the loop.
      last: a last call, of which the source may still overwrite the arguments; None if there is no such call.
    """

    calls: list[LoopCall]
    is_usual: bool
    last: LoopCall | None = None

    @property
    def all(self) -> list[LoopCall]:
        """Return all calls."""
        return self.calls if self.last is None else [*self.calls, self.last]

    @property
    def leaves(self) -> list[Any]:
        """Return the leaves of the arguments of all calls."""
        return [leaf for call in self.all for leaf in call.leaves]


class CallLists(Iterator[CallList]):
    """The calls of a loop in lists, each to be run by one launch. A list ends where an epoch does.

    Attributes:
      most: how many calls a list has at most.
      collected: the calls of a list whose next call is asked for.
      is_alone: whether no code of the user's runs then.
    """

    def __init__(self, items: Batches | Items, calls: Iterator[LoopCall], source: Any, most: int) -> None:
        """Take the calls that `items` makes of `source`, up to `most` a list."""
        self._items, self._calls, self.most, self.collected = items, calls, most, list[LoopCall]()
        order = behind_bar(source)
        self.is_alone = isinstance(order, Minibatches | list | tuple)
        self._order = order if isinstance(order, Minibatches) else None
        self._at = 0 if self._order is None else self._order.start
        self._usual: int | None = None
        # The first call behind the newest list, or the error that came in its place.
        self._next: LoopCall | None = None
        self._error: BaseException | None = None

    def __len__(self) -> int:
        """Return how many lists are left, if sizes of batches are known."""
        order = self._order
        if order is None:
            raise TypeError("The number of lists is not known: it depends on the rows of batches.")
        full, has_short = order.rows // order.batch_size, order.per_epoch > order.rows // order.batch_size
        epoch, done = divmod(self._at, order.per_epoch)
        left, of_epoch = (-(-batches // self.most) + has_short for batches in (full - done, full))
        return left + (order.epochs - epoch - 1) * of_epoch

    def leave_out(self, n: int) -> tuple[int, int]:
        """Leave out the first n calls. Return how many of them there were, and how many lists they make."""
        before, lists = self._at, 0
        with suppress(StopIteration):
            while (left := n - (self._at - before)) > 0:
                self._take(min(self.most, left), lambda call: call)
                lists += 1
        return self._at - before, lists

    def peek(self) -> LoopCall | None:
        """Return the next call, which stays; None if there is none."""
        self._next = self._next or next(self._calls, None)
        return self._next

    def __next__(self) -> CallList:
        return self._take(self.most, self._keep)

    def take_early(self, these: CallList) -> CallList:
        """Make a list ready to wait until it is due."""
        return these if these.last is None else CallList([*these.calls, self._keep(these.last)], these.is_usual)

    def _keep(self, call: LoopCall) -> LoopCall:
        return self._items.keep(call, self.is_alone)

    def _take(self, most: int, keep: Callable[[LoopCall], LoopCall]) -> CallList:
        """Take the next list of up to `most` calls; `keep` makes one ready to wait while the next one is asked for."""
        if self._error is not None:
            raise self._error
        taken, self._next = self._next or next(self._calls), None
        calls, rows = self.collected, self._items.rows_of(taken)
        self._usual = rows if self._usual is None else self._usual
        try:
            while not calls or self._items.rows_of(taken) == rows:
                self._at += 1
                if len(calls) == most - 1 or (self._order and self._at % self._order.per_epoch == 0):
                    return CallList([*calls], rows == self._usual, taken)
                # The source may make the next item where this one lies.
                calls.append(keep(taken))
                taken = next(self._calls)
            self._next = taken
        except Exception as error:
            if not calls:
                raise
            # It comes behind the results of these calls.
            self._error = error
        finally:
            these = CallList([*calls], rows == self._usual)
            calls.clear()
        return these


def small_lists(items: Batches | Items, calls: Iterator[LoopCall], source: Any) -> CallLists:
    """Put the calls of a loop in lists, if they are of few bytes and no code of the user's runs between them."""
    lists = CallLists(items, calls, source, 1)
    first = lists.peek() if lists.is_alone else None
    if first is not None and not items.own(first.arguments):
        lists.most = max(1, min(MOST, SMALL // max(1, _bytes_of(items, first))))
    return lists


def _bytes_of(items: Batches | Items, call: LoopCall) -> int:
    """Estimate the bytes of the rows that a call picks."""
    spec, leaves, rows = call.arguments.spec, call.arguments.leaves, items.rows_of(call) or 1
    rows_of = [as_data(leaves[i]) for i in spec.scattered]
    return rows * sum(prod(leaf.shape[1:]) * leaf.dtype.itemsize for leaf in rows_of if hasattr(leaf, "dtype"))


class ListLauncher:
    """Launcher of lists of calls. What no program runs in a row is launched call by call."""

    def __init__(
        self,
        one: Callable[[BoundArguments, CallOptions], PyTree],
        several: Callable[[Sequence[Call], Repeat], list[PyTree]],
        due: Callable[[LoopCall], Call],
        own: Callable[[BoundArguments], tuple[int, ...]],
        most: int,
        pace: Callable[[int], int],
    ) -> None:
        """Launch a call by `one`, and calls in a row by `several`.

        `due` returns arguments and options of a call that is due, and `own` the broadcast arguments of which each call
        has a value of its own. `pace` is told how many calls have run, and returns how many may run now.
        """
        self._one, self._several, self._due, self._own, self._most, self._pace = one, several, due, own, most, pace
        self._repeats = True

    def __call__(self, these: CallList) -> list[PyTree]:
        """Launch the calls of a list, and return their results."""
        results: list[PyTree] = []
        try:
            calls = [self._due(call) for call in these.all]
            room = self._pace(0)
            while len(results) < len(calls):
                before = len(results)
                results += self._launch(calls[before : before + room], these.is_usual)
                room = self._pace(len(results) - before)
        except Stopped as stopped:
            self._pace(len(stopped.results))
            raise Stopped([*results, *stopped.results], stopped.error) from None
        except Exception as error:
            raise Stopped(results, error) from None
        return results

    def _launch(self, calls: Sequence[Call], is_usual: bool) -> list[PyTree]:
        """Launch the first of these calls, or several of them."""
        if self._repeats and (is_usual or len(calls) > 1):
            try:
                return self._several(calls, Repeat(self._most, self._own(calls[0][0])))
            except RunsAlone:
                # What the function does, and the options of the loop, are the same in all calls.
                self._repeats = False
        return [self._one(*calls[0])]
