"""Pieces: arrays of which each replica has one n-th, as a row of numbers, with zeros after the last one."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._runtime.group import AXIS
from .collectives import all_gather, sum_scatter

Shapes = Sequence[jax.ShapeDtypeStruct]


def piece_of(shape: jax.ShapeDtypeStruct, replicas: int) -> jax.ShapeDtypeStruct:
    """Shape and dtype of one replica's piece."""
    return jax.ShapeDtypeStruct((-(-shape.size // replicas),), shape.dtype)


def cut(array: Any, replicas: int) -> Any:
    """All pieces of an array, of NumPy or JAX: (replicas, numbers of a piece)."""
    numpy: Any = np if isinstance(array, np.ndarray) else jnp
    return numpy.pad(array.reshape(-1), (0, -array.size % replicas)).reshape(replicas, -1)


def join(pieces: Any, shape: jax.ShapeDtypeStruct) -> Any:
    """The array whose pieces these are."""
    return pieces.reshape(-1)[: shape.size].reshape(shape.shape)


# Inside a program.


def own_pieces(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """This replica's pieces of arrays that all have."""
    return [cut(array, lax.psum(1, AXIS))[lax.axis_index(AXIS)] for array in arrays]


def sum_to_pieces(parts: Sequence[jax.Array]) -> list[jax.Array]:
    """This replica's pieces of the sums of arrays over the replicas."""
    return sum_scatter([cut(part, lax.psum(1, AXIS)) for part in parts])


def gather_pieces(pieces: Sequence[jax.Array], shapes: Shapes) -> list[jax.Array]:
    """The arrays of these shapes, from all replicas' pieces."""
    whole = all_gather(pieces)
    return [join(each, shape) for each, shape in zip(whole, shapes, strict=True)]
