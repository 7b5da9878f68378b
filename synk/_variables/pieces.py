"""Pieces: how a value that all replicas share is stored where each holds one n-th of its leaves, of scalars all."""

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


def abstract_pieces(spec: ValueSpec, replicas: int) -> AbstractState:
    """Of a variable in pieces, on so many replicas."""
    pairs = zip(spec.shapes, _is_cut(spec), strict=True)
    return AbstractState(tuple(shard_shape(s, replicas) if one else s for s, one in pairs), "stacked")


def stored_pieces(spec: ValueSpec, group: Group, leaves: Sequence[Any]) -> list[jax.Array]:
    """The stored leaves, from those that the user sees."""
    which = [i for i, one in enumerate(_is_cut(spec)) if one]
    stored = {i: put(group, np.array(cut(np.asarray(leaves[i]), group.size)), "stacked") for i in which}
    others = [i for i in range(len(leaves)) if i not in stored]
    stored |= zip(others, copy_to_replicas(group, [leaves[i] for i in others], "stacked"), strict=True)
    return [stored[i] for i in range(len(leaves))]


def whole_leaves(spec: ValueSpec, group: Group, stored: Sequence[jax.Array]) -> list[jax.Array]:
    """The leaves that the user sees, on every replica."""
    return _joined(group, _is_cut(spec), spec.shapes, stored)


def whole_on_host(spec: ValueSpec, group: Group, stored: Sequence[jax.Array]) -> Iterator[np.ndarray]:
    """The same in host memory, one by one, so that no device needs memory for all. Over processes all ask together."""
    own = group._local_ranks.start
    for leaf, one, shape in zip(stored, _is_cut(spec), spec.shapes, strict=True):
        if not one:
            yield local_replica_to_host(group, leaf, "stacked", own, None)
        elif group._is_multi_process:
            yield local_replica_to_host(group, _joined(group, (True,), (shape,), [leaf])[0], "replicated", own, None)
        else:
            yield join(np.asarray(leaf), shape)


def refuse_pieces(variable: Any, call: str) -> None:
    """Refuse what is about values of replicas' own, as `call` is."""
    if variable._spec.is_cut is not None:
        raise SynkError(
            f"{call}: {variable.name} lies in pieces, of which each replica holds one, so none has a value of its own. "
            f"Outside of functions read and assign the whole, {variable.name}.value; into one pass it as an argument."
        )


def _joined(group: Group, is_cut: tuple[bool, ...], shapes: Shapes, stored: Sequence[jax.Array]) -> list[jax.Array]:
    count = len(stored)
    return run_collective(
        group, _joining(is_cut, shapes), layouts("stacked", count), layouts("replicated", count), stored
    )


@lru_cache(maxsize=256)
def _joining(is_cut: tuple[bool, ...], shapes: Shapes) -> Body:
    which = [i for i, one in enumerate(is_cut) if one]

    def body(*leaves: jax.Array) -> list[jax.Array]:
        found = dict(zip(which, gather_shards([leaves[i] for i in which], [shapes[i] for i in which]), strict=True))
        return [found[i] if i in found else jnp.copy(leaf) for i, leaf in enumerate(leaves)]

    return body


def _is_cut(spec: ValueSpec) -> tuple[bool, ...]:
    assert spec.is_cut is not None
    return spec.is_cut
