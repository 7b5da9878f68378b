"""Partition: cut rows into parts of replicas, and parts into slices. Pure arithmetic."""

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple


class RowRange(NamedTuple):
    """Consecutive rows of an input or of a replica's part: the first row, and their number."""

    start: int
    rows: int


def split_rows(rows: int, parts: int) -> list[RowRange]:
    """Cut `rows` into contiguous parts, sizes differing by at most one, longer ones first.

    Example:
      >>> [part.rows for part in split_rows(7, 3)], [part.start for part in split_rows(7, 3)]
      ([3, 2, 2], [0, 3, 5])
    """
    small, longer = divmod(rows, parts)
    sizes = [small + 1] * longer + [small] * (parts - longer)
    return [RowRange(start, size) for start, size in zip(accumulate(sizes, initial=0), sizes, strict=False)]


@lru_cache(maxsize=1024)
def lengths_of(rows: int, replicas: int, block: int | None = None) -> tuple[int, ...]:
    """Return the number of rows of each replica. With `block`, replicas get whole blocks; the last may be shorter."""
    # Blocks have the same rows whatever the number of replicas, so the bits of a block do not depend on it; the
    # replicas then differ by up to one block.
    if block is None:
        return tuple([part.rows for part in split_rows(rows, replicas)])
    several = split_rows(-(-rows // block), replicas)
    return tuple([max(0, min(part.rows * block, rows - part.start * block)) for part in several])
