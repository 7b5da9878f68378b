"""Scan: prefix combinations of rows that lie on all replicas."""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import group as current_group
from .._base.errors import public_api
from .._base.partition import lengths_of
from .._base.pytree import PyTree, exactly, first_change
from .._call.parts import fill_up
from .._reductions.collectives import all_gather
from .._reductions.reduction import constant_unless
from .._runtime.way import replica_axis
from ._skeletons import Leaves, Results, RowTree, Skeleton, row_tree, run_skeleton, without_state


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

    Each replica scans its rows, and gets one total from each other replica.

    Args:
      op: associative, and need not commute: `op(a, b)` combines each row of `a` with a later row of `b`; both are trees
        like `x`, with any number of rows.
      x: a pytree of arrays that share their rows, axis 0. `synk.data` with `place="scatter"`, and shared variables that
        hold rows, are read on the replicas where their rows lie.
      identity: a tree of one row like `x` that changes nothing under `op`; needed with `exclusive` only.
      reverse: whether to go from the last row to the first.
      exclusive: whether to leave out a row's own value.
      reduce: "concat" for arrays that lie on every replica, "scatter" for `synk.typing.Data` whose rows stay in place.

    Returns:
      A tree like `x`.

    Raises:
      TypeError, ValueError: arrays differ in rows or have none, `op` changes tree, shapes or dtypes, or `exclusive` has
        no identity.

    Example:
      >>> import jax.numpy as jnp, numpy as np, synk.contrib
      >>> synk.contrib.scan(jnp.add, np.arange(1, 6)).tolist()
      [1, 3, 6, 10, 15]
      >>> def then(f, g):  # of affine maps: f, then g
      ...     return g[0] * f[0], g[0] * f[1] + g[1]
      >>> synk.contrib.scan(then, (np.full(4, 2.0), np.ones(4)))[1].tolist()  # y = 2 y + 1, from 0 on
      [1.0, 3.0, 7.0, 15.0]
    """
    name, group = f"synk.contrib.scan({getattr(op, '__name__', 'op')})", current_group()
    group._refuse_if_absent(name)
    rows, op_alone = row_tree(x, "x", name, group), without_state(op, name)
    first = None if identity is None else _identity(identity, rows, name)
    if exclusive and first is None:
        raise ValueError(f"{name}: exclusive leaves the first row with nothing but the identity; give identity=...")
    # Two rows, since an op may look right for one row by broadcasting.
    like = rows.tree.unflatten(rows.structs(2))
    change = first_change(like, jax.eval_shape(op_alone, like, like), "x")
    if change is not None:
        raise ValueError(
            f"{name}: op changes {change[0]} from {change[1]} to {change[2]}. It combines rows with as many rows, of "
            f"the same tree, shapes and dtypes."
        )

    def combine(a: Leaves, b: Leaves) -> list[jax.Array]:
        return jax.tree.leaves(op_alone(rows.tree.unflatten(a), rows.tree.unflatten(b)))

    body = partial(_scan, combine, lengths_of(rows.rows, group.size), reverse, first if exclusive else None)
    constants = [(leaf.dtype.str, leaf.shape, leaf.tobytes()) for leaf in first or ()]
    key = scan, rows.tree, tuple(constants), reverse, exclusive
    return rows.tree.unflatten(run_skeleton(group, Skeleton(name, op, key, body, len(rows.leaves), reduce), [rows]))


def _identity(identity: PyTree, rows: RowTree, name: str) -> list[np.ndarray]:
    leaves, tree = jax.tree.flatten(identity)
    if tree != rows.tree:
        raise ValueError(f"{name}: identity has the tree {tree}, but x has {rows.tree}. Give one row's.")
    pairs, what = zip(leaves, rows.structs(), strict=True), f"{name}: identity"
    return [np.broadcast_to(exactly(leaf, like.dtype, what), like.shape) for leaf, like in pairs]


def _scan(
    combine: Callable[[Leaves, Leaves], list[jax.Array]],
    lengths: Sequence[int],
    is_reversed: bool,
    first: Sequence[np.ndarray] | None,
    values: Leaves,
) -> list[jax.Array]:
    """Scan a replica's rows, and put the total of all earlier replicas before them."""
    # `first` is the result of the first row if a row's own value is left out; else None.
    rank = lax.axis_index(replica_axis())
    count = jnp.asarray(np.array(lengths, np.int32))[rank]
    # A scan from the last row is a scan of the reversed rows. The replicas are taken in reverse below.
    rows = [_reversed(value, count) if is_reversed else value for value in values]
    is_row = jnp.arange(rows[0].shape[0], dtype=jnp.int32) < count

    def combine_rows(a: Leaves, b: Leaves) -> list[jax.Array]:
        """Combine leaves behind a first one that tells which rows count; gradients flow back from these alone."""
        counts = [b[0].reshape(-1, *[1] * (leaf.ndim - 1)) for leaf in b[1:]]
        return [b[0], *combine(*(list(map(constant_unless, counts, leaves[1:])) for leaves in (a, b)))]

    inside = lax.associative_scan(combine_rows, [is_row, *rows])[1:]
    # One total of each replica is all that travels.
    totals = all_gather([leaf.at[count - 1].get() for leaf in inside])
    # The replicas that have rows, in the order of the scan, and the place of each replica in it.
    order = np.flatnonzero(lengths)[:: -1 if is_reversed else 1]
    places = np.zeros(len(lengths), np.int32)
    places[order] = np.arange(len(order))
    place = jnp.asarray(places)[rank]
    carried = lax.associative_scan(combine, [total[order] for total in totals])
    before = [leaf.at[jnp.maximum(place - 1, 0)].get() for leaf in carried]
    # A gradient through what a select leaves out may be NaN, so numbers that do not count are replaced before they are
    # combined: on the first replica by the total of the second one, elsewhere by the first row.
    results = inside = [fill_up(leaf, count, leaf[:1]) for leaf in inside]
    if len(order) > 1:
        after = [jnp.where(place == 0, total[order[1]], leaf) for total, leaf in zip(totals, inside, strict=True)]
        spread = [jnp.broadcast_to(a, b.shape) for a, b in zip(before, after, strict=True)]
        results = [jnp.where(place == 0, a, b) for a, b in zip(inside, combine(spread, after), strict=True)]
    if first is not None:
        start = [jnp.where(place == 0, a, b) for a, b in zip(first, before, strict=True)]
        results = [jnp.concatenate([a[None], leaf[:-1]]) for a, leaf in zip(start, results, strict=True)]
    return [_reversed(leaf, count) if is_reversed else leaf for leaf in results]


def _reversed(rows: jax.Array, count: jax.Array) -> jax.Array:
    """Reverse the first `count` rows; the rows behind them are anything."""
    return rows.at[jnp.maximum(count - 1 - jnp.arange(rows.shape[0], dtype=jnp.int32), 0)].get()
