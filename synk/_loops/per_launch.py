"""Per launch: lists of consecutive calls of a loop, of which those of one kind run in one program."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from math import prod
from typing import Any

from .._base.pytree import PyTree, as_data
from .._call.binding import BoundArguments, CallOptions
from .._call.repeat import NotTogether, RunsAlone
from .._call.several import Call
from .._call.spec import Repeat
from .iterate import Batches, LoopCall
from .minibatches import Minibatches, behind_bar
from .prefetch import Stopped, length
from .stream import Items

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
