"""Monoid: what a part knows of its rows, how two of these merge, and what is made of the whole."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from .._base.pytree import PyTree, first_change
from .._base.refusals import refuse_use
from .reduction import constant_unless


@jax.tree_util.register_pytree_node_class
class Monoid:
    """A part's state, returned by a function as an output whose op is `"merge"` (or unnamed): states of all parts merge
    in row order, by a fixed tree, so that any associative `merge` gives the serial answer.

    Attributes:
      state: a pytree of arrays, what this part knows of its rows (per replica).
      merge: `merge(a, b)` is the state of the rows of both, those of `a` before those of `b`; of the same tree, shapes
        and dtypes.
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
        self,
        state: PyTree,
        merge: Callable[[PyTree, PyTree], PyTree],
        finish: Callable[[PyTree], PyTree] | None = None,
    ) -> None:
        self.state, self.merge, self.finish = state, merge, finish
        self._about = MonoidSpec()

    @property
    def value(self) -> PyTree:
        """The answer for this state alone."""
        return self.state if self.finish is None else self.finish(self.state)

    def tree_flatten(self) -> tuple[tuple[PyTree], Any]:
        """For JAX: the state is a pytree's child."""
        return (self.state,), (self.merge, self.finish, self._about)

    @classmethod
    def tree_unflatten(cls, about: Any, children: tuple[PyTree]) -> "Monoid":
        """For JAX."""
        merge, finish, its = about
        return known(cls(children[0], merge, finish), its)


refuse_use(
    Monoid,
    lambda self, how: (
        f"a synk.Monoid, as synk.stats makes them, is {how}: its value is `.value`; returned from a function by op "
        f'"merge" it is finished by itself.'
    ),
)


class MonoidSpec(NamedTuple):
    """What is known of a Monoid beside its state and functions."""

    least_rows: int = 1  # a call that has fewer in all raises before anything runs
    has_order: bool = True  # whether merging parts in another order could give another answer


def known(monoid: Monoid, about: MonoidSpec) -> Monoid:
    """The same, of which so much is known."""
    monoid._about = about
    return monoid


class Gathered(Monoid):
    """A part's rows, all of which the answer needs: one entry a row on axis 0 of each array, gathered in row order."""

    def __init__(self, rows: PyTree, finish: Callable[[PyTree], PyTree]) -> None:
        super().__init__(rows, _concatenate, finish)

    @classmethod
    def tree_unflatten(cls, about: Any, children: tuple[PyTree]) -> "Gathered":
        """For JAX."""
        return cls(children[0], about[1])


jax.tree_util.register_pytree_node_class(Gathered)


def _concatenate(a: PyTree, b: PyTree) -> PyTree:
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y]), a, b)


class Merge:
    """How the leaves of a Monoid's state merge, and what is made of those of the whole."""

    def __init__(self, monoid: Monoid, where: str) -> None:
        self.functions, self.treedef = (monoid.merge, monoid.finish), jax.tree.structure(monoid.state)
        self.least_rows, self.has_order = monoid._about
        state = jax.tree.map(jnp.asarray, monoid.state)
        self.answer = _shapes_of(lambda state: Monoid(state, *self.functions).value, (state,), f"{where}: finish")
        if not isinstance(monoid, Gathered):
            change = first_change(state, _shapes_of(monoid.merge, (state, state), f"{where}: merge"), "state")
            if change is not None:
                raise ValueError(
                    f"{where}: merge changes {change[0]} from {change[1]} to {change[2]}. It merges two states into "
                    f"one of the same kind."
                )

    def merge(self, a: Sequence[jax.Array], b: Sequence[jax.Array]) -> list[jax.Array]:
        """The leaves of both."""
        return jax.tree.leaves(self.functions[0](self.treedef.unflatten(a), self.treedef.unflatten(b)))

    def merge_all(self, stacked: Sequence[jax.Array], present: Any) -> list[jax.Array]:
        """The leaves of all parts, stacked in row order, by a balanced tree over their places; `present` says which
        parts there are, None for all of them."""
        count = stacked[0].shape[0] if stacked else 1
        if isinstance(present, np.ndarray):
            stacked, count, present = [leaf[np.flatnonzero(present)] for leaf in stacked], int(present.sum()), None
        while count > 1:
            pairs = count // 2
            one, two, rest = ([leaf[cut] for leaf in stacked] for cut in _pairs_and_rest(pairs))
            if present is None:
                merged, has = jax.vmap(self.merge)(one, two), None
            else:
                has_one, has_two, has_rest = (present[cut] for cut in _pairs_and_rest(pairs))
                merged = jax.vmap(self.merge_present)(one, two, has_one, has_two)
                has = jnp.concatenate([has_one | has_two, has_rest])
            stacked = [jnp.concatenate(both) for both in zip(merged, rest, strict=True)]
            count, present = count - pairs, has
        return [leaf[0] for leaf in stacked]

    def merge_present(self, a: Sequence[jax.Array], b: Sequence[jax.Array], has_a: Any, has_b: Any) -> list[jax.Array]:
        """The leaves of both, or of the one that is there."""
        first = [jnp.where(has_a, x, y) for x, y in zip(a, b, strict=True)]
        second = [jnp.where(has_b, y, x) for x, y in zip(a, b, strict=True)]
        has_both = has_a & has_b
        # Without the other a state merges with itself, which is left out: constants there, so that no gradient is NaN.
        merged = self.merge(*([constant_unless(has_both, x) for x in states] for states in (first, second)))
        return [jnp.where(has_both, m, x) for m, x in zip(merged, first, strict=True)]

    def finish(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """The leaves of the answer."""
        answer = jax.tree.leaves(Monoid(self.treedef.unflatten(leaves), *self.functions).value)
        return [jnp.asarray(leaf) for leaf in answer]


def _pairs_and_rest(pairs: int) -> list[slice]:
    """The first of each pair, the second, and what has none."""
    return [slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2), slice(2 * pairs, None)]


def _shapes_of(fn: Callable[..., PyTree], args: tuple[PyTree, ...], where: str) -> PyTree:
    """What a Monoid's function gives; it runs where parts meet, so all that it needs is in the states."""
    traced, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    if any(isinstance(const, jax.core.Tracer) for const in traced.consts):
        raise ValueError(
            f"{where} of its Monoid uses an argument, a shared variable, or what was computed of them, but runs where "
            f"parts meet, which have states alone. Keep it in the state, pass it as static, or finish in then."
        )
    return shapes
