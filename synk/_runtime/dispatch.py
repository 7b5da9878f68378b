"""Dispatch: one lock for calls, whole commits, and no more programs in flight than the runtime can finish."""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable
from importlib.metadata import version
from types import FrameType
from typing import Any

import jax

LOCK = threading.RLock()

# A CPU device admits 32 computations, and below jaxlib 0.12 one more multi-device program that is not awaited wedges
# its thread pool for good. Four in flight keep every core busy.
MAX_IN_FLIGHT = 4
JAXLIB = tuple(int(part) for part in version("jaxlib").split(".")[:2])
CPU_CAN_WEDGE = JAXLIB < (0, 12)

_in_flight: deque[tuple[Any, Callable[[Exception], None]]] = deque()  # Any: is_ready() is not typed


def wait_for_capacity(is_limited: bool) -> None:
    """Wait until one more program may be launched; forget those that have ended, but for the last few."""
    while len(_in_flight) >= MAX_IN_FLIGHT and (is_limited or _in_flight[0][0].is_ready()):
        _retire()


def retire_finished() -> None:
    """Forget the programs that have ended, and with them the values that they would bring back."""
    while _in_flight and _in_flight[0][0].is_ready():
        _retire()


def track(token: jax.Array, on_failure: Callable[[Exception], None]) -> None:
    """Note a program in flight by one of its outputs; `on_failure` is told if it dies."""
    _in_flight.append((token, on_failure))


def ignore_failure(error: Exception) -> None:
    """For programs without updates: JAX raises when their results are read, so nothing is to be done."""


def drain() -> None:
    """Wait for every program that synk has launched."""
    with LOCK:
        while _in_flight:
            _retire()


def _retire() -> None:
    token, on_failure = _in_flight.popleft()
    try:
        token.block_until_ready()
    except Exception as error:  # the program's own reader sees it too; here its variables learn of it
        on_failure(error)


class uninterrupted:
    """Hold Ctrl-C back in a `with` block: what is dispatched is committed."""

    __slots__ = ("before", "noted")

    def __enter__(self) -> None:
        self.noted: list[tuple[int, FrameType | None]] = []
        self.before: Any = None
        if threading.get_ident() == _MAIN:
            noted = self.noted
            self.before = signal.signal(signal.SIGINT, lambda number, frame: noted.append((number, frame)))

    def __exit__(self, *error: object) -> None:
        if self.before is not None:
            signal.signal(signal.SIGINT, self.before)
        if self.noted and callable(self.before):
            self.before(*self.noted[-1])


_MAIN = threading.main_thread().ident
