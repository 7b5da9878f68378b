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
from .._runtime.shards import Shard
from . import collectives, wire

ElementwiseOp: TypeAlias = Literal["sum", "mean", "avg", "max", "min", "prod", "any", "all"]
RowsOp: TypeAlias = Literal["concat", "gather", "scatter", "stack", "first", "merge"]
Op: TypeAlias = ElementwiseOp | RowsOp | Literal["same"] | Callable[[jax.Array], Any] | None


WEIGHTS_APART = (
    "Means by different weights combine each by its own: return them, with their gradients, as outputs of a "
    'synk.function under "mean", and add them up in its then.'
)


def _refuse_arithmetic(self: Any, other: Any) -> Any:
    raise TypeError(f"synk.Weighted: it is a part of a mean, with which nothing can be computed yet. {WEIGHTS_APART}")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weighted:
    """A part's value and its weight: under `"mean"` the outputs become `sum(value * weight) / sum(weight)`.

    A part of weight 0 counts for nothing, whatever its value, NaN included; a total weight of 0 gives NaN.
    In `synk.map` a row is a part.

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

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse_arithmetic


def _as_it_is(value: Any, weight: Any) -> Any:
    return value


@dataclass(frozen=True)
class Reduction:
    """The way in which parts of an output combine.

    Attributes:
      name: the op, in the words of users and messages.
      collective: how states of replicas combine. "gather" keeps the entries of all parts in row order; "first" adds the
        value of the first part and zeros of the others; "merge" keeps each replica's state, for a Monoid; "scatter" and
        "unreduced" send nothing.
      prepare: turns (value of a part, its weight) into a state: widens and weighs the value. A state that is gathered
        has entries on axis 0.
      accumulate: combines the states of two parts of one replica.
      finalize: turns (combined state, total weight) into the whole, before `result_dtype`.
      has_row_entries: whether a gathered state has an entry a row; else it has an entry a part.
      fold: combines all gathered entries into one.
      is_lawful: whether the op means the same for any parts, so that `f.check` compares it.
    """

    name: str
    collective: Literal["sum", "max", "min", "prod", "gather", "first", "merge", "scatter", "unreduced"]
    prepare: Callable[[jax.Array, Any], jax.Array]
    accumulate: Callable[[jax.Array, jax.Array], jax.Array] = jnp.add
    finalize: Callable[[Any, Any], Any] = _as_it_is
    has_row_entries: bool = False
    fold: Callable[[jax.Array], jax.Array] | None = None
    is_lawful: bool = True

    def identity(self, dtype: np.dtype) -> Any:
        """Return the number that changes nothing when it is accumulated."""
        # Sums begin with 0. So do gathered and merged states, whose entries of replicas without rows are never picked.
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
    # A mean of integers is a float, as that of jnp.mean; its dtype follows jax_enable_x64.
    if op == "mean":
        return np.dtype(jnp.result_type(float))
    # Booleans are counted. Other integers keep the dtype that the user's function gave them.
    return np.dtype(np.int32) if op == "sum" and dtype == np.bool_ else dtype


def result_dtype(dtype: np.dtype, op: str) -> np.dtype:
    if op in ("any", "all"):
        return np.dtype(bool)
    return dtype if jnp.issubdtype(dtype, jnp.inexact) else accumulation_dtype(dtype, op)


def _as_entry(value: jax.Array, weight: Any) -> jax.Array:
    return value[None]


def _widen(value: jax.Array, op: str) -> jax.Array:
    return value.astype(accumulation_dtype(value.dtype, op))


def _weigh(value: jax.Array, weight: Any) -> jax.Array:
    # Weights sum to 1 only in the accumulation dtype: as bfloat16, a weight of 1/3 would be off by a thousandth.
    value = _widen(value, "mean")
    weight = jnp.asarray(weight).astype(value.dtype)
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
        # Booleans are counted as int32, so that they share a buffer with other sums of int32.
        Reduction("any", "sum", lambda v, _: v.astype(bool).astype(np.int32)),
        Reduction("all", "sum", lambda v, _: (~v.astype(bool)).astype(np.int32), finalize=lambda n, _: n == 0),
        Reduction("concat", "gather", _as_it_is, has_row_entries=True),
        Reduction("scatter", "scatter", _as_it_is, has_row_entries=True),
        Reduction("stack", "gather", _as_entry, is_lawful=False),
        Reduction("first", "first", _as_it_is, is_lawful=False),
        Reduction("merge", "merge", _as_it_is),
        Reduction("same", "unreduced", _as_it_is),
    )
}
ELEMENTWISE = tuple(name for name, op in REDUCTIONS.items() if op.collective in ("sum", "max", "min", "prod"))
_ALIASES = {"avg": "mean", "gather": "concat"}
_NAMES = sorted([*REDUCTIONS, *_ALIASES])
_MEANT = {name: name for name in REDUCTIONS} | _ALIASES | {"average": "mean"}

# Skip the collective: `then` receives this replica's unreduced mean, in its accumulation dtype. Not for users.
UNREDUCED_MEAN = replace(REDUCTIONS["mean"], collective="unreduced")

# Means whose total is divided by the total weight: of a synk.Weighted, whose weight is a leaf of its own, and of
# `f.over`, where the weight of a part is its number of rows, since it learns the number of all rows at its end.
WEIGHTED = replace(REDUCTIONS["mean"], finalize=lambda total, weight: total / weight.astype(total.dtype))
WEIGHT = Reduction("weight", "sum", lambda v, _: _widen(v, "mean"))

# Monoids of `f.over` whose order counts: the parts of a replica in all batches are not neighbours.
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
    if op is None:
        return REDUCTIONS["first"]
    if isinstance(op, Reduction):
        return op
    if callable(op):
        return Reduction("callable", "gather", _as_entry, finalize=_folded_by(op), is_lawful=False)
    hint = f"use one of {', '.join(_NAMES)}, None or a callable."
    if not isinstance(op, str):
        raise TypeError(f"{where}: op {op!r} is none of synk's; {hint}")
    if (name := _ALIASES.get(op, op)) in REDUCTIONS:
        return REDUCTIONS[name]
    if close := difflib.get_close_matches(op, _MEANT, 1, 0.4):
        hint = f'did you mean "{_MEANT[close[0]]}"?'
    raise ValueError(f"{where}: op {op!r} is none of synk's; {hint}")


def _folded_by(op: Callable[[jax.Array], Any]) -> Callable[[Any, Any], Any]:
    def fold(entries: Any, weight: Any) -> Any:
        # Entries that `f.over` has joined are NumPy arrays.
        return jnp.asarray(op(jnp.asarray(entries)))

    fold.__wrapped__ = op  # type: ignore[attr-defined]  # calls look up the names of the op
    return fold


class OutputLeaf(NamedTuple):
    """Leaf of the outputs of `fn`, and how it combines.

    Attributes:
      reduction: its reduction, whose name is the op in messages.
      path: its place in the tree, as messages write it.
      key: the PRNG implementation of typed keys, whose raw data combines; None for other leaves.
      weight: the number of the leaf that holds the weight of a `Weighted` value; None for other values.
      wire: the format in which its sum travels; None for full precision.
    """

    reduction: Reduction
    dtype: np.dtype
    path: str = ""
    key: Any = None
    weight: int | None = None
    wire: str | None = None


def prepare_part(values: Sequence[Any], leaves: Sequence[OutputLeaf], weight: Any, is_first: Any) -> list[jax.Array]:
    """Return the states of one part's values.

    `weight` is the part's share of the rows; `is_first` tells whether it is the first part that has rows.
    """
    states: list[jax.Array] = []
    for value, leaf in zip(values, leaves, strict=True):
        if isinstance(value, Shard):
            # It has been prepared, and added up over the replicas.
            states.append(value.array)
            continue
        state = leaf.reduction.prepare(value, weight if leaf.weight is None else values[leaf.weight])
        # Zeros of all other parts let a sum carry the first part's value, wherever that part lies.
        if leaf.reduction.collective == "first":
            state = jnp.where(is_first, state, jnp.zeros((), state.dtype))
        states.append(state)
    return states


def combine_replicas(
    states: Sequence[jax.Array],
    leaves: Sequence[OutputLeaf],
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
            entries = lax.collapse(combined[i], 0, 2)
            entries = entries if valid[i] is None else entries.at[valid[i]].get(mode="promise_in_bounds")
            combined[i] = entries if leaf.reduction.fold is None else leaf.reduction.fold(entries)
    wholes: list[jax.Array] = []
    for leaf, state in zip(leaves, combined, strict=True):
        reduction = leaf.reduction
        # A weight is a leaf itself and is combined like the values, so the division comes after both.
        whole = reduction.finalize(state, rows if leaf.weight is None else combined[leaf.weight])
        # A callable may return another dtype. An unreduced sum keeps its accumulation dtype, "same" its own.
        is_final = reduction.collective == "unreduced" or (reduction.collective == "gather" and reduction.fold is None)
        if reduction.collective == "first" and not has_gradients:
            whole = from_bits(whole, leaf.dtype)
        elif not is_final:
            whole = whole.astype(result_dtype(leaf.dtype, reduction.name))
        wholes.append(whole)
    return wholes


def _communicate(
    states: Sequence[jax.Array], leaves: Sequence[OutputLeaf], has_gradients: bool, per_process: int
) -> list[jax.Array]:
    """Combine states over all replicas by their collectives. Gathered states come back on a new axis 0."""
    routes = [_route(state, leaf, has_gradients) for state, leaf in zip(states, leaves, strict=True)]
    combined: dict[int, jax.Array] = {}
    # One collective a route and dtype, since each has a latency.
    for route in dict.fromkeys(routes):
        numbers = [i for i, other in enumerate(routes) if other == route]
        arrays, kinds = [states[i] for i in numbers], [leaves[i].reduction.collective for i in numbers]
        match route:
            case "scatter":
                wholes = arrays
            case "sum":
                # The bits of the first part's value and zeros of the others add up exactly, also for NaN and -0.0.
                is_bits = [kind == "first" and not has_gradients for kind in kinds]
                pairs = zip(arrays, is_bits, strict=True)
                wholes = collectives.all_sum([as_bits(array) if is_bit else array for array, is_bit in pairs])
            case "extreme":
                wholes = collectives.all_extremes(arrays, [kind == "min" for kind in kinds])
            case "gather":
                pairs = zip(collectives.all_gather(arrays), kinds, strict=True)
                wholes = [whole if kind in ("gather", "merge") else fold(kind, whole) for whole, kind in pairs]
            case _:
                wholes = wire.all_sum_narrowly(arrays, route, per_process)
        combined |= zip(numbers, wholes, strict=True)
    return [combined[i] for i in range(len(states))]


def _route(state: jax.Array, leaf: OutputLeaf, has_gradients: bool) -> str:
    """Name the collective, or the wire format, by which a state travels."""
    kind = leaf.reduction.collective
    is_extreme = kind in ("max", "min")
    # There is no all-reduce of products or of complex extremes, and lax.pmax has no derivative
    # (https://github.com/jax-ml/jax/issues/7167). Replicas gather such states and fold them.
    is_complex = jnp.issubdtype(state.dtype, jnp.complexfloating)
    if kind == "prod" or (is_extreme and (has_gradients or is_complex)):
        return "gather"
    if is_extreme:
        return "extreme"
    # Rounded numbers have no derivative, and few numbers are not worth a scale.
    if leaf.wire and not has_gradients and state.dtype == np.float32 and state.size >= wire.BLOCK:
        return leaf.wire
    return {"first": "sum", "merge": "gather", "unreduced": "scatter"}.get(kind, kind)


def constant_unless(counts: Any, value: jax.Array) -> jax.Array:
    """Return the value, with a gradient only where it counts."""
    # The gradient of a value that a select drops is 0 times a derivative: NaN if that is infinite. See
    # https://docs.jax.dev/en/latest/faq.html#gradients-contain-nan-where-using-where
    return jnp.where(counts, value, lax.stop_gradient(value))


def fold(kind: str, entries: jax.Array, axis: int = 0) -> jax.Array:
    """Take the sum, product or an extreme along an axis, in the same dtype."""
    # jnp's sum and prod widen small integers; the parts have been widened already, as far as they should be.
    folded = getattr(entries, kind)(axis).astype(entries.dtype)
    if kind in ("sum", "prod") or not jnp.issubdtype(entries.dtype, jnp.floating):
        return folded
    # XLA's CPU backend may lose NaN in extremes: https://github.com/openxla/xla/issues/21461
    return jnp.where(jnp.isnan(entries).any(axis), np.nan, folded).astype(entries.dtype)
