"""Feed: how the rows of one argument reach a replica's program: sent there, or picked from what lies there."""

from typing import NamedTuple

import jax
import numpy as np
from jax import lax

from .._runtime.layout import Layout
from .overlap import Overlap, halo_of
from .selection import IndexKind


class InputFeed(NamedTuple):
    """How one argument's rows come: in an array, and where its parts do not begin with the very rows, a second one, an
    entry a replica, says which they are: the first of consecutive ones ("slice"), or the index of each ("gather")."""

    layout: Layout = "rows"
    index: IndexKind | None = None  # type: ignore[assignment]  # a tuple has a method of that name
    size: int = 0  # rows of a resident array that a replica sees
    overlap: Overlap | None = None  # which neighbours a part sees
    held_rows: int = 0  # of a resident array whose neighbours the program exchanges, rows of all replicas

    def arrays(
        self, row: jax.ShapeDtypeStruct, max_rows: int, replicas: int
    ) -> list[tuple[Layout, jax.ShapeDtypeStruct]]:
        """Layouts and global shapes, where the longest part has `max_rows` rows of this shape."""
        max_rows += halo_of(self.overlap)
        front = {
            "rows": (max_rows * replicas,),
            "stacked": (replicas, self.size or max_rows),
            "replicated": (self.size,),
        }
        array = self.layout, jax.ShapeDtypeStruct((*front[self.layout], *row.shape), row.dtype)
        return [array] if self.index is None else [array, ("stacked", index_shape(self.index, max_rows, replicas))]


SENT = InputFeed()  # rows that each call brings


def index_shape(kind: IndexKind, max_rows: int, replicas: int) -> jax.ShapeDtypeStruct:
    """Global shape of what says which rows each replica reads."""
    return jax.ShapeDtypeStruct((replicas,) if kind == "slice" else (replicas, max_rows), np.int32)


def read_rows(array: jax.Array, index: jax.Array | None, rows: int) -> jax.Array:
    """Rows of a replica's array. The index was checked; it is data, so that other rows need no other program."""
    if index is None:
        return array if array.shape[0] == rows else lax.slice_in_dim(array, 0, rows)
    if index.ndim:
        return array.at[index[:rows]].get(mode="promise_in_bounds")
    return array if array.shape[0] == rows else lax.dynamic_slice_in_dim(array, index, rows)
