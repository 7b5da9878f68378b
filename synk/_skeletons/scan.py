"""Scan: prefix combinations of rows that lie on all replicas."""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._base.errors import public_api
from .._base.partition import lengths_of
from .._base.pytree import PyTree, exactly, first_change
from .._call.parts import fill_up
from .._reductions.collectives import all_gather
from .._reductions.reduction import constant_unless
from .._runtime.group import AXIS, current_group
from .skeletons import Leaves, Results, RowTree, Skeleton, row_tree, run_skeleton, without_state


@public_api
def scan(
    op: Callable[[PyTree, PyTree], PyTree],
    x: PyTree,
    *,
    identity: PyTree = None,
    reverse: bool = False,
    exclusive: bool = False,
    reduce: Results = "concat",
) -> PyTree:
    """Combine each row with all rows before it: `jax.lax.associative_scan` over rows on all replicas.

    Each replica scans its rows, and gets one total of each other.

    Args:
      op: associative, and need not commute: `op(a, b)` combines each row of `a` with that of `b`, which comes later;
        both are trees as `x`, of any number of rows.
      x: a pytree of arrays that share their rows, axis 0. `synk.data` with `place="scatter"`, and shared variables that
        hold rows, are taken where they lie.
      identity: what changes nothing, a tree of one row as `x`; only needed with `exclusive`.
      reverse: whether to go from the last row to the first.
      exclusive: whether a row's own value is left out.
      reduce: "concat" for arrays that lie on every replica, "scatter" for `synk.Data` whose rows stay on theirs.

    Returns:
      A tree as `x`.

    Raises:
      TypeError, ValueError: arrays differ in rows or have none, `op` changes tree, shapes or dtypes, or there is no
        identity where one is needed.

    Example:
      >>> import jax.numpy as jnp, numpy as np, synk
      >>> synk.scan(jnp.add, np.arange(1, 6)).tolist()
      [1, 3, 6, 10, 15]
      >>> def then(f, g):  # of affine maps: f, then g
      ...     return g[0] * f[0], g[0] * f[1] + g[1]
      >>> synk.scan(then, (np.full(4, 2.0), np.ones(4)))[1].tolist()  # y = 2 y + 1, from 0 on
      [1.0, 3.0, 7.0, 15.0]
    """
    name, group = f"synk.scan({getattr(op, '__name__', 'op')})", current_group()
    group._refuse_if_absent(name)
    given, op_alone = row_tree(x, "x", name, group), without_state(op, name)
    first = None if identity is None else _identity(identity, given, name)
    if exclusive and first is None:
        raise ValueError(f"{name}: exclusive leaves the first row with nothing but the identity; give identity=...")
    like = given.tree.unflatten(given.structs(2))
    change = first_change(like, jax.eval_shape(op_alone, like, like), "x")
    if change is not None:
        raise ValueError(
            f"{name}: op changes {change[0]} from {change[1]} to {change[2]}. It combines rows with as many rows, of "
            f"the same tree, shapes and dtypes."
        )

    def combine(a: Leaves, b: Leaves) -> list[jax.Array]:
        return jax.tree.leaves(op_alone(given.tree.unflatten(a), given.tree.unflatten(b)))

    body = partial(_scan, combine, lengths_of(given.rows, group.size), None if first is None else list(first), reverse)
    constants = None if first is None else tuple((leaf.dtype.str, leaf.shape, leaf.tobytes()) for leaf in first)
    key = scan, given.tree, constants, reverse, exclusive
    program = Skeleton(name, op, key, partial(body, exclusive), len(given.leaves), reduce)
    return given.tree.unflatten(run_skeleton(group, program, [given]))


def _identity(identity: PyTree, given: RowTree, name: str) -> list[np.ndarray]:
    """The leaves of one row."""
    leaves, tree = jax.tree.flatten(identity)
    if tree != given.tree:
        raise ValueError(f"{name}: identity has the tree {tree}, but x has {given.tree}. Give one row's.")
    pairs, what = zip(leaves, given.structs(), strict=True), f"{name}: identity"
    return [np.broadcast_to(exactly(leaf, like.dtype, what), like.shape) for leaf, like in pairs]


def _scan(
    combine: Callable[[Leaves, Leaves], list[jax.Array]],
    lengths: Sequence[int],
    first: Sequence[np.ndarray] | None,
    is_reversed: bool,
    is_exclusive: bool,
    values: Leaves,
) -> list[jax.Array]:
    """Scan a replica's rows, and put before them what all earlier replicas come to."""
    rank = lax.axis_index(AXIS)
    own = jnp.asarray(np.array(lengths, np.int32))[rank]
    rows = [_turned(value, own) if is_reversed else value for value in values]
    is_own = jnp.arange(rows[0].shape[0], dtype=jnp.int32) < own

    def combine_own(a: Leaves, b: Leaves) -> list[jax.Array]:
        """Both, of which the first leaf says which are own rows, where a gradient flows back from these alone."""
        counts = [b[0].reshape(-1, *[1] * (leaf.ndim - 1)) for leaf in b[1:]]
        return [b[0], *combine(*(list(map(constant_unless, counts, each[1:])) for each in (a, b)))]

    inside = lax.associative_scan(combine_own, [is_own, *rows])[1:]
    totals = all_gather([leaf.at[own - 1].get() for leaf in inside])
    order = np.flatnonzero(lengths)[:: -1 if is_reversed else 1]  # the replicas that have rows, as they follow
    place = np.zeros(len(lengths), np.int32)
    place[order] = np.arange(len(order))
    carried = lax.associative_scan(combine, [total[order] for total in totals])
    at = jnp.asarray(place)[rank]
    before = [leaf.at[jnp.maximum(at - 1, 0)].get() for leaf in carried]
    # What does not count is replaced before it is combined by what does follow: a gradient through what a select leaves
    # out may be NaN. So first come the totals of the first two replicas.
    found = safe = [fill_up(leaf, own, leaf[:1]) for leaf in inside]
    if len(order) > 1:
        after = [jnp.where(at == 0, total[order[1]], leaf) for total, leaf in zip(totals, safe, strict=True)]
        spread = [jnp.broadcast_to(a, b.shape) for a, b in zip(before, after, strict=True)]
        found = [jnp.where(at == 0, a, b) for a, b in zip(safe, combine(spread, after), strict=True)]
    if is_exclusive and first is not None:
        start = [jnp.where(at == 0, a, b) for a, b in zip(first, before, strict=True)]
        found = [jnp.concatenate([a[None], leaf[:-1]]) for a, leaf in zip(start, found, strict=True)]
    return [_turned(leaf, own) if is_reversed else leaf for leaf in found]


def _turned(rows: jax.Array, own: jax.Array) -> jax.Array:
    """Its own rows in reverse, before what fills them up."""
    return rows.at[jnp.maximum(own - 1 - jnp.arange(rows.shape[0], dtype=jnp.int32), 0)].get()
