"""Blocks: which rows each replica's blocks have, and where these go among what is gathered."""

from functools import cached_property

import numpy as np

from .spec import CallSpec


class Blocks:
    """The blocks of one call, of which replicas get whole ones; the last may be shorter.

    Attributes:
      size: rows of a block.
      lengths: rows of each replica.
      full: whole blocks of each.
      most: the largest of these.
      rest: rows of the block that is shorter, or 0.
      owner: the replica that has that.
    """

    def __init__(self, call: CallSpec) -> None:
        assert call.block is not None and call.lengths is not None
        self.size, self.lengths = call.block, np.array(call.lengths)
        self.full, self.rest = self.lengths // self.size, int(self.lengths.sum() % self.size)
        self.most, self.owner = int(self.full.max()), int(np.flatnonzero(self.lengths).max())

    @property
    def sizes(self) -> list[int]:
        """The numbers of rows that blocks have, most first."""
        return [*[self.size] * (self.most > 0), *[self.rest] * (self.rest > 0)]

    @property
    def slots(self) -> dict[bool, int]:
        """Entries of a replica of what has one a row (True) or a block (False); the shorter block's come last."""
        return {True: self.most * self.size + self.rest, False: self.most + (self.rest > 0)}

    @cached_property
    def valid(self) -> dict[bool, np.ndarray]:
        """Which of all replicas' entries count, in row order."""
        found: dict[bool, list[np.ndarray]] = {True: [], False: []}
        for rank, (length, full) in enumerate(zip(self.lengths, self.full, strict=True)):
            for kind, whole, last in ((True, full * self.size, self.rest), (False, full, 1)):
                first, size = rank * self.slots[kind], self.most * (self.size if kind else 1)
                found[kind] += [first + np.arange(whole), first + size + np.arange(last * (length % self.size > 0))]
        return {kind: np.concatenate(each) for kind, each in found.items()}
