"""Sharded: an optimizer's state in shards. Each replica updates one n-th of the parameters, and all gather them.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020
(https://arxiv.org/abs/1910.02054): its first stage.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._base.pytree import PyTree
from .._reductions.collectives import all_sum
from .._reductions.reduction import accumulation_dtype
from .._reductions.shard_ops import gather_shards, sum_to_shards, take_shards
from .._runtime.group import AXIS
from .._tracing.context import current_trace
from .._variables.variable import Shared, abstract_value, map_value, shared
from .elementwise import ElementwiseOptimizer, is_sharded

Leaves = Sequence[jax.Array]


class ShardedOptimizer:
    """An elementwise optimizer of optax's whose state lies in shards.

    Parameters of one number are whole on every replica, and so are the leaves of the state that belong to them.

    Attributes:
      state: the shared variable that holds the optimizer's state.
    """

    def __init__(self, call: str, optax: Any, optimizer: Any, params: Shared) -> None:
        self._optax, self._shapes = optax, params._spec.shapes
        self._is_cut = [*map(is_sharded, self._shapes)]
        self._optimizer = ElementwiseOptimizer(call, optimizer, abstract_value(params))
        self.state = shared(map_value(params, optimizer.init), "opt_state")
        self.state._spec = replace(self.state._spec, is_cut=self._optimizer.is_cut)

    def update(self, params: PyTree, grads: PyTree, loss: jax.Array, clip: float | None, unreduced: bool) -> PyTree:
        """Update this replica's shard of the state, inside `then`; return the new parameters."""
        self._optimizer.check_shards(lax.psum(1, AXIS))
        context = current_trace()
        assert context is not None
        leaves, treedef = jax.tree.flatten(params)
        grad_shards = self._summed(jax.tree.leaves(grads)) if unreduced else self._taken(jax.tree.leaves(grads))
        grad_shards = [grad.astype(shape.dtype) for grad, shape in zip(grad_shards, self._shapes, strict=True)]
        grad_shards = grad_shards if clip is None else self._clipped(grad_shards, clip)
        own_grads, own_params = [
            treedef.unflatten(map(_with_axes, shards, self._shapes)) for shards in (grad_shards, self._taken(leaves))
        ]
        state = self._map_state(_with_axes, context.read(self.state))
        updates, state = self._optimizer.update(own_grads, state, own_params, loss)
        context.write(self.state, self._map_state(_as_shard, state), None)
        new = jax.tree.leaves(self._optax.apply_updates(own_params, updates))
        return treedef.unflatten(self._gathered(new))

    def _map_state(self, fn: Any, state: PyTree) -> PyTree:
        """Apply a function of a shard and its whole's shape to the leaves that lie in shards."""
        spec = self.state._spec
        pairs = zip(jax.tree.leaves(state), spec.shapes, self._optimizer.is_cut, strict=True)
        return spec.treedef.unflatten([fn(leaf, shape) if is_cut else leaf for leaf, shape, is_cut in pairs])

    def _taken(self, leaves: Leaves) -> list[jax.Array]:
        """Take this replica's shards; parameters of one number are whole."""
        cut, whole = self._by_kind(leaves)
        return self._merged(take_shards(cut), whole)

    def _summed(self, leaves: Leaves) -> list[jax.Array]:
        """Add up unreduced leaves, each replica its shards."""
        cut, whole = self._by_kind(leaves)
        # Without a barrier XLA makes one computation of a sum and its use, and all sums wait for each other.
        return lax.optimization_barrier(self._merged(sum_to_shards(cut), all_sum(whole)))

    def _gathered(self, leaves: Leaves) -> list[jax.Array]:
        cut, whole = self._by_kind(leaves)
        shapes, _ = self._by_kind(self._shapes)
        return self._merged(gather_shards([shard.reshape(-1) for shard in cut], shapes), whole)

    def _by_kind(self, leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return the leaves that lie in shards, and the others."""
        pairs = [*zip(leaves, self._is_cut, strict=True)]
        return [leaf for leaf, is_cut in pairs if is_cut], [leaf for leaf, is_cut in pairs if not is_cut]

    def _merged(self, cut: Leaves, whole: Leaves) -> list[jax.Array]:
        """Undo `_by_kind`."""
        rest = iter(cut), iter(whole)
        return [next(rest[not is_cut]) for is_cut in self._is_cut]

    def _clipped(self, grads: Leaves, largest: float) -> list[jax.Array]:
        """Scale gradients down to a global norm, as `optax.clip_by_global_norm` does."""
        # Squares are added up in the accumulation dtype over all replicas: the sum of a shard is not narrowed.
        squares = [(jnp.abs(g) ** 2).astype(accumulation_dtype((jnp.abs(g)).dtype, "sum")).sum() for g in grads]
        cut, whole = self._by_kind(squares)
        totals = self._merged(all_sum(cut), whole)
        norm = jnp.sqrt(sum(total.astype(jnp.abs(g).dtype) for total, g in zip(totals, grads, strict=True)))
        return [jnp.where(norm < largest, g, (g / norm.astype(g.dtype)) * jnp.asarray(largest, g.dtype)) for g in grads]


def _with_axes(shard: jax.Array, shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Give a shard as many axes as the whole has; leave single numbers as they are."""
    return shard.reshape(-1, *(1 for _ in shape.shape[1:])) if is_sharded(shape) else shard


def _as_shard(array: jax.Array, shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Undo `_with_axes`, and zero the numbers behind the whole's last one, whatever an optimizer makes of them."""
    first = lax.axis_index(AXIS) * array.size
    is_there = first + lax.iota(jnp.int32, array.size) < shape.size
    fits = array.size * lax.psum(1, AXIS) == shape.size
    return array.reshape(-1) if fits else jnp.where(is_there, array.reshape(-1), 0)
