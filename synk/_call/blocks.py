"""Blocks: which rows the blocks of each replica have, and a barrier that keeps the bits of each block the same."""

from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._base.pytree import PyTree, key_of
from .._data.feed import read_rows
from .._runtime.group import Group
from .parts import Part
from .spec import CallSpec


class Blocks:
    """Blocks of one call. Each replica gets whole blocks; the last block of all may be shorter.

    Attributes:
      size: rows of a block.
      lengths: rows of each replica.
      full: number of whole blocks of each replica.
      most: largest number of whole blocks that a replica has.
      rest: rows of the shorter block, or 0.
      owner: the replica that has the shorter block.
    """

    def __init__(self, call: CallSpec) -> None:
        assert call.block is not None and call.lengths is not None
        self.size, self.lengths = call.block, np.array(call.lengths)
        self.full, self.rest = self.lengths // self.size, int(self.lengths.sum() % self.size)
        self.most, self.owner = int(self.full.max()), int(np.flatnonzero(self.lengths).max())

    @property
    def sizes(self) -> list[int]:
        """Return the numbers of rows that blocks have, most first."""
        return [*[self.size] * (self.most > 0), *[self.rest] * (self.rest > 0)]

    @property
    def sizes_of_longest(self) -> list[int]:
        return [
            min(self.size, int(self.lengths.max()) - first) for first in range(0, int(self.lengths.max()), self.size)
        ]

    @property
    def slots(self) -> dict[bool, int]:
        """Return how many entries a replica has, one a row (True) or one a block (False); the shorter block is last."""
        return {True: self.most * self.size + self.rest, False: self.most + (self.rest > 0)}

    @cached_property
    def valid(self) -> dict[bool, np.ndarray]:
        """Return the indexes of the valid entries of all replicas, in row order."""
        valid: dict[bool, list[np.ndarray]] = {True: [], False: []}
        for rank, (length, full) in enumerate(zip(self.lengths, self.full, strict=True)):
            for kind, whole, last in ((True, full * self.size, self.rest), (False, full, 1)):
                first, size = rank * self.slots[kind], self.most * (self.size if kind else 1)
                valid[kind] += [first + np.arange(whole), first + size + np.arange(last * (length % self.size > 0))]
        return {kind: np.concatenate(numbers) for kind, numbers in valid.items()}


def fusion_barrier(group: Group, values: PyTree, part: Part) -> PyTree:
    """Return values that XLA cannot fuse with what computes them."""
    # Fused, a product and a sum become one operation with other bits, so the bits would depend on the code around.
    if group.platform != "cpu":
        return lax.optimization_barrier(values)
    # XLA's CPU backend removes barriers before it fuses, but not a branch whose condition it does not know.
    leaves, treedef = jax.tree.flatten(values)
    # Typed keys hold no floats, so nothing of them is fused.
    plain = [i for i, leaf in enumerate(leaves) if key_of(leaf) is None]
    apart = lax.cond(
        # A call with blocks has rows, so the condition always holds. XLA cannot know: the number comes from the table
        # of parts.
        part.total > 0,
        lambda leaves: leaves,
        lambda leaves: [jnp.zeros_like(leaf) for leaf in leaves],
        [jnp.asarray(leaves[i]) for i in plain],
    )
    fenced = dict(zip(plain, apart, strict=True))
    return treedef.unflatten([fenced.get(i, leaf) for i, leaf in enumerate(leaves)])


def rows_from(array: jax.Array, index: jax.Array | None, first: Any, rows: int) -> jax.Array:
    """Return so many of a replica's rows, from number `first` on; if it has fewer, earlier rows fill them up."""
    # lax.dynamic_slice moves the start towards the front where rows are missing: a replica without such a block reads
    # other real rows, whose results are dropped.
    if index is None or not index.ndim:
        return lax.dynamic_slice_in_dim(array, first if index is None else index + first, rows)
    return read_rows(array, lax.dynamic_slice_in_dim(index, first, rows), rows)
