"""Views: the state of shared variables in another group: one device, simulated replicas, or absent devices."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax

from .._base.errors import DivergedError
from .._base.partition import lengths_of
from .._call.traces import View
from .._data.selection import merge_replicas, select_on_replicas
from .._runtime.group import Group
from .._runtime.layout import Layout, shard_of_rank, sharding_of
from .._variables.state import VariableState, deal_out
from .._variables.variable import Shared, bind, computed_state, divergence, group_of, host_leaves


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
        state, storage = bind(variable, home), variable._spec.storage
        if state.rows_per_replica is not None:
            return _deal_out(group, variable, batch_s)
        if not state.is_equal:
            raise DivergedError(divergence(variable))
        if group.size == 1 and not storage.is_sharded:
            return replace(state, leaves=[_first_replica(home, group, leaf, state.layout) for leaf in state.leaves])
        return storage.state_of_copies(group, host_leaves(variable, 0), "stacked")

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
    home, state = group_of(variable), computed_state(variable)
    (rows,) = variable._spec.storage.each_on_host(home, state)
    if batch_s is not None:
        together = merge_replicas(select_on_replicas(batch_s, state.rows_per_replica or (), "batch_s", variable.name))
        rows = [leaf[together.positions(0, together.rows)] for leaf in rows]
    return deal_out(group, rows, lengths_of(len(rows[0]), group.size))


def view_of_absent(group: Group) -> View:
    """View variables by shapes in a group whose devices are absent, with their rows dealt out to its replicas."""

    def view(variable: Shared) -> VariableState:
        state = variable._state
        abstract = state.abstract.dealt_out(group.size)
        return replace(state, abstract=variable._spec.storage.abstract(abstract, group.size))

    return view
