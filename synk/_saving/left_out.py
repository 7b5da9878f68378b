"""Left out: the items of a loop that an earlier run has done."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, cast

import numpy as np

from .._tracing.context import asking_for_item

_END = object()

# Iterators whose items nobody notices.
_SILENT = tuple(type(iter(of)) for of in ([], (), "", range(0), range(1 << 70)))


def leave_out(steps: Any, n: int) -> tuple[Iterator[Any], int, int]:
    """Leave out n results. Return what is left, and how many items were asked for and dropped, and left out."""
    if isinstance(steps, enumerate):
        # The form in which Python pickles an iterator tells what it is made of, and how far it is.
        items, first = cast(Any, steps.__reduce__()[1])
        left, dropped, out = leave_out(items, n)
        return enumerate(left, first + out), dropped, out
    if isinstance(steps, zip):
        _, parts, *is_strict = cast(Any, steps.__reduce__())
        # Fewer items than n are left out if some are lists of a loop with `per_launch`, of which n counts the results.
        out, lefts, dropped = n, dict[int, Iterator[Any]](), 0
        # Of what goes with lists as many are left out as lists are.
        for i in sorted(range(len(parts)), key=lambda i: not _gives_lists(parts[i])):
            lefts[i], drops, out = leave_out(parts[i], n if _gives_lists(parts[i]) else out)
            dropped = max(dropped, drops)
        return zip(*(lefts[i] for i in range(len(parts))), strict=bool(is_strict)), dropped, out
    # By index, so no item before is made.
    if isinstance(steps, range | Sequence | np.ndarray):
        _check(min(n, len(steps)), n)
        return _items_from(steps, n), 0, n
    left = iter(steps)
    if hasattr(left, "leave_out"):
        there = left.leave_out(n)
        there, out = there if isinstance(there, tuple) else (there, n)
        _check(there, n)
        return left, 0, out
    is_silent, left = isinstance(left, _SILENT), _computing_nothing(left)
    _check(sum(1 for _ in islice(left, n)), n)
    return left, 0 if is_silent else n, n


def _computing_nothing(items: Iterator[Any]) -> Iterator[Any]:
    """Yield items that call no synk function: where a run goes on, the items before are asked for again."""
    while True:
        with asking_for_item():
            item = next(items, _END)
        if item is _END:
            return
        yield item


def counter_of(steps: Any) -> Callable[[Any], int]:
    """Return what tells how many results an item has: one, unless it is a list of a loop with `per_launch`."""
    if isinstance(steps, enumerate):
        of_item = counter_of(cast(Any, steps.__reduce__()[1])[0])
        return lambda item: of_item(item[1])
    if isinstance(steps, zip):
        counters = [counter_of(part) for part in cast(Any, steps.__reduce__())[1]]
        return lambda items: max(count(item) for count, item in zip(counters, items, strict=True))
    return len if _gives_lists(steps) else lambda item: 1


def _gives_lists(steps: Any) -> bool:
    return getattr(steps, "gives_lists", False)


def _items_from(steps: Any, i: int) -> Iterator[Any]:
    """Yield items by index. The loop may append some."""
    while i < len(steps):
        yield steps[i]
        i += 1


def _check(there: int, n: int) -> None:
    if there < n:
        raise ValueError(f"synk.resume: {n:,} items are done, but now there are {there:,}. Was the program changed?")
