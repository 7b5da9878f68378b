"""Access: what is done with shared variables: bind, read, commit, roll back. Callers hold the lock."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from .._base.errors import DivergedError, PeerError, SharedLostError, SynkError, in_a_line, shown
from .._base.jax_context import is_traced
from .._base.pytree import PyTree, as_keys
from .._runtime.dispatch import drain, uninterrupted
from .._runtime.executable import broadcast_from, copy_to_replicas, relayout, replica_to_host
from .._runtime.group import Group, current_group
from .._runtime.layout import Layout, set_replica, stack_parts
from .._tracing.context import eager
from .pieces import abstract_pieces, refuse_pieces, stored_pieces, whole_leaves, whole_on_host
from .state import AbstractState, VariableState, refuse_narrow
from .value import ValueSpec, as_owned_array, conform, shared_rows


class Variable(Protocol):
    """A shared variable, whose users see its name and value alone."""

    name: str
    _given_name: str  # empty where the name is made up, of a number that may differ between processes
    _spec: ValueSpec
    _group: Group | None  # None: its leaves have not been placed yet
    _state: VariableState
    _cures: dict[str, str]


def group_of(variable: Variable) -> Group:
    """The group it lives in, or will."""
    return variable._group or current_group()


def bind(variable: Variable, group: Group) -> VariableState:
    """Return its state in this group, placing the value on first use."""
    if variable._group is not group:
        group._refuse_if_absent(variable.name)
    if variable._group is None:
        if is_made_of_shapes(variable):
            raise SynkError(
                f"{variable.name}: it was made of shapes alone, for compile and explain. Give it a value first: "
                f"{variable.name}.value = ..., or synk.load."
            )
        state = state_in(variable, group)
        refuse_narrow(state.abstract, variable.name)
        variable._state, variable._group = replace(state, leaves=place(variable, group, state.leaves)), group
    if variable._group is not group:
        here = str(group) if str(group) != str(variable._group) else "a later one of that kind"
        raise SynkError(
            f"{variable.name}: it lives in {variable._group}, but the current group is {here}. Use it in its own group "
            f"(`with group:`), or make a new one from {variable.name}.get_value()."
        )
    if variable._state.failure is not None:
        name, cause = variable._state.failure
        if isinstance(cause, PeerError):  # nothing that is set now would help
            raise cause
        raise SharedLostError(
            f"{variable.name}: a program of {name} that was to write it died ({in_a_line(cause)}), so its value is "
            f"lost. Set or load it again."
        ) from cause
    return variable._state


def state_in(variable: Variable, group: Group) -> VariableState:
    """What it holds, as a call in a group finds it; nothing is placed. One in pieces is not cut before it is."""
    state, is_cut = variable._state, variable._spec.is_cut
    if is_cut is None or variable._group is not None:
        return state if is_cut is None else bind(variable, group)  # which refuses another group
    return replace(state, abstract=abstract_pieces(variable._spec, group.size))


def is_made_of_shapes(variable: Variable) -> bool:
    """Has it been given no value yet?"""
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in variable._state.leaves)


def map_value(variable: Variable, fn: Callable[[PyTree], PyTree]) -> PyTree:
    """A function of what it holds; where that is its first value nothing is placed, and of shapes come shapes."""
    if variable._group is not None:
        with eager():
            value = common_value(variable)
        return fn(value)
    if is_made_of_shapes(variable):
        return jax.eval_shape(fn, abstract_value(variable))
    return fn(variable._spec.tree(variable._state.leaves))


def abstract_value(variable: Variable) -> PyTree:
    """The tree of a variable, with shapes for arrays and typed keys."""
    spec, shapes = variable._spec, logical_shapes(variable)
    return jax.eval_shape(lambda *leaves: spec.treedef.unflatten(map(as_keys, leaves, spec.keys)), *shapes)


def place(variable: Variable, group: Group, leaves: list[Any]) -> list[jax.Array]:
    """Give every replica a copy of these stored leaves. Those that a variable begins with are compared: unseeded random
    numbers, say, differ between processes, and the replicas would differ for good."""
    _compare(variable, group, leaves, always=variable._group is None)
    return _copies(variable, group, leaves)


def _copies(variable: Variable, group: Group, leaves: list[Any]) -> list[jax.Array]:
    if variable._spec.is_cut is not None:
        return stored_pieces(variable._spec, group, leaves)
    return copy_to_replicas(group, leaves, variable._state.layout)


def _compare(variable: Variable, group: Group, leaves: list[Any], always: bool) -> None:
    name, cure = variable._given_name or "a shared variable without a name", f"synk.broadcast({variable.name})"
    remedy = f"Make it alike, e.g. of one seed, or give all of them that of the first replica: {cure}."
    group._peers.compare_values(f"the value of {name}", lambda: leaves, remedy, always)


def stacked_leaves(variable: Variable, group: Group) -> list[jax.Array]:
    """Its leaves, one entry a replica on axis 0; copies, where they are replicated."""
    state = bind(variable, group)
    if state.layout == "stacked":
        return state.leaves
    return read(variable, lambda leaves: relayout(group, leaves, "replicated", "stacked"))


def state_of_leaves(
    leaves: list[Any], layout: Layout, rows: Sequence[int] | None = None, diverged_by: str = ""
) -> VariableState:
    """A state of new leaves with this layout; replicas are equal unless something is named that made them differ."""
    shapes = tuple(jax.ShapeDtypeStruct(leaf.shape[layout == "stacked" :], leaf.dtype) for leaf in leaves)
    abstract = AbstractState(shapes, layout, None if rows is None else tuple(rows))
    return VariableState(leaves, abstract, not diverged_by and rows is None, diverged_by)


def state_of_copies(variable: Variable, leaves: list[Any]) -> VariableState:
    """What it holds once every replica has a copy of these leaves, or its pieces of them."""
    group = group_of(variable)
    layout: Layout = variable._state.layout if variable._spec.is_cut is None else "stacked"
    return state_of_leaves(_copies(variable, group, leaves), layout)


def commit_all(states: Sequence[tuple[Variable, VariableState]]) -> None:
    """Replace what variables hold: all or none, Ctrl-C included."""
    with uninterrupted():
        for variable, state in states:
            variable._group, variable._state = group_of(variable), state


def invalidate(variable: Variable, state: VariableState, name: str, cause: Exception) -> None:
    """Mark the variable as lost, if it still has this state, whose program died."""
    if variable._state is state:
        variable._state = replace(state, failure=(name, cause))


def read(variable: Variable, copy: Callable[[list[jax.Array]], list[Any]]) -> list[Any]:
    """Wait for the leaves and copy them; SharedLostError if the program that was to write them died."""
    group = group_of(variable)
    state = bind(variable, group)
    try:
        jax.block_until_ready(state.leaves)
    except Exception as error:
        # An exception that a handler of a signal has raised is no failure of the program.
        if _end_well(state.leaves):
            raise
        gone = group._peers.translate_error(error)
        if gone is not None:
            raise gone from error
        # The program marks the variable itself. A collective has no function to name.
        drain()
        invalidate(variable, state, "a function", error)
        return read(variable, copy)  # which raises, unless a handler of a signal has set the variable meanwhile
    return jax.block_until_ready(copy(state.leaves))


def _end_well(leaves: Sequence[jax.Array]) -> bool:
    with uninterrupted():
        try:
            jax.block_until_ready(leaves)
        except Exception:
            return False
    return True


def divergence(variable: Variable) -> str:
    """Why there is no one value, and what to do."""
    name, state = variable.name, variable._state
    if state.rows_per_replica is not None:
        return (
            f"{name}: its replicas hold different rows, {list(state.rows_per_replica)} of them. Read them all with "
            f"synk.gather({name}, nd_up=0), one replica's with {name}.get_value(rank)."
        )
    cure = f"Update it in then, from combined outputs; or combine it with synk.all_reduce({name})"
    cure = variable._cures.get(state.diverged_by, cure)
    return (
        f"{name}: its replicas hold different values, since {state.diverged_by} updated it on each from its own rows. "
        f"{cure}; {name}.get_value(rank) reads one replica's."
    )


def rows_of_rank(variable: Variable, rank: int) -> int | None:
    """Axis 0 of the value on one replica; None where the leaves share no axis 0."""
    state = variable._state
    if state.rows_per_replica is not None:
        return state.rows_per_replica[rank]
    return shared_rows(logical_shapes(variable)) if variable._spec.buffers is None else None


def logical_shapes(variable: Variable, rows: int | None = None) -> Sequence[jax.ShapeDtypeStruct]:
    """Of the leaves that the user sees, on a replica with so many rows; None: on that with the most."""
    spec = variable._spec
    return spec.shapes if spec.is_rearranged else variable._state.abstract.part_shapes(rows)


def new_leaves(
    variable: Variable, new: PyTree, call: str, borrow: bool, any_rows: bool = True, is_first: bool = False
) -> list[Any]:
    """Stored leaves of a new value, checked, synk's own unless borrowed; its number of rows may differ."""
    spec = variable._spec
    leaves = conform(spec, new, logical_shapes(variable), variable.name, call, any_rows and not spec.is_rearranged)
    stored = spec.pack([as_owned_array(leaf, variable.name, borrow) for leaf in leaves])
    _compare(variable, group_of(variable), stored, is_first)
    return stored


def copied_state(
    variable: Variable, new: PyTree, call: str = "set_value", *, borrow: bool = False, any_rows: bool = True
) -> VariableState:
    """What it holds once every replica has a copy of `new`."""
    return state_of_copies(variable, new_leaves(variable, new, call, borrow, any_rows, variable._group is None))


def state_with_rank(variable: Variable, rank: int, new: PyTree) -> VariableState:
    """What it holds once one replica has `new`; the others keep theirs."""
    group, state = _bind_rank(variable, rank)
    refuse_pieces(variable, "set_value(rank=...)")
    leaves = new_leaves(variable, new, "set_value", borrow=False)
    is_same = [leaf.shape for leaf in leaves] == [s.shape for s in state.abstract.shapes]
    if state.rows_per_replica is None and is_same:
        held = zip(stacked_leaves(variable, group), leaves, strict=True)
        stacked = [set_replica(group, old, leaf, rank) for old, leaf in held]
        by = f"set_value(rank={rank})" if group.size > 1 else ""
        return state_of_leaves(stacked, "stacked", diverged_by=by)
    if shared_rows(leaves) is None or None in [rows_of_rank(variable, other) for other in range(group.size)]:
        raise ValueError(f"set_value: {variable.name} changes its number of rows, so all leaves need as many.")
    parts = [leaves if other == rank else host_leaves(variable, other) for other in range(group.size)]
    return state_of_rows(variable, parts)


def state_of_rows(variable: Variable, parts: Sequence[Sequence[Any]]) -> VariableState:
    """What it holds once each replica has rows of its own: `parts[rank]` are its leaves."""
    group = group_of(variable)
    rows = tuple(int(leaves[0].shape[0]) for leaves in parts)
    stacked = [stack_parts(group, leaves, max(rows)) for leaves in zip(*parts, strict=True)]
    return state_of_leaves(stacked, "stacked", rows)


def common_value(variable: Variable) -> PyTree:
    group = group_of(variable)
    if not bind(variable, group).is_equal:
        raise DivergedError(divergence(variable))
    if variable._spec.is_cut is not None:
        _read_together(variable, group)
    return variable._spec.tree(read(variable, partial(_common_leaves, variable, group)))


def _read_together(variable: Variable, group: Group) -> None:
    """Before a read that communicates: processes of which one reads alone learn of it, before it meets another call."""
    group._peers.agree(f"a read of {variable._given_name or 'a shared variable without a name'}", "")


def _common_leaves(variable: Variable, group: Group, leaves: list[jax.Array]) -> list[jax.Array]:
    if variable._spec.is_cut is not None:
        return whole_leaves(variable._spec, group, leaves)
    return relayout(group, leaves, variable._state.layout, "replicated")


def host_leaves(variable: Variable, rank: int) -> list[Any]:
    """One replica's leaves in host memory, views where that costs no copy. Over processes all ask together."""
    group, rows = group_of(variable), rows_of_rank(variable, rank)
    if variable._spec.is_cut is not None:
        return read(variable, lambda leaves: list(whole_on_host(variable._spec, group, leaves)))
    return read(
        variable, lambda leaves: [replica_to_host(group, a, variable._state.layout, rank, rows) for a in leaves]
    )


def value_of_rank(variable: Variable, rank: int, borrow: bool) -> PyTree:
    group, state = _bind_rank(variable, rank)
    rows = state.rows_per_replica
    if state.layout == "stacked":
        _read_together(variable, group)

    def copy(leaves: list[jax.Array]) -> list[Any]:
        if variable._state.layout == "replicated" or variable._spec.is_cut is not None:
            return _common_leaves(variable, group, leaves)
        copies = broadcast_from(group, leaves, rank, "replicated")
        return copies if rows is None else [leaf[: rows[rank]] for leaf in copies]

    if borrow:
        return variable._spec.tree(host_leaves(variable, rank))
    if is_traced():  # around this line: a program with ranks of its own would mix with it
        return variable._spec.tree([jnp.array(leaf) for leaf in host_leaves(variable, rank)])
    return variable._spec.tree(read(variable, copy))


def _bind_rank(variable: Variable, rank: int) -> tuple[Group, VariableState]:
    """Its group and its state there; an error where the group has no such rank."""
    group = group_of(variable)
    state = bind(variable, group)
    if isinstance(rank, bool) or not isinstance(rank, int | np.integer):
        raise TypeError(f"{variable.name}: rank is {shown(rank)}; give an integer from 0 to {group.size - 1}.")
    if not 0 <= rank < group.size:
        raise IndexError(f"{variable.name}: there is no rank {rank}; ranks are 0 to {group.size - 1}.")
    return group, state
