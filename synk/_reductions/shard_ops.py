"""Shards: arrays of which each replica stores one n-th, as a row of numbers, with zeros after the last number."""

from collections.abc import Iterable, Sequence
from itertools import compress
from operator import not_
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._runtime.axis import replica_axis
from .collectives import all_gather, sum_scatter

Shapes = Sequence[jax.ShapeDtypeStruct]


def shard_shape(shape: jax.ShapeDtypeStruct, replicas: int) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of one replica's shard of an array: flat, ceil(size / replicas) numbers."""
    return jax.ShapeDtypeStruct((-(-shape.size // replicas),), shape.dtype)


def to_shards(array: Any, replicas: int) -> Any:
    """Cut an array of NumPy or JAX into shards: (replicas, numbers of a shard)."""
    numpy: Any = np if isinstance(array, np.ndarray) else jnp
    return numpy.pad(array.reshape(-1), (0, -array.size % replicas)).reshape(replicas, -1)


def from_shards(shards: Any, shape: jax.ShapeDtypeStruct) -> Any:
    """Join the shards of an array of this shape."""
    return shards.reshape(-1)[: shape.size].reshape(shape.shape)


def parted(leaves: Sequence[Any], in_shards: Sequence[bool]) -> tuple[list[Any], list[Any]]:
    """Part leaves into those that lie in shards and the others."""
    return [*compress(leaves, in_shards)], [*compress(leaves, map(not_, in_shards))]


def joined(sharded: Iterable[Any], others: Iterable[Any], in_shards: Sequence[bool]) -> list[Any]:
    """Undo `parted`."""
    sources = iter(others), iter(sharded)
    return [next(sources[is_sharded]) for is_sharded in in_shards]


# Functions from here on run inside a program, on each replica.


def own_shards(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Return this replica's shards of arrays that all replicas have."""
    return [to_shards(array, lax.psum(1, replica_axis()))[lax.axis_index(replica_axis())] for array in arrays]


def sum_to_shards(parts: Sequence[jax.Array]) -> list[jax.Array]:
    """Add up arrays over the replicas, and return this replica's shards of the sums (a reduce-scatter)."""
    return sum_scatter([to_shards(part, lax.psum(1, replica_axis())) for part in parts])


def gather_shards(shards: Sequence[jax.Array], shapes: Shapes) -> list[jax.Array]:
    """Gather arrays of these shapes from the shards of all replicas."""
    return [from_shards(whole, shape) for whole, shape in zip(all_gather(shards), shapes, strict=True)]
