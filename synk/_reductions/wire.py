"""Wire: sums of floats that travel narrowly: encoded, added as float32, and encoded again for all to decode."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._base.pytree import PyTree
from .._runtime.group import AXIS
from .collectives import PACK_BYTES, packed

BLOCK = 256  # numbers that share a scale; leaves with fewer travel as they are
_LARGEST = 127  # of int8, with either sign


class Wire(NamedTuple):
    """How floats are written; blocks are on the last axis, float32.

    A psum of bfloat16 would not do: XLA's CPU backend widens it. So bits travel, as unsigned integers.
    """

    encode: Callable[[jax.Array], jax.Array]
    decode: Callable[[jax.Array], jax.Array]
    error: float  # what a sum is off at most, to the sum of what its parts are (of int8: of their largest numbers)
    is_by_number: bool  # whether that holds for each number, or for the largest of a leaf


def _encode_bf16(blocks: jax.Array) -> jax.Array:
    # XLA takes a conversion there and back for none where nothing comes between, as on simulated replicas.
    rounded = lax.reduce_precision(blocks, exponent_bits=8, mantissa_bits=7)
    return lax.bitcast_convert_type(rounded.astype(jnp.bfloat16), jnp.uint16)


def _decode_bf16(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.bfloat16).astype(jnp.float32)


def _encode_int8(blocks: jax.Array) -> jax.Array:
    """(..., 256) numbers as as many bytes, and the 4 of their scale; one NaN or infinity makes all of a block NaN."""
    is_finite = jnp.isfinite(blocks).all(-1, keepdims=True)  # XLA's CPU backend may lose NaN in a maximum
    scale = jnp.maximum(jnp.abs(blocks).max(-1, keepdims=True) / _LARGEST, jnp.finfo(jnp.float32).tiny)
    scale = jnp.where(is_finite, scale, jnp.nan)
    numbers = jnp.round(blocks / scale).astype(jnp.int8)
    scale_bytes = lax.bitcast_convert_type(scale, jnp.uint8).reshape(*scale.shape[:-1], 4)
    return jnp.concatenate([lax.bitcast_convert_type(numbers, jnp.uint8), scale_bytes], -1)


def _decode_int8(bits: jax.Array) -> jax.Array:
    numbers = lax.bitcast_convert_type(bits[..., :BLOCK], jnp.int8).astype(jnp.float32)
    scale = lax.bitcast_convert_type(bits[..., BLOCK:], jnp.float32)[..., None]
    return jnp.where(jnp.isfinite(scale), numbers * scale, jnp.nan)


# Half a unit in the last place of each part and once more of their sum.
WIRES = {
    "bf16": Wire(_encode_bf16, _decode_bf16, 2**-7, True),
    "int8": Wire(_encode_int8, _decode_int8, 1 / _LARGEST, False),
}


def check_wire(wire: PyTree, name: str) -> PyTree:
    """Check a tree of wires, None where sums travel as they are."""
    for each in jax.tree.leaves(wire):
        if not isinstance(each, str) or each not in WIRES:
            error = ValueError if isinstance(each, str) else TypeError
            raise error(f'{name}: wire {each!r} is none of synk\'s; use "bf16", "int8" or None.')
    return wire


def largest_error(wire: str, op: str, parts: np.ndarray) -> np.ndarray:
    """How far a combination of these parts, on axis 0, may be off for having travelled so."""
    sizes = np.nan_to_num(np.abs(parts.astype(np.float64)))
    if not WIRES[wire].is_by_number:
        sizes = sizes.max(tuple(range(1, sizes.ndim)), keepdims=True)
    return WIRES[wire].error * (sizes.sum(0) if op == "sum" else sizes.max(0))  # weights of means add up to 1


def may_be_nan(wire: str, parts: np.ndarray) -> np.ndarray:
    """Where a sum may be NaN, as its parts, on axis 0, are: of int8 where a number of the block is not finite."""
    bad: np.ndarray = np.asarray(~np.isfinite(parts.astype(np.float64)).all(0))
    if WIRES[wire].is_by_number:
        return bad
    blocks = np.pad(bad.ravel(), (0, -bad.size % BLOCK)).reshape(-1, BLOCK)
    return np.repeat(blocks.any(1), BLOCK)[: bad.size].reshape(bad.shape)


def travels_narrowly(state: Any) -> bool:
    """Is it worth it, and can it? Few numbers travel as they are, and those that are no float32."""
    return state.dtype == np.float32 and state.size >= BLOCK


def all_sum_narrowly(values: Sequence[jax.Array], wire: str, per_process: int = 1) -> list[jax.Array]:
    """Sum each array over the replicas, at half or a quarter of the bytes; small ones together. No derivatives.

    Of several processes, those of a process add up first, as float32: what lies together has a wide way between, and
    only their sums travel further.
    """
    if lax.psum(1, AXIS) == 1:
        return list(values)
    flat = [_padded(value.ravel(), BLOCK) for value in values]  # no block of two leaves
    found = packed(flat, PACK_BYTES, lambda arrays: [_sum(wire, array, per_process) for array in arrays])
    return [whole[: value.size].reshape(value.shape) for whole, value in zip(found, values, strict=True)]


def _sum(wire: str, flat: jax.Array, per_process: int) -> jax.Array:
    """Reduce-scatter by an all-to-all of what is encoded, so that nothing encoded is ever added, and all-gather.

    Each replica decodes what all have gathered, its own part included: else they would drift apart.
    """
    replicas, (encode, decode, *_) = lax.psum(1, AXIS), WIRES[wire]
    together = _padded(flat, replicas * BLOCK)
    processes, inside, across = replicas // per_process, None, None
    if 1 < per_process < replicas:
        ranks = np.arange(replicas).reshape(processes, per_process)
        inside, across = ranks.tolist(), ranks.T.tolist()
        together = lax.psum_scatter(together.reshape(per_process, -1), AXIS, axis_index_groups=inside)
    blocks = together.reshape(replicas if inside is None else processes, -1, BLOCK)
    mine = decode(lax.all_to_all(encode(blocks), AXIS, 0, 0, axis_index_groups=across)).sum(0)
    bits = lax.all_gather(encode(mine), AXIS, axis_index_groups=across)
    whole = decode(bits if inside is None else lax.all_gather(bits, AXIS, axis_index_groups=inside))
    return whole.ravel()[: flat.size]


def _padded(flat: jax.Array, multiple: int) -> jax.Array:
    return jnp.pad(flat, (0, -flat.size % multiple))
