"""Group: the replicas, one mesh axis of devices, and which group is the current one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from traceback import walk_stack
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .._base.bounded_cache import BoundedCache
from .._base.errors import SynkError
from .dispatch import CPU_CAN_WEDGE, LOCK

Device: TypeAlias = jax.Device  # pyright: ignore[reportInvalidTypeForm]  # a class that JAX exports untyped

AXIS = "replica"
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


@dataclass(frozen=True)
class Accelerator:
    """What devices can do, by their makers' data sheets.

    Attributes:
      name: what `synk.target` calls them.
      memory: bytes a device.
      usable_memory: of these, what programs may use as JAX is set up (XLA_PYTHON_CLIENT_MEM_FRACTION, of GPUs).
      flops: dense bfloat16 operations a second a device.
      bandwidth: bytes a second between a device and its memory.
      link: bytes a second, one way, between devices of one host.

    Example:
      >>> import synk
      >>> synk.group().accelerator is None  # of devices that are here
      True
    """

    name: str
    memory: int
    usable_memory: int
    flops: float
    bandwidth: float
    link: float


class Peers:
    """What a group does about other processes around its launches: in one process nothing."""

    def agree(self, what: str, text: str) -> None:
        """Wait until every process is about to run `what`, its `text` equal; DisagreementError where one is not."""

    def before_launch(self, what: str) -> None:
        """Count a launch that every process makes."""

    def after_failure(self, what: str, error: Exception) -> Exception:
        """A program that every process has launched died here; what its variables are to say is the cause."""
        return error

    def translate_error(self, error: BaseException) -> SynkError | None:
        """An error of the communication between processes as synk's; None where it is another."""

    def compare_values(self, what: str, arrays: Callable[[], Sequence[Any]], remedy: str, always: bool = False) -> None:
        """DisagreementError where processes differ in values: compared `always`, or where users ask for it."""

    def from_process_0(self, what: str, act: Callable[[], str]) -> str:
        """Let process 0 act; every process has its result, or raises its error."""
        return act()


@dataclass(frozen=True, eq=False, repr=False)
class Group:
    """All replicas: one device each on one mesh axis named `"replica"`, or all simulated on one device.

    Used in `with`, it is the current group inside and the previous one is restored after. Where a number is wanted, it
    is its size.

    Attributes:
      devices: the device of each replica, in rank order.
      mesh: the `jax.sharding.Mesh` that arrays of the group live on (one device where simulated).
      is_simulated: whether the replicas share one device, by `jax.vmap`.
      accelerator: of a group made by `synk.target`, what its devices are, which are not here; else None.
      memory: bytes of a device that programs may use: as `memory=` had it when the group was made, else what the device
        tells; None where it tells nothing, as CPUs.

    Example:
      >>> import synk
      >>> with synk.simulate(3) as group:
      ...     print(group.size, synk.group() is group, list(range(group)))
      3 True [0, 1, 2]
    """

    devices: tuple[Device, ...]
    mesh: Mesh
    is_simulated: bool
    _peers: Peers
    accelerator: Accelerator | None = None
    _memory: int | float | None = None  # as its user gave it: bytes, or a fraction
    _caches: WeakKeyDictionary[Any, BoundedCache] = field(default_factory=WeakKeyDictionary)
    _groups_before: list[Group | None] = field(default_factory=list)

    @property
    def size(self) -> int:
        """How many replicas there are."""
        return len(self.devices)

    @property
    def platform(self) -> str:
        """The platform of the devices: "cpu", "gpu" or "tpu"."""
        return self.devices[0].platform

    def __index__(self) -> int:
        return self.size

    @cached_property
    def memory(self) -> int | None:
        if isinstance(self._memory, int):
            return self._memory
        told = None if self.accelerator is None else self.accelerator.usable_memory
        if told is None and self.platform != "cpu":
            stats: Mapping[str, int] = self.devices[self._local_ranks.start].memory_stats() or {}
            told = stats.get("bytes_limit")
        return told if told is None or self._memory is None else int(told * self._memory)

    @cached_property
    def _local_ranks(self) -> range:
        """The ranks whose devices belong to this process: all, unless the group spans several."""
        if self.accelerator is not None:
            return range(self.size)
        here = jax.process_index()
        ranks = [rank for rank, device in enumerate(self.devices) if device.process_index == here]
        return range(ranks[0], ranks[-1] + 1) if ranks else range(0)

    @cached_property
    def _is_multi_process(self) -> bool:
        """Does it span several processes?"""
        return len(self._local_ranks) < self.size

    @cached_property
    def _per_process(self) -> int:
        """How many replicas each process has, in the order of ranks; 1 where they do not lie so."""
        owners = [device.process_index for device in self.devices]
        count = 1 if self.is_simulated else len(owners) // len(set(owners))
        is_even = all(len(set(owners[i : i + count])) == 1 for i in range(0, len(owners), count))
        return count if is_even and len(owners) % count == 0 else 1

    @cached_property
    def _has_one_device(self) -> bool:
        """Is there one device?"""
        return self.mesh.devices.size == 1

    @cached_property
    def stacked(self) -> NamedSharding:
        """The sharding of an array with axis 0 over the replicas."""
        return NamedSharding(self.mesh, PartitionSpec() if self.is_simulated else PartitionSpec(AXIS))

    @cached_property
    def replicated(self) -> NamedSharding:
        """The sharding of a value that all replicas share."""
        return NamedSharding(self.mesh, PartitionSpec())

    @cached_property
    def _limits_in_flight(self) -> bool:
        """Can launches that nobody waits for wedge the devices?"""
        return CPU_CAN_WEDGE and self.platform == "cpu" and len(set(self.devices)) > 1

    def _subgroup(self, start: int, stop: int) -> Group:
        """Return ranks `start` to `stop`, of this process, as a group of their own."""
        if (start, stop) == (0, self.size):
            return self
        return self._cached(
            self, (start, stop), lambda: make_group(self.devices[start:stop], self.is_simulated, memory=self._memory)
        )

    def _simulated(self, n: int) -> Group:
        """Return a group of n replicas simulated on this group's first device."""
        return self._cached(self, n, lambda: make_group(self.devices[:1] * n, True, memory=self._memory))

    def _cached(self, owner: Any, key: Hashable, make: Callable[[], Any]) -> Any:
        """Keep what `make` gives, a pure function of `key`, as long as group and owner live; the newest ones alone."""
        cache = self._caches.get(owner)
        if cache is None:
            cache = self._caches[owner] = BoundedCache()
        return cache.get(key, make)

    def _refuse_if_absent(self, what: str) -> None:
        """SynkError where something is to run or to be placed on devices that are not here."""
        if self.accelerator is not None:
            raise SynkError(
                f"{what}: the current group is {self}, whose devices are not here: functions compile and explain "
                f"there, and nothing runs. Leave the `with` block of synk.target, or call synk.init()."
            )

    def __repr__(self) -> str:
        if self.accelerator is not None:
            hosts = len({device.process_index for device in self.devices})
            where = f" in {hosts} hosts" if hosts > 1 else ""
            return f"Group(target of {self.size} {self.accelerator.name}{where})"
        ids = ", ".join(str(device.id) for device in dict.fromkeys(self.devices))
        kind = "simulated " * self.is_simulated + ("replica" if self.size == 1 else "replicas")
        processes = len({device.process_index for device in self.devices})
        where = f" of {processes} processes" if self._is_multi_process else ""
        return f"Group({self.size} {kind} on {self.platform}:{ids}{where})"

    def __enter__(self) -> Group:
        self._groups_before.append(CURRENT.enter(self))
        return self

    def __exit__(self, *error: object) -> None:
        CURRENT.group = self._groups_before.pop()


class _CurrentGroup:
    """The one mutable global: the current group, if one has been made."""

    def __init__(self) -> None:
        self.group: Group | None = None
        self.make_default: Callable[[], Group]  # of all devices
        self._made: tuple[Group, Group | None, set[Any]] | None = None  # the newest, what was before, where it was made

    def use(self, new: Group) -> Group:
        """Make a new group the current one, for `with` or for good."""
        self._made = (new, self.group, set(_lines()))
        self.group = new
        return new

    def enter(self, group: Group) -> Group | None:
        """Make it current in a `with` block; return what is current after it.

        `with synk.init(3):` has made its group current already, so what that replaced comes back. After
        `g = synk.init(3)`, `with g:` leaves g current. What tells them apart is the line that made the group.
        """
        before = self.group
        if self._made is not None and self._made[0] is group is before:
            line = next((line for line in _lines() if not line[0].endswith("contextlib.py")), None)
            before = self._made[1] if line in self._made[2] else before
        self._made = None
        self.group = group
        return before

    def forget(self) -> None:
        """Let there be none."""
        self.group = self._made = None


def _lines() -> Iterator[tuple[str, int, int]]:
    """Where the lines under way outside this package are: file, frame and line, the innermost first."""
    for frame, line in walk_stack(sys._getframe(1)):
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            yield frame.f_code.co_filename, id(frame), line


CURRENT = _CurrentGroup()


def current_group() -> Group:
    """The current group, made of all devices on first use."""
    if CURRENT.group is None:
        with LOCK:  # threads that ask at once get the same
            return CURRENT.group or CURRENT.make_default()
    return CURRENT.group


def make_group(
    devices: tuple[Device, ...],
    is_simulated: bool,
    peers: Peers | None = None,
    accelerator: Accelerator | None = None,
    memory: int | float | None = None,
) -> Group:
    """A group of these devices."""
    on = devices[:1] if is_simulated else devices
    # Auto: newer JAX makes Explicit axes by default, which change what jnp functions accept.
    mesh = Mesh(np.array(on), (AXIS,), axis_types=(AxisType.Auto,))
    return Group(devices, mesh, is_simulated, peers or Peers(), accelerator, memory)
