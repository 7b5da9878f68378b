"""Partition: cut rows into parts for replicas, and a replica's rows into slices. Pure arithmetic."""

from collections.abc import Sequence
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


def microbatches(lengths: Sequence[int], slices: int) -> list[list[RowRange]]:
    """Cut each replica's rows into slices and line them up: launch j runs slice j of every replica.

    A replica with fewer rows than slices has none (a part of 0 rows) in the last launches.

    Example:
      >>> [[part.rows for part in launch] for launch in microbatches([3, 2], 2)]
      [[2, 1], [1, 1]]
    """
    cuts = [split_rows(length, slices) for length in lengths]
    return [[parts[j] for parts in cuts] for j in range(min(slices, max(lengths)))]
