"""Group: the replicas on one mesh axis of devices, and the current group."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from traceback import walk_stack
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import jax
from jax.sharding import Mesh, NamedSharding

from .._base.bounded_cache import BoundedCache
from .._base.errors import SynkError
from .dispatch import CPU_CAN_WEDGE, LOCK, call_in_helpers
from .way import Absent, Accelerator, AsOne, Device, Mapped, Replicas, Way

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class Peers:
    """Hooks around launches for groups of several processes. In one process they do nothing."""

    def agree(self, what: str, text: str) -> None:
        """Wait until all processes are about to run `what`. Raise DisagreementError if their texts differ."""

    def before_launch(self, what: str) -> None:
        """Count a launch that all processes make."""

    def after_failure(self, what: str, error: Exception) -> Exception:
        """Tell the others that a program died here. Return the error that its variables are to name."""
        return error

    def translate_error(self, error: BaseException) -> SynkError | None:
        """Return the error of synk for an error of communication between processes, None for other errors."""

    def compare_values(self, what: str, arrays: Callable[[], Sequence[Any]], remedy: str, always: bool = False) -> None:
        """Raise DisagreementError if processes have different values. Compare them `always`, or if users ask for it."""

    def from_process_0(self, what: str, act: Callable[[], str]) -> str:
        """Let process 0 act, and return its result in every process, or raise its error there."""
        return act()


# The peers of a group in one process.
ALONE = Peers()


@dataclass(frozen=True, eq=False, repr=False)
class Group:
    """The replicas: one device each, on a mesh axis named `"replica"`, or all simulated on one device.

    Inside a `with` block the group is the current one; after it the previous group is. As a number it is its size.

    Attributes:
      devices: the device of each replica, in rank order.
      mesh: the `jax.sharding.Mesh` that arrays of the group live on (one device where simulated).
      is_simulated: whether the replicas share one device, by `jax.vmap`.
      accelerator: the kind of devices, for a group made by `synk.target`, whose devices are not here; else None.
      memory: bytes of a device that programs may use: by `memory=` of the call that made the group, else by the device;
        None if the device does not tell, as CPUs.

    Example:
      >>> import synk
      >>> with synk.simulate(3) as group:
      ...     print(group.size, synk.group() is group, list(range(group)))
      3 True [0, 1, 2]
    """

    is_simulated: bool
    _way: Way
    _peers: Peers
    # By the user: bytes, or a fraction.
    _memory: int | float | None = None
    # The group in which variables and data live, where all its devices make this one's replica.
    _of: Group | None = None
    _caches: WeakKeyDictionary[Any, BoundedCache] = field(default_factory=WeakKeyDictionary)
    _groups_before: list[Group | None] = field(default_factory=list)

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        return self._way.devices

    @cached_property
    def mesh(self) -> Mesh:
        return self._way.mesh

    @cached_property
    def accelerator(self) -> Accelerator | None:
        return self._way.accelerator

    @cached_property
    def size(self) -> int:
        """Return the number of replicas."""
        return len(self.devices)

    @property
    def platform(self) -> str:
        """Return the platform of the devices: "cpu", "gpu" or "tpu"."""
        return self.devices[0].platform

    def __index__(self) -> int:
        return self.size

    @cached_property
    def memory(self) -> int | None:
        if isinstance(self._memory, int):
            return self._memory
        usable = None if self.accelerator is None else self.accelerator.usable_memory
        if usable is None and self.platform != "cpu":
            stats: Mapping[str, int] = self.devices[self._local_ranks.start].memory_stats() or {}
            usable = stats.get("bytes_limit")
        return usable if usable is None or self._memory is None else int(usable * self._memory)

    @cached_property
    def _local_ranks(self) -> range:
        """Return the ranks whose devices belong to this process."""
        if self.accelerator is not None:
            return range(self.size)
        process = jax.process_index()
        # `init` has checked that the ranks of a process are consecutive.
        ranks = [rank for rank, device in enumerate(self.devices) if device.process_index == process]
        return range(ranks[0], ranks[-1] + 1) if ranks else range(0)

    @cached_property
    def _is_multi_process(self) -> bool:
        return len(self._home._local_ranks) < self._home.size

    @cached_property
    def _per_process(self) -> int:
        """Return the number of replicas of each process, if all have as many consecutive ranks; else 1."""
        owners = [device.process_index for device in self.devices]
        count = 1 if self.is_simulated else len(owners) // len(set(owners))
        is_even = all(len(set(owners[i : i + count])) == 1 for i in range(0, len(owners), count))
        return count if is_even and len(owners) % count == 0 else 1

    @cached_property
    def _has_one_device(self) -> bool:
        return self.mesh.devices.size == 1

    @cached_property
    def stacked(self) -> NamedSharding:
        """Return the sharding of an array with axis 0 over the replicas."""
        return self._way.stacked

    @cached_property
    def replicated(self) -> NamedSharding:
        """Return the sharding of a value that all replicas share."""
        return self._way.replicated

    @property
    def _home(self) -> Group:
        """Return the group in which variables and data live: itself, unless all its devices make one replica."""
        return self._of or self

    @cached_property
    def _as_one(self) -> Group:
        """Return the group of one replica that all devices make together; XLA divides its work among them."""
        way = AsOne(self._way, self.devices[self._local_ranks.start])
        return Group(self.is_simulated, way, self._peers, self._memory, self)

    @cached_property
    def _limits_in_flight(self) -> bool:
        """Check whether programs that nobody waits for can block the devices."""
        return CPU_CAN_WEDGE and self.platform == "cpu" and self.mesh.devices.size > 1

    def _derived(self, devices: tuple[Device, ...], is_simulated: bool) -> Group:
        # Made once, since plans and variables are kept by the group, and a group is equal to itself alone.
        return self._cached(
            self, (devices, is_simulated), lambda: make_group(devices, is_simulated, memory=self._memory)
        )

    def _cached(self, owner: Any, key: Hashable, make: Callable[[], Any]) -> Any:
        """Cache the results of `make`, a pure function of `key`, as long as group and owner live."""
        cache = self._caches.get(owner)
        if cache is None:
            cache = self._caches[owner] = BoundedCache()
        return cache.get(key, make)

    def _refuse_if_absent(self, what: str) -> None:
        if self.accelerator is not None:
            raise SynkError(
                f"{what}: the current group is {self}, whose devices are not here: functions compile and explain "
                f"there, and nothing runs. Leave the `with` block of synk.target, or call synk.init()."
            )

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self}: a group has the devices of a process, and is not copied or pickled. Make one there.")

    def __repr__(self) -> str:
        if self._of is not None:
            return repr(self._of)
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
    def __init__(self) -> None:
        self.group: Group | None = None
        self.make_default: Callable[[], Group]
        # The newest group, the group before it, and the lines under way when it was made.
        self._made: tuple[Group, Group | None, set[Any]] | None = None

    def use(self, new: Group) -> Group:
        """Make a new group the current one, for `with` or for good."""
        self._made = (new, self.group, set(_lines()))
        self.group = new
        return new

    def enter(self, group: Group) -> Group | None:
        """Make a group current in a `with` block, and return the group that is current after it."""
        # `with synk.init(3):` has made its group current already, and restores the group before. After
        # `g = synk.init(3)`, `with g:` leaves g current. The line that made the group tells the two apart.
        before = self.group
        if self._made is not None and self._made[0] is group is before:
            line = next((line for line in _lines() if not line[0].endswith("contextlib.py")), None)
            before = self._made[1] if line in self._made[2] else before
        self._made = None
        self.group = group
        return before

    def forget(self) -> None:
        self.group = self._made = None


def _lines() -> Iterator[tuple[str, int, int]]:
    """Yield file, frame and line of each line under way outside this package, the innermost first."""
    for frame, line in walk_stack(sys._getframe(1)):
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            yield frame.f_code.co_filename, id(frame), line


# The current group of the process, as users see it by `synk.group()`.
CURRENT = _CurrentGroup()


def _keep_client() -> None:
    """Keep JAX's client for good in a forked helper: its destructor waits for threads that a helper does not have."""
    if CURRENT.group is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(CURRENT.group.devices[0].client))


call_in_helpers(_keep_client)


def current_group() -> Group:
    """Return the current group. Make one of all devices on first use."""
    if CURRENT.group is None:
        # Threads that ask at once get the same group.
        with LOCK:
            return CURRENT.group or CURRENT.make_default()
    return CURRENT.group


def make_group(
    devices: tuple[Device, ...],
    is_simulated: bool,
    peers: Peers = ALONE,
    accelerator: Accelerator | None = None,
    memory: int | float | None = None,
) -> Group:
    if accelerator is not None:
        way = Absent(devices, accelerator)
    else:
        # A single replica needs no map, whatever it stands for.
        way = Mapped(devices) if is_simulated and len(devices) > 1 else Replicas(devices)
    return Group(is_simulated, way, peers, memory)
