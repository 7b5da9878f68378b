"""Per launch: several batches of a loop in one program."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from math import prod
from typing import Any, NamedTuple

from .._base.pytree import PyTree, as_data
from .._call.binding import BoundArguments, CallOptions
from .._call.repeat import NotTogether, RunsAlone
from .._call.several import Call
from .._call.spec import Repeat
from .._data.minibatches import Minibatches, behind_bar
from .._data.prefetch import Stopped, length
from .iterate import Batches, LoopCall
from .stream import Items

# A program of `f.over` runs so many calls, if all have so few bytes together.
MOST, SMALL = 16, 1 << 22


class CallList(NamedTuple):
    """Consecutive calls of a loop that have as many rows.

    Attributes:
      calls: the calls.
      is_usual: whether they have as many rows as the first call of the loop.
    """

    calls: list[LoopCall]
    is_usual: bool

    @property
    def leaves(self) -> list[Any]:
        """Return the leaves of the arguments of all calls."""
        return [leaf for call in self.calls for leaf in call.leaves]


class CallLists(Iterator[CallList]):
    """The calls of a loop in lists, each to be run by one launch. A list ends where an epoch does.

    Attributes:
      most: how many calls a list has at most.
      collected: the calls of a list whose next call is asked for.
      is_alone: whether no code of the user's runs then.
      repeats: whether a program can run several calls in a row, as far as it is known.
    """

    repeats = True

    def __init__(self, items: Batches | Items, calls: Iterator[LoopCall], source: Any, most: int) -> None:
        """Take the calls that `items` makes of `source`, up to `most` a list."""
        self.items, self._calls, self.collected, order = items, calls, list[LoopCall](), behind_bar(source)
        # A program costs as much to compile as it may have calls.
        known = order.per_epoch if isinstance(order, Minibatches) else length(order)
        self.most = min(most, known or most)
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
        return self._take(self.most, lambda call: self.items.keep(call, self.is_alone))

    def _take(self, most: int, keep: Callable[[LoopCall], LoopCall]) -> CallList:
        """Take the next list of up to `most` calls; `keep` makes one ready to wait while the next one is asked for."""
        if self._error is not None:
            raise self._error
        taken, self._next = self._next or next(self._calls), None
        calls, rows = self.collected, self.items.rows_of(taken)
        self._usual = rows if self._usual is None else self._usual
        try:
            while not calls or self.items.rows_of(taken) == rows:
                # The source may make the next item where this one lies.
                calls.append(keep(taken) if most > 1 else taken)
                self._at += 1
                if len(calls) == most or (self._order and self._at % self._order.per_epoch == 0):
                    break
                taken = next(self._calls)
            else:
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
    lists = CallLists(items, calls, source, MOST)
    first = lists.peek() if lists.is_alone else None
    if first is None or items.own(first.arguments):
        lists.most = 1
    else:
        spec, leaves = first.arguments.spec, first.leaves
        each = [as_data(leaves[i]) for i in spec.scattered]
        size = sum(prod(leaf.shape[1:]) * leaf.dtype.itemsize for leaf in each if hasattr(leaf, "dtype"))
        lists.most = max(1, min(lists.most, SMALL // max(1, size * (items.rows_of(first) or 1))))
    return lists


def launch_list(
    lists: CallLists,
    one: Callable[[BoundArguments, CallOptions], PyTree],
    several: Callable[[Sequence[Call], Repeat], list[PyTree]],
    due: Callable[[LoopCall], Call],
    pace: Callable[[int], int],
    these: CallList,
) -> list[PyTree]:
    """Launch the calls of a list, as many in a row as may be, and return their results.

    `one` launches a call, and `several` calls in a row. `due` returns arguments and options of a call that is due.
    `pace` is told how many calls have run, and returns how many may run now.
    """
    results: list[PyTree] = []
    try:
        calls, room = [due(call) for call in these.calls], pace(0)
        while left := calls[len(results) :][:room]:
            new: list[PyTree] = []
            if lists.repeats and (these.is_usual or len(left) > 1):
                try:
                    new = several(left, Repeat(lists.most, lists.items.own(left[0][0])))
                except RunsAlone as alone:
                    # What the function does, and the options of the loop, are the same in all calls.
                    lists.repeats = isinstance(alone, NotTogether)
            new = new or [one(*left[0])]
            results, room = [*results, *new], pace(len(new))
    except Stopped as stopped:
        pace(len(stopped.results))
        raise Stopped([*results, *stopped.results], stopped.error) from None
    except Exception as error:
        raise Stopped(results, error) from None
    return results
