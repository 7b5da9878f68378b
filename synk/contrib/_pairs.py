"""Pairs: all pairs of rows, by a ring on which rows go round the replicas."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import Monoid, Weighted
from .. import group as current_group
from .._base.errors import public_api
from .._base.partition import lengths_of
from .._base.pytree import PyTree
from .._reductions.outputs import is_whole
from .._reductions.reduction import ELEMENTWISE, ElementwiseOp, Reduction, fold, reduction_of, result_dtype
from .._runtime.way import replica_axis
from ._skeletons import Leaves, Results, Skeleton, all_rows, row_tree, run_skeleton, without_state


@public_api
def pairs(
    fn: Callable[[PyTree, PyTree], PyTree],
    x: PyTree,
    y: PyTree = None,
    *,
    reduce: ElementwiseOp | Literal["concat"] = "sum",
    outputs: Results = "concat",
) -> PyTree:
    """Combine `fn(x[i], y[j])` over all j, for each i.

    The rows of `y` go round the replicas, so none of them holds all rows, unless results keep all pairs.

    Args:
      fn: a function of one row of `x` and one of `y`, both without axis 0.
      x: a pytree of arrays that share their rows, as for `synk.contrib.scan`.
      y: another tree, of any number of rows; None for `x` itself.
      reduce: how pairs combine: "sum", "mean", "max", "min", "prod", "any" or "all"; "concat" keeps all on axis 1.
      outputs: "concat" for arrays that lie on every replica; "scatter" for `synk.typing.Data` whose rows stay in place.

    Returns:
      The combined results of `fn`, with the rows of `x` on axis 0.

    Raises:
      TypeError, ValueError: arrays differ in rows or have none, or `reduce` is no such op.

    Example:
      >>> import jax.numpy as jnp, numpy as np, synk.contrib
      >>> synk.contrib.pairs(lambda a, b: jnp.abs(a - b), np.array([1.0, 2.0, 5.0]), reduce="max").tolist()
      [4.0, 3.0, 4.0]
      >>> synk.contrib.pairs(jnp.multiply, np.arange(3), np.arange(1, 3), reduce="concat").tolist()
      [[0, 0], [1, 2], [2, 4]]
    """
    name, group = f"synk.contrib.pairs({getattr(fn, '__name__', 'fn')})", current_group()
    reduction = reduction_of(reduce, "")
    group._refuse_if_absent(name)
    if reduction.name not in (*ELEMENTWISE, "concat"):
        raise ValueError(f"{name}: reduce is {reduce!r}; use one of {', '.join(ELEMENTWISE)}, or concat.")
    x_rows = row_tree(x, "x", name, group)
    y_rows = x_rows if y is None else row_tree(y, "y", name, group)
    alone = without_state(fn, name)
    out = jax.eval_shape(alone, x_rows.tree.unflatten(x_rows.structs()), y_rows.tree.unflatten(y_rows.structs()))
    if any(isinstance(leaf, Monoid | Weighted) for leaf in jax.tree.leaves(out, is_leaf=is_whole)):
        raise ValueError(
            f"{name}: it returns a Monoid or Weighted, but pairs combine by {reduce!r} alone. Return arrays."
        )
    tree = jax.tree.structure(out)

    def of_pair(a: Leaves, b: Leaves) -> list[jax.Array]:
        results = alone(x_rows.tree.unflatten(a), y_rows.tree.unflatten(b))
        return [jnp.asarray(leaf) for leaf in jax.tree.leaves(results)]

    ring = _Ring(of_pair, len(x_rows.leaves), lengths_of(y_rows.rows, group.size), reduction)
    key = pairs, x_rows.tree, y_rows.tree, reduction.name, y_rows.rows
    program = Skeleton(name, fn, key, ring.run, tree.num_leaves, outputs)
    return tree.unflatten(run_skeleton(group, program, [x_rows, y_rows]))


# The number of pairs that are made at a time: a replica needs memory for its rows, visiting rows, and these pairs.
PAIRS_AT_ONCE = 1 << 16


class _Ring(NamedTuple):
    """Pairs of a replica's rows with the rows of all replicas, which visit one after another.

    Attributes:
      fn: the user's function of one row of each tree, on leaves.
      arguments: the number of leaves of the first tree.
      lengths: the number of rows that each replica has of the second tree.
      reduction: how pairs combine.
    """

    fn: Callable[[Leaves, Leaves], list[jax.Array]]
    arguments: int
    lengths: Sequence[int]
    reduction: Reduction

    def run(self, values: Leaves) -> list[jax.Array]:
        x, y, size = list(values[: self.arguments]), list(values[self.arguments :]), len(self.lengths)
        if self.reduction.name == "concat":
            # All pairs, which results hold, usually need more memory than all rows.
            return self._pairs(x, all_rows(y, self.lengths))
        rank, to_previous = lax.axis_index(replica_axis()), [(i, (i - 1) % size) for i in range(size)]
        lengths, max_rows = jnp.asarray(np.array(self.lengths, np.int32)), max(self.lengths)
        count = max(1, min(max_rows, PAIRS_AT_ONCE // x[0].shape[0]))
        blocks = jnp.arange(-(-max_rows // count) * count, dtype=jnp.int32).reshape(-1, count)

        def turn(k: jax.Array, carry: tuple[list[jax.Array], ...]) -> tuple[list[jax.Array], ...]:
            # Rows travel on while their pairs are computed. The last turn sends them home, where nothing reads them.
            before, visitors = carry
            rows = lengths[(rank + k) % size]

            def add(states: list[jax.Array], block: jax.Array) -> tuple[list[jax.Array], None]:
                # The last block may be longer than the rows. Its spare pairs are of a row that is there, and do not
                # count.
                index = jnp.minimum(block, max_rows - 1)
                new = self._states(x, [leaf.at[index].get() for leaf in visitors], block < rows)
                return [self.reduction.accumulate(a, b) for a, b in zip(states, new, strict=True)], None

            return lax.scan(add, before, blocks)[0], lax.ppermute(visitors, replica_axis(), to_previous)

        # Shapes and dtypes of results follow from a block of rows; nothing is computed here.
        few = [leaf[:count] for leaf in y]
        shapes = jax.eval_shape(self._states, x, few, blocks[0] < count)
        # Turns begin with the identity of the op, so the first one needs no program of its own.
        start = [jnp.full(s.shape, self.reduction.identity(s.dtype), s.dtype) for s in shapes]
        # A loop: unrolled turns would make a program that grows with the number of replicas.
        results = lax.fori_loop(0, size, turn, (start, y))[0]
        dtypes = [result_dtype(pair.dtype, self.reduction.name) for pair in jax.eval_shape(self._pairs, x, few)]
        return [self.reduction.finalize(leaf, None).astype(d) for leaf, d in zip(results, dtypes, strict=True)]

    def _pairs(self, x: Leaves, y: Leaves) -> list[jax.Array]:
        """Compute all pairs of some rows: (rows of x, rows of y, ...)."""
        results = jax.vmap(lambda a, b: jax.vmap(partial(self.fn, a))(b), (0, None))(list(x), list(y))
        if self.reduction.name not in ("sum", "prod"):
            return results
        # Sums and products of small integers would wrap.
        return [value.astype(jax.eval_shape(jnp.sum, value).dtype) for value in results]

    def _states(self, x: Leaves, y: Leaves, is_row: jax.Array) -> list[jax.Array]:
        """Combine the pairs with some rows of y, of which `is_row` tells which count."""
        weight, states = 1 / sum(self.lengths), list[jax.Array]()
        for value in self._pairs(x, y):
            state = self.reduction.prepare(value, weight)
            counts = is_row.reshape(1, -1, *[1] * (state.ndim - 2))
            state = jnp.where(counts, state, jnp.asarray(self.reduction.identity(state.dtype), state.dtype))
            states.append(fold(self.reduction.collective, state, axis=1))
        return states
