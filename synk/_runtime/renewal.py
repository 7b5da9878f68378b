"""Renewal: what takes part when an elastic group loses a process, and goes on with other devices."""

from collections.abc import Callable
from typing import Protocol


class Keeper(Protocol):
    """Something whose values outlive the devices: shared variables."""

    def snapshot(self) -> Callable[[], None]:
        """Return what brings back the values as they are now, on the devices as they are now."""
        ...

    def can_move(self) -> bool:
        """Tell whether every process has all values, so that another one may get them."""
        ...

    def to_host(self) -> Callable[[], None]:
        """Copy all values to host memory. Return what places them on the devices that groups have then."""
        ...


KEEPERS: list[Keeper] = []
