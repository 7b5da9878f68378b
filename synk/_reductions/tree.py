"""Tree: combine blocks of rows by one fixed tree, so that the bits do not depend on the number of replicas."""

from collections.abc import Callable, Sequence
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .reduction import MERGE_IN_ORDER, Reduction


def by_block(reduction: Reduction, dtype: np.dtype) -> Reduction:
    """Return a reduction that gathers one entry a block and combines the entries by a tree, if their order matters."""
    # The entries of a Monoid merge by a tree anyway.
    if reduction.collective == "merge":
        return MERGE_IN_ORDER
    # Means and weights of integers add up as floats.
    is_integer = reduction.name not in ("mean", "weight") and not jnp.issubdtype(dtype, jnp.inexact)
    # Integers and extremes combine to the same bits in any order, by a collective that moves less.
    is_exact = reduction.collective == "sum" and is_integer
    return reduction if is_exact or reduction.collective not in ("sum", "prod") else _entries_of(reduction)


@lru_cache(maxsize=64)
def _entries_of(reduction: Reduction) -> Reduction:
    def combine(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> list[jax.Array]:
        return [reduction.accumulate(a[0], b[0])]

    def finalize(total: jax.Array, weight: jax.Array | None) -> jax.Array:
        if weight is not None:
            # XLA may turn A / broadcast(B) into A * broadcast(1 / B), or not, depending on how often B is used.
            weight = lax.optimization_barrier(jnp.broadcast_to(weight, total.shape))
        return reduction.finalize(total, weight)

    return Reduction(
        reduction.name,
        "gather",
        lambda value, weight: reduction.prepare(value, weight)[None],
        finalize=finalize,
        fold=lambda entries: fold_by_tree([entries], combine)[0],
    )


def fold_by_tree(states: Sequence[jax.Array], combine: Callable[..., list[jax.Array]]) -> list[jax.Array]:
    """Combine all entries on axis 0: neighbours first. An entry without a neighbour stays as it is.

    `combine` takes the leaves of as many first as second neighbours.
    """
    states = list(states)
    while states and len(states[0]) > 1:
        # Neighbours and not halves: the tree depends on the number of entries alone, and keeps their order for merges
        # that do not commute.
        stop = len(states[0]) // 2 * 2
        both = combine([leaf[0:stop:2] for leaf in states], [leaf[1:stop:2] for leaf in states])
        states = [jnp.concatenate([pairs, leaf[stop:]]) for pairs, leaf in zip(both, states, strict=True)]
    return [leaf[0] for leaf in states]
