"""Pieces: of what an optimizer keeps, which leaves may lie in pieces; found by tracing it, and nothing runs."""

from typing import Any

import jax
import jax.numpy as jnp

from .._base.pytree import PyTree
from .._reductions.pieces import piece_of
from .._tracing.elementwise import asks_for_shapes, mixing
from .optimizer import update_of

_LOSS = jax.ShapeDtypeStruct((), jnp.float32)
_SHAPES = "what it does depends on the shapes of parameters"


class Elementwise:
    """An optimizer of optax's that treats each number of its parameters alone.

    Attributes:
      is_cut: which leaves of its state have a number for each of a parameter's.
      update: updates and the new state, from gradients, state, parameters and the loss; of pieces, those of pieces.
    """

    def __init__(self, call: str, optimizer: Any, params: PyTree) -> None:
        """`params` is a tree of shapes. ValueError where pieces of them would not do."""
        self._call, self._init, self._params, self.update = call, optimizer.init, params, update_of(optimizer)
        self._state = jax.eval_shape(optimizer.init, params)
        jax.eval_shape(self.update, params, self._state, params, _LOSS)  # whose errors are the optimizer's own
        self.is_cut = self._numbers_of_params()
        self._check_equations()
        self._checked: set[int] = set()
        for replicas in (2, max([leaf.size for leaf in jax.tree.leaves(params)], default=2)):
            self.check_pieces(max(replicas, 2))

    def _refuse(self, why: str) -> ValueError:
        return ValueError(
            f"{self._call}: shard_optimizer=True gives each replica a piece of every parameter, which takes an "
            f"optimizer that treats each number alone. This one does not: {why}. To clip by the global norm use clip=."
        )

    def _numbers_of_params(self) -> tuple[bool, ...]:
        """Of the smallest pieces that there are the state is smaller where it has a number for each."""
        small = jax.tree.map(lambda shape: like_piece(shape, max(shape.size, 1)), self._params)
        try:
            of_small = jax.eval_shape(self._init, small)
        except Exception as error:  # of whatever it does with shapes
            raise self._refuse(_SHAPES) from error
        if jax.tree.structure(of_small) != jax.tree.structure(self._state):
            raise self._refuse(_SHAPES)
        leaves = jax.tree.leaves(self._state)
        is_cut = tuple(a.shape != b.shape for a, b in zip(leaves, jax.tree.leaves(of_small), strict=True))
        of_params = {leaf.shape for leaf in jax.tree.leaves(self._params)}
        if not {leaf.shape for leaf, one in zip(leaves, is_cut, strict=True) if one} <= of_params:
            raise self._refuse("its state has other shapes than the parameters")
        return is_cut

    def _check_equations(self) -> None:
        params = jax.tree.map(lies_in_pieces, self._params)
        state = jax.tree.structure(self._state).unflatten(self.is_cut)
        arguments = self._params, self._state, self._params, _LOSS
        mixes = mixing(self.update, ((params, state, params, False), (params, state)), *arguments)
        if mixes is not None:
            raise self._refuse(f"it mixes them ({mixes})")

    def check_pieces(self, replicas: int) -> None:
        """ValueError where it does anything else to the pieces of so many replicas than to the whole, as masks by size
        may."""
        if replicas in self._checked:
            return
        params = jax.tree.map(lambda shape: like_piece(shape, replicas), self._params)
        leaves, treedef = jax.tree.flatten(self._state)
        pairs = zip(leaves, self.is_cut, strict=True)
        state = treedef.unflatten([like_piece(leaf, replicas) if one else leaf for leaf, one in pairs])
        try:
            asks = asks_for_shapes(
                self.update, (self._params, self._state, self._params, _LOSS), (params, state, params, _LOSS)
            )
        except Exception as error:  # of whatever it does with shapes
            raise self._refuse(_SHAPES) from error
        if asks:
            raise self._refuse(_SHAPES)
        self._checked.add(replicas)


def lies_in_pieces(shape: jax.ShapeDtypeStruct) -> bool:
    """Does a parameter? One number does not, nor what is empty."""
    return shape.size > 1


def like_piece(shape: jax.ShapeDtypeStruct, replicas: int) -> jax.ShapeDtypeStruct:
    """A piece as the optimizer sees it: with as many axes as the whole, which tell matrices from biases."""
    if not lies_in_pieces(shape):
        return shape
    return jax.ShapeDtypeStruct((*piece_of(shape, replicas).shape, *(1 for _ in shape.shape[1:])), shape.dtype)
