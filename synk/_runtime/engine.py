"""Engine: the one place that knows how JAX maps a program over replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from .group import AXIS, Group
from .layout import Layout

Body: TypeAlias = Callable[..., Sequence[jax.Array]]
EngineName: TypeAlias = Literal["shard_map", "pmap"]


def spmd(group: Group, body: Body, ins: Sequence[Layout], outs: Sequence[Layout], engine: str = "shard_map") -> Body:
    """Map `body` over the replicas of a group: arrays in, arrays out; for use under `jax.jit`.

    Args:
      body: takes and returns one replica's arrays.
      ins: the layout of each argument.
      outs: the layout of each result, "stacked" or "replicated".
      engine: a key of `ENGINES`; simulated replicas have their own.
    """
    if group.is_simulated:
        engine = "vmap"
    elif engine == "pmap" and jax.process_count() > 1:
        engine = "shard_map"  # under jit jax.pmap knows this process's devices only, and maps over those
    return ENGINES[engine](group, body, ins, outs)


def _by_shard_map(group: Group, body: Body, ins: Sequence[Layout], outs: Sequence[Layout]) -> Body:
    def block(*args: jax.Array) -> tuple[jax.Array, ...]:
        results = body(*(a[0] if layout == "stacked" else a for a, layout in zip(args, ins, strict=True)))
        return tuple(r[None] if layout == "stacked" else r for r, layout in zip(results, outs, strict=True))

    specs = {"stacked": P(AXIS), "rows": P(AXIS), "replicated": P()}
    # check_vma=True would sum gradients of values it takes to be the same everywhere; pmap does not, nor does synk.
    return jax.shard_map(
        block,
        mesh=group.mesh,
        in_specs=tuple(specs[layout] for layout in ins),
        out_specs=tuple(specs[layout] for layout in outs),
        check_vma=False,
    )


def _by_pmap(group: Group, body: Body, ins: Sequence[Layout], outs: Sequence[Layout]) -> Body:
    mapped = jax.pmap(
        lambda _, *args: tuple(body(*args)),  # pmap wants at least one mapped argument
        axis_name=AXIS,
        devices=group.devices,
        in_axes=(0, *(None if layout == "replicated" else 0 for layout in ins)),
        out_axes=tuple(None if layout == "replicated" else 0 for layout in outs),
    )
    ranks = np.arange(group.size, dtype=np.int32)
    return lambda *args: mapped(ranks, *(_per_replica(group, a, layout) for a, layout in zip(args, ins, strict=True)))


def _by_vmap(group: Group, body: Body, ins: Sequence[Layout], outs: Sequence[Layout]) -> Body:
    mapped = jax.vmap(
        lambda *args: tuple(body(*args)),
        in_axes=tuple(None if layout == "replicated" else 0 for layout in ins),
        axis_name=AXIS,
        axis_size=group.size,
    )

    def call(*args: jax.Array) -> tuple[jax.Array, ...]:
        results = mapped(*(_per_replica(group, a, layout) for a, layout in zip(args, ins, strict=True)))
        return tuple(r if layout == "stacked" else r[0] for r, layout in zip(results, outs, strict=True))

    return call


def _per_replica(group: Group, array: jax.Array, layout: Layout) -> jax.Array:
    return array.reshape(group.size, len(array) // group.size, *array.shape[1:]) if layout == "rows" else array


ENGINES: dict[str, Callable[[Group, Body, Sequence[Layout], Sequence[Layout]], Body]] = {
    "shard_map": _by_shard_map,
    "pmap": _by_pmap,
    "vmap": _by_vmap,
}
