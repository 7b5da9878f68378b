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
from .._reductions.pieces import gather_pieces, own_pieces, sum_to_pieces
from .._reductions.reduction import accumulation_dtype
from .._runtime.group import AXIS
from .._variables.access import abstract_value, map_value
from .._variables.variable import Shared, shared
from .pieces import Elementwise, lies_in_pieces

Leaves = Sequence[jax.Array]


class ShardedOptimizer:
    """An optimizer of optax's that treats each number alone, and its state in pieces.

    Parameters of one number are whole on every replica, and so is what the optimizer keeps of those, or of none.

    Attributes:
      state: the shared variable that holds its state.
    """

    def __init__(self, call: str, optax: Any, optimizer: Any, params: Shared) -> None:
        self._optax, self._params = optax, params
        self._is_cut = [*map(lies_in_pieces, params._spec.shapes)]
        self._optimizer = Elementwise(call, optimizer, abstract_value(params))
        self.state = shared(map_value(params, optimizer.init), "opt_state")
        self.state._spec = replace(self.state._spec, is_cut=self._optimizer.is_cut)

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
        self._optimizer.check_pieces(lax.psum(1, AXIS))
        shapes, spec = self._params._spec.shapes, self.state._spec
        leaves, treedef = jax.tree.flatten(params)
        own = self._pieces(jax.tree.leaves(grads), are_parts)
        own = lax.optimization_barrier(own) if are_parts else own  # as before every then
        own = [grad.astype(shape.dtype) for grad, shape in zip(own, shapes, strict=True)]
        own = own if clip is None else self._clipped(own, clip)
        trees = [
            treedef.unflatten(map(_with_axes, each, shapes)) for each in (own, self._pieces(leaves, are_parts=False))
        ]
        is_cut = self._optimizer.is_cut
        pairs = zip(jax.tree.leaves(state), spec.shapes, is_cut, strict=True)
        kept = [_with_axes(leaf, shape) if one else leaf for leaf, shape, one in pairs]
        updates, state = self._optimizer.update(trees[0], spec.treedef.unflatten(kept), trees[1], loss)
        new = jax.tree.leaves(self._optax.apply_updates(trees[1], updates))
        pairs = zip(jax.tree.leaves(state), spec.shapes, is_cut, strict=True)
        kept = [_as_piece(leaf, shape) if one else leaf for leaf, shape, one in pairs]
        return treedef.unflatten(self._gathered(new)), spec.treedef.unflatten(kept)

    def _pieces(self, leaves: Leaves, are_parts: bool) -> list[jax.Array]:
        """This replica's pieces, of parts once they are added up; what is whole is whole."""
        cut, whole = self._by_kind(leaves)
        return self._merged(*((sum_to_pieces(cut), all_sum(whole)) if are_parts else (own_pieces(cut), whole)))

    def _gathered(self, pieces: Leaves) -> list[jax.Array]:
        cut, whole = self._by_kind(pieces)
        shapes, _ = self._by_kind(self._params._spec.shapes)
        return self._merged(gather_pieces([piece.reshape(-1) for piece in cut], shapes), whole)

    def _by_kind(self, leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Those that lie in pieces, and the others."""
        pairs = [*zip(leaves, self._is_cut, strict=True)]
        return [leaf for leaf, one in pairs if one], [leaf for leaf, one in pairs if not one]

    def _merged(self, cut: Leaves, whole: Leaves) -> list[jax.Array]:
        rest = iter(cut), iter(whole)
        return [next(rest[not one]) for one in self._is_cut]

    def _clipped(self, grads: Leaves, largest: float) -> list[jax.Array]:
        """Scaled down to a global norm, as `optax.clip_by_global_norm` does; sums of pieces are not narrowed."""
        squares = [(jnp.abs(g) ** 2).astype(accumulation_dtype((jnp.abs(g)).dtype, "sum")).sum() for g in grads]
        cut, whole = self._by_kind(squares)
        totals = self._merged(all_sum(cut), whole)
        norm = jnp.sqrt(sum(total.astype(jnp.abs(g).dtype) for total, g in zip(totals, grads, strict=True)))
        return [jnp.where(norm < largest, g, (g / norm.astype(g.dtype)) * jnp.asarray(largest, g.dtype)) for g in grads]


def _with_axes(piece: jax.Array, shape: jax.ShapeDtypeStruct) -> jax.Array:
    """A piece, with as many axes as the whole of this shape; what is whole as it is."""
    return piece.reshape(-1, *(1 for _ in shape.shape[1:])) if lies_in_pieces(shape) else piece


def _as_piece(array: jax.Array, shape: jax.ShapeDtypeStruct) -> jax.Array:
    """The reverse; behind the last number of the whole are zeros again, whatever an optimizer makes of those."""
    first = lax.axis_index(AXIS) * array.size
    is_there = first + lax.iota(jnp.int32, array.size) < shape.size
    fits = array.size * lax.psum(1, AXIS) == shape.size
    return array.reshape(-1) if fits else jnp.where(is_there, array.reshape(-1), 0)
