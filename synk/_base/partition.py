"""Partition: cut rows into parts: for replicas, and into slices of one. Pure arithmetic."""

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple


class RowRange(NamedTuple):
    """A run of rows: of the whole input, or of one replica's."""

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
    """How many rows each replica gets of so many; of blocks whole ones, but for the last."""
    if block is None:
        return tuple([part.rows for part in split_rows(rows, replicas)])
    several = split_rows(-(-rows // block), replicas)
    return tuple([max(0, min(part.rows * block, rows - part.start * block)) for part in several])
