"""Views: the state of shared variables in another group: one device, all as one, simulated replicas, absent ones."""

from dataclasses import replace
from typing import Any

import jax

from .._base.errors import DivergedError
from .._base.partition import lengths_of
from .._data.selection import merge_replicas, select_on_replicas
from .._runtime.executable import relayout
from .._runtime.group import Group
from .state import AbstractState, VariableState, deal_out, with_layout
from .variable import Shared, bind, computed_state, divergence


class View:
    """The states of shared variables as a group sees them in which they do not live.

    Attributes:
      copies: whether a look at a variable may copy it.
    """

    copies = False

    def __call__(self, variable: Shared) -> VariableState:
        raise NotImplementedError

    def abstract(self, variable: Shared) -> AbstractState:
        """Return shapes, layout and rows of a variable, outside any trace under way."""
        # A copy would become an equation of a trace.
        with jax.ensure_compile_time_eval():
            return self(variable).abstract


def one_device(group: Group) -> Group:
    """Return the group of this process's first device."""
    if group.size == 1:
        return group
    return group._derived((group.devices[group._local_ranks.start],), group.is_simulated)


def view_from(home: Group, group: Group, batch_s: Any = None) -> View:
    """View variables of the group `home` in another group: its first device, simulated replicas on its only device, or
    one replica of all its devices.

    A variable has the value that all replicas share. Rows of all replicas, or those that `batch_s` picks, are dealt
    out in rank order.
    """
    return (_InPlace if group._way.is_one else _Copied)(home, group, batch_s)


class _Copied(View):
    """Variables as they are copied to another group."""

    copies = True

    def __init__(self, home: Group, group: Group, batch_s: Any) -> None:
        self._home, self._group, self._batch_s = home, group, batch_s
        # One call looks at a variable several times, and each look may copy.
        self._seen: dict[Shared, VariableState] = {}

    def __call__(self, variable: Shared) -> VariableState:
        if variable not in self._seen:
            self._seen[variable] = self._look(variable)
        return self._seen[variable]

    def _look(self, variable: Shared) -> VariableState:
        state = bind(variable, self._home)
        if state.rows_per_replica is not None:
            return _deal_out(self._home, self._group, variable, self._batch_s)
        if not state.is_equal:
            raise DivergedError(divergence(variable))
        return self._of_value(variable, state)

    def _of_value(self, variable: Shared, state: VariableState) -> VariableState:
        return variable._spec.storage.in_group(self._home, computed_state(variable), self._group)


class _InPlace(_Copied):
    """Variables where they lie, as the one replica sees them that all devices of their group make."""

    copies = False

    def abstract(self, variable: Shared) -> AbstractState:
        return ShapesAlone(self._group)(variable).abstract

    def _of_value(self, variable: Shared, state: VariableState) -> VariableState:
        if variable._spec.storage.is_sharded:
            raise ValueError(
                f'{variable.name}: it lies in shards, one on each replica, which engine="jit" does not take. Make '
                f"it whole, without sharded=True (of a step shard_params, shard_optimizer), or leave the engine out."
            )
        if state.layout == "replicated":
            return state
        # All replicas share the value, so the devices have it already: it only takes another layout.
        leaves = relayout(self._home, state.leaves, state.layout, "replicated")
        return replace(state, leaves=leaves, abstract=with_layout(state.abstract, "replicated"))


def _deal_out(home: Group, group: Group, variable: Shared, batch_s: Any) -> VariableState:
    state = computed_state(variable)
    # By way of the host: another group may have other devices, and parts of other lengths.
    (rows,) = variable._spec.storage.each_on_host(home, state)
    if batch_s is not None:
        together = merge_replicas(select_on_replicas(batch_s, state.rows_per_replica or (), "batch_s", variable.name))
        rows = [leaf[together.positions(0, together.rows)] for leaf in rows]
    return deal_out(group, rows, lengths_of(len(rows[0]), group.size))


class ShapesAlone(View):
    """Variables by shapes alone, in a group whose devices may be absent, with rows dealt out to its replicas."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def __call__(self, variable: Shared) -> VariableState:
        group, state = self._group, variable._state
        abstract = state.abstract.dealt_out(group.size)
        if group._way.is_one and abstract.rows_per_replica is None:
            abstract = with_layout(abstract, "replicated")
        return replace(state, abstract=variable._spec.storage.abstract(abstract, group))
