"""Statistics: states of `synk.stats`, their merges, and the answers made of them.

Means and squares merge by the formulas of Chan, Golub and LeVeque (1982, doi:10.1007/978-3-642-51461-6_3), which stay
exact for data far from 0.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .monoid import concatenate_rows
from .reduction import accumulation_dtype

State = dict[str, jax.Array]


def rows_of(x: Any, name: str) -> jax.Array:
    """Return an array of rows, with booleans as integers. Raise ValueError for a scalar."""
    x = jnp.asarray(x)
    if x.ndim == 0:
        raise ValueError(f"synk.stats.{name}: a scalar has no rows; give an array, rows first.")
    return x.astype(jnp.int32) if x.dtype == np.bool_ else x


def integers_of(x: Any, name: str) -> jax.Array:
    """Return rows of integers as int32. Raise TypeError for other dtypes."""
    x = rows_of(x, name)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"synk.stats.{name}: it counts integers, but this array has dtype {x.dtype}.")
    if jnp.can_cast(x.dtype, np.int32):
        return x.astype(jnp.int32)
    # Numbers beyond int32 are counted in no bin, and must not wrap around into one.
    return jnp.where((x >= 0) & (x <= np.iinfo(np.int32).max), x.astype(jnp.int32), -1)


def real_like(x: Any) -> Any:
    """Return the dtype of a mean of numbers."""
    dtype = jnp.asarray(x).dtype
    return dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.result_type(float)


def rows_in_words(rows: int) -> jax.Array:
    """Write a number of rows, which int32 may not hold, as a multiple of 2**30 and a rest."""
    return jnp.array([rows >> 30, rows % 2**30], jnp.int32)


def add_rows(a: jax.Array, b: jax.Array) -> jax.Array:
    high, low = a + b
    return jnp.stack([high + (low >> 30), low % 2**30])


def number_of(rows: jax.Array, dtype: Any, ddof: int = 0) -> jax.Array:
    high, low = rows
    return high.astype(dtype) * 2**30 + (low - ddof).astype(dtype)


def centered(x: jax.Array) -> tuple[State, jax.Array]:
    """Return the number and the mean of rows, and the distance of each row from the mean."""
    wide, shift = _shifted(x, accumulation_dtype(x.dtype, "mean"))
    # A second number holds the bits of the mean that the first has no room for.
    center = wide.mean(0, keepdims=True)
    rest = jnp.where(jnp.isfinite(center), (wide - center).mean(0, keepdims=True), 0)
    off = wide - center - rest
    if shift is not None:
        center, lost = _two_sum(shift, center)
        rest += lost
    return {"rows": rows_in_words(len(x)), "mean": center[0], "rest": rest[0]}, off


def _shifted(x: jax.Array, dtype: np.dtype) -> tuple[jax.Array, jax.Array | None]:
    """Return rows in a float dtype, minus a shift. Only integers with more bits than the dtype need one."""
    if not jnp.issubdtype(x.dtype, jnp.integer) or jnp.iinfo(x.dtype).bits <= jnp.finfo(dtype).nmant:
        return x.astype(dtype), None
    half = jnp.iinfo(x.dtype).bits // 2
    high, low = (x >> half).astype(dtype), (x & (2**half - 1)).astype(dtype)
    has_room = jnp.abs(high).max(0, keepdims=True) < 2 ** (jnp.finfo(dtype).nmant + 1 - half)
    about = jnp.where(has_room, 0, jnp.round(high.mean(0, keepdims=True)))
    return (high - about) * 2**half + low, about * 2**half


def _two_sum(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return a sum and its rounding error, which is exact: https://en.wikipedia.org/wiki/2Sum."""
    whole = a + b
    back = whole - a
    return whole, (a - (whole - back)) + (b - back)


def spread(x: Any, name: str) -> State:
    means, off = centered(rows_of(x, name))
    return means | {"squares": (jnp.abs(off) ** 2).sum(0)}


def merge_means(a: State, b: State) -> tuple[State, jax.Array, jax.Array]:
    """Merge the numbers and means of two states.

    Returns:
      The merged numbers and mean, the distance of the two means, and its weight in the sum of squares.
    """
    rows = add_rows(a["rows"], b["rows"])
    of_a, of_b, of_all = (number_of(words, a["mean"].real.dtype) for words in (a["rows"], b["rows"], rows))
    share = of_b / of_all
    apart = (b["mean"] - a["mean"]) + (b["rest"] - a["rest"])
    more = a["rest"] + apart * share.astype(apart.dtype)
    mean, rest = _two_sum(a["mean"], more)
    of_both = a["mean"] * (1 - share).astype(mean.dtype) + b["mean"] * share.astype(mean.dtype)
    # The difference of two means may be infinite or overflow. Then the weighted sum is right.
    is_fine = jnp.isfinite(mean)
    means = {"rows": rows, "mean": jnp.where(is_fine, mean, of_both), "rest": jnp.where(is_fine, rest, 0)}
    return means, apart, of_a * share


def merge_spreads(a: State, b: State) -> State:
    means, apart, weight = merge_means(a, b)
    return means | {"squares": a["squares"] + b["squares"] + jnp.abs(apart) ** 2 * weight}


def merge_products(a: State, b: State) -> State:
    means, apart, weight = merge_means(a, b)
    between = jnp.outer(apart, apart.conj()) * weight.astype(apart.dtype)
    return means | {"products": a["products"] + b["products"] + between}


def mean(state: State, dtype: Any) -> jax.Array:
    return (state["mean"] + state["rest"]).astype(dtype)


def var(state: State, ddof: int, dtype: Any) -> jax.Array:
    squares = state["squares"]
    return (squares / number_of(state["rows"], squares.dtype, ddof)).astype(jnp.finfo(dtype).dtype)


def std(state: State, ddof: int, dtype: Any) -> jax.Array:
    return jnp.sqrt(var(state, ddof, dtype))


def moments(state: State, dtype: Any) -> tuple[jax.Array, jax.Array]:
    return mean(state, dtype), var(state, 0, dtype)


def cov(state: State, ddof: int, dtype: Any) -> jax.Array:
    products = state["products"]
    return (products / number_of(state["rows"], products.dtype, ddof)).astype(dtype)


def finite(most: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(most), most, 0)


def merge_exponentials(a: State, b: State) -> State:
    most = jnp.maximum(a["most"], b["most"])
    # A state of nothing but -inf adds nothing, however small the numbers of the other state are.
    gaps = (jnp.where(s["most"] == -jnp.inf, -jnp.inf, finite(s["most"]) - finite(most)) for s in (a, b))
    of_a, of_b = (s["sum"] * jnp.exp(gap) for s, gap in zip((a, b), gaps, strict=True))
    return {"most": most, "sum": of_a + of_b}


def logsumexp(state: State, dtype: Any) -> jax.Array:
    return (finite(state["most"]) + jnp.log(state["sum"])).astype(dtype)


def merge_extreme(a: State, b: State, is_min: bool) -> State:
    """Take the state with the larger value, or with the smaller one. NaN wins, then the earlier of equal rows."""
    is_beyond = b["value"] < a["value"] if is_min else b["value"] > a["value"]
    nan_a, nan_b = jnp.isnan(a["value"]), jnp.isnan(b["value"])
    is_equal = (a["value"] == b["value"]) | (nan_a & nan_b)
    takes = (is_beyond & ~nan_a) | (nan_b & ~nan_a) | (is_equal & (b["row"] < a["row"]))
    return jax.tree.map(lambda x, y: jnp.where(takes, y, x), a, b)


def largest(values: jax.Array, rows: jax.Array, k: int) -> State:
    """Return the k largest values, NaN first. Of equal values the first rows win; negative rows are fillers."""
    is_nan = jnp.isnan(values)
    falling = jnp.where(is_nan, 0, -values) if jnp.issubdtype(values.dtype, jnp.floating) else ~values
    order = jnp.lexsort((rows, falling, ~is_nan, rows < 0))[:k]
    return {"value": values[order], "row": rows[order]}


def merge_largest(a: State, b: State, k: int) -> State:
    both = concatenate_rows(a, b)
    return largest(both["value"], both["row"], k)


def places(x: jax.Array, edges: np.ndarray) -> jax.Array:
    """Return the bin of each number, in the dtype of the edges: -1 before all bins, their number after all."""
    if jnp.issubdtype(x.dtype, np.integer):
        return _places_of_integers(x, edges)
    x = x.astype(edges.dtype)
    place = jnp.searchsorted(jnp.asarray(edges), x, side="right") - 1
    return jnp.where(x == edges[-1], len(edges) - 2, place)


def _places_of_integers(x: jax.Array, edges: np.ndarray) -> jax.Array:
    """Return the bin of each integer, which compares exactly with edges that its dtype does not have."""
    limits = jnp.iinfo(x.dtype)
    at_least = [edge if np.isinf(edge) else math.ceil(edge) for edge in edges.tolist()]
    below = sum(edge <= limits.min for edge in at_least)
    inside = np.array([edge for edge in at_least[below:] if edge <= limits.max], x.dtype)
    place = jnp.full(x.shape, below - 1)
    if len(inside):
        place += jnp.searchsorted(jnp.asarray(inside), x, side="right")
    last = edges[-1].item()
    is_last = x == np.asarray(int(last), x.dtype) if limits.min <= last <= limits.max and last == int(last) else False
    return jnp.where(is_last, len(edges) - 2, place)


def counted(place: jax.Array, length: int) -> jax.Array:
    """Count the entries of each bin. Counts saturate at the largest integer."""
    place, dtype = place.ravel(), jnp.result_type(int)
    place = jnp.where((place >= 0) & (place < length), place, length)
    # Unsigned counts have room for a part of 2**32 - 1 rows.
    counts = jnp.zeros(length, f"u{dtype}").at[place].add(1, mode="drop")
    return jnp.minimum(counts, jnp.iinfo(dtype).max).astype(dtype)


def merge_counts(a: jax.Array, b: jax.Array) -> jax.Array:
    return a + jnp.minimum(b, jnp.iinfo(a.dtype).max - a)


def quantile(rows: jax.Array, q: np.ndarray) -> jax.Array:
    return jnp.quantile(rows.astype(real_like(rows)), jnp.asarray(q, jnp.result_type(float)), axis=0)
