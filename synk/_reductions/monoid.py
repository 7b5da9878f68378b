"""Monoid: outputs that know how to combine: a state of some rows, an associative merge, and a final answer."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path

from .._base.errors import refuse_use
from .._base.pytree import PyTree, first_change
from .reduction import REDUCTIONS, OutputLeaf, constant_unless
from .tree import fold_by_tree


@jax.tree_util.register_pytree_node_class
class Monoid:
    """An output that combines by the op `"merge"`, which need not be named.

    States of all parts merge in row order, by a fixed tree, so that any associative `merge` gives the serial answer.

    Attributes:
      state: a pytree of arrays, which summarise the part's rows (per replica).
      merge: `merge(a, b)` returns the state of the rows of `a` followed by those of `b`, with the same tree, shapes and
        dtypes.
      finish: `finish(state)` is the answer, a pytree of arrays; None for the state itself.

    Raises:
      ValueError: when the function is traced, where `merge` changes tree, shape or dtype, or `merge` or `finish` use
        more of the function than states.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np, synk
      >>> @synk.function
      ... def product(matrices):  # whose order counts
      ...     return synk.Monoid(jax.lax.associative_scan(jnp.matmul, matrices)[-1], jnp.matmul)
      >>> turn = np.array([[0.0, -1.0], [1.0, 0.0]], np.float32)
      >>> product(np.stack([turn, 2 * turn, turn])).tolist()
      [[0.0, 2.0], [-2.0, 0.0]]
    """

    def __init__(
        self, state: PyTree, merge: Callable[[PyTree, PyTree], PyTree], finish: Callable[[PyTree], PyTree] | None = None
    ) -> None:
        self.state, self.merge, self.finish = state, merge, finish
        self._least_rows, self._has_order = 1, True

    @property
    def value(self) -> PyTree:
        """Finish this state alone, and return the answer."""
        return self.state if self.finish is None else self.finish(self.state)

    def tree_flatten(self) -> tuple[tuple[PyTree], Any]:
        """Flatten for JAX: the state is the child."""
        # The functions are static data: two Monoids of other functions have different trees, so JAX combines none of
        # them by mistake.
        return (self.state,), (self.merge, self.finish, self._least_rows, self._has_order)

    @classmethod
    def tree_unflatten(cls, about: Any, children: tuple[PyTree]) -> "Monoid":
        """Restore for JAX."""
        merge, finish, least_rows, has_order = about
        return statistic(children[0], merge, finish, least_rows, has_order)


refuse_use(
    Monoid,
    lambda self, how: (
        f"a synk.Monoid, as synk.stats makes them, is {how}: its value is `.value`; returned from a function by op "
        f'"merge" it is finished by itself.'
    ),
)


def statistic(
    state: PyTree, merge: Callable[..., PyTree], finish: Any = None, least_rows: int = 1, has_order: bool = False
) -> Monoid:
    """Make a Monoid of which more is known.

    Args:
      state, merge, finish: as for `Monoid`.
      least_rows: a call with fewer rows in all raises before anything runs.
      has_order: whether parts merged in another order could give another answer.
    """
    monoid = Monoid(state, merge, finish)
    monoid._least_rows, monoid._has_order = least_rows, has_order
    return monoid


def concatenate_rows(a: PyTree, b: PyTree) -> PyTree:
    """Merge states that have one entry a row on axis 0."""
    # `Merge` knows this function by identity: such a state is gathered in row order like an output under "concat", and
    # never merged by a tree.
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y]), a, b)


class Merge:
    """A Monoid among the outputs, whose functions work on leaves of its state.

    Attributes:
      leaves: the indexes of the leaves of its state.
      results: the leaves of its answer.
      least_rows, has_order: as in `statistic`.
      is_gathered: whether its answer is made of all rows.
    """

    def __init__(self, monoid: Monoid, first: int, path: str, name: str) -> None:
        # Neither the Monoid nor its state is kept: the state's leaves are tracers.
        self._functions, self._treedef = (monoid.merge, monoid.finish), jax.tree.structure(monoid.state)
        self.leaves = range(first, first + self._treedef.num_leaves)
        self.least_rows, self.has_order = monoid._least_rows, monoid._has_order
        self.is_gathered = monoid.merge is concatenate_rows
        state, where = jax.tree.map(jnp.asarray, monoid.state), f"{name}: output{path}"
        self._shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)]
        answer = _shapes_of(lambda state: Monoid(state, *self._functions).value, (state,), f"{where}: finish")
        self.results = [
            OutputLeaf(REDUCTIONS["merge"], leaf.dtype, path + keystr(sub))
            for sub, leaf in tree_leaves_with_path(answer)
        ]
        if not self.is_gathered:
            change = first_change(state, _shapes_of(monoid.merge, (state, state), f"{where}: merge"), "state")
            if change is not None:
                raise ValueError(
                    f"{where}: merge changes {change[0]} from {change[1]} to {change[2]}. It merges two states into "
                    f"one of the same kind."
                )

    def traced(self) -> list[Any]:
        """Trace `merge` and `finish`."""
        # Users make lambdas anew in each trace, so the functions themselves would make each trace another one; their
        # equations tell.
        finish = jax.make_jaxpr(self.finish)(self._shapes)
        return [finish] if self.is_gathered else [finish, jax.make_jaxpr(self._merge)(self._shapes, self._shapes)]

    def _merge(self, a: Sequence[jax.Array], b: Sequence[jax.Array]) -> list[jax.Array]:
        return jax.tree.leaves(self._functions[0](self._treedef.unflatten(a), self._treedef.unflatten(b)))

    def merge_all(self, stacked: Sequence[jax.Array], present: Any) -> list[jax.Array]:
        """Merge the states of all parts by a balanced tree.

        Args:
          stacked: the leaves of all parts' states, in row order on axis 0.
          present: a mask of the parts that exist, of NumPy or traced; None if all exist.
        """
        # A mask that is known now costs nothing at run time.
        if isinstance(present, np.ndarray):
            stacked, present = [leaf[np.flatnonzero(present)] for leaf in stacked], None
        if present is None:
            return fold_by_tree(stacked, jax.vmap(self._merge))

        # A state may be absent at any place of the tree, so the mask goes through the merges with the states.
        def merge(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> list[jax.Array]:
            return [*self.merge_present(a[:-1], b[:-1], a[-1], b[-1]), a[-1] | b[-1]]

        return fold_by_tree([*stacked, present], jax.vmap(merge))[:-1]

    def merge_present(self, a: Sequence[jax.Array], b: Sequence[jax.Array], has_a: Any, has_b: Any) -> list[jax.Array]:
        """Merge two states of which either may be absent."""
        # Selects and not a branch: under jax.vmap, over entries or simulated replicas, JAX makes a select of a branch
        # anyway.
        first = [jnp.where(has_a, x, y) for x, y in zip(a, b, strict=True)]
        second = [jnp.where(has_b, y, x) for x, y in zip(a, b, strict=True)]
        has_both = has_a & has_b
        # If one state is absent, the other merges with itself, and the result is not used. Constants keep NaN out of
        # the gradient there.
        merged = self._merge(*([constant_unless(has_both, x) for x in states] for states in (first, second)))
        return [jnp.where(has_both, m, x) for m, x in zip(merged, first, strict=True)]

    def finish(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        state = self._treedef.unflatten(map(jnp.asarray, leaves))
        answer = jax.tree.leaves(Monoid(state, *self._functions).value)
        return [jnp.asarray(leaf) for leaf in answer]


def _shapes_of(fn: Callable[..., PyTree], args: tuple[PyTree, ...], where: str) -> PyTree:
    """Return the shapes of the result of `merge` or `finish`. Raise ValueError if it closes over traced values."""
    # These functions run outside `fn`, where its arguments and variables do not exist.
    traced, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    if any(isinstance(const, jax.core.Tracer) for const in traced.consts):
        raise ValueError(
            f"{where} of its Monoid uses an argument, a shared variable, or what was computed of them, but runs where "
            f"parts meet, which have states alone. Keep it in the state, pass it as static, or finish in then."
        )
    return shapes
