"""Reduction: how the parts of an output combine, on one replica and then over all replicas.

    state = prepare(first part); for each other part: state = accumulate(state, prepare(part))
    whole = finalize(collective(state))

A replica that has no part has the identity for its state.
"""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
    """A part's weight and place, as traced numbers where rows differ.

    Attributes:
      weight: the part's share of the rows of all parts.
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


def _plain(combined: Any, weight: Any) -> Any:
    return combined


@dataclass(frozen=True)
class Reduction:
    """The way in which parts of an output combine.

    Attributes:
      name: the op, in the words of users and messages.
      collective: how states of replicas combine. "gather" keeps the entries of all parts in row order; "first" adds one
        value and zeros as bits; "merge" keeps each replica's state, for a Monoid; "stay" and "unreduced" send nothing.
      prepare: turns a part's value into a state: widens and weighs it. A state that is gathered has entries on axis 0.
      accumulate: combines the states of two parts of one replica.
      finalize: turns (combined state, total weight) into the whole, before `result_dtype`.
      has_row_entries: whether a gathered state has an entry a row; else it has an entry a part.
      fold: combines all gathered entries into one.
      is_lawful: whether the op means the same for any parts, so that `f.check` compares it.
    """

    name: str
    collective: Literal["sum", "max", "min", "prod", "gather", "first", "merge", "stay", "unreduced"]
    prepare: Callable[[jax.Array, PartInfo], jax.Array]
    accumulate: Callable[[jax.Array, jax.Array], jax.Array] = jnp.add
    finalize: Callable[[Any, Any], Any] = _plain
    has_row_entries: bool = False
    fold: Callable[[jax.Array], jax.Array] | None = None
    is_lawful: bool = True

    def identity(self, dtype: np.dtype) -> Any:
        """Return the number that changes nothing when it is accumulated."""
        if self.collective not in ("max", "min"):
            return int(self.collective == "prod")
        is_max, is_inexact = self.collective == "max", jnp.issubdtype(dtype, jnp.inexact)
        if dtype == np.bool_:
            return not is_max
        # Some floats of 8 bits have no infinity.
        if is_inexact and np.isinf(np.array(np.inf).astype(dtype)):
            return -np.inf if is_max else np.inf
        limits = jnp.finfo(dtype) if is_inexact else jnp.iinfo(dtype)
        return limits.min if is_max else limits.max


def accumulation_dtype(dtype: np.dtype, op: str) -> np.dtype:
    """Return the dtype in which parts of a dtype combine: at least 32 bits for sums of floats."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.dtype(np.float32) if jnp.finfo(dtype).bits < 32 and op not in ("max", "min") else dtype
    if op == "mean":
        return np.dtype(jnp.result_type(float))
    return np.dtype(np.int32) if op == "sum" and dtype == np.bool_ else dtype


def result_dtype(dtype: np.dtype, op: str) -> np.dtype:
    """Return the dtype of the combined output of parts of a dtype."""
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
    # The mask comes before the product, since a gradient through 0 * NaN is NaN.
    return jnp.where(weight != 0, value, 0) * weight


REDUCTIONS = {
    reduction.name: reduction
    for reduction in (
        Reduction("sum", "sum", lambda v, _: _widen(v, "sum")),
        Reduction("mean", "sum", _weigh),
        Reduction("max", "max", _as_it_is, jnp.maximum),
        Reduction("min", "min", _as_it_is, jnp.minimum),
        Reduction("prod", "prod", lambda v, _: _widen(v, "prod"), jnp.multiply),
        Reduction("any", "sum", lambda v, _: v.astype(bool).astype(np.int32)),
        Reduction("all", "sum", lambda v, _: (~v.astype(bool)).astype(np.int32), finalize=lambda n, _: n == 0),
        Reduction("concat", "gather", _as_it_is, has_row_entries=True),
        Reduction("scatter", "stay", _as_it_is, has_row_entries=True),
        Reduction("stack", "gather", _as_entry, is_lawful=False),
        Reduction("first", "first", _if_first, is_lawful=False),
        Reduction("merge", "merge", _as_it_is),
    )
}
ELEMENTWISE = tuple(name for name, op in REDUCTIONS.items() if op.collective in ("sum", "max", "min", "prod"))
_ALIASES = {"avg": "mean", "gather": "concat"}
_NAMES = sorted([*REDUCTIONS, *_ALIASES])
_MEANT = {name: name for name in REDUCTIONS} | _ALIASES | {"average": "mean"}

# Leaves of a synk.Weighted: its values, whose total is divided by the total weight; and its weight.
WEIGHTED = Reduction(
    "mean", "sum", _weigh_unless_zero, finalize=lambda total, weight: total / weight.astype(total.dtype)
)
WEIGHT = Reduction("weight", "sum", lambda v, _: _widen(v, "mean"))

# Skip the collective: `then` receives this replica's unreduced mean, in its accumulation dtype. Not for users.
UNREDUCED_MEAN = replace(REDUCTIONS["mean"], collective="unreduced")

# Means of `f.over`, which learns the number of rows at its end: the weight of a part is its number of rows.
MEAN_OF_ROWS = Reduction("mean", "sum", _weigh, finalize=lambda total, rows: total / rows.astype(total.dtype))
# Monoids of `f.over` whose order counts: a replica keeps the states of all batches, which are not neighbours.
MERGE_IN_ORDER = Reduction("merge", "gather", _as_entry)

# The parts themselves, for `f.check`.
PER_PART = Reduction("parts", "gather", _as_entry, is_lawful=False)

# How updates of the slices of one replica combine. Nothing travels.
UPDATES = {
    "mean": REDUCTIONS["mean"],
    "max": REDUCTIONS["max"],
    "min": REDUCTIONS["min"],
    "last": Reduction("last", "sum", _as_it_is, lambda before, new: new),
    "add": REDUCTIONS["sum"],
}


def reduction_of(op: Op | Reduction, where: str) -> Reduction:
    """Return the reduction that a user has named. Raise ValueError or TypeError if there is none."""
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
    """The way in which one leaf of the outputs combines.

    Attributes:
      reduction: its reduction.
      dtype: the dtype of its parts.
      weight: the number of the leaf that holds the weight of a `Weighted` value; None for other values.
      wire: the format in which its sum travels; None for full precision.
    """

    reduction: Reduction
    dtype: np.dtype
    weight: int | None = None
    wire: str | None = None


def prepare_parts(values: Sequence[jax.Array], leaves: Sequence[Reduced], info: PartInfo) -> list[jax.Array]:
    """Return the states of one part's values."""
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
    """Combine states over all replicas, by one collective a kind of reduction and dtype.

    Args:
      states: one state a leaf. Gathered states have as many entries on each replica. States of "merge" come back on a
        new axis 0.
      leaves: how each state combines.
      valid: for each leaf the indexes of the entries of all replicas that count, in row order; None for all.
      has_gradients: whether the result may be differentiated.
      rows: the total number of rows, where weights are numbers of rows.
      per_process: how many replicas each process has.
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
    """Return the value, with a gradient only where it counts.

    The gradient of a value that a select drops is 0 times a derivative: NaN if that is infinite. See
    https://docs.jax.dev/en/latest/faq.html#gradients-contain-nan-where-using-where
    """
    return jnp.where(counts, value, lax.stop_gradient(value))


def fold(kind: str, entries: jax.Array, axis: int = 0) -> jax.Array:
    """Take the sum, product or an extreme along an axis, in the same dtype."""
    folded = getattr(entries, kind)(axis).astype(entries.dtype)
    if kind in ("sum", "prod") or not jnp.issubdtype(entries.dtype, jnp.floating):
        return folded
    # XLA's CPU backend may lose NaN in extremes: https://github.com/openxla/xla/issues/21461
    return jnp.where(jnp.isnan(entries).any(axis), np.nan, folded).astype(entries.dtype)


def _communicate(
    states: Sequence[jax.Array], leaves: Sequence[Reduced], has_gradients: bool, per_process: int
) -> dict[int, jax.Array]:
    """Combine states over all replicas by their collectives. Gathered states come back on a new axis 0."""
    kinds = [leaf.reduction.collective for leaf in leaves]

    def is_folded(i: int) -> bool:
        # There is no all-reduce of products or of complex extremes, and lax.pmax has no derivative
        # (https://github.com/jax-ml/jax/issues/7167). Replicas gather such states and fold them.
        is_complex = jnp.issubdtype(states[i].dtype, jnp.complexfloating)
        return kinds[i] == "prod" or (kinds[i] in ("max", "min") and (has_gradients or is_complex))

    folded = [i for i in range(len(leaves)) if is_folded(i)]
    narrow: dict[int, str] = {}
    # Rounded numbers have no derivative.
    if not has_gradients:
        narrow = {i: leaf.wire for i, leaf in enumerate(leaves) if leaf.wire and wire.travels_narrowly(states[i])}
    staying = [i for i, kind in enumerate(kinds) if kind in ("stay", "unreduced")]
    sums = [i for i, kind in enumerate(kinds) if kind in ("sum", "first") and i not in narrow]
    extremes = [i for i, kind in enumerate(kinds) if kind in ("max", "min") and i not in folded]
    gathered = [*folded, *(i for i, kind in enumerate(kinds) if kind in ("gather", "merge"))]
    # The bits of the first part's value and zeros of the others add up exactly, also for NaN and -0.0.
    as_sums = [as_bits(states[i]) if kinds[i] == "first" and not has_gradients else states[i] for i in sums]
    combined = {i: states[i] for i in staying}
    combined |= zip(sums, collectives.all_sum(as_sums), strict=True)
    for name in dict.fromkeys(narrow.values()):
        same = [i for i in narrow if narrow[i] == name]
        combined |= zip(same, wire.all_sum_narrowly([states[i] for i in same], name, per_process), strict=True)
    is_min = [kinds[i] == "min" for i in extremes]
    combined |= zip(extremes, collectives.all_extremes([states[i] for i in extremes], is_min), strict=True)
    combined |= zip(gathered, collectives.all_gather([states[i] for i in gathered]), strict=True)
    return combined | {i: fold(kinds[i], combined[i]) for i in folded}
