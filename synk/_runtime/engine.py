"""Engine: the one place that knows how JAX maps a program over replicas."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .group import AXIS, Group
from .layout import Layout, Layouts, sharding_of

Body: TypeAlias = Callable[..., Sequence[jax.Array]]


def spmd(group: Group, body: Body, ins: Layouts, outs: Layouts, engine: str = "shard_map") -> Body:
    """Map a body of one replica's arrays over a group, for use under `jax.jit`; results are stacked or replicated."""
    if group.is_simulated and group.size > 1:
        engine = "vmap"
    elif engine == "pmap" and jax.process_count() > 1:
        engine = "shard_map"  # under jit jax.pmap knows this process's devices only, and maps over those
    return ENGINES[engine](group, body, ins, outs)


def run_rank_by_rank(
    group: Group, run: Callable[[int, list[jax.Array]], Sequence[jax.Array]], values: Sequence[jax.Array], ins: Layouts
) -> list[jax.Array]:
    """Run `run(rank, arrays)` for one simulated replica after another, and stack the results."""

    def of_rank(array: jax.Array, layout: Layout, rank: int) -> jax.Array:
        if layout == "replicated":
            return array
        return array[rank] if layout == "stacked" else array.reshape(group.size, -1, *array.shape[1:])[rank]

    each = [
        run(rank, [of_rank(value, layout, rank) for value, layout in zip(values, ins, strict=True)])
        for rank in range(group.size)
    ]
    return [jnp.stack(leaves) for leaves in zip(*each, strict=True)]


def _by_shard_map(group: Group, body: Body, ins: Layouts, outs: Layouts) -> Body:
    def block(*args: jax.Array) -> tuple[jax.Array, ...]:
        results = body(*(a[0] if layout == "stacked" else a for a, layout in zip(args, ins, strict=True)))
        return tuple(r[None] if layout == "stacked" else r for r, layout in zip(results, outs, strict=True))

    in_specs, out_specs = (tuple(sharding_of(group, layout).spec for layout in each) for each in (ins, outs))
    # check_vma=True would sum gradients of values it takes to be the same everywhere; pmap does not, nor does synk.
    return jax.shard_map(block, mesh=group.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _by_pmap(group: Group, body: Body, ins: Layouts, outs: Layouts) -> Body:
    mapped = jax.pmap(
        lambda _, *args: tuple(body(*args)),  # pmap wants at least one mapped argument
        axis_name=AXIS,
        devices=group.devices,
        in_axes=(0, *_axes(ins)),
        out_axes=_axes(outs),
    )
    ranks = np.arange(group.size, dtype=np.int32)
    return lambda *args: mapped(ranks, *_per_replica(group, args, ins))


def _by_vmap(group: Group, body: Body, ins: Layouts, outs: Layouts) -> Body:
    mapped = jax.vmap(lambda *args: tuple(body(*args)), in_axes=_axes(ins), axis_name=AXIS, axis_size=group.size)

    def call(*args: jax.Array) -> tuple[jax.Array, ...]:
        results = mapped(*_per_replica(group, args, ins))
        return tuple(r if layout == "stacked" else r[0] for r, layout in zip(results, outs, strict=True))

    return call


def _axes(layouts: Layouts) -> tuple[int | None, ...]:
    return tuple(None if layout == "replicated" else 0 for layout in layouts)


def _per_replica(group: Group, args: Sequence[jax.Array], layouts: Layouts) -> list[jax.Array]:
    """With rows cut into one entry a replica."""
    n = group.size
    return [
        a.reshape(n, len(a) // n, *a.shape[1:]) if layout == "rows" else a
        for a, layout in zip(args, layouts, strict=True)
    ]


ENGINES: dict[str, Callable[[Group, Body, Layouts, Layouts], Body]] = {
    "shard_map": _by_shard_map,
    "pmap": _by_pmap,
    "vmap": _by_vmap,
}
