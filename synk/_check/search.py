"""Search: the first of many rows that is bad, by questions about sets of rows."""

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Found(NamedTuple):
    """What is bad: one row by itself, or several together."""

    first: int
    last: int
    is_alone: bool


def find_first(rows: int, is_bad: Callable[[Sequence[int]], bool]) -> Found | None:
    """The first row that is bad by itself; where none is, a run of rows that are bad together. None: all are good.

    It asks at most 2 log2(rows) + 4 times. A row is named only if some other is good by itself, since what is computed
    across rows (a standard deviation, say) may be bad of any row alone.
    """
    if not is_bad(range(rows)):
        return None
    good, bad = 0, rows  # so many rows from the first on are good, and so many are not
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (good, middle) if is_bad(range(middle)) else (middle, bad)
    row = bad - 1
    if is_bad([row]):
        others = [other for other in dict.fromkeys((row - 1, 0) if row else (rows // 2, rows - 1)) if 0 <= other != row]
        if rows == 1 or not all(is_bad([other]) for other in others):
            return Found(row, row, True)
        return Found(0, rows - 1, False)
    bad, good = 0, row  # rows from here to that one are bad together, and are good
    while good - bad > 1:
        middle = (good + bad) // 2
        good, bad = (good, middle) if is_bad(range(middle, row + 1)) else (middle, bad)
    return Found(bad, row, False)
