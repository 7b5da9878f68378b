"""Reduction: how the parts of one output combine, on one replica and then over all of them.

    state = prepare(first part); for each other part: state = accumulate(state, prepare(part))
    whole = finalize(collective(state))

A replica that has no part has the identity for its state.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .._base.pytree import PyTree
from .._runtime.executable import as_bits, from_bits
from . import collectives

Op: TypeAlias = str | Callable[[jax.Array], Any] | None
Collective: TypeAlias = Literal["sum", "max", "min", "prod", "gather"]


class PartInfo(NamedTuple):
    """Which part a value is of; traced numbers, none compiled in where rows differ.

    Attributes:
      weight: its share of the rows of all parts.
      is_first: whether it is the first part that has rows.
    """

    weight: Any
    is_first: Any


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


@dataclass(frozen=True)
class Reduction:
    """How parts combine.

    Attributes:
      name: the op, as users and messages call it.
      collective: how states combine over the replicas; "gather" keeps each part's entries, in row order.
      prepare: (part, info) -> its state: widened, weighed; of what is gathered, entries on axis 0.
      accumulate: (state, state) -> state, of parts of one replica; not of what is gathered.
      identity: dtype of the state -> the number that changes nothing.
      finalize: (combined state, total weight) -> the whole, before `result_dtype`.
      result_dtype: dtype of a part -> dtype of the whole.
      has_row_entries: whether what is gathered has an entry a row, else an entry a part.
      is_lawful: whether `f.check` compares it: whether it means the same for any parts.
    """

    name: str
    collective: Collective
    prepare: Callable[[jax.Array, PartInfo], jax.Array]
    accumulate: Callable[[jax.Array, jax.Array], jax.Array]
    identity: Callable[[np.dtype], Any]
    finalize: Callable[[Any, Any], Any]
    result_dtype: Callable[[np.dtype], np.dtype]
    has_row_entries: bool = False
    is_lawful: bool = True


def accumulation_dtype(dtype: np.dtype, op: str) -> np.dtype:
    """The dtype that parts of `dtype` are combined in."""
    if op in ("any", "all"):
        return np.dtype(np.int32)
    if op == "mean" and not jnp.issubdtype(dtype, jnp.inexact):
        return np.dtype(jnp.result_type(float))
    if op == "sum" and dtype == np.bool_:
        return np.dtype(np.int32)
    if jnp.issubdtype(dtype, jnp.inexact) and jnp.finfo(dtype).bits < 32 and op not in ("max", "min"):
        return np.dtype(np.float32)
    return dtype


def result_dtype(dtype: np.dtype, op: str) -> np.dtype:
    """The dtype of the combined output of parts of `dtype`."""
    if op in ("any", "all"):
        return np.dtype(bool)
    if jnp.issubdtype(dtype, jnp.inexact) or op in ("first", "max", "min"):
        return dtype
    return accumulation_dtype(dtype, op)


def _widen(value: jax.Array, op: str) -> jax.Array:
    return value.astype(accumulation_dtype(value.dtype, op))


def _weigh(value: jax.Array, info: PartInfo) -> jax.Array:
    value = _widen(value, "mean")
    return value * jnp.asarray(info.weight).astype(value.dtype)


def _weigh_unless_zero(value: jax.Array, info: PartInfo) -> jax.Array:
    value = _widen(value, "mean")
    weight = jnp.asarray(info.weight).astype(value.dtype)
    # Masked before the product: a gradient through 0 * NaN would be NaN.
    return jnp.where(weight != jnp.zeros((), weight.dtype), value, jnp.zeros((), value.dtype)) * weight


def _if_first(value: jax.Array, info: PartInfo) -> jax.Array:
    return jnp.where(info.is_first, value, jnp.zeros((), value.dtype))


def _zero(dtype: np.dtype) -> int:
    return 0


def _plain(combined: Any, weight: Any) -> Any:
    return combined


def _sum(name: str, prepare: Callable[..., jax.Array], finalize: Callable[..., Any] = _plain) -> Reduction:
    return Reduction(name, "sum", prepare, jnp.add, _zero, finalize, lambda dtype: result_dtype(dtype, name))


def _fold(name: Literal["max", "min", "prod"], accumulate: Callable[..., jax.Array]) -> Reduction:
    return Reduction(
        name, name, lambda v, _: _widen(v, name), accumulate, lambda dtype: identity_of(name, dtype), _plain,
        lambda dtype: result_dtype(dtype, name),
    )  # fmt: skip


def _gather(name: str, prepare: Callable[..., jax.Array], op: Callable[[jax.Array], Any] | None = None) -> Reduction:
    finalize = _plain if op is None else lambda entries, weight: op(entries)
    is_rows = name == "concat"
    return Reduction(name, "gather", prepare, jnp.add, _zero, finalize, lambda d: d, is_rows, is_lawful=is_rows)


def identity_of(op: str, dtype: np.dtype) -> Any:
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


def _multiply(a: jax.Array, b: jax.Array) -> jax.Array:
    return a & b if a.dtype == np.bool_ else a * b


def _is_nonzero(value: jax.Array) -> jax.Array:
    return value != jnp.zeros((), value.dtype)


def _as_entry(value: jax.Array, info: PartInfo) -> jax.Array:
    return value[None]


REDUCTIONS: dict[str, Reduction] = {
    "sum": _sum("sum", lambda v, _: _widen(v, "sum")),
    "mean": _sum("mean", _weigh),
    "any": _sum("any", lambda v, _: _is_nonzero(v).astype(np.int32), lambda count, _: _is_nonzero(count)),
    "all": _sum("all", lambda v, _: (~_is_nonzero(v)).astype(np.int32), lambda count, _: ~_is_nonzero(count)),
    "max": _fold("max", jnp.maximum),
    "min": _fold("min", jnp.minimum),
    "prod": _fold("prod", _multiply),
    "concat": _gather("concat", lambda v, _: v),
    "stack": _gather("stack", _as_entry),
    "first": Reduction("first", "sum", _if_first, jnp.add, _zero, _plain, lambda d: d, is_lawful=False),
}  # fmt: skip

# Of synk.Weighted: a value leaf, whose total is divided by that of its weight; and the weight.
WEIGHTED = _sum("mean", _weigh_unless_zero, lambda total, weight: total / weight.astype(total.dtype))
WEIGHT = _sum("weight", lambda v, _: _widen(v, "mean"))

# The parts as they come, for `f.check`.
PER_PART = _gather("parts", _as_entry)

# How the slices of one replica's update combine; nothing travels.
UPDATES: dict[str, Reduction] = {
    "mean": REDUCTIONS["mean"],
    "add": _sum("sum", lambda v, _: _widen(v, "sum")),
    "max": REDUCTIONS["max"],
    "min": REDUCTIONS["min"],
    "last": Reduction("last", "sum", lambda v, _: v, lambda a, b: b, _zero, _plain, lambda d: d),
}

SPELLINGS = {"avg": "mean", "gather": "concat", None: "first"}
NAMES = sorted([*REDUCTIONS, "avg", "gather"])
ELEMENTWISE = ("sum", "mean", "max", "min", "prod", "any", "all")


def reduction_of(op: Op | Reduction, where: str) -> Reduction:
    """The reduction that a user has named; ValueError or TypeError where it is none."""
    if isinstance(op, Reduction):
        return op
    name = SPELLINGS.get(op, op) if op is None or isinstance(op, str) else op
    if isinstance(name, str) and name in REDUCTIONS:
        return REDUCTIONS[name]
    if callable(name):
        return _gather("callable", _as_entry, name)
    close = difflib.get_close_matches(op, NAMES, 1, 0.4) if isinstance(op, str) else []
    hint = (
        f'did you mean "{SPELLINGS.get(close[0], close[0])}"?'
        if close
        else f"use one of {', '.join(NAMES)}, None or a callable."
    )
    error = ValueError if isinstance(op, str) else TypeError
    raise error(f"{where}: op {op!r} is none of synk's; {hint}")


class Reduced(NamedTuple):
    """One output leaf's reduction, and where its weight is.

    Attributes:
      reduction: how it combines.
      dtype: of a part.
      weight: the number of the leaf that holds its weight, of a `Weighted` value.
    """

    reduction: Reduction
    dtype: np.dtype
    weight: int | None = None


def prepare_parts(values: Sequence[jax.Array], leaves: Sequence[Reduced], info: PartInfo) -> list[jax.Array]:
    """The states of one part's values."""
    return [
        leaf.reduction.prepare(value, info if leaf.weight is None else info._replace(weight=values[leaf.weight]))
        for value, leaf in zip(values, leaves, strict=True)
    ]


def combine_replicas(
    states: Sequence[jax.Array], leaves: Sequence[Reduced], valid: Sequence[Any], has_gradients: bool = False
) -> list[jax.Array]:
    """Combine states over all replicas: one collective a kind of reduction and dtype.

    Args:
      states: this replica's, one a leaf; of what is gathered, entries on axis 0, as many on each replica.
      leaves: their reductions.
      has_gradients: whether it may be differentiated.
      valid: of what is gathered, the indexes of the entries of all replicas that count, in row order; None for all.

    Returns:
      The whole outputs, the same on every replica.
    """
    combined = _communicate(states, leaves, has_gradients)

    def finish(i: int, leaf: Reduced) -> jax.Array:
        whole: Any = combined[i]
        if leaf.reduction.collective == "gather":
            whole = collectives.merge_leading_axes(whole)
            whole = whole if valid[i] is None else whole.at[valid[i]].get(mode="promise_in_bounds")
            return leaf.reduction.finalize(whole, None)
        if leaf.reduction.prepare is _if_first:
            return whole if has_gradients else from_bits(whole, leaf.dtype)
        total = None if leaf.weight is None else combined[leaf.weight]
        return leaf.reduction.finalize(whole, total).astype(leaf.reduction.result_dtype(leaf.dtype))

    return [finish(i, leaf) for i, leaf in enumerate(leaves)]


_FOLDS: dict[str, Callable[..., jax.Array]] = {"max": jnp.max, "min": jnp.min, "prod": jnp.prod}


def _communicate(states: Sequence[jax.Array], leaves: Sequence[Reduced], has_gradients: bool) -> dict[int, jax.Array]:
    """States over all replicas: summed, extreme, multiplied, or all of them on a new axis 0."""

    def chosen(*kinds: str) -> list[int]:
        return [i for i, leaf in enumerate(leaves) if leaf.reduction.collective in kinds]

    found: dict[int, jax.Array] = {}
    sums, extremes = chosen("sum"), chosen("max", "min")
    # No all-reduce multiplies or orders complex numbers, and lax.pmax has no derivative (jax-ml/jax#7167): each replica
    # folds what all have gathered, or a piece of it.
    is_complex = {i for i in extremes if jnp.issubdtype(states[i].dtype, jnp.complexfloating)}
    folded = [*chosen("prod"), *(i for i in extremes if has_gradients or i in is_complex)]
    extremes = [i for i in extremes if i not in folded]
    gathered = [*chosen("gather"), *(i for i in folded if states[i].nbytes <= collectives.PACK_BYTES)]
    # The first part's value and the others' zeros add up exactly as bits, NaN and -0.0 included.
    as_sums = [
        as_bits(states[i]) if leaves[i].reduction.prepare is _if_first and not has_gradients else states[i]
        for i in sums
    ]
    found |= zip(sums, collectives.all_sum(as_sums), strict=True)
    is_min = [leaves[i].reduction.collective == "min" for i in extremes]
    found |= zip(extremes, collectives.all_extremes([states[i] for i in extremes], is_min), strict=True)
    found |= zip(gathered, collectives.all_gather([states[i] for i in gathered]), strict=True)
    for i in folded:
        fold = partial(_fold_entries, _FOLDS[leaves[i].reduction.collective])
        found[i] = fold(found[i]) if i in gathered else collectives.all_folded(states[i], fold)
    return found


def _fold_entries(fold: Callable[..., jax.Array], entries: jax.Array) -> jax.Array:
    return entries.all(0) if entries.dtype == np.bool_ else fold(entries, 0).astype(entries.dtype)
