"""Flight: one lock for calls, whole commits, and no more programs under way than the runtime can finish."""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable, Sequence
from importlib.metadata import version
from types import FrameType
from typing import Any, Protocol

import jax

LOCK = threading.RLock()

# A CPU device admits 32 computations, and below jaxlib 0.12 one more multi-device program that is not awaited wedges
# its thread pool for good. Four in flight keep every core busy.
BOUND = 4
_BOUNDED_JAXLIB = tuple(int(part) for part in version("jaxlib").split(".")[:2]) < (0, 12)


class Loan(Protocol):
    """What a program reads until it ends."""

    def give_back(self) -> None:
        """It has ended."""
        ...


_flying: deque[tuple[Any, Callable[[Exception], None], Sequence[Loan]]] = deque()


def is_bounded(platform: str, devices: int) -> bool:
    """Can launches that nobody waits for wedge these devices?"""
    return _BOUNDED_JAXLIB and platform == "cpu" and devices > 1


def admit(bounded: bool) -> None:
    """Wait until one more program may be launched; forget those that have ended, but for the last few."""
    while len(_flying) >= BOUND and (bounded or _flying[0][0].is_ready()):
        _land()


def settle() -> None:
    """Forget the programs that have ended, and with them the values that they would bring back."""
    while _flying and _flying[0][0].is_ready():
        _land()


def launched(token: jax.Array, failed: Callable[[Exception], None], loans: Sequence[Loan] = ()) -> None:
    """Note a program in flight by one of its outputs; `failed` is told if it dies, and `loans` if it ends well."""
    _flying.append((token, failed, loans))


def drain() -> None:
    """Wait for every program that synk has launched."""
    with LOCK:
        while _flying:
            _land()


def _land() -> None:
    token, failed, loans = _flying.popleft()
    try:
        token.block_until_ready()
    except Exception as error:  # the program's own reader sees it too; here its variables learn of it
        failed(error)
    else:
        for loan in loans:
            loan.give_back()


class uninterrupted:
    """Hold Ctrl-C back in a `with` block: what is dispatched is committed."""

    __slots__ = ("before", "noted")

    def __enter__(self) -> None:
        self.noted: list[tuple[int, FrameType | None]] = []
        self.before: Any = None
        if threading.get_ident() == _MAIN:
            noted = self.noted
            self.before = _set_handler(signal.SIGINT, lambda number, frame: noted.append((number, frame)))

    def __exit__(self, *error: object) -> None:
        if self.before is not None:
            _set_handler(signal.SIGINT, self.before)
        if self.noted and callable(self.before):
            self.before(*self.noted[-1])


_MAIN = threading.main_thread().ident

try:  # signal.signal turns handlers into enums and back in Python; what it calls takes a tenth of its time (30 us)
    from _signal import signal as _set_handler  # type: ignore[import]  # CPython only
except ImportError:
    from signal import signal as _set_handler
