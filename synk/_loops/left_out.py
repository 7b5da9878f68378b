"""Left out: the items of a loop that a run before has done."""

from collections.abc import Iterator, Sequence
from itertools import islice
from threading import get_ident
from typing import Any, cast

import numpy as np

from .iterate import LEAVES_OUT

# Iterators whose items nobody notices.
_SILENT = tuple(type(iter(of)) for of in ([], (), "", range(0), range(1 << 70)))


def leave_out(steps: Any, n: int) -> tuple[Iterator[Any], int]:
    """Leave out the first n items of an iterable.

    Returns:
      An iterator over what is left, and how many items were asked for and dropped.

    Raises:
      ValueError: there are fewer items.
      SynkError: a loop of `iterate` or `stream` has begun.
    """
    if isinstance(steps, enumerate):
        # The form in which Python pickles an iterator tells what it is made of, and how far it is.
        items, first = cast(Any, steps.__reduce__()[1])
        left, dropped = leave_out(items, n)
        return enumerate(left, first + n), dropped
    if isinstance(steps, zip):
        _, parts, *is_strict = cast(Any, steps.__reduce__())
        lefts, drops = zip(*[leave_out(part, n) for part in parts], strict=True)
        return zip(*lefts, strict=bool(is_strict)), max(drops)
    if isinstance(steps, range | Sequence | np.ndarray):
        _check(min(n, len(steps)), n)
        return _items_from(steps, n), 0
    left = iter(steps)
    if hasattr(left, "leave_out"):
        _check(left.leave_out(n), n)
        return left, 0
    # A call of a synk function that makes an item would count its rows again.
    LEAVES_OUT.add(get_ident())
    try:
        _check(sum(1 for _ in islice(left, n)), n)
    finally:
        LEAVES_OUT.discard(get_ident())
    return left, 0 if isinstance(left, _SILENT) else n


def _items_from(steps: Any, i: int) -> Iterator[Any]:
    """Yield items by index. The loop may append some."""
    while i < len(steps):
        yield steps[i]
        i += 1


def _check(there: int, n: int) -> None:
    if there < n:
        raise ValueError(f"synk.resume: {n:,} items are done, but now there are {there:,}. Was the program changed?")
