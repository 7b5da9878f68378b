"""Collectives inside a program: one a dtype, small arrays packed into one buffer, large ones as they are."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._runtime.way import replica_axis

Arrays = Sequence[jax.Array]

# Leaves of up to this many bytes share one buffer a dtype. A collective costs time per operand, packing costs time per
# byte. Here the two meet, by measurements on CPU devices.
PACK_BYTES = 64 * 1024
# The number of leaves a buffer where XLA makes one collective of several buffers. A training step of 200 leaves
# compiles in 9.6 s with one buffer, in 5.5 s with 16 leaves in each, and runs as fast.
SUMMED_TOGETHER = 16


def all_sum(values: Arrays) -> list[jax.Array]:
    return list(values) if _is_alone() else _reduced(lax.psum, values)


def all_extremes(values: Arrays, is_min: Sequence[bool]) -> list[jax.Array]:
    """Take the elementwise maximum or minimum over the replicas, NaN if one has NaN. Extremes have no gradient."""
    if _is_alone():
        return list(values)
    # Floats travel as integers of the same order, since all-reduces of floats may lose NaN
    # (https://github.com/openxla/xla/issues/21461). Minima travel as maxima of the reverse order, so that one
    # collective a dtype serves both.
    keys = [_sortable(array, low) for array, low in zip(values, is_min, strict=True)]
    largest = _reduced(lax.pmax, keys)
    return [_unsortable(k, a.dtype, low) for k, a, low in zip(largest, values, is_min, strict=True)]


def _reduced(operation: Callable[..., Any], values: Arrays) -> list[jax.Array]:
    return packed(values, partial(operation, axis_name=replica_axis()), most=SUMMED_TOGETHER)


def all_gather(values: Arrays) -> list[jax.Array]:
    """Gather each array from all replicas: (replicas, *shape)."""
    if _is_alone():
        return [value[None] for value in values]
    return packed(values, lambda arrays: [lax.all_gather(array, replica_axis()) for array in arrays])


def _is_alone() -> bool:
    # The sum of a Python number over an axis is its size, known while tracing.
    return lax.psum(1, replica_axis()) == 1


def _sortable(array: jax.Array, is_min: bool) -> jax.Array:
    """Map numbers to integers of the same order, or of the reverse order for minima. NaN becomes the largest."""
    # The complement reverses the order of signed and of unsigned integers, and, unlike a negation, maps no number
    # outside the dtype.
    if not jnp.issubdtype(array.dtype, jnp.floating):
        key = array.astype(jnp.int32) if array.dtype == np.bool_ else array
        return ~key if is_min else key
    wide = array if array.dtype.itemsize >= 4 else array.astype(jnp.float32)
    key = _ordered(lax.bitcast_convert_type(wide, jnp.int64 if wide.dtype.itemsize == 8 else jnp.int32))
    # NaN is the largest key in both orders, so that it wins whichever extreme is taken.
    return jnp.where(jnp.isnan(wide), jnp.iinfo(key.dtype).max, ~key if is_min else key)


def _unsortable(key: jax.Array, dtype: np.dtype, is_min: bool) -> jax.Array:
    order = ~key if is_min else key
    if not jnp.issubdtype(dtype, jnp.floating):
        return order.astype(dtype)
    wide = lax.bitcast_convert_type(_ordered(order), jnp.float64 if key.dtype.itemsize == 8 else jnp.float32)
    return jnp.where(key == jnp.iinfo(key.dtype).max, np.nan, wide).astype(dtype)


def _ordered(bits: jax.Array) -> jax.Array:
    """Map the bits of floats to integers of the same order, and back."""
    # Negative floats have a sign bit and a magnitude, negative integers are complements.
    return jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)


def packed(values: Arrays, communicate: Callable[[list[jax.Array]], Arrays], most: int = 2**31) -> list[jax.Array]:
    """Communicate arrays of one dtype together, up to `most` in one buffer."""
    results: dict[int, jax.Array] = {}
    # Concatenating other dtypes would convert them. The order of dtypes is that of the values, so that all processes
    # communicate alike.
    for dtype in dict.fromkeys(value.dtype for value in values):
        same = [i for i, value in enumerate(values) if value.dtype == dtype]
        small = [i for i in same if values[i].nbytes <= PACK_BYTES]
        groups = [small[start : start + most] for start in range(0, len(small), most)]
        groups += [[i] for i in same if values[i].nbytes > PACK_BYTES]
        received = communicate([_joined([values[i] for i in group]) for group in groups])
        for group, buffer in zip(groups, received, strict=True):
            if len(group) == 1:
                results[group[0]] = buffer
                continue
            shapes = [values[i].shape for i in group]
            # A gathered buffer has an axis of replicas in front, so it is split along the last.
            stops = np.cumsum([math.prod(shape) for shape in shapes])
            for i, piece, shape in zip(group, jnp.split(buffer, stops[:-1], axis=-1), shapes, strict=True):
                results[i] = piece.reshape(*buffer.shape[:-1], *shape)
    return [results[i] for i in range(len(values))]


def _joined(arrays: Arrays) -> jax.Array:
    if len(arrays) == 1:
        return arrays[0]
    return jnp.concatenate([array.reshape(-1) for array in arrays])
