"""Shards: how a value that all replicas share is stored so that each replica holds one n-th of its large leaves."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._base.errors import SynkError
from .._reductions.shard_ops import cut, gather_shards, join, shard_shape
from .._runtime.engine import Body
from .._runtime.executable import copy_to_replicas, run_collective
from .._runtime.group import Group
from .._runtime.layout import layouts, local_replica_to_host, put
from .state import AbstractState
from .value import Shapes, ValueSpec


def abstract_shards(spec: ValueSpec, replicas: int) -> AbstractState:
    """Return the state of a sharded variable on so many replicas, as shapes."""
    pairs = zip(spec.shapes, _is_cut(spec), strict=True)
    return AbstractState(tuple(shard_shape(s, replicas) if is_cut else s for s, is_cut in pairs), "stacked")


def stored_shards(spec: ValueSpec, group: Group, leaves: Sequence[Any]) -> list[jax.Array]:
    """Cut and place the leaves that the user sees."""
    return [
        put(group, np.array(cut(np.asarray(leaf), group.size)), "stacked")
        if is_cut
        else copy_to_replicas(group, [leaf], "stacked")[0]
        for leaf, is_cut in zip(leaves, _is_cut(spec), strict=True)
    ]


def whole_leaves(spec: ValueSpec, group: Group, stored: Sequence[jax.Array]) -> list[jax.Array]:
    """Gather the leaves that the user sees on every replica."""
    return _gathered(group, _is_cut(spec), spec.shapes, stored)


def whole_on_host(spec: ValueSpec, group: Group, stored: Sequence[jax.Array]) -> Iterator[np.ndarray]:
    """Gather the leaves that the user sees in host memory, one by one, so that no device needs memory for all of them.

    All processes of a group must ask together.
    """
    rank = group._local_ranks.start
    for leaf, is_cut, shape in zip(stored, _is_cut(spec), spec.shapes, strict=True):
        if not is_cut:
            yield local_replica_to_host(group, leaf, "stacked", rank, None)
        elif group._is_multi_process:
            whole = _gathered(group, (True,), (shape,), [leaf])[0]
            yield local_replica_to_host(group, whole, "replicated", rank, None)
        else:
            yield join(np.asarray(leaf), shape)


def refuse_shards(variable: Any, call: str) -> None:
    """Raise SynkError if the variable is sharded and `call` is about values that each replica has for itself."""
    if variable._spec.is_cut is not None:
        raise SynkError(
            f"{call}: {variable.name} lies in shards, of which each replica holds one, so none has a value of its own. "
            f"Outside of functions read and assign the whole, {variable.name}.value; into one pass it as an argument."
        )


def _gathered(group: Group, is_cut: tuple[bool, ...], shapes: Shapes, stored: Sequence[jax.Array]) -> list[jax.Array]:
    ins, outs = layouts("stacked", len(stored)), layouts("replicated", len(stored))
    return run_collective(group, _gather_body(is_cut, shapes), ins, outs, stored)


@lru_cache(maxsize=256)
def _gather_body(is_cut: tuple[bool, ...], shapes: Shapes) -> Body:
    cut_leaves = [i for i, leaf_is_cut in enumerate(is_cut) if leaf_is_cut]

    def body(*leaves: jax.Array) -> list[jax.Array]:
        whole = gather_shards([leaves[i] for i in cut_leaves], [shapes[i] for i in cut_leaves])
        by_number = dict(zip(cut_leaves, whole, strict=True))
        return [by_number[i] if i in by_number else jnp.copy(leaf) for i, leaf in enumerate(leaves)]

    return body


def _is_cut(spec: ValueSpec) -> tuple[bool, ...]:
    assert spec.is_cut is not None
    return spec.is_cut
