"""Feed: how the rows of one argument reach a replica's program: sent, or picked from rows that lie there."""

from typing import NamedTuple

import jax
import numpy as np
from jax import lax

from .._runtime.group import Group
from .._runtime.way import Layout
from .overlap import Overlap, halo_of
from .selection import IndexKind


class InputFeed(NamedTuple):
    """The arrays by which one argument's rows reach a program.

    Attributes:
      layout: the layout of the rows.
      index: the form of a second array that picks rows, one entry a replica: the first of consecutive rows ("slice") or
        the index of each row ("gather"). None if a part is the whole entry of its replica.
      size: the rows of a resident array that a replica sees.
      overlap: the neighbours that a part sees.
      held_rows: the rows of all replicas in a resident array whose neighbours the program exchanges.
    """

    layout: Layout = "rows"
    index: IndexKind | None = None  # type: ignore[assignment]  # a tuple has a method of that name
    size: int = 0
    overlap: Overlap | None = None
    held_rows: int = 0

    def arrays(
        self, row: jax.ShapeDtypeStruct, max_rows: int, group: Group
    ) -> list[tuple[Layout, jax.ShapeDtypeStruct]]:
        """Return layouts and global shapes for parts of up to `max_rows` rows of this shape."""
        max_rows += halo_of(self.overlap)
        # Neighbours travel with the rows of each part, so every layout but a whole array has room for them.
        front = {
            "rows": (group._way.rows_sent(max_rows),),
            "stacked": (group.size, self.size or max_rows),
            "replicated": (self.size,),
        }
        array = self.layout, jax.ShapeDtypeStruct((*front[self.layout], *row.shape), row.dtype)
        return [array] if self.index is None else [array, ("stacked", index_shape(self.index, max_rows, group.size))]


# Rows that each call sends from the host.
SENT = InputFeed()


def index_shape(kind: IndexKind, max_rows: int, replicas: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((replicas,) if kind == "slice" else (replicas, max_rows), np.int32)


def read_rows(array: jax.Array, index: jax.Array | None, rows: int) -> jax.Array:
    """Pick rows of a replica's array. The index is data, so that other rows need no other program."""
    # The host has checked the index: out-of-bounds handling would cost time in the program.
    if index is None:
        return array if array.shape[0] == rows else lax.slice_in_dim(array, 0, rows)
    if index.ndim:
        return array.at[index[:rows]].get(mode="promise_in_bounds")
    return array if array.shape[0] == rows else lax.dynamic_slice_in_dim(array, index, rows)
