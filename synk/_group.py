"""Group: the replicas, one mesh axis of devices, and which group is the current one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from . import _flight, _processes
from ._errors import entry

PyTree: TypeAlias = Any

Device: TypeAlias = jax.Device  # pyright: ignore[reportInvalidTypeForm]  # a class that JAX exports untyped

AXIS = "replica"


@dataclass(frozen=True, eq=False, repr=False)
class Group:
    """All replicas: one device each on one mesh axis named `"replica"`, or all simulated on one device.

    Used in `with`, it is the current group inside and the previous one is restored after.

    Attributes:
      devices: the device of each replica, in rank order.
      mesh: the `jax.sharding.Mesh` that arrays of the group live on (one device where simulated).
      is_simulated: whether the replicas share one device, by `jax.vmap`.

    Example:
      >>> import synk
      >>> with synk.simulate(3) as group:
      ...     print(group.size, synk.group() is group)
      3 True
    """

    devices: tuple[Device, ...]
    mesh: Mesh
    is_simulated: bool = False
    _before: list[Group | None] = field(default_factory=list)

    @property
    def size(self) -> int:
        """How many replicas there are."""
        return len(self.devices)

    @property
    def platform(self) -> str:
        """The platform of the devices: "cpu", "gpu" or "tpu"."""
        return self.devices[0].platform

    @cached_property
    def mine(self) -> range:
        """The ranks whose devices belong to this process: all, unless the group spans several."""
        here = jax.process_index()
        ranks = [rank for rank, device in enumerate(self.devices) if device.process_index == here]
        return range(ranks[0], ranks[-1] + 1) if ranks else range(0)

    @cached_property
    def spans(self) -> bool:
        """Does it span several processes?"""
        return len(self.mine) < self.size

    @cached_property
    def stacked(self) -> NamedSharding:
        """How an array with one entry a replica lies: axis 0 over the replicas."""
        return NamedSharding(self.mesh, P() if self.is_simulated else P(AXIS))

    @cached_property
    def everywhere(self) -> NamedSharding:
        """How a value that all replicas share lies."""
        return NamedSharding(self.mesh, P())

    @cached_property
    def is_on_one(self) -> bool:
        """Is there one device?"""
        return self.mesh.devices.size == 1

    @cached_property
    def is_bounded(self) -> bool:
        """Must programs in flight be counted?"""
        return _flight.is_bounded(self.platform, len(set(self.devices)))

    @cached_property
    def _spans(self) -> dict[tuple[int, int], Group]:
        return {(0, self.size): self}

    def span(self, start: int, stop: int) -> Group:
        """Return ranks `start` to `stop` as a group of their own."""
        if (start, stop) not in self._spans:
            devices = self.devices[start:stop]
            self._spans[start, stop] = _build(devices, self.is_simulated)
        return self._spans[start, stop]

    def simulated(self, n: int) -> Group:
        """Return a group of n replicas simulated on the first device."""
        if (-1, n) not in self._spans:
            self._spans[-1, n] = _build(self.devices[:1] * n, is_simulated=True)
        return self._spans[-1, n]

    def __repr__(self) -> str:
        ids = ", ".join(str(device.id) for device in dict.fromkeys(self.devices))
        kind = "simulated replicas on" if self.is_simulated else "replicas on"
        where = f" of {len({device.process_index for device in self.devices})} processes" if self.spans else ""
        return f"Group({self.size} {kind} {self.platform}:{ids}{where})"

    def __enter__(self) -> Group:
        global _current
        # `with synk.init(3):` has made this group current already; what it replaced comes back after.
        self._before.append(_current if _current is not self else _replaced.pop(self, None))
        _current = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        global _current
        _current = self._before.pop()


_current: Group | None = None
_replaced: dict[Group, Group | None] = {}


@entry
def init(
    devices: int | Sequence[Device] | None = None,
    *,
    distributed: bool = False,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    watchdog: float | None = None,
    exit_hook: bool = True,
    heartbeat: int = _processes.HEARTBEAT,
    shutdown: int = _processes.SHUTDOWN,
    start: int = _processes.START,
) -> Group:
    """Make a group of devices and make it the current one.

    On a machine with CPUs only, before JAX has started its backend, `init(n)` makes n virtual CPU devices (the
    option `jax_num_cpu_devices`).

    With `distributed=True` the group spans all processes of the program, each of which makes this call, first of all:
    it is `jax.distributed.initialize` with shorter time-outs. A launcher is found by JAX (SLURM, Open MPI, MPICH,
    Kubernetes), else the next three arguments, or `SYNK_COORDINATOR`, `SYNK_NUM_PROCESSES` and `SYNK_PROCESS_ID` in the
    environment (which `python -m synk launch` sets), say who is who. Where the runtime has been started already, as
    Ray does, it is used as it is.

    Args:
      devices: None for all of `jax.devices()`; an int n for the first n; or a sequence of distinct devices.
      distributed: whether other processes take part.
      coordinator: "host:port" of process 0.
      num_processes: how many there are.
      process_id: which one this is, from 0.
      watchdog: seconds without a call to synk after which this process prints the stacks of its threads and ends.
      exit_hook: whether an uncaught error ends this process at once, so that the others need not wait for it.
      heartbeat: seconds without a sign of life after which a process counts as dead.
      shutdown: seconds to wait for the others at the end.
      start: seconds to wait for them at the start.

    Returns:
      The group, to be used in `with` or left as it is.

    Raises:
      ValueError: fewer devices exist than were asked for, one is named twice, or no launcher is found.
      TypeError: `devices` is none of these.

    Example:
      >>> import synk
      >>> with synk.init(1) as group:
      ...     group.size
      1
    """
    if distributed:
        _processes.start(coordinator, num_processes, process_id, watchdog, exit_hook, heartbeat, shutdown, start)
    elif (coordinator, num_processes, process_id) != (None, None, None):
        raise ValueError("synk.init: coordinator, num_processes and process_id go with distributed=True.")
    else:
        _processes.watch(watchdog)
    if devices is None:
        return _use(_build(tuple(jax.devices())))
    if isinstance(devices, int | np.integer) and not isinstance(devices, bool):
        return _use(_build(_first(int(devices), distributed)))
    if isinstance(devices, str) or not isinstance(devices, Sequence):
        raise TypeError(f"synk.init: devices is {devices!r}; give None, a number or a list of jax.Devices.")
    chosen = tuple(devices)
    if not chosen or not all(isinstance(device, jax.Device) for device in chosen):
        raise TypeError(f"synk.init: devices is {devices!r}; give at least one jax.Device, e.g. jax.devices()[:2].")
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"synk.init: a device is named twice in {devices!r}; use synk.simulate to share one.")
    return _use(_build(chosen))


@entry
def simulate(n: int) -> Group:
    """Make a group of `n` replicas that share one device, and make it the current one.

    The per-replica program is the same, mapped by `jax.vmap` with a named axis: the same answers to rounding, no
    flags, no communication. For tests, laptops, and one GPU where eight are meant.

    Args:
      n: how many replicas, >= 1.

    Returns:
      The group.

    Raises:
      ValueError: `n` is below 1.
      TypeError: `n` is no integer.

    Example:
      >>> import jax.numpy as jnp, numpy as np, synk
      >>> with synk.simulate(8):
      ...     float(synk.function(jnp.mean, reduce="mean")(np.arange(11.0)))
      5.0
    """
    _check_count("synk.simulate", n)
    return _use(_build((jax.local_devices()[0],) * int(n), is_simulated=True))


@entry
def group() -> Group:
    """Return the current group, made of all devices on first use.

    Example:
      >>> import synk
      >>> with synk.simulate(2) as two:
      ...     synk.group() is two
      True
    """
    return _current if _current is not None else init()


def current() -> Group | None:
    """The current group, if one has been made."""
    return _current


@entry
def close() -> None:
    """Wait for running work and forget the current group; the next use makes a new one.

    Raises:
      SynkError: never; a program that died is reported where its results are read.

    Example:
      >>> import synk
      >>> synk.close()
    """
    global _current
    _flight.drain()
    _current = None
    _replaced.clear()


def _use(new: Group) -> Group:
    global _current
    _replaced.clear()
    _replaced[new] = _current
    _current = new
    return new


def _build(devices: tuple[Device, ...], is_simulated: bool = False) -> Group:
    on = devices[:1] if is_simulated else devices
    # Auto: newer JAX makes Explicit axes by default, which change what jnp functions accept.
    new = Group(devices, Mesh(np.array(on), (AXIS,), axis_types=(AxisType.Auto,)), is_simulated)
    here = jax.process_index()
    if not new.mine or any(device.process_index != here for device in devices[new.mine.start : new.mine.stop]):
        raise ValueError(
            f"synk.init: of the devices {devices}, those of one process must stand together, and each process that "
            f"runs this needs one; this is process {here}."
        )
    return new


def _first(n: int, is_distributed: bool = False) -> tuple[Device, ...]:
    """The first n devices; made, where they are virtual CPU devices that JAX has not counted yet."""
    _check_count("synk.init", n)
    if not is_distributed:
        _ask_for_cpu_devices(n)
    have = jax.devices()
    if len(have) < n and have[0].platform == "cpu":
        raise ValueError(
            f"synk.init: {n} replicas were asked for, but JAX has started with {len(have)} CPU device(s). "
            f"Set JAX_NUM_CPU_DEVICES={n} before Python starts, call synk.init({n}) before any other use of JAX, "
            f"or use synk.simulate({n})."
        )
    if len(have) < n:
        raise ValueError(
            f"synk.init: {n} replicas were asked for, but there are {len(have)} {have[0].platform} device(s). "
            f"Ask for at most {len(have)}, or use synk.simulate({n})."
        )
    return tuple(have[:n])


def _ask_for_cpu_devices(n: int) -> None:
    """Set the number of CPU devices where neither the user nor a started backend has fixed it."""
    chosen = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]  # options are not typed
    if chosen != -1 or "host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    try:
        jax.config.update("jax_num_cpu_devices", n)
    except RuntimeError:  # the backend has started: its devices are what there is
        return


def _check_count(call: str, n: int) -> None:
    if isinstance(n, bool) or not isinstance(n, int | np.integer):
        raise TypeError(f"{call}: the number of replicas is {n!r}; give an integer >= 1.")
    if n < 1:
        raise ValueError(f"{call}: {n} replicas were asked for; give an integer >= 1.")
