"""First rows: NumPy's indexing of an array of which only the first rows count."""

from typing import Any

import numpy as np

from .sources import Reader


def read_within(source: Reader, length: int, index: Any) -> Any:
    """Return the rows that an index of NumPy's picks among the first rows of a file. Read no other rows."""
    axes: tuple[Any, ...] = (index or (...,)) if isinstance(index, tuple) else (index,)
    first, *rest = axes
    if isinstance(first, int | np.integer) and not isinstance(first, bool):
        row = range(length)[first]
        return source[row : row + 1][(0, *rest)]
    if isinstance(first, slice):
        run = range(length)[first]
        # Files read upwards only.
        up, step = (run, 1) if run.step > 0 else (run[::-1], -1)
        return source[up.start : max(up.start, up.stop) : up.step][(slice(None, None, step), *rest)]
    if np.ndim(first) == 1 and len(numbers := np.arange(length)[first]):
        rows, at = source.find(numbers)
        return rows[(at, *rest)]
    return source[:length][index]


def index_within(index: Any, length: int) -> Any:
    """Rewrite an index of NumPy's among the first rows, so that it picks the same rows of the whole array."""
    first, *rest = (index or (...,)) if isinstance(index, tuple) else (index,)
    if first is ...:
        return (slice(length), ..., *rest)
    if isinstance(first, slice):
        run = range(length)[first]
        return (slice(run.start, run.stop if run.stop >= 0 else None, run.step), *rest)
    numbers = np.arange(length)[first]
    return (numbers if isinstance(numbers, np.ndarray) else int(numbers), *rest)
