"""Sharded: an optimizer's state in shards. Each replica updates one n-th of the parameters, and all gather them.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020
(https://arxiv.org/abs/1910.02054): its first stage.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._base.pytree import PyTree
from .._reductions.collectives import all_sum
from .._reductions.reduction import accumulation_dtype
from .._reductions.shard_ops import gather_shards, joined, own_shards, parted, sum_to_shards
from .._runtime.axis import replica_axis
from .._tracing.context import current_trace
from .._variables.storage import Shards, storage_of
from .._variables.variable import Shared, abstract_value, map_value
from .elementwise import is_sharded, sharded_state
from .optimizer import Update

Leaves = Sequence[jax.Array]


class ShardedOptimizer:
    """An elementwise optimizer of optax's whose state lies in shards.

    Parameters of one number are whole on every replica, and so are the leaves of the state that belong to them.

    Attributes:
      state: the shared variable that holds the optimizer's state.
    """

    def __init__(self, optimizer: Any, update: Update, params: Shared) -> None:
        self._shapes, self._in_shards = params._spec.shapes, [*map(is_sharded, params._spec.shapes)]
        self._update = update
        # Which leaves of the state lie in shards, for so many replicas; raises if the optimizer mixes numbers.
        self._sharded_state = partial(sharded_state, optimizer.init, update, abstract_value(params))
        self.state = Shared(map_value(params, optimizer.init), "opt_state", packs=False)
        self._storage: Shards = storage_of(Shards, self.state._spec.shapes, self._sharded_state(2))
        self.state._spec = replace(self.state._spec, storage=self._storage)

    def update(self, params: PyTree, grads: PyTree, loss: jax.Array, clip: float | None, unreduced: bool) -> PyTree:
        """Update this replica's shard of the state, inside `then`; return the new parameters."""
        self._sharded_state(lax.psum(1, replica_axis()))
        context = current_trace()
        assert context is not None
        leaves, treedef = jax.tree.flatten(params)
        if unreduced:
            grad_shards = self._apply(jax.tree.leaves(grads), sum_to_shards, all_sum)
            if lax.psum(1, replica_axis()) > 1:
                # Without a barrier XLA makes one computation of a sum and its use, and all sums wait for each other.
                grad_shards = lax.optimization_barrier(grad_shards)
        else:
            grad_shards = self._apply(jax.tree.leaves(grads), own_shards)
        grad_shards = [grad.astype(shape.dtype) for grad, shape in zip(grad_shards, self._shapes, strict=True)]
        grad_shards = grad_shards if clip is None else self._clipped(grad_shards, clip)
        own_grads, own_params = [
            treedef.unflatten(map(_with_axes, shards, self._shapes))
            for shards in (grad_shards, self._apply(leaves, own_shards))
        ]
        state = self._map_state(_with_axes, context.read(self.state))
        new, state, _ = self._update(own_grads, state, own_params, loss)
        context.write(self.state, self._map_state(_as_shard, state), None)
        sharded_shapes = [*filter(is_sharded, self._shapes)]
        return treedef.unflatten(self._apply(jax.tree.leaves(new), partial(gather_shards, shapes=sharded_shapes)))

    def _map_state(self, fn: Any, state: PyTree) -> PyTree:
        """Replace each sharded leaf of the optimizer's state by `fn(leaf, shape)`, given the unsharded shape."""
        leaves, treedef = jax.tree.flatten(state)
        rows = zip(leaves, self._storage.shapes, self._storage.sharded, strict=True)
        return treedef.unflatten([fn(leaf, shape) if in_shards else leaf for leaf, shape, in_shards in rows])

    def _apply(self, leaves: Leaves, on_sharded: Any, on_whole: Any = list) -> list[jax.Array]:
        """Apply one function to the list of leaves that lie in shards, and another to the list of the other leaves."""
        sharded, whole = parted(leaves, self._in_shards)
        return joined(on_sharded(sharded), on_whole(whole), self._in_shards)

    def _clipped(self, grads: Leaves, largest: float) -> list[jax.Array]:
        """Scale gradients down to a global norm, as `optax.clip_by_global_norm` does."""
        # Squares are added up in the accumulation dtype over all replicas: the sum of a shard is not narrowed.
        squares = [(jnp.abs(g) ** 2).astype(accumulation_dtype((jnp.abs(g)).dtype, "sum")).sum() for g in grads]
        totals = zip(self._apply(squares, all_sum), grads, strict=True)
        norm = jnp.sqrt(sum(total.astype(jnp.abs(g).dtype) for total, g in totals))
        return [jnp.where(norm < largest, g, (g / norm.astype(g.dtype)) * jnp.asarray(largest, g.dtype)) for g in grads]


def _with_axes(shard: jax.Array, shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Give a shard as many axes as the whole has; leave single numbers as they are."""
    return shard.reshape(-1, *(1 for _ in shape.shape[1:])) if is_sharded(shape) else shard


def _as_shard(array: jax.Array, shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Undo `_with_axes`, and zero the numbers behind the whole's last one, whatever an optimizer makes of them."""
    place = lax.axis_index(replica_axis()) * array.size + lax.iota(jnp.int32, array.size)
    return jnp.where(place < shape.size, array.reshape(-1), 0)
