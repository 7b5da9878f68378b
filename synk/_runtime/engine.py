"""Engine: the one place that knows how JAX maps a program over replicas."""

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from .group import AXIS, Group, GroupAsOne, axis_named, replica_axis
from .layout import Layouts

Body: TypeAlias = Callable[..., Sequence[jax.Array]]
EngineName: TypeAlias = Literal["shard_map", "pmap", "jit"]


def spmd(group: Group, body: Body, ins: Layouts, outs: Layouts, engine: str = "shard_map") -> Body:
    """Map a body of one replica's arrays over a group, for use under `jax.jit`; `engine` is an entry of `ENGINES`."""
    axis = replica_axis()

    def named(*args: jax.Array) -> Sequence[jax.Array]:
        # JAX may trace the body later.
        with axis_named(axis):
            return body(*args)

    if isinstance(group, GroupAsOne):
        return _as_one(named, ins, outs)
    if group.is_simulated and group.size > 1:
        return _by_vmap(group, named, ins, outs)
    # Under jit, jax.pmap maps over the devices of this process alone.
    if jax.process_count() > 1 or engine == "jit":
        engine = "shard_map"
    return ENGINES[engine](group, named, ins, outs)


def run_rank_by_rank(
    group: Group, run: Callable[[int, list[jax.Array]], Sequence[jax.Array]], values: Sequence[jax.Array], ins: Layouts
) -> list[jax.Array]:
    """Run `run(rank, arrays)` for one simulated replica after another, and stack the results."""
    # Under jax.vmap every replica runs all branches (https://docs.jax.dev/en/latest/_autosummary/jax.lax.cond.html),
    # and callbacks inside loops are refused (https://github.com/jax-ml/jax/issues/20628).
    pairs = list(zip(_per_replica(group, values, ins), ins, strict=True))
    results = [
        run(rank, [value if layout == "replicated" else value[rank] for value, layout in pairs])
        for rank in range(group.size)
    ]
    return [jnp.stack(leaves) for leaves in zip(*results, strict=True)]


def _by_shard_map(group: Group, body: Body, ins: Layouts, outs: Layouts) -> Body:
    def block(*args: jax.Array) -> tuple[jax.Array, ...]:
        results = body(*(a[0] if layout == "stacked" else a for a, layout in zip(args, ins, strict=True)))
        return tuple(r[None] if layout == "stacked" else r for r, layout in zip(results, outs, strict=True))

    axis, mesh = replica_axis(), group.mesh
    if axis != AXIS:
        # The same devices under another name. Arrays stay on the mesh of the group.
        mesh = Mesh(mesh.devices, (axis,), axis_types=mesh.axis_types)
    cut = P() if group.is_simulated else P(axis)
    in_specs, out_specs = (
        tuple(P() if layout == "replicated" else cut for layout in layouts) for layouts in (ins, outs)
    )
    # check_vma=True would add collectives to gradients of values that are equal on all replicas. Gradients of synk's
    # functions are per replica, as those of pmap are: https://docs.jax.dev/en/latest/notebooks/shard_map.html
    return jax.shard_map(block, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _by_pmap(group: Group, body: Body, ins: Layouts, outs: Layouts) -> Body:
    mapped = jax.pmap(
        # pmap needs at least one mapped argument.
        lambda _, *args: tuple(body(*args)),
        axis_name=replica_axis(),
        devices=group.devices,
        in_axes=(0, *_axes(ins)),
        out_axes=_axes(outs),
    )
    ranks = np.arange(group.size, dtype=np.int32)

    def call(*args: jax.Array) -> tuple[jax.Array, ...]:
        return _of_replicas(mapped(ranks, *_per_replica(group, args, ins)), outs)

    return call


def _by_vmap(group: Group, body: Body, ins: Layouts, outs: Layouts) -> Body:
    mapped = jax.vmap(
        lambda *args: tuple(body(*args)), in_axes=_axes(ins), axis_name=replica_axis(), axis_size=group.size
    )

    def call(*args: jax.Array) -> tuple[jax.Array, ...]:
        results = mapped(*_per_replica(group, args, ins))
        results = [r[0] if layout == "replicated" else r for r, layout in zip(results, outs, strict=True)]
        return _of_replicas(results, outs)

    return call


def _as_one(body: Body, ins: Layouts, outs: Layouts) -> Body:
    """Run the body of one replica as it is, with an axis of size 1; XLA divides its work among the devices."""
    # No argument is mapped, so nothing gets an axis more.
    mapped = jax.vmap(
        lambda _, *args: tuple(body(*args)), in_axes=(0, *[None] * len(ins)), axis_name=replica_axis(), axis_size=1
    )

    def call(*args: jax.Array) -> tuple[jax.Array, ...]:
        results = mapped(
            np.zeros(1), *(a[0] if layout == "stacked" else a for a, layout in zip(args, ins, strict=True))
        )
        return tuple(r if layout == "stacked" else r[0] for r, layout in zip(results, outs, strict=True))

    return call


def dividing_mesh(group: Group) -> Mesh | None:
    """Return the mesh of devices among which XLA divides the work of one replica; None where there is one device."""
    mesh = group.rows.mesh if isinstance(group, GroupAsOne) else None
    return mesh if isinstance(mesh, Mesh) and mesh.size > 1 else None


def divided(group: Group, rows: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Divide rows of one replica that all devices make together; XLA divides what is computed from them alike."""
    if not isinstance(group, GroupAsOne):
        return rows
    # Inside a program rows need not divide:
    # https://docs.jax.dev/en/latest/_autosummary/jax.lax.with_sharding_constraint.html
    return [jax.lax.with_sharding_constraint(leaf, group.rows) for leaf in rows]


def _axes(layouts: Layouts) -> tuple[int | None, ...]:
    return tuple(None if layout == "replicated" else 0 for layout in layouts)


def _per_replica(group: Group, args: Sequence[jax.Array], layouts: Layouts) -> list[jax.Array]:
    """Reshape arrays of layout "rows" to one entry a replica on axis 0."""
    n = group.size
    return [
        a.reshape(n, len(a) // n, *a.shape[1:]) if layout == "rows" else a
        for a, layout in zip(args, layouts, strict=True)
    ]


def _of_replicas(results: Sequence[jax.Array], layouts: Layouts) -> tuple[jax.Array, ...]:
    """Reshape results with an entry a replica on axis 0 to arrays of layout "rows" where they are to be some."""
    pairs = zip(results, layouts, strict=True)
    return tuple(r.reshape(r.shape[0] * r.shape[1], *r.shape[2:]) if layout == "rows" else r for r, layout in pairs)


ENGINES: dict[str, Callable[[Group, Body, Layouts, Layouts], Body]] = {"shard_map": _by_shard_map, "pmap": _by_pmap}
