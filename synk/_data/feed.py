"""Feed: how the rows of one argument reach a replica's program: sent there, or picked from what lies there."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
from jax import lax

from .._runtime.layout import Layout
from .selection import IndexKind


class InputFeed(NamedTuple):
    """How one argument's rows come.

    Attributes:
      layout: of its array.
      index: None where a replica's part of that begins with the very rows; else a second array says which: the first
        of consecutive rows ("slice"), or the index of each ("gather"), an entry a replica.
      size: rows of a resident array that a replica sees; 0 where rows are sent.
    """

    layout: Layout = "rows"
    index: IndexKind | None = None  # type: ignore[assignment]  # a tuple has a method of that name
    size: int = 0

    @property
    def layouts(self) -> list[Layout]:
        """Of its arrays."""
        return [self.layout] if self.index is None else [self.layout, "stacked"]

    def shapes(self, row: jax.ShapeDtypeStruct, tall: int, replicas: int) -> list[jax.ShapeDtypeStruct]:
        """Global shapes of its arrays, where the longest part has `tall` rows of this shape."""
        front = {"rows": (tall * replicas,), "stacked": (replicas, self.size or tall), "replicated": (self.size,)}
        array = jax.ShapeDtypeStruct((*front[self.layout], *row.shape), row.dtype)
        return [array] if self.index is None else [array, index_shape(self.index, tall, replicas)]


SENT = InputFeed()  # rows that each call brings


def index_shape(kind: IndexKind, tall: int, replicas: int) -> jax.ShapeDtypeStruct:
    """Global shape of what says which rows each replica reads."""
    return jax.ShapeDtypeStruct((replicas,) if kind == "slice" else (replicas, tall), np.int32)


def read_rows(array: jax.Array, index: jax.Array | None, rows: int) -> jax.Array:
    """Rows of a replica's array. The index was checked; it is data, so that other rows need no other program."""
    if index is None:
        return array if array.shape[0] == rows else lax.slice_in_dim(array, 0, rows)
    if index.ndim:
        return array.at[index[:rows]].get(mode="promise_in_bounds")
    return array if array.shape[0] == rows else lax.dynamic_slice_in_dim(array, index, rows)
