"""Exact statistics over all rows of a call, whatever parts the rows come in.

A synk function returns a statistic of its part's rows (axis 0), a `synk.Monoid`. The call returns the statistic of all
rows, as NumPy computes it.
"""

import math
from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from ._base.errors import checked_integer, shown
from ._base.pytree import narrow
from ._reductions.monoid import Monoid, concatenate_rows, statistic
from ._reductions.reduction import accumulation_dtype
from ._tracing.context import row_numbers

__all__ = [
    "argmax", "argmin", "bincount", "confusion", "cov", "histogram", "logsumexp", "mean", "moments", "quantile", "std",
    "top_k", "var",
]  # fmt: skip


def mean(x: Any) -> Monoid:
    """Return the mean of the rows, as `np.mean(x, 0)`.

    Args:
      x: of shape (rows, ...).

    Returns:
      A Monoid whose value has the shape of a row, floating.

    Example:
      >>> import numpy as np, synk
      >>> round(float(synk.function(synk.stats.mean)(np.arange(5.0))), 4)
      2.0
    """
    return _of_spread(x, _mean)


def var(x: Any, ddof: int = 0) -> Monoid:
    """Return the variance of the rows, as `np.var(x, 0, ddof=ddof)`.

    It is accurate also for rows far from 0 (Chan, Golub and LeVeque 1983).

    Args:
      x: of shape (rows, ...).
      ddof: the divisor is the number of rows less `ddof`.

    Returns:
      A Monoid whose value has the shape of a row, floating; NaN or infinite for no more than `ddof` rows.

    Example:
      >>> import numpy as np, synk
      >>> x = np.arange(4, dtype=np.float32) + 10000
      >>> float(synk.function(synk.stats.var)(x))
      1.25
    """
    return _of_spread(x, _var, ddof=ddof)


def std(x: Any, ddof: int = 0) -> Monoid:
    """Return the standard deviation of the rows, as `np.std(x, 0, ddof=ddof)`.

    Args:
      x: of shape (rows, ...).
      ddof: as in `var`.

    Returns:
      A Monoid whose value has the shape of a row, floating.

    Example:
      >>> import numpy as np, synk
      >>> float(synk.function(synk.stats.std)(np.array([1.0, 3.0, 1.0, 3.0])))
      1.0
    """
    return _of_spread(x, _std, ddof=ddof)


def moments(x: Any) -> Monoid:
    """Return mean and variance of the rows together.

    Args:
      x: of shape (rows, ...).

    Returns:
      A Monoid whose value is the pair of mean and variance.

    Example:
      >>> import numpy as np, synk
      >>> [round(float(m), 4) for m in synk.function(synk.stats.moments)(np.arange(3.0))]
      [1.0, 0.6667]
    """
    return _of_spread(x, _moments)


def cov(x: Any, ddof: int = 1) -> Monoid:
    """Return the covariance of the columns, as `np.cov(x, rowvar=False, ddof=ddof)`.

    Args:
      x: of shape (rows, columns).
      ddof: the divisor is the number of rows less `ddof`.

    Returns:
      A Monoid whose value has shape (columns, columns).

    Example:
      >>> import numpy as np, synk
      >>> synk.function(synk.stats.cov)(np.array([[0.0, 1.0], [2.0, 5.0]])).tolist()
      [[2.0, 4.0], [4.0, 8.0]]
    """
    x = _rows_of(x, "cov")
    if x.ndim != 2:
        raise ValueError(f"synk.stats.cov: x has shape {x.shape}; give rows of columns, two dimensions.")
    means, off = _centered(x)
    state = means | {"products": off.T @ off.conj()}
    finish = partial(_cov, ddof=ddof, dtype=_real_like(x))
    return statistic(state, _merge_products, finish)


def logsumexp(x: Any) -> Monoid:
    """Return the logarithm of the sum of exponentials over the rows, as `scipy.special.logsumexp(x, 0)`.

    Args:
      x: of shape (rows, ...), floating.

    Returns:
      A Monoid whose value has the shape of a row.

    Example:
      >>> import numpy as np, synk
      >>> f"{synk.function(synk.stats.logsumexp)(np.array([100.0, 100.0])):.3f}"
      '100.693'
    """
    x = _rows_of(x, "logsumexp")
    wide = x.astype(accumulation_dtype(x.dtype, "mean"))
    most = wide.max(0, keepdims=True)
    # Relative to the largest number, so that no exponential overflows.
    state = {"most": most[0], "sum": jnp.exp(wide - _finite(most)).sum(0)}
    return statistic(state, _merge_exponentials, partial(_logsumexp, dtype=_real_like(x)))


def argmax(x: Any) -> Monoid:
    """Return the number of the row that holds the maximum, as `np.argmax(x, 0)`.

    Of equal rows the first counts; NaN is the maximum.

    Args:
      x: of shape (rows, ...), real.

    Returns:
      A Monoid whose value has the shape of a row, int32: row numbers in the selection of the call.

    Example:
      >>> import numpy as np, synk
      >>> int(synk.function(synk.stats.argmax)(np.array([1.0, 7.0, 7.0])))
      1
    """
    return _extreme(x, "argmax", is_min=False)


def argmin(x: Any) -> Monoid:
    """Return the number of the row that holds the minimum, as `np.argmin(x, 0)`.

    Args:
      x: as for `argmax`.

    Returns:
      A Monoid like that of `argmax`.

    Example:
      >>> import numpy as np, synk
      >>> int(synk.function(synk.stats.argmin)(np.array([1.0, -7.0, -7.0])))
      1
    """
    return _extreme(x, "argmin", is_min=True)


def top_k(x: Any, k: int) -> Monoid:
    """Return the k largest numbers and their rows, as `jax.lax.top_k`.

    Of equal numbers the first rows count; NaN is the largest.

    Args:
      x: of shape (rows,), real.
      k: how many; a call with fewer rows in all raises ValueError before anything runs.

    Returns:
      A Monoid whose value is the pair of the numbers, largest first, and their row numbers in the selection, int32.

    Example:
      >>> import numpy as np, synk
      >>> losses = np.array([0.5, 3.0, 2.0, 3.0], np.float32)
      >>> [part.tolist() for part in synk.function(lambda x: synk.stats.top_k(x, 2))(losses)]
      [[3.0, 3.0], [1, 3]]
    """
    x, rows = _numbered(x, "top_k")
    if x.ndim != 1:
        raise ValueError(f"synk.stats.top_k: x has shape {x.shape}; give one number a row.")
    k = checked_integer(k, "synk.stats.top_k: k", 1)
    values, rows = jnp.pad(x, (0, k)), jnp.pad(rows, (0, k), constant_values=-1)
    merge = partial(_merge_largest, k=k)
    finish = itemgetter("value", "row")
    return statistic(_largest(values, rows, k), merge, finish, least_rows=k)


def histogram(x: Any, bins: Any = 10, range: tuple[float, float] | None = None) -> Monoid:
    """Count the numbers in each bin, and return counts and edges, as `np.histogram(x, bins, range)`.

    Args:
      x: of any shape (rows, ...), real. To leave out numbers by a mask put them outside the range:
        `jnp.where(mask, x, -jnp.inf)`.
      bins: the number of bins of equal width, with `range`; or their edges, increasing.
      range: the outer edges; numbers outside are not counted. Needed with a number of bins, since the extremes of the
        data are not known before all rows are.

    Returns:
      A Monoid whose value is the pair of the counts and the edges. Counts are int32, at most 2**31 - 1, or int64 under
      `jax_enable_x64`.

    Example:
      >>> import numpy as np, synk
      >>> count = synk.function(lambda x: synk.stats.histogram(x, 2, (0, 1)))
      >>> [part.tolist() for part in count(np.array([0.1, 0.5, 0.9, 7.0]))]
      [[1, 2], [0.0, 0.5, 1.0]]
    """
    x = _rows_of(x, "histogram")
    _refuse_traced("histogram", "bins", bins)
    _refuse_traced("histogram", "range", range)
    if np.ndim(bins) == 0 and range is None:
        raise ValueError(f"synk.stats.histogram: bins={bins!r} needs range=(lowest, highest); or give edges as bins.")
    # Edges depend on the data only by its dtype, since bins and range are given.
    like = np.zeros(0, x.dtype if jnp.issubdtype(x.dtype, np.floating) and x.dtype.itemsize >= 4 else np.float32)
    edges = np.histogram_bin_edges(like, bins, range)
    if not jnp.issubdtype(x.dtype, np.integer):
        edges = edges.astype(narrow(np.result_type(like.dtype, edges.dtype)))
    counts = _counted(_places(x.ravel(), edges), len(edges) - 1)
    return statistic(counts, _merge_counts, lambda counts: (counts, jnp.asarray(edges, jnp.result_type(float))))


def bincount(x: Any, length: int) -> Monoid:
    """Count how often each of 0, 1, ..., length - 1 occurs, as `np.bincount(x, minlength=length)`.

    Args:
      x: integers of shape (rows, ...); other integers are not counted.
      length: the number of counts.

    Returns:
      A Monoid whose value has shape (length,), with the dtype and limit of `histogram`'s counts.

    Example:
      >>> import numpy as np, synk
      >>> synk.function(lambda x: synk.stats.bincount(x, 3))(np.array([0, 2, 2])).tolist()
      [1, 0, 2]
    """
    _refuse_traced("bincount", "length", length)
    return statistic(_counted(_integers_of(x, "bincount"), length), _merge_counts)


def confusion(labels: Any, predictions: Any, classes: int) -> Monoid:
    """Return the confusion matrix, as scikit-learn's `confusion_matrix(labels, predictions, labels=range(classes))`.

    Args:
      labels: true classes, integers of shape (rows, ...).
      predictions: predicted classes, of the same shape; a pair is not counted if one of the two is no class.
      classes: the number of classes.

    Returns:
      A Monoid whose value has shape (classes, classes), with the dtype and limit of `histogram`'s counts. Rows are true
      classes.

    Example:
      >>> import numpy as np, synk
      >>> matrix = synk.function(lambda y, p: synk.stats.confusion(y, p, 2))
      >>> matrix(np.array([0, 1, 1]), np.array([0, 0, 1])).tolist()
      [[1, 0], [1, 1]]
    """
    _refuse_traced("confusion", "classes", classes)
    true, predicted = _integers_of(labels, "confusion"), _integers_of(predictions, "confusion")
    if true.shape != predicted.shape:
        raise ValueError(f"synk.stats.confusion: labels have shape {true.shape}, predictions {predicted.shape}.")
    is_class = (true >= 0) & (true < classes) & (predicted >= 0) & (predicted < classes)
    place = jnp.where(is_class, true * classes + predicted, -1)
    counts = _counted(place, classes * classes).reshape(classes, classes)
    return statistic(counts, _merge_counts)


def quantile(x: Any, q: Any) -> Monoid:
    """Return quantiles of the rows, as `np.quantile(x, q, 0)`. All rows are gathered on every replica.

    Args:
      x: of shape (rows, ...), real.
      q: a number from 0 to 1, or a list of them.

    Returns:
      A Monoid whose value has the shape of `q`, followed by the shape of a row.

    Example:
      >>> import numpy as np, synk
      >>> synk.function(lambda x: synk.stats.quantile(x, [0.5, 1]))(np.arange(5.0)).tolist()
      [2.0, 4.0]
    """
    _refuse_traced("quantile", "q", q)
    wanted = np.asarray(q, np.float64)
    if not ((wanted >= 0) & (wanted <= 1)).all():
        raise ValueError(f"synk.stats.quantile: q is {shown(q)}; give numbers from 0 to 1.")
    finish = partial(_quantile, q=wanted)
    return statistic(_rows_of(x, "quantile"), concatenate_rows, finish)


def _of_spread(x: Any, finish: Any, **options: int) -> Monoid:
    finish_it = partial(finish, dtype=_real_like(x), **options)
    return statistic(_spread(x, finish.__name__[1:]), _merge_spreads, finish_it)


def _refuse_traced(call: str, name: str, value: Any) -> None:
    """Raise TypeError for an option that is known only when the program runs."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value)):
        raise TypeError(
            f"synk.stats.{call}: {name} is an argument, or made by jax.numpy in a trace. Make it by NumPy, or pass it "
            f'as "static".'
        )


def _numbered(x: Any, name: str) -> tuple[jax.Array, jax.Array]:
    """Return the rows and their numbers; raise ValueError if the array has another number of rows."""
    x, rows = _rows_of(x, name), row_numbers()
    if x.shape[:1] != rows.shape:
        raise ValueError(
            f"synk.stats.{name}: x has shape {x.shape} for {rows.size} rows. Give it an entry a row; reshape the array "
            f"before the call."
        )
    return x, rows


def _extreme(x: Any, name: str, is_min: bool) -> Monoid:
    x, rows = _numbered(x, name)
    at = (jnp.argmin if is_min else jnp.argmax)(x, axis=0)
    value = jnp.take_along_axis(x, at[None], axis=0)[0]
    merge = partial(_merge_extreme, is_min=is_min)
    return statistic({"value": value, "row": rows[at]}, merge, itemgetter("row"))


# States, their merges, and the answers made of them. Means and squares merge by the formulas of Chan, Golub and LeVeque
# (1982, doi:10.1007/978-3-642-51461-6_3), which stay exact for data far from 0.

_State = dict[str, jax.Array]


def _rows_of(x: Any, name: str) -> jax.Array:
    x = jnp.asarray(x)
    if x.ndim == 0:
        raise ValueError(f"synk.stats.{name}: a scalar has no rows; give an array, rows first.")
    return x.astype(jnp.int32) if x.dtype == np.bool_ else x


def _integers_of(x: Any, name: str) -> jax.Array:
    """Return rows of integers as int32. Raise TypeError for other dtypes."""
    x = _rows_of(x, name)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"synk.stats.{name}: it counts integers, but this array has dtype {x.dtype}.")
    if jnp.can_cast(x.dtype, np.int32):
        return x.astype(jnp.int32)
    # Numbers beyond int32 are counted in no bin, and must not wrap around into one.
    return jnp.where((x >= 0) & (x <= np.iinfo(np.int32).max), x.astype(jnp.int32), -1)


def _real_like(x: Any) -> Any:
    dtype = jnp.asarray(x).dtype
    return dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.result_type(float)


def _rows_in_words(rows: int) -> jax.Array:
    """Write a number of rows, which int32 may not hold, as a multiple of 2**30 and a rest."""
    return jnp.array([rows >> 30, rows % 2**30], jnp.int32)


def _add_rows(a: jax.Array, b: jax.Array) -> jax.Array:
    # Both words stay below 2**31: the low ones of two counts add up to less than that.
    high, low = a + b
    return jnp.stack([high + (low >> 30), low % 2**30])


def _number_of(rows: jax.Array, dtype: Any, ddof: int = 0) -> jax.Array:
    high, low = rows
    return high.astype(dtype) * 2**30 + (low - ddof).astype(dtype)


def _centered(x: jax.Array) -> tuple[_State, jax.Array]:
    """Return the number and the mean of rows, and the distance of each row from the mean."""
    wide, shift = _shifted(x, accumulation_dtype(x.dtype, "mean"))
    # A second number holds the bits of the mean that the first has no room for.
    center = wide.mean(0, keepdims=True)
    rest = jnp.where(jnp.isfinite(center), (wide - center).mean(0, keepdims=True), 0)
    off = wide - center - rest
    if shift is not None:
        center, lost = _two_sum(shift, center)
        rest += lost
    return {"rows": _rows_in_words(len(x)), "mean": center[0], "rest": rest[0]}, off


def _shifted(x: jax.Array, dtype: np.dtype) -> tuple[jax.Array, jax.Array | None]:
    """Return rows in a float dtype, minus a shift. Only integers with more bits than the dtype need one."""
    if not jnp.issubdtype(x.dtype, jnp.integer) or jnp.iinfo(x.dtype).bits <= jnp.finfo(dtype).nmant:
        return x.astype(dtype), None
    # Both halves of an integer are exact floats. Their sum may not be, so a number near the mean is taken off before.
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


def _spread(x: Any, name: str) -> _State:
    means, off = _centered(_rows_of(x, name))
    return means | {"squares": (jnp.abs(off) ** 2).sum(0)}


def _merge_means(a: _State, b: _State) -> tuple[_State, jax.Array, jax.Array]:
    """Merge the numbers and means of two states. Return also the distance of the means, and its weight in squares."""
    rows = _add_rows(a["rows"], b["rows"])
    of_a, of_b, of_all = (_number_of(words, a["mean"].real.dtype) for words in (a["rows"], b["rows"], rows))
    share = of_b / of_all
    apart = (b["mean"] - a["mean"]) + (b["rest"] - a["rest"])
    more = a["rest"] + apart * share.astype(apart.dtype)
    _mean, rest = _two_sum(a["mean"], more)
    of_both = a["mean"] * (1 - share).astype(_mean.dtype) + b["mean"] * share.astype(_mean.dtype)
    # The difference of two means may be infinite or overflow. Then the weighted sum is right.
    is_fine = jnp.isfinite(_mean)
    means = {"rows": rows, "mean": jnp.where(is_fine, _mean, of_both), "rest": jnp.where(is_fine, rest, 0)}
    return means, apart, of_a * share


def _merge_spreads(a: _State, b: _State) -> _State:
    means, apart, weight = _merge_means(a, b)
    return means | {"squares": a["squares"] + b["squares"] + jnp.abs(apart) ** 2 * weight}


def _merge_products(a: _State, b: _State) -> _State:
    means, apart, weight = _merge_means(a, b)
    between = jnp.outer(apart, apart.conj()) * weight.astype(apart.dtype)
    return means | {"products": a["products"] + b["products"] + between}


def _mean(state: _State, dtype: Any) -> jax.Array:
    return (state["mean"] + state["rest"]).astype(dtype)


def _var(state: _State, ddof: int, dtype: Any) -> jax.Array:
    squares = state["squares"]
    return (squares / _number_of(state["rows"], squares.dtype, ddof)).astype(jnp.finfo(dtype).dtype)


def _std(state: _State, ddof: int, dtype: Any) -> jax.Array:
    return jnp.sqrt(_var(state, ddof, dtype))


def _moments(state: _State, dtype: Any) -> tuple[jax.Array, jax.Array]:
    return _mean(state, dtype), _var(state, 0, dtype)


def _cov(state: _State, ddof: int, dtype: Any) -> jax.Array:
    products = state["products"]
    return (products / _number_of(state["rows"], products.dtype, ddof)).astype(dtype)


def _finite(most: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(most), most, 0)


def _merge_exponentials(a: _State, b: _State) -> _State:
    most = jnp.maximum(a["most"], b["most"])
    # A state of nothing but -inf adds nothing, however small the numbers of the other state are.
    gaps = (jnp.where(s["most"] == -jnp.inf, -jnp.inf, _finite(s["most"]) - _finite(most)) for s in (a, b))
    of_a, of_b = (s["sum"] * jnp.exp(gap) for s, gap in zip((a, b), gaps, strict=True))
    return {"most": most, "sum": of_a + of_b}


def _logsumexp(state: _State, dtype: Any) -> jax.Array:
    return (_finite(state["most"]) + jnp.log(state["sum"])).astype(dtype)


def _merge_extreme(a: _State, b: _State, is_min: bool) -> _State:
    """Take the state with the larger value, or with the smaller one. NaN wins, then the earlier of equal rows."""
    is_beyond = b["value"] < a["value"] if is_min else b["value"] > a["value"]
    nan_a, nan_b = jnp.isnan(a["value"]), jnp.isnan(b["value"])
    is_equal = (a["value"] == b["value"]) | (nan_a & nan_b)
    takes = (is_beyond & ~nan_a) | (nan_b & ~nan_a) | (is_equal & (b["row"] < a["row"]))
    return jax.tree.map(lambda x, y: jnp.where(takes, y, x), a, b)


def _largest(values: jax.Array, rows: jax.Array, k: int) -> _State:
    """Return the k largest values, NaN first. Of equal values the first rows win; negative rows are fillers."""
    is_nan = jnp.isnan(values)
    falling = jnp.where(is_nan, 0, -values) if jnp.issubdtype(values.dtype, jnp.floating) else ~values
    # lexsort sorts by its last key first: fillers last, NaN first, larger values, earlier rows. `~values` reverses
    # integers without overflow, which `-values` has at the least one.
    order = jnp.lexsort((rows, falling, ~is_nan, rows < 0))[:k]
    return {"value": values[order], "row": rows[order]}


def _merge_largest(a: _State, b: _State, k: int) -> _State:
    both = concatenate_rows(a, b)
    return _largest(both["value"], both["row"], k)


def _places(x: jax.Array, edges: np.ndarray) -> jax.Array:
    """Return the bin of each number, in the dtype of the edges: -1 before all bins, their number after all."""
    if jnp.issubdtype(x.dtype, np.integer):
        return _places_of_integers(x, edges)
    x = x.astype(edges.dtype)
    place = jnp.searchsorted(jnp.asarray(edges), x, side="right") - 1
    return jnp.where(x == edges[-1], len(edges) - 2, place)


def _places_of_integers(x: jax.Array, edges: np.ndarray) -> jax.Array:
    """Return the bin of each integer, which compares exactly with edges that its dtype does not have."""
    limits = jnp.iinfo(x.dtype)
    # An integer is at or above an edge if it is at or above the edge rounded up. Floats would lose digits of large
    # integers.
    at_least = [edge if np.isinf(edge) else math.ceil(edge) for edge in edges.tolist()]
    below = sum(edge <= limits.min for edge in at_least)
    inside = np.array([edge for edge in at_least[below:] if edge <= limits.max], x.dtype)
    place = jnp.full(x.shape, below - 1)
    if len(inside):
        place += jnp.searchsorted(jnp.asarray(inside), x, side="right")
    last = edges[-1].item()
    is_last = x == np.asarray(int(last), x.dtype) if limits.min <= last <= limits.max and last == int(last) else False
    return jnp.where(is_last, len(edges) - 2, place)


def _counted(place: jax.Array, length: int) -> jax.Array:
    """Count the entries of each bin. Counts saturate at the largest integer."""
    place, dtype = place.ravel(), jnp.result_type(int)
    place = jnp.where((place >= 0) & (place < length), place, length)
    # Unsigned counts have room for a part of 2**32 - 1 rows.
    counts = jnp.zeros(length, f"u{dtype}").at[place].add(1, mode="drop")
    return jnp.minimum(counts, jnp.iinfo(dtype).max).astype(dtype)


def _merge_counts(a: jax.Array, b: jax.Array) -> jax.Array:
    # A count that wraps around would look right.
    return a + jnp.minimum(b, jnp.iinfo(a.dtype).max - a)


def _quantile(rows: jax.Array, q: np.ndarray) -> jax.Array:
    return jnp.quantile(rows.astype(_real_like(rows)), jnp.asarray(q, jnp.result_type(float)), axis=0)
