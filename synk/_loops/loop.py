"""Loop: a queue of waiting calls, launched in turn, one by one or in lists of which a program runs several calls."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from itertools import islice
from typing import Any, NamedTuple

from .._base.errors import checked_integer
from .._call.binding import CallOptions
from .._call.compiler import NotTogether, RunsAlone
from .._call.feed import Fed
from .._call.plan import Site
from .._call.spec import Repeat
from .._data.dataset import writes_so_far
from .._runtime.dispatch import LOCK
from .iterate import Batches
from .minibatches import Minibatches, behind_bar
from .per_launch import is_alone
from .prefetch import Prefetch, length
from .stream import Items
from .waiting import Waiting


class Launcher(NamedTuple):
    """Ways of a function to launch the calls of its loops.

    Attributes:
      refuse: raises where no call may run, as in a trace.
      site: returns where calls run now.
      run: launches a call and returns its result.
      run_several: launches the first of these calls and all behind it that one program can run. Returns the results,
        and the error of the next call, if that is refused.
      pace: told how many calls have run, returns how many may run now before something else must.
    """

    refuse: Callable[[], None]
    site: Callable[[], Site]
    run: Callable[[Fed], Any]
    run_several: Callable[[Iterable[Fed], int, Repeat], tuple[list[Any], Exception | None]]
    pace: Callable[[int], int] = lambda ran: sys.maxsize


class Loop(Prefetch[list[Waiting], Any]):
    """The loop of `iterate` and `stream`: gives the results of calls, or with `per_launch` lists of them."""

    def __init__(
        self,
        launcher: Launcher,
        source: Iterable[Any],
        items: Batches | Items,
        options: CallOptions,
        sizes: tuple[int, int | None],
        name: str,
    ) -> None:
        """`sizes` are how many items or lists may be early, and how many calls a list has."""
        prefetch, per_launch = sizes
        if per_launch is not None:
            checked_integer(per_launch, f"{name}: per_launch", 1)
        super().__init__(source, items.calls(source, options), prefetch, f"{name}: prefetch", launcher.refuse)
        self._launcher, self._own = launcher, items.own
        # Whether the body of the loop writes to data that its calls read.
        self._is_written = False
        # Whether no code of the user's runs when the next call is asked for.
        self._is_alone = is_alone(source) and not items.has_values
        # Whether a program can run several calls in a row, as far as it is known.
        self._repeats, self._most, self._epoch, self._at, self._left = True, 1, None, 0, self._length
        if per_launch is not None:
            self.gives_lists, order = True, behind_bar(source)
            if isinstance(order, Minibatches):
                self._epoch, self._at = order.per_epoch, order.start
            self._left = length(order)
            # A program costs as much to compile as it may have calls.
            self._most = min(per_launch, self._epoch or self._left or per_launch)
        self._length = self._count()

    def _count(self) -> int | None:
        """Return how many items are left, if the number of calls is known."""
        if self._left is None:
            return None
        epoch = self._epoch or self._left or 1
        # The first epoch may have begun, by `start` or by items that are left out.
        first = min(self._left, epoch - self._at % epoch)
        return -(-first // self._most) + (self._left - first) // epoch * -(-epoch // self._most)

    def leave_out(self, n: int) -> tuple[int, int]:
        left, there, lists = self._before_first(), 0, 0
        while there < n and (taken := sum(1 for _ in islice(left, min(n - there, self._room)))):
            there, lists, self._at = there + taken, lists + 1, self._at + taken
        self._left = None if self._left is None else self._left - there
        self._length = self._count()
        return there, lists

    @property
    def _room(self) -> int:
        """Return how many calls the next list may have: it ends where an epoch does."""
        return self._most if self._epoch is None else min(self._most, self._epoch - self._at % self._epoch)

    def _next(self, items: Iterator[Waiting], is_early: bool) -> list[Waiting]:
        calls = list[Waiting]()
        try:
            for _ in range(1 if self._most == 1 else self._room):
                since = 0 if self._is_alone else writes_so_far()
                try:
                    call = next(items)
                finally:
                    # What the source has written to data comes after the calls that wait.
                    for waiting in () if self._is_alone else (*self.waiting, calls):
                        for each in waiting:
                            if each.data:
                                each.pass_by(since)
                if self._is_alone and (
                    self._most > 1 or (call.data and (self._is_written or call.takes_from_devices()))
                ):
                    # Nobody but the body of the loop may write to the rows, which is to be seen. So the call is fed at
                    # its turn, if there is nothing to send early, or rows of a list are picked together.
                    call.keep_batch()
                elif is_early or self._most > 1:
                    self._looks_at_waiting |= bool(call.data)
                    if call.data and not self._is_alone:
                        call.written.update(id(data) for data in call.data if data._version > since)
                    call.wait(self._launcher.site(), self._most > 1)
                calls.append(call)
        except Exception as error:
            if not calls:
                raise
            # It comes behind the results of these calls.
            self._items, self._error = None, None if isinstance(error, StopIteration) else error
        self._at += len(calls)
        return calls

    def _launch(self, item: list[Waiting]) -> Any:
        if not self.gives_lists:
            with LOCK:
                swapped = self._swapped(item) if item[0].data else frozenset[int]()
                return self._launcher.run(item[0].due(self._launcher.site(), swapped))
        # `pace` is told how many calls have run: local steps stop for their average.
        results, error = list[Any](), None
        try:
            room = self._launcher.pace(0)
            while error is None and (left := item[len(results) :][:room]):
                new, error = self._launch_some(left)
                results += new
                room = self._launcher.pace(len(new))
        except Exception as raised:
            error = raised
        if error is None:
            return results
        if not results:
            try:
                raise error
            finally:
                # The error refers to this frame. Without this line the frame would refer to the error.
                del error
        # Results before an error belong to the loop, which gets them first.
        self.close()
        self._error = error
        return results

    def _launch_some(self, calls: Sequence[Waiting]) -> tuple[list[Any], Exception | None]:
        """Launch as many of these calls as one program runs, or the first. Return also the error of the next call."""
        with LOCK:
            site, swapped = self._launcher.site(), self._swapped(calls)
            if self._repeats:
                repeat = Repeat(self._most, self._own(calls[0].bound))
                try:
                    return self._launcher.run_several((call.due(site, swapped) for call in calls), len(calls), repeat)
                except RunsAlone as alone:
                    # What the function does, and the options of the loop, are the same in all calls.
                    self._repeats = isinstance(alone, NotTogether)
            return [self._launcher.run(calls[0].due(site, swapped))], None

    def close(self) -> None:
        super().close()
        # It has the arguments of the loop.
        self._own = lambda bound: ()

    def _launched(self) -> None:
        """Feed calls again whose data the body of the loop has written to, before the source is asked."""
        swapped: Set[int] | None = None
        for calls in self.waiting:
            for call in calls:
                if call.data:
                    swapped = self._swapped(()) if swapped is None else swapped
                    self._is_written |= call.refresh(self._launcher.site(), self._most > 1, swapped)

    def _swapped(self, due: Sequence[Waiting]) -> Set[int]:
        """Return the data to which the source has written for calls that are not due before these, by id."""
        if self._is_alone:
            return frozenset()
        return {data for calls in (due, *self.waiting) for call in calls for data in call.written}
