"""Views: shared variables as one device, or simulated replicas, see them."""

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


def one_device(group: Group) -> Group:
    """One device, of this process: the first."""
    return group._subgroup(group._local_ranks.start, group._local_ranks.start + 1)


def view_of_one(group: Group, batch_s: Any) -> View:
    """Variables for one replica: the value that all share, or the rows picked of all, in rank order."""
    one, rank = one_device(group), group._local_ranks.start

    def look(variable: Shared, state: VariableState) -> VariableState:
        if not state.is_equal:
            raise DivergedError(divergence(variable))
        return replace(state, leaves=[_of_rank(group, one, leaf, state, rank) for leaf in state.leaves])

    return _view(group, one, batch_s, look)


def _view(group: Group, target: Group, batch_s: Any, look: Callable[[Shared, VariableState], VariableState]) -> View:
    """Variables of a group as another one sees them; `look` is for those that neither hold rows nor lie in shards."""

    @cache
    def view(variable: Shared) -> VariableState:
        state = bind(variable, group)
        if state.rows_per_replica is not None:
            return _of_rows(target, variable, state, batch_s)
        return look(variable, state) if variable._spec.is_cut is None else _of_shards(target, variable)

    return view


def _of_rank(group: Group, one: Group, leaf: jax.Array, state: VariableState, rank: int) -> jax.Array:
    """One replica's part of a leaf as an array of a group of it alone; nothing is copied on real devices."""
    if group is one:
        return leaf
    if group.is_simulated:
        return leaf if state.layout == "replicated" else jax.device_put(leaf[rank : rank + 1], one.stacked)
    shard = shard_of_rank(group, leaf, rank)
    sharding = one.replicated if state.layout == "replicated" else one.stacked
    return jax.make_array_from_single_device_arrays(shard.shape, sharding, [shard])


def view_of_absent(group: Group) -> View:
    """Variables as a group whose devices are not here would have them: rows dealt out to its replicas, by shapes."""

    def look(variable: Shared) -> VariableState:
        state = variable._state
        if variable._spec.is_cut is not None:
            return replace(state, abstract=abstract_shards(variable._spec, group.size))
        if state.rows_per_replica is None:
            return state
        lengths = lengths_of(sum(state.rows_per_replica), group.size)
        shapes = tuple(jax.ShapeDtypeStruct((max(lengths), *s.shape[1:]), s.dtype) for s in state.abstract.shapes)
        return replace(state, abstract=replace(state.abstract, shapes=shapes, rows_per_replica=lengths))

    return look


def view_of_simulated(group: Group, parallel: Group, batch_s: Any) -> View:
    """Variables of a group of one replica, for several simulated ones."""

    def look(variable: Shared, state: VariableState) -> VariableState:
        first = [leaf[0] for leaf in stacked_leaves(variable)]
        leaves, abstract = copy_to_replicas(parallel, first, "stacked"), replace(state.abstract, layout="stacked")
        return replace(state, leaves=leaves, abstract=abstract)

    return _view(group, parallel, batch_s, look)


def _of_shards(group: Group, variable: Shared) -> VariableState:
    """Return the state of a sharded variable, cut for the replicas of another group."""
    leaves = stored_shards(variable._spec, group, host_leaves(variable, 0))
    return replace(variable._state, leaves=leaves, abstract=abstract_shards(variable._spec, group.size))


def _of_rows(group: Group, variable: Shared, state: VariableState, batch_s: Any) -> VariableState:
    """The rows that a variable holds on all replicas, those picked alone, dealt out to the replicas of a group."""
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
    """Rows of each leaf, cut for replicas of these lengths."""
    stops = np.cumsum(lengths).tolist()
    return [[leaf[stop - length : stop] for leaf in rows] for stop, length in zip(stops, lengths, strict=True)]
