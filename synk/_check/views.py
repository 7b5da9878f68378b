"""Views: the state of shared variables in another group: one device, simulated replicas, or absent devices."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np

from .._base.errors import DivergedError
from .._base.partition import lengths_of
from .._call.traces import View
from .._data.selection import merge_replicas, select_on_replicas
from .._runtime.executable import copy_to_replicas, replica_to_host
from .._runtime.group import Group
from .._runtime.layout import Layout, shard_of_rank, sharding_of, stack_parts
from .._variables.shards import abstract_shards, stored_shards, whole_on_host
from .._variables.state import VariableState
from .._variables.variable import Shared, bind, divergence, host_leaves, stacked_leaves, state_of_leaves


def one_device(group: Group) -> Group:
    """Return the group of this process's first device."""
    if group.size == 1:
        return group
    return group._derived((group.devices[group._local_ranks.start],), group.is_simulated)


def view_from(home: Group, group: Group, batch_s: Any = None) -> View:
    """View variables of the group `home` in another group: its first device, or simulated replicas of its only one.

    A variable has the value that all replicas share. Rows of all replicas, or those that `batch_s` picks, are dealt
    out in rank order.
    """

    # One call looks at a variable several times, and each view of it may copy.
    @cache
    def view(variable: Shared) -> VariableState:
        state, spec = bind(variable, home), variable._spec
        if state.rows_per_replica is not None:
            return _deal_out(group, variable, batch_s)
        if spec.is_cut is not None:
            leaves = stored_shards(spec, group, host_leaves(variable, 0))
            return replace(state, leaves=leaves, abstract=abstract_shards(spec, group.size))
        if not state.is_equal:
            raise DivergedError(divergence(variable))
        if group.size == 1:
            return replace(state, leaves=[_first_replica(home, group, leaf, state.layout) for leaf in state.leaves])
        leaves = copy_to_replicas(group, [leaf[0] for leaf in stacked_leaves(variable)], "stacked")
        return replace(state, leaves=leaves, abstract=replace(state.abstract, layout="stacked"))

    return view


def _first_replica(home: Group, one: Group, leaf: jax.Array, layout: Layout) -> jax.Array:
    """Return this process's first part of a leaf as an array of the group `one`, in the same memory."""
    shard = shard_of_rank(home, leaf, home._local_ranks.start)
    # Replicas of a simulated group share one device, where axis 0 of a stacked leaf counts them.
    if home.is_simulated and layout == "stacked":
        shard = shard[:1]
    return jax.device_put(shard, sharding_of(one, layout))


def _deal_out(group: Group, variable: Shared, batch_s: Any) -> VariableState:
    """Deal out the rows that a variable holds, or those that `batch_s` picks, to the replicas of another group."""
    lengths = variable._state.rows_per_replica or ()
    by_rank = [host_leaves(variable, rank) for rank in range(len(lengths))]
    rows = [np.concatenate(leaves) for leaves in zip(*by_rank, strict=True)]
    if batch_s is not None:
        together = merge_replicas(select_on_replicas(batch_s, lengths, "batch_s", variable.name))
        rows = [leaf[together.positions(0, together.rows)] for leaf in rows]
    lengths = lengths_of(len(rows[0]), group.size)
    cuts = np.cumsum(lengths)[:-1]
    stacked = [stack_parts(group, np.split(leaf, cuts), max(lengths)) for leaf in rows]
    return state_of_leaves(stacked, "stacked", lengths)


def stored_on_host(variable: Shared, state: VariableState, group: Group) -> list[list[np.ndarray]]:
    """Return a variable's stored leaves on each replica; only once if the replicas share them."""
    if variable._spec.is_cut is not None:
        return [[*whole_on_host(variable._spec, group, state.leaves)]]
    held = state.rows_per_replica or [None] * group.size
    ranks = range(group.size if state.layout == "stacked" else 1)
    by_rank = [[replica_to_host(group, leaf, state.layout, r, held[r]) for leaf in state.leaves] for r in ranks]
    if state.rows_per_replica is None:
        return by_rank
    return [[np.concatenate(leaves) for leaves in zip(*by_rank, strict=True)]]


def view_of_absent(group: Group) -> View:
    """View variables by shapes in a group whose devices are absent, with their rows dealt out to its replicas."""

    def view(variable: Shared) -> VariableState:
        state = variable._state
        if variable._spec.is_cut is not None:
            return replace(state, abstract=abstract_shards(variable._spec, group.size))
        if state.rows_per_replica is None:
            return state
        lengths = lengths_of(sum(state.rows_per_replica), group.size)
        shapes = tuple(jax.ShapeDtypeStruct((max(lengths), *s.shape[1:]), s.dtype) for s in state.abstract.shapes)
        return replace(state, abstract=replace(state.abstract, shapes=shapes, rows_per_replica=lengths))

    return view
