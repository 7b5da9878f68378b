"""Access: what is done with shared variables: bind, read, commit, roll back. Callers hold the lock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from .._base.errors import DivergedError, PeerError, SharedLostError, SynkError
from .._base.jax_context import is_traced
from .._base.pytree import PyTree
from .._runtime.dispatch import drain, uninterrupted
from .._runtime.executable import broadcast_from, copy_to_replicas, relayout, replica_to_host
from .._runtime.group import Group, current_group
from .._runtime.layout import Layout, set_replica, stack_parts
from .._tracing.context import current_trace
from .state import VariableState
from .value import ValueSpec, as_owned_array, conform


class Variable(Protocol):
    """A shared variable, whose users see its name and value alone."""

    name: str
    _spec: ValueSpec
    _pending: list[Any] | None  # stored leaves that have not been placed yet
    _group: Group | None
    _state: VariableState
    # States whose program has died, by id: the state itself, so that its id stays its own, and what came before.
    _superseded: dict[int, tuple[VariableState, VariableState]]


def group_of(variable: Variable) -> Group:
    """The group it lives in, or will."""
    return variable._group or current_group()


def bind(variable: Variable, group: Group) -> VariableState:
    """Return its state in this group, placing the value on first use."""
    if variable._pending is not None:
        leaves = copy_to_replicas(group, variable._pending, variable._state.layout)
        variable._group, variable._state = group, replace(variable._state, leaves=leaves)
        variable._pending = None
    if variable._group is not group:
        raise SynkError(
            f"{variable.name}: it lives in {variable._group}, but the current group is {group}. Use it in its own "
            f"group (`with group:`), or make a new one from {variable.name}.get_value()."
        )
    failure = variable._state.failure
    if failure is not None:
        name, cause = failure
        if isinstance(cause, PeerError):  # nothing that is set now would help
            raise cause
        raise SharedLostError(
            f"{variable.name}: its value was donated to a program of {name} that died ({_in_a_line(cause)}). "
            f"Set or load it again; donate=False in {name} keeps old values."
        ) from cause
    return variable._state


def stacked_leaves(variable: Variable, group: Group) -> list[jax.Array]:
    """Its leaves, one entry a replica on axis 0; copies, where they are replicated."""
    state = bind(variable, group)
    if state.layout == "stacked":
        return state.leaves
    return read(variable, lambda leaves: relayout(group, leaves, "replicated", "stacked"))


def state_of_leaves(
    variable: Variable,
    leaves: list[jax.Array],
    layout: Layout,
    rows: Sequence[int] | None = None,
    diverged_by: str = "",
) -> VariableState:
    """A state of new leaves with this layout; replicas are equal unless something is named that made them differ."""
    axes = 1 if layout == "stacked" else 0
    shapes = tuple(jax.ShapeDtypeStruct(leaf.shape[axes:], leaf.dtype) for leaf in leaves)
    rows = None if rows is None else tuple(rows)
    abstract = replace(variable._state.abstract, shapes=shapes, layout=layout, rows_per_replica=rows)
    return VariableState(leaves, abstract, not diverged_by and rows is None, diverged_by)


def commit(variable: Variable, state: VariableState) -> None:
    """Replace what it holds, whatever that was."""
    commit_all([(variable, state)])


def commit_all(states: Sequence[tuple[Variable, VariableState]]) -> None:
    """Replace what variables hold: all or none, Ctrl-C included."""
    with uninterrupted():
        for variable, state in states:
            variable._group = group_of(variable)
            variable._pending, variable._state = None, state


def invalidate(variable: Variable, state: VariableState, name: str, cause: Exception) -> None:
    """Note that this state was donated to a program that died, or came of one."""
    if variable._state is state:
        variable._state = replace(state, failure=(name, cause))


def restore(variable: Variable, state: VariableState, old: VariableState) -> None:
    """The program that gave `state` died; go back to `old`, or to what that went back to."""
    while id(old) in variable._superseded:
        old = variable._superseded[id(old)][1]
    if variable._state is state:
        variable._state = old
    else:  # A later program already consumed these leaves. It fails as well, and its own rollback then goes on to old.
        variable._superseded[id(state)] = (state, old)


def read(variable: Variable, copy: Callable[[list[jax.Array]], list[Any]]) -> list[Any]:
    """Copy the leaves and wait: a program that died shows here, and the old value, if it is back, is read."""
    while True:
        group = group_of(variable)
        state = bind(variable, group)
        try:
            jax.block_until_ready(state.leaves)
        except Exception as error:
            gone = group.peers.explain(error)
            if gone is not None:
                raise gone from error
            drain()  # which notes whose program it was
            if variable._state is state:
                invalidate(variable, state, "a function", error)
        else:
            variable._superseded.clear()  # whatever came before has ended
            return jax.block_until_ready(copy(state.leaves))


def divergence(variable: Variable) -> str:
    """Why there is no one value, and what to do."""
    name, state = variable.name, variable._state
    if state.rows_per_replica is not None:
        return (
            f"{name}: its replicas hold different rows, {list(state.rows_per_replica)} of them. Read them all with "
            f"synk.gather({name}, nd_up=0), one replica's with {name}.get_value(rank)."
        )
    return (
        f"{name}: its replicas hold different values, since {state.diverged_by} updated it on each from its own "
        f"rows. Update it in then, from combined outputs; or combine it with synk.all_reduce({name}); "
        f"{name}.get_value(rank) reads one replica's."
    )


def rows_of_rank(variable: Variable, rank: int) -> int | None:
    """Axis 0 of the value on one replica; None where the leaves share no axis 0."""
    state = variable._state
    if state.rows_per_replica is not None:
        return state.rows_per_replica[rank]
    rows = {s.shape[0] if s.shape and variable._spec.slots is None else None for s in state.abstract.shapes}
    return rows.pop() if len(rows) == 1 else None


def copied_state(
    variable: Variable, new: PyTree, call: str = "set_value", *, borrow: bool = False, any_rows: bool = True
) -> VariableState:
    """What it holds once every replica has a copy of `new`."""
    group, spec = group_of(variable), variable._spec
    shapes = spec.shapes if spec.slots else variable._state.abstract.shapes
    leaves = conform(spec, new, shapes, variable.name, call, any_rows and spec.slots is None)
    held = leaves if borrow else [as_owned_array(leaf, variable.name, borrow=False) for leaf in leaves]
    layout = variable._state.layout
    return state_of_leaves(variable, copy_to_replicas(group, spec.pack(held), layout), layout)


def state_with_rank(variable: Variable, rank: int, new: PyTree) -> VariableState:
    """What it holds once one replica has `new`; the others keep theirs."""
    group, spec, name = group_of(variable), variable._spec, variable.name
    state = bind(variable, group)
    _check_rank(variable, rank, group)
    shapes = spec.shapes if spec.slots else state.abstract.shapes
    leaves = conform(spec, new, shapes, name, "set_value", spec.slots is None)
    leaves = spec.pack([as_owned_array(leaf, name, False) for leaf in leaves])
    is_same = all(a.shape == b.shape for a, b in zip(leaves, state.abstract.shapes, strict=True))
    if state.rows_per_replica is None and is_same:
        held = zip(stacked_leaves(variable, group), leaves, strict=True)
        stacked = [set_replica(group, old, leaf, rank) for old, leaf in held]
        by = f"set_value(rank={rank})" if group.size > 1 else ""
        return state_of_leaves(variable, stacked, "stacked", diverged_by=by)
    rows = {leaf.shape[0] if leaf.ndim else None for leaf in leaves}
    if len(rows) != 1 or None in [rows_of_rank(variable, other) for other in range(group.size)]:
        raise ValueError(f"set_value: {name} changes its number of rows, so all leaves need as many.")
    parts = [_host_leaves_of_rank(variable, other) for other in range(group.size)]
    parts[rank] = leaves
    return state_of_rows(variable, parts)


def state_of_rows(variable: Variable, parts: Sequence[Sequence[Any]]) -> VariableState:
    """What it holds once each replica has rows of its own: `parts[rank]` are its leaves."""
    group = group_of(variable)
    rows = tuple(int(leaves[0].shape[0]) for leaves in parts)
    stacked = [stack_parts(group, [leaves[i] for leaves in parts], max(rows)) for i in range(len(parts[0]))]
    return state_of_leaves(variable, stacked, "stacked", rows)


def all_rows(variable: Variable) -> list[np.ndarray]:
    """All replicas' rows in rank order, of each leaf."""
    parts = [_host_leaves_of_rank(variable, rank) for rank in range(group_of(variable).size)]
    return [np.concatenate([part[i] for part in parts]) for i in range(len(parts[0]))]


def refuse_inside(variable: Variable, call: str) -> None:
    """Refuse to run inside a function, where a replica sees its own value only."""
    context = current_trace()
    if context is not None:
        raise SynkError(
            f"{context.name}: {call} of {variable.name} is for the serial program, not inside a function. "
            f"There, read and assign {variable.name}.value."
        )


def common_value(variable: Variable) -> PyTree:
    group = group_of(variable)
    bind(variable, group)
    if not variable._state.is_equal:
        raise DivergedError(divergence(variable))
    return variable._spec.tree(
        read(variable, lambda leaves: relayout(group, leaves, variable._state.layout, "replicated"))
    )


def _host_leaves_of_rank(variable: Variable, rank: int) -> list[Any]:
    group, state, rows = group_of(variable), variable._state, rows_of_rank(variable, rank)
    return [replica_to_host(group, leaf, state.layout, rank, rows) for leaf in state.leaves]


def value_of_rank(variable: Variable, rank: int, borrow: bool) -> PyTree:
    group = group_of(variable)
    state = bind(variable, group)
    _check_rank(variable, rank, group)
    rows = None if state.rows_per_replica is None else state.rows_per_replica[rank]

    def view(leaves: list[jax.Array]) -> list[Any]:
        return [replica_to_host(group, leaf, variable._state.layout, rank, rows) for leaf in leaves]

    def copy(leaves: list[jax.Array]) -> list[Any]:
        if is_traced():  # around this line: a program with ranks of its own would mix with it
            return [jnp.array(leaf) for leaf in view(leaves)]
        if variable._state.layout == "replicated":
            return list(relayout(group, leaves, "replicated", "replicated"))
        copies = broadcast_from(group, leaves, rank, "replicated")
        return [leaf if rows is None else leaf[:rows] for leaf in copies]

    return variable._spec.tree(read(variable, view if borrow else copy))


def _check_rank(variable: Variable, rank: int, group: Group) -> None:
    if isinstance(rank, bool) or not isinstance(rank, int | np.integer):
        raise TypeError(f"{variable.name}: rank is {rank!r}; give an integer from 0 to {group.size - 1}.")
    if not 0 <= rank < group.size:
        raise IndexError(f"{variable.name}: there is no rank {rank}; ranks are 0 to {group.size - 1}.")


def _in_a_line(error: Exception) -> str:
    """What an error of JAX's says: its first line, or the last where the first announces a traceback."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1 if "Traceback" in lines[0] else 0].strip()[:200]
