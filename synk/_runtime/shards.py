"""Shards: arrays of which each replica stores one n-th, in rows of numbers with zeros behind the last one.

Those of three axes or more keep axis 0, so that a loop over stacked layers finds a shard of each; others are flat.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .way import replica_axis


@partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["shape"])
@dataclass(frozen=True)
class Shard:
    """One replica's shard of an array.

    Attributes:
      array: its numbers: (numbers,), or (layers, numbers of a layer).
      shape: of the whole.
    """

    array: Any
    shape: tuple[int, ...]

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    @property
    def has_layers(self) -> bool:
        """Tell whether the shard holds a part of each layer on axis 0 of the whole."""
        return self.array.ndim == 2

    @property
    def length(self) -> int:
        """Return how many numbers the shards of all replicas hold, of each layer or of the whole."""
        return prod(self.shape[1:] if self.has_layers else self.shape)


def keeps_layers(shape: Sequence[int]) -> bool:
    return len(shape) > 2


def shard_shape(shape: jax.ShapeDtypeStruct, replicas: int) -> jax.ShapeDtypeStruct:
    front = shape.shape[:1] if keeps_layers(shape.shape) else ()
    return jax.ShapeDtypeStruct((*front, -(-prod(shape.shape[len(front) :]) // replicas)), shape.dtype)


def to_shards(array: Any, replicas: int, has_layers: bool | None = None) -> Any:
    """Cut an array of NumPy or JAX into shards: (replicas, *a shard)."""
    numpy: Any = np if isinstance(array, np.ndarray) else jnp
    has_layers = keeps_layers(array.shape) if has_layers is None else has_layers
    layers = len(array) if has_layers else 1
    rows = array.reshape(layers, array.size // max(layers, 1))
    # Zeros at the end make shards of one length, which psum_scatter and all_gather demand.
    rows = numpy.pad(rows, ((0, 0), (0, -rows.shape[1] % replicas)))
    rows = numpy.moveaxis(rows.reshape(layers, replicas, -1), 1, 0)
    return rows if has_layers else rows[:, 0]


def from_shards(shards: Any, shape: jax.ShapeDtypeStruct) -> Any:
    """Join the shards of an array of this shape: (replicas, *a shard)."""
    numpy: Any = np if isinstance(shards, np.ndarray) else jnp
    rows = numpy.moveaxis(shards, 0, -2)
    rows = rows.reshape(*rows.shape[:-2], -1)
    return rows[..., : prod(shape.shape[rows.ndim - 1 :])].reshape(shape.shape)


# Functions from here on run inside a program, on each replica.


def own_shard(array: jax.Array, has_layers: bool | None = None) -> Shard:
    """Return this replica's shard of an array that all replicas have."""
    cut = to_shards(array, lax.psum(1, replica_axis()), has_layers)
    return Shard(cut[lax.axis_index(replica_axis())], array.shape)


def sum_to_shards(part: jax.Array, has_layers: bool | None = None) -> Shard:
    """Add up an array over the replicas, and return this replica's shard of the sum (a reduce-scatter)."""
    return Shard(lax.psum_scatter(to_shards(part, lax.psum(1, replica_axis()), has_layers), replica_axis()), part.shape)


def gather_shard(shard: Shard) -> jax.Array:
    # The last axis is the one that is cut, so one gather joins a flat leaf, or each layer of a stacked one.
    rows = lax.all_gather(shard.array, replica_axis(), axis=shard.array.ndim - 1, tiled=True)
    return rows[..., : shard.length].reshape(shard.shape)


def whole(value: Any) -> Any:
    """Gather a value that is a shard; return any other as it is."""
    return gather_shard(value) if isinstance(value, Shard) else value


def filled(shard: Shard, filler: Any) -> jax.Array:
    """Return the numbers of a shard with this number behind the last one, where an operation left any other."""
    length, replicas = shard.array.shape[-1], lax.psum(1, replica_axis())
    if length * replicas == shard.length:
        return shard.array
    # Counted here, since 32 bits do not count the numbers of the largest leaves.
    counts = np.clip(shard.length - length * np.arange(replicas), 0, length).astype(np.int32)
    is_there = lax.iota(jnp.int32, length) < jnp.asarray(counts)[lax.axis_index(replica_axis())]
    return jnp.where(is_there, shard.array, jnp.asarray(filler, shard.dtype))
