"""Collectives inside a program: one a dtype, small arrays packed into one buffer, large ones as they are."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._runtime.group import AXIS

Arrays = Sequence[jax.Array]

# Leaves up to this many bytes share one buffer a dtype: a collective costs per operand on CPU, a copy per byte.
# bench/packing.py measures where that turns.
PACK_BYTES = 64 * 1024
# How many share one where XLA makes one collective of several buffers: a training step of 200 leaves takes it 9.6 s to
# compile where all are in one, 5.5 s with 16 in each, and steps take as long either way.
SUMMED_TOGETHER = 16


def all_sum(values: Arrays) -> list[jax.Array]:
    """Sum each array over the replicas."""
    return list(values) if _is_alone() else _reduced(lax.psum, values)


def all_extremes(values: Arrays, is_min: Sequence[bool]) -> list[jax.Array]:
    """Take the elementwise maximum or minimum over the replicas; NaN where one has NaN, and no gradients.

    All-reduces of floats may lose NaN, so floats travel as integers of the same order, and minima as maxima of their
    reverse: one collective a dtype.
    """
    if _is_alone():
        return list(values)
    keys = [_sortable(array, low) for array, low in zip(values, is_min, strict=True)]
    found = _reduced(lax.pmax, keys)
    return [_unsortable(k, a.dtype, low) for k, a, low in zip(found, values, is_min, strict=True)]


def _reduced(operation: Callable[..., Any], values: Arrays) -> list[jax.Array]:
    return packed(values, PACK_BYTES, partial(operation, axis_name=AXIS), most=SUMMED_TOGETHER)


def all_gather(values: Arrays) -> list[jax.Array]:
    """Gather each array from all replicas: (replicas, *shape)."""
    if _is_alone():
        return [value[None] for value in values]
    return packed(values, PACK_BYTES, lambda arrays: [lax.all_gather(array, AXIS) for array in arrays])


def sum_scatter(values: Arrays) -> list[jax.Array]:
    """Sum arrays that have an entry for each replica on axis 0; each replica gets its entry."""
    if _is_alone():
        return [value[0] for value in values]
    return packed(values, PACK_BYTES, lambda arrays: [lax.psum_scatter(array, AXIS) for array in arrays], front=1)


def all_folded(array: jax.Array, fold: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Fold an array over the replicas, each of which folds a piece: the memory of two, and not of one a replica."""
    if _is_alone() or not array.size:
        return array
    size = lax.psum(1, AXIS)
    piece = -(-array.size // size)
    flat = jnp.pad(array.ravel(), (0, piece * size - array.size)).reshape(size, piece)
    # Of what is the same on all replicas JAX's vmap of all_to_all makes (replicas, piece, replicas, piece).
    flat = jnp.where(lax.axis_index(AXIS) >= 0, flat, flat[:1, :1])
    mine = fold(lax.all_to_all(flat, AXIS, 0, 0)).astype(array.dtype)
    return lax.all_gather(mine, AXIS).ravel()[: array.size].reshape(array.shape)


def merge_leading_axes(entries: jax.Array) -> jax.Array:
    """The first two axes as one."""
    return entries.reshape(entries.shape[0] * entries.shape[1], *entries.shape[2:])


def _is_alone() -> bool:
    return lax.psum(1, AXIS) == 1


def _sortable(array: jax.Array, is_min: bool) -> jax.Array:
    """Numbers as integers of the same order, of the reverse for minima; NaN is where it wins."""
    if not jnp.issubdtype(array.dtype, jnp.floating):
        key = array.astype(jnp.int32) if array.dtype == np.bool_ else array
        return ~key if is_min else key
    wide = array if array.dtype.itemsize >= 4 else array.astype(jnp.float32)
    key = _ordered(lax.bitcast_convert_type(wide, jnp.int64 if wide.dtype.itemsize == 8 else jnp.int32))
    return jnp.where(jnp.isnan(wide), jnp.iinfo(key.dtype).max, ~key if is_min else key)


def _unsortable(key: jax.Array, dtype: np.dtype, is_min: bool) -> jax.Array:
    order = ~key if is_min else key
    if not jnp.issubdtype(dtype, jnp.floating):
        return order.astype(dtype)
    wide = lax.bitcast_convert_type(_ordered(order), jnp.float64 if key.dtype.itemsize == 8 else jnp.float32)
    return jnp.where(key == jnp.iinfo(key.dtype).max, np.nan, wide).astype(dtype)


def _ordered(bits: jax.Array) -> jax.Array:
    """Bits of floats as integers of the same order, and back."""
    return jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)


def packed(
    values: Arrays, limit: float, communicate: Callable[[list[jax.Array]], Arrays], front: int = 0, most: int = 2**31
) -> list[jax.Array]:
    """Communicate arrays of one dtype together; those of at most `limit` bytes by up to `most` in one buffer, but for
    `front` axes."""
    results: dict[int, jax.Array] = {}
    for dtype in dict.fromkeys(value.dtype for value in values):
        same = [i for i, value in enumerate(values) if value.dtype == dtype]
        small = [i for i in same if values[i].nbytes <= limit]
        alone = [i for i in same if values[i].nbytes > limit]
        if len(small) == 1:
            alone, small = same, []
        groups = [small[start : start + most] for start in range(0, len(small), most)]
        together = [
            jnp.concatenate([values[i].reshape(*values[i].shape[:front], -1) for i in each], -1) for each in groups
        ]
        received = communicate([*together, *(values[i] for i in alone)])
        for each, buffer in zip(groups, received, strict=False):
            like = [jax.ShapeDtypeStruct(values[i].shape[front:], dtype) for i in each]
            results |= zip(each, _unpack(buffer, like), strict=True)
        results |= zip(alone, received[len(together) :], strict=True)
    return [results[i] for i in range(len(values))]


def _unpack(packed: jax.Array, like: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    """Cut the last axis of a buffer into arrays shaped like those that were packed."""
    stops = np.cumsum([array.size for array in like])
    return [
        lax.slice_in_dim(packed, int(stop) - array.size, int(stop), axis=-1).reshape(*packed.shape[:-1], *array.shape)
        for array, stop in zip(like, stops, strict=True)
    ]
