"""Split: cut rows into parts for replicas, and a replica's rows into slices. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class Part(NamedTuple):
    """A run of rows: of the whole input, or of one replica's."""

    start: int
    rows: int


def cut(rows: int, parts: int) -> list[Part]:
    """Cut `rows` into contiguous parts, sizes differing by at most one, longer ones first.

    Example:
      >>> [part.rows for part in cut(7, 3)], [part.start for part in cut(7, 3)]
      ([3, 2, 2], [0, 3, 5])
    """
    small, longer = divmod(rows, parts)
    sizes = [small + 1] * longer + [small] * (parts - longer)
    return [Part(start, size) for start, size in zip(accumulate(sizes, initial=0), sizes, strict=False)]


def waves(lengths: Sequence[int], slices: int) -> list[list[Part]]:
    """Cut each replica's rows into slices and line them up: wave j holds slice j of every replica.

    A replica with fewer rows than slices has no rows (`Part(0, 0)`) in the last waves.

    Example:
      >>> [[part.rows for part in wave] for wave in waves([3, 2], 2)]
      [[2, 1], [1, 1]]
    """
    cuts = [cut(length, slices) for length in lengths]
    lined_up = [[parts[j] for parts in cuts] for j in range(slices)]
    return [wave for wave in lined_up if any(part.rows for part in wave)] or lined_up[:1]


def runs(sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """List the runs of equal, non-zero sizes as (first rank, rank after the last, size).

    Example:
      >>> runs([3, 3, 2, 0])
      [(0, 2, 3), (2, 3, 2)]
    """
    found: list[tuple[int, int, int]] = []
    for rank, size in enumerate(sizes):
        if found and found[-1][1] == rank and found[-1][2] == size:
            found[-1] = (found[-1][0], rank + 1, size)
        else:
            found.append((rank, rank + 1, size))
    return [run for run in found if run[2]]
