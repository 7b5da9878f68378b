"""Dispatch: one lock for calls, whole commits, and where the runtime cannot finish many, few programs in flight."""

import signal
import threading
from collections import deque
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, TypeAlias

OnFailure: TypeAlias = Callable[[Exception], None]

LOCK = threading.RLock()
_MAIN = threading.main_thread().ident

# A CPU device admits 32 computations, and below jaxlib 0.12 one more multi-device program that is not awaited wedges
# its thread pool for good. Four in flight keep every core busy.
MAX_IN_FLIGHT = 4
JAXLIB = tuple(int(part) for part in version("jaxlib").split(".")[:2])
CPU_CAN_WEDGE = JAXLIB < (0, 12)

# One output of each program under way, and whom to tell if it dies. Any: is_ready() is not typed.
IN_FLIGHT: deque[tuple[Any, OnFailure]] = deque()


def wait_for_capacity(is_limited: bool) -> None:
    """Where few may be in flight, wait until one more may be; forget those that have ended, but for the last few."""
    while len(IN_FLIGHT) >= MAX_IN_FLIGHT and (is_limited or IN_FLIGHT[0][0].is_ready()):
        _retire()


def retire_finished() -> None:
    """Forget the programs that have ended, and with them the values that they would bring back."""
    with LOCK:
        while IN_FLIGHT and IN_FLIGHT[0][0].is_ready():
            _retire()


def ignore_failure(error: Exception) -> None:
    """For programs without updates: JAX raises when their results are read, so nothing is to be done."""


def drain() -> None:
    """Wait for every program that synk has launched."""
    with LOCK:
        while IN_FLIGHT:
            _retire()


def settle() -> None:
    """Forget the programs that have ended; wait for those that would bring back old values, had they died."""
    with LOCK:
        retire_finished()
        if any(getattr(on_failure, "brings_back", False) for _, on_failure in IN_FLIGHT):
            drain()


def _retire() -> None:
    token, on_failure = IN_FLIGHT.popleft()
    try:
        token.block_until_ready()
    except Exception as error:  # the program's own reader sees it too; here its variables learn of it
        on_failure(error)


class uninterrupted:
    """Hold Ctrl-C back in a `with` block: what is dispatched is committed."""

    __slots__ = ("before", "noted")

    def __enter__(self) -> None:
        self.before: Any = None
        self.noted: list[Any] = []
        if threading.get_ident() == _MAIN:
            noted = self.noted
            self.before = signal.signal(signal.SIGINT, lambda *ctrl_c: noted.append(ctrl_c))

    def __exit__(self, *error: object) -> None:
        if self.before is not None:
            signal.signal(signal.SIGINT, self.before)
        if self.noted and callable(self.before):
            self.before(*self.noted[-1])
