"""Survival: shared variables of an elastic group that loses a process."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from .._base.errors import PeerError
from .._runtime.executable import copy_to_replicas
from .._runtime.layout import local_replica_to_host, put
from .._runtime.renewal import KEEPERS
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

    def can_move(self) -> bool:
        """Tell whether every process has the values of all variables."""
        return not any(_what_is_apart(variable) for variable in _living())

    def to_host(self) -> Callable[[], None]:
        """Copy the values to host memory. Return what places them on the devices that groups have then."""
        kept = [(variable, variable._state, _on_host(variable)) for variable in _living()]

        def place() -> None:
            for variable, state, leaves in kept:
                group = variable._group
                if isinstance(leaves, PeerError):
                    variable._state = replace(state, failure=(variable.name, leaves))
                elif group is not None and group._is_elastic:
                    variable._state = replace(state, leaves=copy_to_replicas(group, leaves, state.layout))
                elif group is not None:
                    variable._state = replace(state, leaves=[put(group, leaf, state.layout) for leaf in leaves])

        return place


def _living() -> list[Shared]:
    return [variable for reference in list(Shared._living.values()) if (variable := reference()) is not None]


def _what_is_apart(variable: Shared) -> str:
    """Say how the processes of an elastic group have different parts of a value; "" if each has all of it."""
    state, group = variable._state, variable._group
    if group is None or not group._is_elastic or state.failure is not None:
        return ""
    if state.rows_per_replica is not None:
        return "it holds rows, of which each process has its own"
    if variable._spec.is_cut is not None:
        return "it lies in shards, of which each process has its own"
    return "" if state.is_equal else f"its replicas differ, since {state.diverged_by} updated it on each"


def _on_host(variable: Shared) -> list[Any] | PeerError:
    """Return the stored leaves in host memory, or the error of a value that a lost process alone held a part of."""
    state, group = variable._state, variable._group
    if group is None or state.failure is not None:
        return []
    if what := _what_is_apart(variable):
        return PeerError(
            f"{variable.name}: a process of the elastic group is gone with a part of its value: {what}. Start all "
            f"processes again from the last checkpoint."
        )
    if not group._is_elastic:
        return [np.array(leaf) for leaf in state.leaves]
    rank = group._local_ranks.start
    return [local_replica_to_host(group, leaf, state.layout, rank, None).copy() for leaf in state.leaves]


KEEPERS.append(_Variables())
