"""Wire: sums of floats with fewer bits on the way: encode, add as float32, encode the sum again.

Quantised reduce-scatters by an all-to-all are described in ZeRO++ (arXiv:2306.10209).
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._base.pytree import PyTree
from .._runtime.way import replica_axis
from .collectives import packed

WireName: TypeAlias = Literal["bf16", "int8"]

# Numbers that share a scale. Leaves with fewer numbers travel as they are.
BLOCK = 256
# The largest int8 that has a negative.
_LARGEST = 127


class Wire(NamedTuple):
    """A format of floats on the way. Blocks of float32 numbers lie on the last axis; they travel as unsigned integers.

    Attributes:
      error: bound of a sum's error, relative to the sum of the parts' largest numbers.
    """

    encode: Callable[[jax.Array], jax.Array]
    decode: Callable[[jax.Array], jax.Array]
    error: float


def _encode_bf16(blocks: jax.Array) -> jax.Array:
    # On simulated replicas nothing travels, and XLA drops a conversion to bfloat16 and back. It keeps this operation:
    # https://github.com/jax-ml/jax/issues/6283
    rounded = lax.reduce_precision(blocks, exponent_bits=8, mantissa_bits=7)
    # Bits, since XLA's CPU backend widens collectives of bfloat16.
    return lax.bitcast_convert_type(rounded.astype(jnp.bfloat16), jnp.uint16)


def _decode_bf16(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.bfloat16).astype(jnp.float32)


def _encode_int8(blocks: jax.Array) -> jax.Array:
    """Encode (..., 256) numbers as 256 bytes and the 4 bytes of their scale. NaN or infinity turns a block to NaN."""
    # XLA's CPU backend may lose NaN in a maximum (https://github.com/openxla/xla/issues/21461), so this asks first.
    is_finite = jnp.isfinite(blocks).all(-1, keepdims=True)
    # A block of zeros would divide by 0.
    scale = jnp.maximum(jnp.abs(blocks).max(-1, keepdims=True) / _LARGEST, jnp.finfo(jnp.float32).tiny)
    scale = jnp.where(is_finite, scale, jnp.nan)
    numbers = jnp.round(blocks / scale).astype(jnp.int8)
    # The scale travels in the same buffer: a second collective would cost more than its 4 bytes.
    scale_bytes = lax.bitcast_convert_type(scale, jnp.uint8).reshape(*scale.shape[:-1], 4)
    return jnp.concatenate([lax.bitcast_convert_type(numbers, jnp.uint8), scale_bytes], -1)


def _decode_int8(bits: jax.Array) -> jax.Array:
    numbers = lax.bitcast_convert_type(bits[..., :BLOCK], jnp.int8).astype(jnp.float32)
    scale = lax.bitcast_convert_type(bits[..., BLOCK:], jnp.float32)[..., None]
    return jnp.where(jnp.isfinite(scale), numbers * scale, jnp.nan)


# Each part is off by half a unit in the last place, and so is the sum.
WIRES: dict[str, Wire] = {
    "bf16": Wire(_encode_bf16, _decode_bf16, 2**-7),
    "int8": Wire(_encode_int8, _decode_int8, 1 / _LARGEST),
}


def check_wire(wire: PyTree, name: str) -> PyTree:
    for leaf in jax.tree.leaves(wire):
        if not isinstance(leaf, str) or leaf not in WIRES:
            error = ValueError if isinstance(leaf, str) else TypeError
            formats = ", ".join(f'"{wire}"' for wire in WIRES)
            raise error(f"{name}: wire {leaf!r} is none of synk's; use {formats} or None.")
    return wire


def largest_error(wire: str, op: str, parts: np.ndarray) -> float:
    """Return how far a combination of parts, stacked on axis 0, may be off because of its wire."""
    sizes = np.nan_to_num(np.abs(parts.astype(np.float64)), posinf=0).reshape(len(parts), -1).max(1)
    # The weights of a mean add up to 1.
    return WIRES[wire].error * float(sizes.sum() if op == "sum" else sizes.max())


def all_sum_narrowly(values: Sequence[jax.Array], wire: str, per_process: int = 1) -> list[jax.Array]:
    """Sum each array over the replicas, with a half or a quarter of the bytes. The sum has no derivative."""
    if lax.psum(1, replica_axis()) == 1:
        return list(values)
    # Padding keeps numbers of two leaves out of one block.
    flat = [_padded(value.ravel(), BLOCK) for value in values]
    # Replicas of one process add up as float32 first, since devices of one host have fast links; only the sums of
    # processes are encoded.
    sums = packed(flat, lambda arrays: [_sum(wire, array, per_process) for array in arrays])
    return [whole[: value.size].reshape(value.shape) for whole, value in zip(sums, values, strict=True)]


def _sum(wire: str, flat: jax.Array, per_process: int) -> jax.Array:
    """Sum one flat array: exchange encoded parts by an all-to-all, add them decoded, all-gather the encoded sums."""
    replicas, (encode, decode, *_) = lax.psum(1, replica_axis()), WIRES[wire]
    together = _padded(flat, replicas * BLOCK)
    processes, inside, across = replicas // per_process, None, None
    # Ranks are sorted by process: row i are the replicas of process i, column j those with place j in their process.
    if 1 < per_process < replicas:
        ranks = np.arange(replicas).reshape(processes, per_process)
        inside, across = ranks.tolist(), ranks.T.tolist()
        together = lax.psum_scatter(together.reshape(per_process, -1), replica_axis(), axis_index_groups=inside)
    blocks = together.reshape(replicas if inside is None else processes, -1, BLOCK)
    mine = decode(lax.all_to_all(encode(blocks), replica_axis(), 0, 0, axis_index_groups=across)).sum(0)
    bits = lax.all_gather(encode(mine), replica_axis(), axis_index_groups=across)
    # Each replica also decodes its own part of the sum. Otherwise replicas would hold other bits of it, and drift
    # apart.
    whole = decode(bits if inside is None else lax.all_gather(bits, replica_axis(), axis_index_groups=inside))
    return whole.ravel()[: flat.size]


def _padded(flat: jax.Array, multiple: int) -> jax.Array:
    return jnp.pad(flat, (0, -flat.size % multiple))
