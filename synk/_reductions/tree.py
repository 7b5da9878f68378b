"""Tree: combine blocks of rows by one fixed tree, so that the bits do not depend on the number of replicas."""

from collections.abc import Callable
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .reduction import MERGE_IN_ORDER, Reduction


def by_block(reduction: Reduction, dtype: np.dtype) -> Reduction:
    """Return a reduction that gathers one entry a block and combines the entries by a tree.

    Reductions whose order does not matter, as of integers and extremes, are returned as they are.
    """
    # The entries of a Monoid merge by a tree anyway.
    if reduction.collective == "merge":
        return MERGE_IN_ORDER
    # Means and weights of integers add up as floats.
    is_integer = reduction.name not in ("mean", "weight") and not jnp.issubdtype(dtype, jnp.inexact)
    is_exact = reduction.collective == "sum" and is_integer
    return reduction if is_exact or reduction.collective not in ("sum", "prod") else _entries_of(reduction)


@lru_cache(maxsize=64)
def _entries_of(reduction: Reduction) -> Reduction:
    return Reduction(
        reduction.name,
        "gather",
        lambda value, info: reduction.prepare(value, info)[None],
        finalize=lambda total, weight: reduction.finalize(total, _spread(weight, total)),
        fold=lambda entries: fold(entries, reduction.accumulate),
    )


def _spread(weight: jax.Array | None, total: jax.Array) -> jax.Array | None:
    """Return the weight once for each number."""
    # XLA may turn A / broadcast(B) into A * broadcast(1 / B), or not, depending on how often B is used.
    return None if weight is None else lax.optimization_barrier(jnp.broadcast_to(weight, total.shape))


def fold(entries: jax.Array, combine: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
    """Combine all entries on axis 0: neighbours first. An entry without a neighbour stays as it is."""
    while entries.shape[0] > 1:
        pairs = entries.shape[0] // 2
        both = combine(entries[0 : 2 * pairs : 2], entries[1 : 2 * pairs : 2])
        entries = jnp.concatenate([both, entries[2 * pairs :]])
    return entries[0]
