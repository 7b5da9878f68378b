"""Tree: parts combined by one fixed tree over their numbers, so that the bits do not depend on who has made them."""

from collections.abc import Callable
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .reduction import MERGE_IN_ORDER, Reduction


def by_block(reduction: Reduction, dtype: np.dtype) -> Reduction:
    """The same where each block of rows gives one entry, and these combine by a tree; as it is where order does not
    matter, as for integers and extremes."""
    if reduction.collective == "merge":
        return MERGE_IN_ORDER  # whose answer merges entries by a tree
    is_integer = reduction.name not in ("mean", "weight") and not jnp.issubdtype(dtype, jnp.inexact)
    is_exact = reduction.collective == "sum" and is_integer  # weights are added up as floats
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
    """A weight for each number: XLA's CPU backend may take A / broadcast(B) for A * broadcast(1 / B), or not."""
    return None if weight is None else lax.optimization_barrier(jnp.broadcast_to(weight, total.shape))


def fold(entries: jax.Array, combine: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
    """All entries on axis 0 as one: neighbours first, what has none as it is."""
    while entries.shape[0] > 1:
        pairs = entries.shape[0] // 2
        both = combine(entries[0 : 2 * pairs : 2], entries[1 : 2 * pairs : 2])
        entries = jnp.concatenate([both, entries[2 * pairs :]])
    return entries[0]
