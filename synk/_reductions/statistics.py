"""Statistics: the states of `synk.stats`, how they merge, and what they come to."""

import math
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .reduction import accumulation_dtype

State = dict[str, jax.Array]


def rows_of(x: Any, name: str) -> jax.Array:
    x = jnp.asarray(x)
    if x.ndim == 0:
        raise ValueError(f"synk.stats.{name}: a scalar has no rows; give an array, rows first.")
    return x.astype(jnp.int32) if x.dtype == np.bool_ else x


def integers_of(x: Any, name: str) -> jax.Array:
    x = rows_of(x, name)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"synk.stats.{name}: it counts integers, but this array has dtype {x.dtype}.")
    if jnp.can_cast(x.dtype, np.int32):
        return x.astype(jnp.int32)
    # What is beyond is counted by nobody, and must not become another number.
    return jnp.where((x >= 0) & (x <= np.iinfo(np.int32).max), x.astype(jnp.int32), -1)


def real_like(x: Any) -> Any:
    """The dtype of a mean of these."""
    dtype = jnp.asarray(x).dtype
    return dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.result_type(float)


def rows_in_words(rows: int) -> jax.Array:
    """A number of rows, for which int32 may have no room: how many times 2**30, and how many more."""
    return jnp.array([rows >> 30, rows % 2**30], jnp.int32)


def add_rows(a: jax.Array, b: jax.Array) -> jax.Array:
    high, low = a + b
    return jnp.stack([high + (low >> 30), low % 2**30])


def number_of(rows: jax.Array, dtype: Any, ddof: int = 0) -> jax.Array:
    high, low = rows
    return high.astype(dtype) * 2**30 + (low - ddof).astype(dtype)


def mean_in_two(wide: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The mean in two numbers: the second has the bits that the first has no room for, of infinite ones none."""
    center = wide.mean(0, keepdims=True)
    return center, jnp.where(jnp.isfinite(center), (wide - center).mean(0, keepdims=True), 0)


def centered(x: jax.Array) -> tuple[State, jax.Array]:
    """Number and mean of rows, and how far each is from it."""
    wide, shift = _shifted(x, accumulation_dtype(x.dtype, "mean"))
    center, rest = mean_in_two(wide)
    off = wide - center - rest
    if shift is not None:
        whole = shift + center
        back = whole - shift
        center, rest = whole, (shift - (whole - back)) + (center - back) + rest
    return {"rows": rows_in_words(len(x)), "mean": center[0], "rest": rest[0]}, off


def _shifted(x: jax.Array, dtype: np.dtype) -> tuple[jax.Array, jax.Array | None]:
    """Rows in this dtype; of integers that it has no room for how far they are from about their mean, and that."""
    if not jnp.issubdtype(x.dtype, jnp.integer) or jnp.iinfo(x.dtype).bits <= jnp.finfo(dtype).nmant:
        return x.astype(dtype), None
    half = jnp.iinfo(x.dtype).bits // 2
    high, low = (x >> half).astype(dtype), (x & (2**half - 1)).astype(dtype)
    has_room = jnp.abs(high).max(0, keepdims=True) < 2 ** (jnp.finfo(dtype).nmant + 1 - half)
    about = jnp.where(has_room, 0, jnp.round(high.mean(0, keepdims=True)))
    return (high - about) * 2**half + low, about * 2**half


def spread(x: Any, name: str) -> State:
    means, off = centered(rows_of(x, name))
    return means | {"squares": (jnp.abs(off) ** 2).sum(0)}


def merge_means(a: State, b: State) -> tuple[State, jax.Array, jax.Array]:
    """Numbers and means of both; how far their means are apart, and with which weight that counts in squares."""
    rows = add_rows(a["rows"], b["rows"])
    of_a, of_b, of_all = (number_of(each, a["mean"].real.dtype) for each in (a["rows"], b["rows"], rows))
    share = of_b / of_all
    apart = (b["mean"] - a["mean"]) + (b["rest"] - a["rest"])
    more = a["rest"] + apart * share.astype(apart.dtype)
    mean = a["mean"] + more
    back = mean - a["mean"]  # what is lost in that sum (Knuth's two-sum)
    rest = (a["mean"] - (mean - back)) + (more - back)
    of_both = a["mean"] * (1 - share).astype(mean.dtype) + b["mean"] * share.astype(mean.dtype)
    is_fine = jnp.isfinite(mean)  # else there are infinities, which add up, or they are so far apart that it overflows
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
    # What has nothing but -inf adds nothing, however far below 0 the other is.
    gaps = (jnp.where(s["most"] == -jnp.inf, -jnp.inf, finite(s["most"]) - finite(most)) for s in (a, b))
    of_a, of_b = (s["sum"] * jnp.exp(gap) for s, gap in zip((a, b), gaps, strict=True))
    return {"most": most, "sum": of_a + of_b}


def logsumexp(state: State, dtype: Any) -> jax.Array:
    return (finite(state["most"]) + jnp.log(state["sum"])).astype(dtype)


def merge_most(a: State, b: State) -> State:
    return later_if(b["value"] > a["value"], a, b)


def merge_least(a: State, b: State) -> State:
    return later_if(b["value"] < a["value"], a, b)


def later_if(is_beyond: jax.Array, a: State, b: State) -> State:
    """The second where it is beyond the first, or NaN; of equal ones that of the earlier row, in whatever order."""
    nan_a, nan_b = jnp.isnan(a["value"]), jnp.isnan(b["value"])
    is_equal = (a["value"] == b["value"]) | (nan_a & nan_b)
    takes = (is_beyond & ~nan_a) | (nan_b & ~nan_a) | (is_equal & (b["row"] < a["row"]))
    return jax.tree.map(lambda one, two: jnp.where(takes, two, one), a, b)


def row(state: State) -> jax.Array:
    return state["row"]


def largest(values: jax.Array, rows: jax.Array, k: int) -> State:
    """The k largest of those whose row is one; of equal ones the first."""
    is_nan = jnp.isnan(values)
    falling = jnp.where(is_nan, 0, -values) if jnp.issubdtype(values.dtype, jnp.floating) else ~values
    order = jnp.lexsort((rows, falling, ~is_nan, rows < 0))[:k]
    return {"value": values[order], "row": rows[order]}


@lru_cache(maxsize=1024)
def merge_largest(k: int) -> Any:
    def merge(a: State, b: State) -> State:
        both = jax.tree.map(lambda one, two: jnp.concatenate([one, two]), a, b)
        return largest(both["value"], both["row"], k)

    return merge


def pair(state: State) -> tuple[jax.Array, jax.Array]:
    return state["value"], state["row"]


def places_of_integers(x: jax.Array, edges: np.ndarray) -> jax.Array:
    """In which bin each integer lies, compared exactly, whatever edges its dtype has: -1 before all, as many as there
    are bins after all."""
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


def places_of_floats(x: jax.Array, edges: np.ndarray) -> jax.Array:
    """The same of floats, in the dtype of the edges."""
    place = jnp.searchsorted(jnp.asarray(edges), x, side="right") - 1
    return jnp.where(x == edges[-1], len(edges) - 2, place)


def counted(place: jax.Array, length: int) -> jax.Array:
    """How many have each place, at most as many as an integer has room for."""
    place, dtype = place.ravel(), jnp.result_type(int)
    place = jnp.where((place >= 0) & (place < length), place, length)
    counts = jnp.zeros(length, f"u{dtype}").at[place].add(1, mode="drop")  # with room for a part of 2**32 - 1
    return jnp.minimum(counts, jnp.iinfo(dtype).max).astype(dtype)


def merge_counts(a: jax.Array, b: jax.Array) -> jax.Array:
    return a + jnp.minimum(b, jnp.iinfo(a.dtype).max - a)


def with_edges(counts: jax.Array, edges: tuple[float, ...]) -> tuple[jax.Array, jax.Array]:
    return counts, jnp.asarray(edges, jnp.result_type(float))


def quantile(rows: jax.Array, q: np.ndarray) -> jax.Array:
    return jnp.quantile(rows.astype(real_like(rows)), jnp.asarray(q, jnp.result_type(float)), axis=0)
