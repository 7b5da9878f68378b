"""Ops: how the parts of an output combine into the whole. Knows one mesh axis and no device.

A part is lifted (weighed, widened), merged with the replica's other slices, combined across replicas, and finished.
Three kinds cover every op: sums travel in one all-reduce, folds and rows in one all-gather.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._group import AXIS, PyTree

Op: TypeAlias = str | Callable[[jax.Array], Any] | None
Kind: TypeAlias = Literal["sum", "fold", "rows", "parts", "first", "last"]

KINDS: dict[str | None, Kind] = {
    "sum": "sum", "mean": "sum", "any": "sum", "all": "sum",
    "max": "fold", "min": "fold", "prod": "fold",
    "concat": "rows", "stack": "parts", "first": "first",
}  # fmt: skip
SPELLINGS = {"avg": "mean", "gather": "concat", None: "first"}
NAMES = sorted([*KINDS, "avg", "gather"])  # type: ignore[type-var]  # no None among the keys
FOLDS = {"max": jnp.maximum, "min": jnp.minimum, "prod": jnp.multiply}

# Leaves up to this many bytes share one buffer a dtype: a collective costs per operand on CPU, a copy per byte.
# bench/packing.py measures where that turns.
PACK_BYTES = 64 * 1024


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weighted:
    """A part's value and its weight: under `"mean"` the outputs become `sum(value * weight) / sum(weight)`.

    A part of weight 0 counts for nothing, whatever its value, NaN included; a total weight of 0 gives NaN.

    Attributes:
      value: a pytree of arrays, the part's mean (per replica).
      weight: a scalar, e.g. the part's number of tokens.

    Example:
      >>> import jax.numpy as jnp, numpy as np, synk
      >>> @synk.function(reduce="mean")
      ... def masked_mean(x, mask):
      ...     return synk.Weighted((x * mask).sum() / mask.sum(), mask.sum())
      >>> float(masked_mean(np.arange(4.0), np.array([1.0, 0.0, 0.0, 1.0])))
      1.5
    """

    value: PyTree
    weight: Any


class Leaf(NamedTuple):
    """One output leaf and its op: what tracing learns and every later step follows."""

    path: str
    op: str | Callable[[jax.Array], Any]
    kind: Kind
    dtype: np.dtype  # of the part; of raw key data where `key` is set
    key: Any = None  # the PRNG implementation of a typed key
    weight: int | None = None  # Weighted: which leaf holds its weight


def canonical(op: Op, where: str) -> str | Callable[[jax.Array], Any]:
    """Check an op and return it under its one name."""
    name = SPELLINGS.get(op, op) if op is None or isinstance(op, str) else op
    if callable(name) or (isinstance(name, str) and name in KINDS):
        return name
    close = difflib.get_close_matches(op, NAMES, 1, 0.4) if isinstance(op, str) else []
    hint = (
        f'did you mean "{SPELLINGS.get(close[0], close[0])}"?'
        if close
        else f"use one of {', '.join(NAMES)}, None or a callable."
    )
    error = ValueError if isinstance(op, str) else TypeError
    raise error(f"{where}: op {op!r} is none of synk's; {hint}")


def widened(dtype: np.dtype, op: str) -> np.dtype:
    """The dtype that parts of `dtype` are combined in."""
    if op in ("any", "all"):
        return np.dtype(np.int32)
    if op in ("mean", "weighted", "weight") and not jnp.issubdtype(dtype, jnp.inexact):
        return np.dtype(jnp.result_type(float))
    if op == "sum" and dtype == np.bool_:
        return np.dtype(np.int32)
    if jnp.issubdtype(dtype, jnp.inexact) and jnp.finfo(dtype).bits < 32 and op not in ("max", "min"):
        return np.dtype(np.float32)
    return dtype


def narrowed(dtype: np.dtype, op: str) -> np.dtype:
    """The dtype of the combined output of parts of `dtype`."""
    if op in ("any", "all"):
        return np.dtype(bool)
    if jnp.issubdtype(dtype, jnp.inexact) or op in ("first", "max", "min"):
        return dtype
    return widened(dtype, op)


def lift(values: Sequence[jax.Array], leaves: Sequence[Leaf], weight: Any, rank: Any) -> list[jax.Array]:
    """Prepare one part's outputs: weigh what is summed, give what is gathered an axis 0.

    Args:
      values: the part's outputs, one a leaf.
      weight: the part's share of the rows; 0 where its rows are fillers, which then count for nothing.
      rank: of the replica.
    """
    return [_lift(value, leaf, values, weight, rank) for value, leaf in zip(values, leaves, strict=True)]


def _lift(value: jax.Array, leaf: Leaf, values: Sequence[jax.Array], weight: Any, rank: Any) -> jax.Array:
    if leaf.kind in ("rows", "last"):
        return value
    if leaf.kind == "parts":
        return value[None]
    op = str(leaf.op)
    if op == "any":
        value = value != jnp.zeros((), value.dtype)
    elif op == "all":
        value = value == jnp.zeros((), value.dtype)
    value = value.astype(widened(leaf.dtype, op))
    if leaf.kind == "fold":
        return value
    scale = jnp.asarray(weight)
    counts = scale > jnp.zeros((), scale.dtype)
    if leaf.kind == "first":
        counts = rank == jnp.zeros((), jnp.int32)
    if op == "mean":
        value = value * scale.astype(value.dtype)
    if leaf.weight is not None:
        scale = values[leaf.weight].astype(value.dtype)
        counts = counts & (scale != jnp.zeros((), scale.dtype))
        # Masked before the product too: a gradient through 0 * NaN would be NaN.
        value = jnp.where(counts, value, jnp.zeros((), value.dtype)) * scale
    return jnp.where(counts, value, jnp.zeros((), value.dtype))


def merge(one: Sequence[jax.Array], two: Sequence[jax.Array], leaves: Sequence[Leaf], present: Any) -> list[jax.Array]:
    """Add slice `two` to slice `one` of the same replica; where it is not `present`, leave `one` as it is."""

    def pair(a: jax.Array, b: jax.Array, leaf: Leaf) -> jax.Array:
        if leaf.kind == "fold":
            return jnp.where(present, FOLDS[str(leaf.op)](a, b), a)
        if leaf.kind == "last":
            return jnp.where(present, b, a)
        return a + b  # an absent slice has lifted to zeros

    return [pair(a, b, leaf) for a, b, leaf in zip(one, two, leaves, strict=True)]


class Gathered(NamedTuple):
    """Rows or parts of one leaf on this replica, and which of all replicas' entries to keep, in order."""

    entries: jax.Array
    keep: Any  # None keeps all


def across(values: Sequence[jax.Array | Gathered], leaves: Sequence[Leaf], present: Any) -> list[jax.Array]:
    """Combine lifted and merged outputs over all replicas: one all-reduce and one all-gather a dtype.

    Args:
      values: this replica's, one a leaf: an array for sums and folds, `Gathered` for rows and parts.
      present: booleans of shape (replicas,), which replicas had rows; None for all.

    Returns:
      The finished outputs, the same on every replica.
    """
    sums = [i for i, leaf in enumerate(leaves) if leaf.kind in ("sum", "first")]
    others = [i for i, leaf in enumerate(leaves) if leaf.kind in ("fold", "rows", "parts")]
    totals = dict(zip(sums, all_sum([_array(values[i]) for i in sums]), strict=True))
    gathered = dict(zip(others, all_entries([_array(values[i]) for i in others]), strict=True))

    def finish(i: int, leaf: Leaf) -> jax.Array:
        op = str(leaf.op)
        if leaf.kind in ("rows", "parts"):
            entries = joined(gathered[i])
            keep = getattr(values[i], "keep", None)
            entries = entries if keep is None else entries.at[keep].get(mode="promise_in_bounds")
            return leaf.op(entries) if callable(leaf.op) else entries
        if leaf.kind == "fold":
            return _fold(gathered[i], op, present).astype(narrowed(leaf.dtype, op))
        total = totals[i]
        if leaf.weight is not None:
            total = total / totals[leaf.weight].astype(total.dtype)
        if op == "any":
            total = total > jnp.zeros((), total.dtype)
        elif op == "all":
            total = total == jnp.zeros((), total.dtype)
        return total.astype(narrowed(leaf.dtype, op))

    return [finish(i, leaf) for i, leaf in enumerate(leaves)]


def joined(entries: jax.Array) -> jax.Array:
    """The first two axes as one."""
    return entries.reshape(entries.shape[0] * entries.shape[1], *entries.shape[2:])


def _array(value: jax.Array | Gathered) -> jax.Array:
    return value.entries if isinstance(value, Gathered) else value


def _fold(entries: jax.Array, op: str, present: Any) -> jax.Array:
    if present is not None:
        mask = jnp.reshape(present, (-1,) + (1,) * (entries.ndim - 1))
        entries = jnp.where(mask, entries, jnp.asarray(neutral(op, entries.dtype), entries.dtype))
    if entries.dtype == np.bool_ and op == "prod":
        return entries.all(0)
    if op == "prod":
        return jnp.prod(entries, 0, dtype=entries.dtype)
    return entries.max(0) if op == "max" else entries.min(0)


def neutral(op: str, dtype: np.dtype) -> Any:
    """What changes nothing when folded in."""
    if op == "prod":
        return 1
    if dtype == np.bool_:
        return op == "min"
    if jnp.issubdtype(dtype, jnp.inexact):
        if not np.isinf(np.array(np.inf).astype(dtype)):  # some of 8 bits have no infinity
            return jnp.finfo(dtype).min if op == "max" else jnp.finfo(dtype).max
        return -np.inf if op == "max" else np.inf
    return jnp.iinfo(dtype).min if op == "max" else jnp.iinfo(dtype).max


def all_sum(values: Sequence[jax.Array]) -> list[jax.Array]:
    """Sum each array over the replicas, all in one collective a dtype: small ones packed, large ones as they are."""
    if lax.psum(1, AXIS) == 1:
        return list(values)
    return _packed(values, PACK_BYTES, lambda arrays: lax.psum(arrays, AXIS), _unpack)


def all_entries(values: Sequence[jax.Array]) -> list[jax.Array]:
    """Gather each array from all replicas, (replicas, *shape), in one collective a dtype."""
    if lax.psum(1, AXIS) == 1:
        return [value[None] for value in values]

    def unpack(packed: jax.Array, like: Sequence[jax.Array]) -> list[jax.Array]:
        return list(jax.vmap(lambda row: tuple(_unpack(row, like)))(packed))

    return _packed(values, None, lambda arrays: [lax.all_gather(a, AXIS) for a in arrays], unpack)


def _packed(
    values: Sequence[jax.Array],
    limit: int | None,
    communicate: Callable[[list[jax.Array]], list[jax.Array]],
    unpack: Callable[[jax.Array, Sequence[jax.Array]], list[jax.Array]],
) -> list[jax.Array]:
    """Communicate arrays of one dtype together; those of at most `limit` bytes in one buffer."""
    results: dict[int, jax.Array] = {}
    for dtype in dict.fromkeys(value.dtype for value in values):
        same = [i for i, value in enumerate(values) if value.dtype == dtype]
        small = [i for i in same if limit is None or values[i].size * dtype.itemsize <= limit]
        alone = [i for i in same if i not in set(small)]
        if len(small) == 1:
            alone, small = alone + small, []
        packed = [jnp.concatenate([values[i].ravel() for i in small])] if small else []
        sent = communicate(packed + [values[i] for i in alone])
        if small:
            results |= zip(small, unpack(sent[0], [values[i] for i in small]), strict=True)
        results |= zip(alone, sent[len(packed) :], strict=True)
    return [results[i] for i in range(len(values))]


def _unpack(packed: jax.Array, like: Sequence[jax.Array]) -> list[jax.Array]:
    """Cut a flat buffer into arrays shaped like those that were packed."""
    stops = np.cumsum([array.size for array in like])
    return [
        lax.slice(packed, (int(stop) - array.size,), (int(stop),)).reshape(array.shape)
        for array, stop in zip(like, stops, strict=True)
    ]
