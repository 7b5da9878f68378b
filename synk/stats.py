"""Exact statistics over all rows of a call, whatever parts the rows come in.

A synk function returns a statistic of its part's rows (axis 0), a `synk.Monoid`. The call returns the statistic of all
rows, as NumPy computes it.
"""

from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from ._base.errors import checked_integer, shown
from ._base.pytree import narrow
from ._reductions import statistics
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
    return _of_spread(x, statistics.mean)


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
    return _of_spread(x, statistics.var, ddof=ddof)


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
    return _of_spread(x, statistics.std, ddof=ddof)


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
    return _of_spread(x, statistics.moments)


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
    x = statistics.rows_of(x, "cov")
    if x.ndim != 2:
        raise ValueError(f"synk.stats.cov: x has shape {x.shape}; give rows of columns, two dimensions.")
    means, off = statistics.centered(x)
    state = means | {"products": off.T @ off.conj()}
    finish = partial(statistics.cov, ddof=ddof, dtype=statistics.real_like(x))
    return statistic(state, statistics.merge_products, finish)


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
    x = statistics.rows_of(x, "logsumexp")
    wide = x.astype(accumulation_dtype(x.dtype, "mean"))
    most = wide.max(0, keepdims=True)
    state = {"most": most[0], "sum": jnp.exp(wide - statistics.finite(most)).sum(0)}
    return statistic(state, statistics.merge_exponentials, partial(statistics.logsumexp, dtype=statistics.real_like(x)))


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
    merge = partial(statistics.merge_largest, k=k)
    finish = itemgetter("value", "row")
    return statistic(statistics.largest(values, rows, k), merge, finish, least_rows=k)


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
    x = statistics.rows_of(x, "histogram")
    _refuse_traced("histogram", "bins", bins)
    _refuse_traced("histogram", "range", range)
    if np.ndim(bins) == 0 and range is None:
        raise ValueError(f"synk.stats.histogram: bins={bins!r} needs range=(lowest, highest); or give edges as bins.")
    like = np.zeros(0, x.dtype if jnp.issubdtype(x.dtype, np.floating) and x.dtype.itemsize >= 4 else np.float32)
    edges = np.histogram_bin_edges(like, bins, range)
    if not jnp.issubdtype(x.dtype, np.integer):
        edges = edges.astype(narrow(np.result_type(like.dtype, edges.dtype)))
    counts = statistics.counted(statistics.places(x.ravel(), edges), len(edges) - 1)
    return statistic(
        counts, statistics.merge_counts, lambda counts: (counts, jnp.asarray(edges, jnp.result_type(float)))
    )


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
    return statistic(statistics.counted(statistics.integers_of(x, "bincount"), length), statistics.merge_counts)


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
    true, predicted = statistics.integers_of(labels, "confusion"), statistics.integers_of(predictions, "confusion")
    if true.shape != predicted.shape:
        raise ValueError(f"synk.stats.confusion: labels have shape {true.shape}, predictions {predicted.shape}.")
    is_class = (true >= 0) & (true < classes) & (predicted >= 0) & (predicted < classes)
    place = jnp.where(is_class, true * classes + predicted, -1)
    counts = statistics.counted(place, classes * classes).reshape(classes, classes)
    return statistic(counts, statistics.merge_counts)


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
    finish = partial(statistics.quantile, q=wanted)
    return statistic(statistics.rows_of(x, "quantile"), concatenate_rows, finish)


def _of_spread(x: Any, finish: Any, **options: int) -> Monoid:
    """Make a statistic that `finish` computes from count, mean and squares."""
    finish_it = partial(finish, dtype=statistics.real_like(x), **options)
    return statistic(statistics.spread(x, finish.__name__), statistics.merge_spreads, finish_it)


def _refuse_traced(call: str, name: str, value: Any) -> None:
    """Raise TypeError for an option that is known only when the program runs."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value)):
        raise TypeError(
            f"synk.stats.{call}: {name} is an argument, or made by jax.numpy in a trace. Make it by NumPy, or pass it "
            f'as "static".'
        )


def _numbered(x: Any, name: str) -> tuple[jax.Array, jax.Array]:
    """Return the rows and their numbers; raise ValueError if the array has another number of rows."""
    x, rows = statistics.rows_of(x, name), row_numbers()
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
    merge = partial(statistics.merge_extreme, is_min=is_min)
    return statistic({"value": value, "row": rows[at]}, merge, itemgetter("row"))
