"""Survival: shared variables of an elastic group that loses a process."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .._base.errors import PeerError
from .._runtime.executable import copy_to_replicas
from .._runtime.group import Group
from .._runtime.layout import local_replica_to_host
from .._runtime.renewal import KEEPERS
from .state import VariableState
from .variable import Shared


class _Variables:
    """All shared variables that live."""

    def snapshot(self) -> Callable[[], None]:
        """Return what gives all variables the states that they have now: states never change."""
        states = [(variable, variable._group, variable._state) for variable in _living()]

        def restore() -> None:
            for variable, group, state in states:
                variable._group, variable._state = group, state

        return restore

    def to_host(self) -> Callable[[], None]:
        """Copy the values to host memory. Return what places them on the devices that groups have then."""
        kept = [(v, v._state, _on_host(v._group, v)) for v in _living() if v._group is not None]

        def place() -> None:
            for variable, state, leaves in kept:
                if isinstance(leaves, PeerError):
                    variable._state = replace(state, failure=(variable.name, leaves))
                else:
                    assert variable._group is not None
                    copies = copy_to_replicas(variable._group, leaves, state.layout)
                    variable._state = VariableState(copies, state.abstract, failure=state.failure)

        return place


def _living() -> list[Shared]:
    return [variable for reference in list(Shared._living.values()) if (variable := reference()) is not None]


def _on_host(group: Group, variable: Shared) -> list[Any] | PeerError:
    """Return the stored leaves in host memory, or the error of a value that a lost process alone held a part of."""
    state = variable._state
    what = ""
    if state.rows_per_replica is not None:
        what = "it holds rows, of which each process has its own"
    elif variable._spec.is_cut is not None:
        what = "it lies in shards, of which each process has its own"
    elif not state.is_equal:
        what = f"its replicas differ, since {state.diverged_by} updated it on each"
    if what and group._is_multi_process:
        return PeerError(
            f"{variable.name}: a process of the elastic group is gone with a part of its value: {what}. Start all "
            f"processes again from the last checkpoint, or give it a new value."
        )
    if state.failure is not None:
        return []
    rank = group._local_ranks.start
    return [local_replica_to_host(group, leaf, state.layout, rank, None).copy() for leaf in state.leaves]


KEEPERS.append(_Variables())
