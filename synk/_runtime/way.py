"""Way: how a body of one replica becomes a program of all replicas, and where their arrays lie.

A group has one way. To add a way, write a subclass of `Way`: no other module asks how bodies run.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# JAX exports the class without a type.
Device: TypeAlias = jax.Device  # pyright: ignore[reportInvalidTypeForm]
Body: TypeAlias = Callable[..., Sequence[jax.Array]]
# Between programs an array is *stacked* (one entry a replica on axis 0), *rows* (axis 0 cut over the replicas) or
# *replicated* (one value that all share). A body sees one replica's part of each.
Layout: TypeAlias = Literal["replicated", "stacked", "rows"]
Layouts: TypeAlias = Sequence[Layout]
EngineName: TypeAlias = Literal["shard_map", "pmap", "jit"]

# The name of the replicas' axis in every group's mesh.
AXIS = "replica"

# Each thread traces functions of its own, whose axis may have another name.
_name = ContextVar("name of the replicas' axis", default=AXIS)


def replica_axis() -> str:
    """Return the name of the replicas' axis in the function or program that is traced around this line."""
    return _name.get()


@contextmanager
def axis_named(name: str) -> Generator[None]:
    """Trace functions and programs, inside a `with` block, in which the replicas' axis has this name."""
    token = _name.set(name)
    try:
        yield
    finally:
        _name.reset(token)


@dataclass(frozen=True)
class Accelerator:
    """Memory and speeds of a kind of device, by its maker's data sheet.

    Attributes:
      name: what `synk.target` calls them.
      memory: bytes a device.
      usable_memory: of these, what programs may use as JAX is set up (XLA_PYTHON_CLIENT_MEM_FRACTION, of GPUs).
      flops: dense bfloat16 operations a second a device.
      bandwidth: bytes a second between a device and its memory.
      link: bytes a second, one way, between devices of one host.
    """

    name: str
    memory: int
    usable_memory: int
    flops: float
    bandwidth: float
    link: float


class Way:
    """Base of the ways to run the body of one replica on all of them.

    Attributes:
      devices: the device of each replica, in rank order.
      mesh: the mesh on which arrays lie.
      in_words: which replica runs which rows, for `explain`.
      is_one: whether one replica takes all rows of a call, so that there are no parts.
      shares_device: whether all replicas run on one device, mapped together: a branch that one takes, all take.
      accelerator: the kind of devices that are not here, on which nothing runs; None where they are.
    """

    in_words = "each replica runs its rows"
    is_one = shares_device = False
    accelerator: Accelerator | None = None

    def __init__(self, devices: tuple[Device, ...]) -> None:
        # Under Explicit axes jnp functions ask users for shardings:
        # https://docs.jax.dev/en/latest/parallel.html
        on = np.array(devices[:1] if self.shares_device else devices)
        self.devices, self.mesh = devices, Mesh(on, (AXIS,), axis_types=(AxisType.Auto,))

    @property
    def size(self) -> int:
        return len(self.devices)

    # Where arrays lie.

    @cached_property
    def replicated(self) -> NamedSharding:
        """Return the sharding of a value that all replicas share."""
        return NamedSharding(self.mesh, P())

    @cached_property
    def stacked(self) -> NamedSharding:
        """Return the sharding of an array with axis 0 over the replicas."""
        return NamedSharding(self.mesh, P(AXIS))

    @property
    def rows(self) -> NamedSharding:
        """Return the sharding of rows, which are cut over the replicas."""
        return self.stacked

    def rows_sent(self, rows: int) -> int:
        """Return how many rows an array has that brings each replica so many."""
        return rows * self.size

    # Inside a program.

    def map(self, body: Body, ins: Layouts, outs: Layouts, engine: str = "shard_map") -> Body:
        """Map a body of one replica's arrays over the replicas, for use under `jax.jit`."""
        axis = replica_axis()

        def named(*args: jax.Array) -> Sequence[jax.Array]:
            # JAX may trace the body later.
            with axis_named(axis):
                return body(*args)

        return self._mapped(named, ins, outs, engine)

    def _mapped(self, body: Body, ins: Layouts, outs: Layouts, engine: str) -> Body:
        raise NotImplementedError

    def in_turns(
        self, run: Callable[[int, list[jax.Array]], Sequence[jax.Array]], values: Sequence[jax.Array], ins: Layouts
    ) -> list[jax.Array]:
        """Run `run(rank, arrays)` for one replica after another on one device, and stack the results."""
        # Under jax.vmap every replica runs all branches
        # (https://docs.jax.dev/en/latest/_autosummary/jax.lax.cond.html), and callbacks inside loops are refused
        # (https://github.com/jax-ml/jax/issues/20628).
        pairs = list(zip(self._per_replica(values, ins), ins, strict=True))
        results = [
            run(rank, [value if layout == "replicated" else value[rank] for value, layout in pairs])
            for rank in range(self.size)
        ]
        return [jnp.stack(leaves) for leaves in zip(*results, strict=True)]

    def rank(self) -> Any:
        """Return the rank of the replica whose body is traced around this line."""
        return jax.lax.axis_index(replica_axis())

    @property
    def dividing_mesh(self) -> Mesh | None:
        """Return the mesh of devices among which XLA divides the work of one replica; None where there is one."""
        return None

    def divided(self, rows: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Divide the rows of one replica among its devices; XLA divides what is computed from them alike."""
        return rows

    def fits_in(self, mesh: Mesh | AbstractMesh) -> bool:
        """Tell whether its programs may be traced inside a trace over another mesh."""
        return False

    def refuse_parts(self, name: str, asked: Mapping[str, bool]) -> None:
        """Raise ValueError if a call asks for parts, or for rows of replicas, where there are none."""

    def _per_replica(self, args: Sequence[jax.Array], layouts: Layouts) -> list[jax.Array]:
        """Reshape arrays of layout "rows" to one entry a replica on axis 0."""
        n, pairs = self.size, zip(args, layouts, strict=True)
        return [a.reshape(n, len(a) // n, *a.shape[1:]) if layout == "rows" else a for a, layout in pairs]


class Replicas(Way):
    """Each replica runs on a device of its own, by `jax.shard_map` or `jax.pmap`."""

    def _mapped(self, body: Body, ins: Layouts, outs: Layouts, engine: str) -> Body:
        # Under jit, jax.pmap maps over the devices of this process alone.
        if engine == "pmap" and jax.process_count() == 1:
            return self._by_pmap(body, ins, outs)
        return self._by_shard_map(body, ins, outs)

    def _by_shard_map(self, body: Body, ins: Layouts, outs: Layouts) -> Body:
        def block(*args: jax.Array) -> tuple[jax.Array, ...]:
            results = body(*(a[0] if layout == "stacked" else a for a, layout in zip(args, ins, strict=True)))
            return tuple(r[None] if layout == "stacked" else r for r, layout in zip(results, outs, strict=True))

        axis, mesh = replica_axis(), self.mesh
        if axis != AXIS:
            # The same devices under another name. Arrays stay on the mesh of the group.
            mesh = Mesh(mesh.devices, (axis,), axis_types=mesh.axis_types)
        in_specs, out_specs = (
            tuple(P() if layout == "replicated" else P(axis) for layout in layouts) for layouts in (ins, outs)
        )
        # check_vma=True would add collectives to gradients of values that are equal on all replicas. Gradients of
        # synk's functions are per replica, as those of pmap are:
        # https://docs.jax.dev/en/latest/notebooks/shard_map.html
        return jax.shard_map(block, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def _by_pmap(self, body: Body, ins: Layouts, outs: Layouts) -> Body:
        mapped = jax.pmap(
            # pmap needs at least one mapped argument.
            lambda _, *args: tuple(body(*args)),
            axis_name=replica_axis(),
            devices=self.devices,
            in_axes=(0, *_axes(ins)),
            out_axes=_axes(outs),
        )
        ranks = np.arange(self.size, dtype=np.int32)

        def call(*args: jax.Array) -> tuple[jax.Array, ...]:
            return _of_replicas(mapped(ranks, *self._per_replica(args, ins)), outs)

        return call


class Mapped(Way):
    """All replicas run on one device, mapped together by `jax.vmap`."""

    shares_device = True

    @cached_property
    def stacked(self) -> NamedSharding:
        return self.replicated

    def _mapped(self, body: Body, ins: Layouts, outs: Layouts, engine: str) -> Body:
        mapped = jax.vmap(
            lambda *args: tuple(body(*args)), in_axes=_axes(ins), axis_name=replica_axis(), axis_size=self.size
        )

        def call(*args: jax.Array) -> tuple[jax.Array, ...]:
            results = mapped(*self._per_replica(args, ins))
            results = [r[0] if layout == "replicated" else r for r, layout in zip(results, outs, strict=True)]
            return _of_replicas(results, outs)

        return call

    def fits_in(self, mesh: Mesh | AbstractMesh) -> bool:
        return set(mesh.axis_types) == {AxisType.Auto}


class AsOne(Way):
    """All devices of another way make one replica, which takes all rows; XLA divides its work among them.

    Its arrays lie as those of the other way do.
    """

    in_words = "all devices make one replica, among which XLA divides the work"
    is_one = True

    def __init__(self, home: Way, device: Device) -> None:
        self.home, self.devices, self.mesh = home, (device,), home.mesh
        self.shares_device, self.accelerator = home.shares_device, home.accelerator

    @cached_property
    def stacked(self) -> NamedSharding:
        return self.home.replicated

    @property
    def rows(self) -> NamedSharding:
        return self.home.stacked

    def rows_sent(self, rows: int) -> int:
        return -(-rows // self.home.size) * self.home.size

    def _mapped(self, body: Body, ins: Layouts, outs: Layouts, engine: str) -> Body:
        """Run the body of one replica as it is, with an axis of size 1."""
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

    def rank(self) -> Any:
        # The index of an axis of vmap would bring the axis into all that is computed of it.
        return jnp.int32(0)

    @property
    def dividing_mesh(self) -> Mesh | None:
        return self.mesh if self.mesh.size > 1 else None

    def divided(self, rows: Sequence[jax.Array]) -> Sequence[jax.Array]:
        # Inside a program rows need not divide:
        # https://docs.jax.dev/en/latest/_autosummary/jax.lax.with_sharding_constraint.html
        return [jax.lax.with_sharding_constraint(leaf, self.rows) for leaf in rows]

    def fits_in(self, mesh: Mesh | AbstractMesh) -> bool:
        return self.home.fits_in(mesh)

    def refuse_parts(self, name: str, asked: Mapping[str, bool]) -> None:
        for what in [what for what, is_asked in asked.items() if is_asked]:
            raise ValueError(
                f'{name}: engine="jit" runs all rows of a call as one part, so it does not go with {what}. Leave out '
                f"one of the two."
            )


class Absent(Replicas):
    """Replicas on devices that are not here: functions compile and explain there, and nothing runs."""

    def __init__(self, devices: tuple[Device, ...], accelerator: Accelerator) -> None:
        super().__init__(devices)
        self.accelerator = accelerator


def _axes(layouts: Layouts) -> tuple[int | None, ...]:
    return tuple(None if layout == "replicated" else 0 for layout in layouts)


def _of_replicas(results: Sequence[jax.Array], layouts: Layouts) -> tuple[jax.Array, ...]:
    """Reshape results with an entry a replica on axis 0 to arrays of layout "rows" where they are to be some."""
    pairs = zip(results, layouts, strict=True)
    return tuple(r.reshape(r.shape[0] * r.shape[1], *r.shape[2:]) if layout == "rows" else r for r, layout in pairs)
