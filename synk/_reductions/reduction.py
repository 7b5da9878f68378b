"""Reduction: how the parts of one output combine, on one replica and then over all of them.

    state = prepare(first part); for each other part: state = accumulate(state, prepare(part))
    whole = finalize(collective(state))

A replica that has no part has the identity for its state.
"""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._base.pytree import PyTree
from .._runtime.executable import as_bits, from_bits
from . import collectives, wire

ElementwiseOp: TypeAlias = Literal["sum", "mean", "avg", "max", "min", "prod", "any", "all"]
RowsOp: TypeAlias = Literal["concat", "gather", "scatter", "stack", "first", "merge"]
Op: TypeAlias = ElementwiseOp | RowsOp | Callable[[jax.Array], Any] | None


class PartInfo(NamedTuple):
    """Which part a value is of; traced numbers, none compiled in where rows differ."""

    weight: Any  # its share of the rows of all parts
    is_first: Any  # whether it is the first part that has rows


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


def _plain(combined: Any, weight: Any) -> Any:
    return combined


@dataclass(frozen=True)
class Reduction:
    """How parts combine."""

    name: str  # the op, as users and messages call it
    # Over the replicas: "gather" keeps each part's entries, in row order; "first" adds one value and zeros, as bits;
    # "merge" keeps each replica's state, which merges with the others of its Monoid; of "stay" and "unreduced" nothing
    # travels.
    collective: Literal["sum", "max", "min", "prod", "gather", "first", "merge", "stay", "unreduced"]
    prepare: Callable[[jax.Array, PartInfo], jax.Array]  # widens and weighs; of what is gathered, entries on axis 0
    accumulate: Callable[[jax.Array, jax.Array], jax.Array] = jnp.add  # states of parts of one replica
    finalize: Callable[[Any, Any], Any] = _plain  # (combined state, total weight) -> the whole, before `result_dtype`
    has_row_entries: bool = False  # whether what is gathered has an entry a row, else an entry a part
    fold: Callable[[jax.Array], jax.Array] | None = None  # of what is gathered: all entries -> the combined state
    is_lawful: bool = True  # whether it means the same for any parts, so that `f.check` compares it

    def identity(self, dtype: np.dtype) -> Any:
        """What changes nothing when it is accumulated."""
        if self.collective not in ("max", "min"):
            return int(self.collective == "prod")
        is_max, is_inexact = self.collective == "max", jnp.issubdtype(dtype, jnp.inexact)
        if dtype == np.bool_:
            return not is_max
        if is_inexact and np.isinf(np.array(np.inf).astype(dtype)):  # some of 8 bits have no infinity
            return -np.inf if is_max else np.inf
        limits = jnp.finfo(dtype) if is_inexact else jnp.iinfo(dtype)
        return limits.min if is_max else limits.max


def accumulation_dtype(dtype: np.dtype, op: str) -> np.dtype:
    """The dtype that parts of `dtype` are combined in."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.dtype(np.float32) if jnp.finfo(dtype).bits < 32 and op not in ("max", "min") else dtype
    if op == "mean":
        return np.dtype(jnp.result_type(float))
    return np.dtype(np.int32) if op == "sum" and dtype == np.bool_ else dtype


def result_dtype(dtype: np.dtype, op: str) -> np.dtype:
    """The dtype of the combined output of parts of `dtype`."""
    if op in ("any", "all"):
        return np.dtype(bool)
    return dtype if jnp.issubdtype(dtype, jnp.inexact) else accumulation_dtype(dtype, op)


def _as_it_is(value: jax.Array, info: PartInfo) -> jax.Array:
    return value


def _as_entry(value: jax.Array, info: PartInfo) -> jax.Array:
    return value[None]


def _if_first(value: jax.Array, info: PartInfo) -> jax.Array:
    return jnp.where(info.is_first, value, jnp.zeros((), value.dtype))


def _widen(value: jax.Array, op: str) -> jax.Array:
    return value.astype(accumulation_dtype(value.dtype, op))


def _weigh(value: jax.Array, info: PartInfo) -> jax.Array:
    value = _widen(value, "mean")
    return value * jnp.asarray(info.weight).astype(value.dtype)


def _weigh_unless_zero(value: jax.Array, info: PartInfo) -> jax.Array:
    value = _widen(value, "mean")
    weight = jnp.asarray(info.weight).astype(value.dtype)
    # Masked before the product: a gradient through 0 * NaN would be NaN.
    return jnp.where(weight != 0, value, 0) * weight


REDUCTIONS = {
    reduction.name: reduction
    for reduction in (
        Reduction("sum", "sum", lambda v, _: _widen(v, "sum")),
        Reduction("mean", "sum", _weigh),
        Reduction("any", "sum", lambda v, _: v.astype(bool).astype(np.int32)),
        Reduction("all", "sum", lambda v, _: (~v.astype(bool)).astype(np.int32), finalize=lambda n, _: n == 0),
        Reduction("max", "max", _as_it_is, jnp.maximum),
        Reduction("min", "min", _as_it_is, jnp.minimum),
        Reduction("prod", "prod", lambda v, _: _widen(v, "prod"), jnp.multiply),
        Reduction("concat", "gather", _as_it_is, has_row_entries=True),
        Reduction("scatter", "stay", _as_it_is, has_row_entries=True),
        Reduction("stack", "gather", _as_entry, is_lawful=False),
        Reduction("first", "first", _if_first, is_lawful=False),
        Reduction("merge", "merge", _as_it_is),
    )
}
ELEMENTWISE = ("sum", "mean", "max", "min", "prod", "any", "all")
_ALIASES = {"avg": "mean", "gather": "concat"}
_NAMES = sorted([*REDUCTIONS, *_ALIASES])
_MEANT = {name: name for name in REDUCTIONS} | _ALIASES | {"average": "mean"}

# Of synk.Weighted: a value leaf, whose total is divided by that of its weight; and the weight.
WEIGHTED = Reduction(
    "mean", "sum", _weigh_unless_zero, finalize=lambda total, weight: total / weight.astype(total.dtype)
)
WEIGHT = Reduction("weight", "sum", lambda v, _: _widen(v, "mean"))

# Skip the collective: `then` receives this replica's unreduced mean, in its accumulation dtype. Not for users.
UNREDUCED_MEAN = replace(REDUCTIONS["mean"], collective="unreduced")

# Of `f.over`, which learns at its end how many rows there are: weights are rows of parts, and these are the total.
MEAN_OF_ROWS = Reduction("mean", "sum", _weigh, finalize=lambda total, rows: total / rows.astype(total.dtype))
# The same, of a Monoid whose order counts: batches come one after another, but replicas take turns in each.
MERGE_IN_ORDER = Reduction("merge", "gather", _as_entry)

# The parts as they come, for `f.check`.
PER_PART = Reduction("parts", "gather", _as_entry, is_lawful=False)

# How the slices of one replica's update combine; nothing travels.
UPDATES = {
    "mean": REDUCTIONS["mean"],
    "max": REDUCTIONS["max"],
    "min": REDUCTIONS["min"],
    "last": Reduction("last", "sum", _as_it_is, lambda before, new: new),
    "add": REDUCTIONS["sum"],
}


def reduction_of(op: Op | Reduction, where: str) -> Reduction:
    """The reduction that a user has named; ValueError or TypeError where it is none."""
    if op is None:
        return REDUCTIONS["first"]
    if isinstance(op, Reduction):
        return op
    if callable(op):
        return Reduction("callable", "gather", _as_entry, finalize=lambda entries, _: op(entries), is_lawful=False)
    hint = f"use one of {', '.join(_NAMES)}, None or a callable."
    if not isinstance(op, str):
        raise TypeError(f"{where}: op {op!r} is none of synk's; {hint}")
    if (name := _ALIASES.get(op, op)) in REDUCTIONS:
        return REDUCTIONS[name]
    if close := difflib.get_close_matches(op, _MEANT, 1, 0.4):
        hint = f'did you mean "{_MEANT[close[0]]}"?'
    raise ValueError(f"{where}: op {op!r} is none of synk's; {hint}")


class Reduced(NamedTuple):
    """How one output leaf combines.

    Attributes:
      reduction: its reduction.
      dtype: the dtype of its parts.
      weight: the number of the leaf that holds the weight of a `Weighted` value; None for other values.
      wire: as what its sum travels; None as it is.
    """

    reduction: Reduction
    dtype: np.dtype
    weight: int | None = None
    wire: str | None = None


def prepare_parts(values: Sequence[jax.Array], leaves: Sequence[Reduced], info: PartInfo) -> list[jax.Array]:
    """The states of one part's values."""
    return [
        leaf.reduction.prepare(value, info if leaf.weight is None else info._replace(weight=values[leaf.weight]))
        for value, leaf in zip(values, leaves, strict=True)
    ]


def combine_replicas(
    states: Sequence[jax.Array],
    leaves: Sequence[Reduced],
    valid: Sequence[Any],
    has_gradients: bool = False,
    rows: jax.Array | None = None,
    *,
    per_process: int = 1,
) -> list[jax.Array]:
    """Combine states over all replicas: one collective a kind of reduction and dtype.

    Of what is gathered, states are entries on axis 0, as many on each replica, and `valid` has the indexes of those of
    all replicas that count, in row order; None for all. What stays stays as it is. Of what merges, the states of all
    replicas come back on a new axis 0. `has_gradients` says whether it may be differentiated; `rows` is the total where
    weights are rows; `per_process` says how many replicas each process has.
    """
    combined = _communicate(states, leaves, has_gradients, per_process)
    for i, leaf in enumerate(leaves):
        if leaf.reduction.collective == "gather":
            entries = collectives.merge_leading_axes(combined[i])
            combined[i] = entries if valid[i] is None else entries.at[valid[i]].get(mode="promise_in_bounds")
            combined[i] = combined[i] if leaf.reduction.fold is None else leaf.reduction.fold(combined[i])

    def finish(i: int, leaf: Reduced) -> jax.Array:
        whole, reduction = combined[i], leaf.reduction
        if reduction.collective in ("merge", "stay"):
            return whole
        if reduction.collective == "gather" and reduction.fold is None:
            return reduction.finalize(whole, None)
        if reduction.collective == "first":
            return whole.astype(leaf.dtype) if has_gradients else from_bits(whole, leaf.dtype)
        total = rows if leaf.weight is None else combined[leaf.weight]
        whole = reduction.finalize(whole, total)
        is_whole = reduction.collective != "unreduced"
        return whole.astype(result_dtype(leaf.dtype, reduction.name)) if is_whole else whole

    return [finish(i, leaf) for i, leaf in enumerate(leaves)]


def constant_unless(counts: Any, value: jax.Array) -> jax.Array:
    """The same value, into which no gradient flows back unless it counts: that through what a select leaves out is 0
    times a derivative, NaN where this is infinite."""
    return jnp.where(counts, value, lax.stop_gradient(value))


def fold(kind: str, entries: jax.Array, axis: int = 0) -> jax.Array:
    """The sum, the product or an extreme along an axis, in the same dtype."""
    found = getattr(entries, kind)(axis).astype(entries.dtype)
    if kind in ("sum", "prod") or not jnp.issubdtype(entries.dtype, jnp.floating):
        return found
    # XLA's CPU backend loses NaN in extremes of wide arrays.
    return jnp.where(jnp.isnan(entries).any(axis), np.nan, found).astype(entries.dtype)


def _communicate(
    states: Sequence[jax.Array], leaves: Sequence[Reduced], has_gradients: bool, per_process: int
) -> dict[int, jax.Array]:
    """States over all replicas: summed, extreme, multiplied, or all of them on a new axis 0."""
    kinds = [leaf.reduction.collective for leaf in leaves]

    def is_folded(i: int) -> bool:
        # No all-reduce multiplies or orders complex numbers, and lax.pmax has no derivative (jax-ml/jax#7167): each
        # replica folds what all have gathered, or a piece of it.
        is_complex = jnp.issubdtype(states[i].dtype, jnp.complexfloating)
        return kinds[i] == "prod" or (kinds[i] in ("max", "min") and (has_gradients or is_complex))

    folded = [i for i in range(len(leaves)) if is_folded(i)]
    narrow: dict[int, str] = {}
    if not has_gradients:  # what is rounded has none
        narrow = {i: leaf.wire for i, leaf in enumerate(leaves) if leaf.wire and wire.travels_narrowly(states[i])}
    staying = [i for i, kind in enumerate(kinds) if kind in ("stay", "unreduced")]
    sums = [i for i, kind in enumerate(kinds) if kind in ("sum", "first") and i not in narrow]
    extremes = [i for i, kind in enumerate(kinds) if kind in ("max", "min") and i not in folded]
    gathered = [i for i, kind in enumerate(kinds) if kind in ("gather", "merge")]
    gathered += [i for i in folded if states[i].nbytes <= collectives.PACK_BYTES]
    # The first part's value and the others' zeros add up exactly as bits, NaN and -0.0 included.
    as_sums = [as_bits(states[i]) if kinds[i] == "first" and not has_gradients else states[i] for i in sums]
    found = {i: states[i] for i in staying}
    found |= zip(sums, collectives.all_sum(as_sums), strict=True)
    for name in dict.fromkeys(narrow.values()):
        same = [i for i in narrow if narrow[i] == name]
        found |= zip(same, wire.all_sum_narrowly([states[i] for i in same], name, per_process), strict=True)
    is_min = [kinds[i] == "min" for i in extremes]
    found |= zip(extremes, collectives.all_extremes([states[i] for i in extremes], is_min), strict=True)
    found |= zip(gathered, collectives.all_gather([states[i] for i in gathered]), strict=True)
    for i in folded:
        fold_entries = partial(fold, kinds[i])
        found[i] = fold_entries(found[i]) if i in found else collectives.all_folded(states[i], fold_entries)
    return found
