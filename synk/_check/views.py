"""Views: the state of shared variables in another group: one device, simulated replicas, or absent devices."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np

from .._base.errors import DivergedError
from .._base.partition import lengths_of
from .._call.traces import View
from .._data.selection import merge_replicas, select_on_replicas
from .._runtime.executable import copy_to_replicas
from .._runtime.group import Group
from .._runtime.layout import shard_of_rank, stack_parts
from .._variables.shards import abstract_shards, stored_shards
from .._variables.state import VariableState
from .._variables.variable import Shared, bind, divergence, group_of, host_leaves, stacked_leaves

StateOf = Callable[[Shared, VariableState], VariableState]


def one_device(group: Group) -> Group:
    """Return the group of this process's first device."""
    return group._subgroup(group._local_ranks.start, group._local_ranks.start + 1)


def view_of_one(group: Group, batch_s: Any) -> View:
    """View variables on one device: the value that all replicas share, or the picked rows of all, in rank order."""
    one, rank = one_device(group), group._local_ranks.start

    def state_of(variable: Shared, state: VariableState) -> VariableState:
        if not state.is_equal:
            raise DivergedError(divergence(variable))
        return replace(state, leaves=[_of_rank(group, one, leaf, state, rank) for leaf in state.leaves])

    return _view(group, one, batch_s, state_of)


def _view(group: Group, target: Group, batch_s: Any, state_of: StateOf) -> View:
    """View variables of a group in the group `target`.

    `state_of` makes the state of a variable that holds no rows and is not cut into shards.
    """

    # One call looks at a variable several times, and each view of it may copy.
    @cache
    def view(variable: Shared) -> VariableState:
        state = bind(variable, group)
        if state.rows_per_replica is not None:
            return _of_rows(target, variable, state, batch_s)
        return state_of(variable, state) if variable._spec.is_cut is None else _of_shards(target, variable)

    return view


def _of_rank(group: Group, one: Group, leaf: jax.Array, state: VariableState, rank: int) -> jax.Array:
    """Return one replica's part of a leaf as an array of the group `one`, without a copy on real devices."""
    if group is one:
        return leaf
    # Replicas of a simulated group share one device, where axis 0 of a stacked leaf counts them.
    if group.is_simulated:
        return leaf if state.layout == "replicated" else jax.device_put(leaf[rank : rank + 1], one.stacked)
    shard = shard_of_rank(group, leaf, rank)
    sharding = one.replicated if state.layout == "replicated" else one.stacked
    return jax.make_array_from_single_device_arrays(shard.shape, sharding, [shard])


def view_of_absent(group: Group) -> View:
    """View variables by shapes in a group whose devices are absent, with their rows dealt out to its replicas."""

    def state_of(variable: Shared) -> VariableState:
        state = variable._state
        if variable._spec.is_cut is not None:
            return replace(state, abstract=abstract_shards(variable._spec, group.size))
        if state.rows_per_replica is None:
            return state
        lengths = lengths_of(sum(state.rows_per_replica), group.size)
        shapes = tuple(jax.ShapeDtypeStruct((max(lengths), *s.shape[1:]), s.dtype) for s in state.abstract.shapes)
        return replace(state, abstract=replace(state.abstract, shapes=shapes, rows_per_replica=lengths))

    return state_of


def view_of_simulated(group: Group, parallel: Group, batch_s: Any) -> View:
    """View variables of a group of one replica on the simulated replicas of `parallel`."""

    def state_of(variable: Shared, state: VariableState) -> VariableState:
        first = [leaf[0] for leaf in stacked_leaves(variable)]
        leaves, abstract = copy_to_replicas(parallel, first, "stacked"), replace(state.abstract, layout="stacked")
        return replace(state, leaves=leaves, abstract=abstract)

    return _view(group, parallel, batch_s, state_of)


def _of_shards(group: Group, variable: Shared) -> VariableState:
    """Cut a variable that lies in shards for the replicas of another group."""
    leaves = stored_shards(variable._spec, group, host_leaves(variable, 0))
    return replace(variable._state, leaves=leaves, abstract=abstract_shards(variable._spec, group.size))


def _of_rows(group: Group, variable: Shared, state: VariableState, batch_s: Any) -> VariableState:
    """Deal out the rows that a variable holds, or those that `batch_s` picks, to the replicas of another group."""
    parts = [host_leaves(variable, rank) for rank in range(group_of(variable).size)]
    rows = [np.concatenate(leaves) for leaves in zip(*parts, strict=True)]
    lengths = variable._state.rows_per_replica or ()
    if batch_s is not None:
        chosen = select_on_replicas(batch_s, lengths, "batch_s", variable.name)
        together = merge_replicas(chosen)
        index = together.positions(0, together.rows)
        rows, lengths = [leaf[index] for leaf in rows], chosen.lengths
    lengths = lengths_of(sum(lengths), group.size)
    parts = split_at(rows, lengths)
    leaves = [stack_parts(group, [part[i] for part in parts], max(lengths)) for i in range(len(rows))]
    shapes = tuple(jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for leaf in leaves)
    abstract = replace(state.abstract, shapes=shapes, layout="stacked", rows_per_replica=lengths)
    return replace(state, leaves=leaves, abstract=abstract, is_equal=group.size == 1)


def split_at(rows: Sequence[np.ndarray], lengths: Sequence[int]) -> list[list[np.ndarray]]:
    """Cut the rows of each leaf for replicas of these lengths."""
    stops = np.cumsum(lengths).tolist()
    return [[leaf[stop - length : stop] for leaf in rows] for stop, length in zip(stops, lengths, strict=True)]
