"""Sharded: an optimizer's state in pieces: each replica updates one n-th of the parameters, and all gather them.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020: its first stage.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._base.pytree import PyTree
from .._reductions.collectives import all_sum
from .._reductions.pieces import gather_pieces, own_pieces, piece_of, sum_to_pieces
from .._runtime.group import AXIS
from .._tracing.elementwise import mixing, outline
from .._variables.access import abstract_value, map_value
from .._variables.variable import Shared, shared

Leaves = Sequence[jax.Array]


class ShardedOptimizer:
    """An optimizer of optax's that treats each number alone, and its state in pieces.

    Parameters of one number are whole on every replica, and so is what the optimizer keeps of those, or of none.
    """

    def __init__(self, call: str, optax: Any, optimizer: Any, params: Shared) -> None:
        self.optax, self.optimizer, self.params = optax, optimizer, params
        self.is_cut = [shape.size > 1 for shape in params._spec.shapes]
        self.state = shared(map_value(params, optimizer.init), "opt_state")
        self.state._spec = replace(self.state._spec, is_cut=self._cut_of_state(call))

    def _cut_of_state(self, call: str) -> tuple[bool, ...]:
        """Which leaves of the state have a number for each of a parameter's; ValueError where pieces would not do."""
        is_cut, wrong = self._explored()
        if wrong is not None:
            raise ValueError(
                f"{call}: shard_optimizer=True gives each replica a piece of every parameter, which takes an optimizer "
                f"that treats each number alone. This one does not: {wrong}. To clip by the global norm use clip=."
            )
        return is_cut

    def _explored(self) -> tuple[tuple[bool, ...], str | None]:
        """What is cut of the state, and why the optimizer needs more than pieces, if so; found by tracing it."""
        whole, loss = abstract_value(self.params), jax.ShapeDtypeStruct((), jnp.float32)
        state = jax.eval_shape(self.optimizer.init, whole)
        # The smallest pieces that there are: what asks for shapes, as masks do, shows by the difference.
        small = jax.tree.map(lambda shape: _like_piece(shape, max(shape.size, 1)), whole)
        try:
            of_small = jax.eval_shape(self.optimizer.init, small)
            outlines = [outline(self._update, p, s, p, loss) for p, s in ((whole, state), (small, of_small))]
        except Exception as error:  # of optax's, or of the user's own optimizer
            return (), f"of pieces it raises {type(error).__name__}: {error}"
        trees = jax.tree.structure(state), jax.tree.structure(of_small)
        if trees[0] != trees[1] or outlines[0] != outlines[1]:
            return (), "what it does depends on the shapes of parameters"
        pairs = zip(jax.tree.leaves(state), jax.tree.leaves(of_small), strict=True)
        is_cut = tuple([one.shape != other.shape for one, other in pairs])
        cut_shapes = {leaf.shape for leaf, one in zip(jax.tree.leaves(state), is_cut, strict=True) if one}
        if not cut_shapes <= {shape.shape for shape in self.params._spec.shapes}:
            return (), "its state has other shapes than the parameters"
        params, kept = jax.tree.structure(whole).unflatten(self.is_cut), trees[0].unflatten(is_cut)
        mixes = mixing(self._update, ((params, kept, params, False), (params, kept)), whole, state, whole, loss)
        return is_cut, None if mixes is None else f"it mixes them ({mixes})"

    def _update(self, grads: PyTree, state: PyTree, params: PyTree, loss: jax.Array) -> tuple[PyTree, PyTree]:
        return self.optimizer.update(grads, state, params, value=loss)

    def update(
        self, params: PyTree, state: PyTree, grads: PyTree, loss: jax.Array, clip: float | None, are_parts: bool
    ) -> tuple[PyTree, PyTree]:
        """Parameters, and this replica's pieces of the state, after a step.

        Args:
          params: all of them.
          state: this replica's pieces.
          grads: the combined gradient, or this replica's part of it.
          loss: the combined loss.
          clip: the largest global norm.
          are_parts: whether `grads` are to be added up.
        """
        shapes, spec = self.params._spec.shapes, self.state._spec
        assert spec.is_cut is not None
        leaves, treedef = jax.tree.flatten(params)
        own = self._pieces(jax.tree.leaves(grads), are_parts)
        own = lax.optimization_barrier(own) if are_parts else own  # as before every then
        own = [grad.astype(shape.dtype) for grad, shape in zip(own, shapes, strict=True)]
        own = own if clip is None else self._clipped(own, clip)
        held = self._pieces(leaves, are_parts=False)
        kept = [
            _with_axes(leaf, shape) if one else leaf
            for leaf, shape, one in zip(jax.tree.leaves(state), spec.shapes, spec.is_cut, strict=True)
        ]
        trees = [treedef.unflatten(map(_with_axes, each, shapes)) for each in (own, held)]
        updates, new_state = self._update(trees[0], spec.treedef.unflatten(kept), trees[1], loss)
        new = jax.tree.leaves(self.optax.apply_updates(trees[1], updates))
        flat = [
            leaf.reshape(-1) if one else leaf for leaf, one in zip(jax.tree.leaves(new_state), spec.is_cut, strict=True)
        ]
        return treedef.unflatten(self._gathered(new)), spec.treedef.unflatten(flat)

    def _pieces(self, leaves: Leaves, are_parts: bool) -> list[jax.Array]:
        """This replica's pieces, of parts once they are added up; what is whole is whole."""
        cut = [leaf for leaf, one in zip(leaves, self.is_cut, strict=True) if one]
        whole = [leaf for leaf, one in zip(leaves, self.is_cut, strict=True) if not one]
        return self._merged(*((sum_to_pieces(cut), all_sum(whole)) if are_parts else (own_pieces(cut), whole)))

    def _gathered(self, pieces: Leaves) -> list[jax.Array]:
        cut = [piece.reshape(-1) for piece, one in zip(pieces, self.is_cut, strict=True) if one]
        whole = [piece for piece, one in zip(pieces, self.is_cut, strict=True) if not one]
        shapes = [shape for shape, one in zip(self.params._spec.shapes, self.is_cut, strict=True) if one]
        return self._merged(gather_pieces(cut, shapes), whole)

    def _merged(self, cut: Leaves, whole: Leaves) -> list[jax.Array]:
        rest = iter(cut), iter(whole)
        return [next(rest[not one]) for one in self.is_cut]

    def _clipped(self, grads: Leaves, largest: float) -> list[jax.Array]:
        """Scaled down to a global norm, as `optax.clip_by_global_norm` does."""

        def squares(of_pieces: bool) -> Any:
            which = [grad for grad, one in zip(grads, self.is_cut, strict=True) if one == of_pieces]
            return sum([jnp.sum(jnp.abs(grad) ** 2) for grad in which])

        norm = jnp.sqrt(lax.psum(squares(True), AXIS) + squares(False))
        return [jnp.where(norm < largest, g, (g / norm.astype(g.dtype)) * jnp.asarray(largest, g.dtype)) for g in grads]


def _like_piece(shape: jax.ShapeDtypeStruct, replicas: int) -> jax.ShapeDtypeStruct:
    """A piece as the optimizer sees it: with as many axes as the whole, which tell matrices from biases."""
    if shape.size <= 1:
        return shape
    return jax.ShapeDtypeStruct((*piece_of(shape, replicas).shape, *(1 for _ in shape.shape[1:])), shape.dtype)


def _with_axes(piece: jax.Array, shape: jax.ShapeDtypeStruct) -> jax.Array:
    """The same of an array, which may be whole."""
    return piece if shape.size <= 1 else piece.reshape(-1, *(1 for _ in shape.shape[1:]))
