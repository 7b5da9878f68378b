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


def touched_rows(index: Any, length: int) -> range:
    """Return the range of rows that an index of NumPy's may touch."""
    first = (index[0] if index else ...) if isinstance(index, tuple) else index
    if isinstance(first, slice):
        run = range(length)[first]
        touched = np.array(run[:: max(1, len(run) - 1)])
    else:
        numbers = np.asarray(first)
        if numbers.dtype.kind in "iu":
            touched = numbers.astype(np.int64) % max(length, 1)
        elif numbers.dtype == bool and numbers.ndim == 1:
            touched = np.flatnonzero(numbers)
        else:
            return range(length)
    return range(int(touched.min()), int(touched.max()) + 1) if touched.size else range(0)


def rows_shared(source: Any, written: range, other: Any) -> range:
    """Return the range of rows of another source that a write to these rows of a source may have changed."""
    if source is other:
        return written
    if isinstance(source, Reader) and isinstance(other, Reader):
        # Each `file["x"]` of h5py is another object, and equal. What has no hash may compare numbers.
        is_one = source.of is other.of or (type(source.of).__hash__ and (source.of == other.of) is True)
        return written if is_one else range(0)
    if not (isinstance(source, np.ndarray) and isinstance(other, np.ndarray)):
        return range(0)
    # Work enough to tell columns apart.
    if not np.may_share_memory(source, other, max_work=99):  # type: ignore[arg-type]  # any number
        return range(0)
    is_one = (source.ctypes.data, source.strides) == (other.ctypes.data, other.strides)
    return written if is_one else range(len(other))
