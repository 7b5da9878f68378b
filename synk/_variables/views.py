"""Views: the state of shared variables in another group: one device, all as one, simulated replicas, absent ones."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, TypeAlias

from .._base.errors import DivergedError
from .._base.partition import lengths_of
from .._data.selection import merge_replicas, select_on_replicas
from .._runtime.executable import relayout
from .._runtime.group import Group, GroupAsOne
from .state import VariableState, deal_out, with_layout
from .variable import Shared, bind, computed_state, divergence

# Returns the state of a variable as another group sees it.
View: TypeAlias = Callable[[Shared], VariableState]


def one_device(group: Group) -> Group:
    """Return the group of this process's first device."""
    if group.size == 1:
        return group
    return group._derived((group.devices[group._local_ranks.start],), group.is_simulated)


def view_from(home: Group, group: Group, batch_s: Any = None) -> View:
    """View variables of the group `home` in another group: its first device, or simulated replicas on its only device.

    A variable has the value that all replicas share. Rows of all replicas, or those that `batch_s` picks, are dealt
    out in rank order.
    """

    # One call looks at a variable several times, and each view of it may copy.
    @cache
    def view(variable: Shared) -> VariableState:
        state, storage = bind(variable, home), variable._spec.storage
        if state.rows_per_replica is not None:
            return _deal_out(home, group, variable, batch_s)
        if not state.is_equal:
            raise DivergedError(divergence(variable))
        if isinstance(group, GroupAsOne):
            return _as_one(home, variable, state)
        return storage.in_group(home, computed_state(variable), group)

    return view


def _as_one(home: Group, variable: Shared, state: VariableState) -> VariableState:
    """Return the value that replicas share, where it lies, as the one replica sees it that their devices make."""
    if variable._spec.storage.is_sharded:
        raise ValueError(
            f'{variable.name}: it lies in shards, one on each replica, which engine="jit" does not take. Make '
            f"it whole, without sharded=True (of a step shard_params, shard_optimizer), or leave the engine out."
        )
    if state.layout == "replicated":
        return state
    # All replicas share the value, so the devices have it already: it only takes another layout.
    leaves = relayout(home, state.leaves, state.layout, "replicated")
    return replace(state, leaves=leaves, abstract=with_layout(state.abstract, "replicated"))


def _deal_out(home: Group, group: Group, variable: Shared, batch_s: Any) -> VariableState:
    state = computed_state(variable)
    # By way of the host: another group may have other devices, and parts of other lengths.
    (rows,) = variable._spec.storage.each_on_host(home, state)
    if batch_s is not None:
        together = merge_replicas(select_on_replicas(batch_s, state.rows_per_replica or (), "batch_s", variable.name))
        rows = [leaf[together.positions(0, together.rows)] for leaf in rows]
    return deal_out(group, rows, lengths_of(len(rows[0]), group.size))


def view_of_shapes(group: Group) -> View:
    """View variables by shapes alone, in a group whose devices may be absent, with rows dealt out to its replicas."""

    def view(variable: Shared) -> VariableState:
        state = variable._state
        abstract = state.abstract.dealt_out(group.size)
        if isinstance(group, GroupAsOne) and abstract.rows_per_replica is None:
            abstract = with_layout(abstract, "replicated")
        return replace(state, abstract=variable._spec.storage.abstract(abstract, group))

    return view
