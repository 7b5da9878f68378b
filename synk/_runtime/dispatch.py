"""Dispatch: one lock for calls, whole commits, and where the runtime cannot finish many, few programs in flight."""

import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, NamedTuple, TypeAlias

OnFailure: TypeAlias = Callable[[Exception], None]

# signal.signal also looks names up for what it takes and gives, by exceptions: some microseconds of each call.
_set_handler: Callable[[int, Any], Any] = getattr(sys.modules.get("_signal"), "signal", signal.signal)
_get_handler: Callable[[int], Any] = getattr(sys.modules.get("_signal"), "getsignal", signal.getsignal)
# Ctrl-C, the end of a job, and time limits.
_HELD_BACK = tuple(int(getattr(signal, name)) for name in ("SIGINT", "SIGTERM", "SIGALRM") if hasattr(signal, name))

LOCK = threading.RLock()
_MAIN = threading.main_thread().ident

# A CPU device admits 32 computations, and below jaxlib 0.12 one more multi-device program that is not awaited wedges
# its thread pool for good. Four in flight keep every core busy.
MAX_IN_FLIGHT = 4
JAXLIB = tuple(int(part) for part in version("jaxlib").split(".")[:2])
CPU_CAN_WEDGE = JAXLIB < (0, 12)


class InFlight(NamedTuple):
    """A program under way."""

    token: Any  # one output of it; its is_ready() is not typed
    on_failure: OnFailure  # whom to tell if it dies
    peers: Any  # of its group, which learn of it first
    name: str  # what they call it


IN_FLIGHT: deque[InFlight] = deque()
_of_the_runtime: Any = None  # the handler of SIGTERM over which JAX has put one that Python does not know


def wait_for_capacity(is_limited: bool) -> None:
    """Where few may be in flight, wait until one more may be; forget those that have ended, but for the last few."""
    while len(IN_FLIGHT) >= MAX_IN_FLIGHT and (is_limited or IN_FLIGHT[0].token.is_ready()):
        _retire()


def retire_finished() -> None:
    """Forget the programs that have ended; variables of those that died learn that they are lost."""
    with LOCK:
        while IN_FLIGHT and IN_FLIGHT[0].token.is_ready():
            _retire()


def ignore_failure(error: Exception) -> None:
    """For programs without updates: JAX raises when their results are read, so nothing is to be done."""


def drain() -> None:
    """Wait for every program that synk has launched."""
    with LOCK:
        while IN_FLIGHT:
            _retire()


def _retire() -> None:
    with uninterrupted():  # what a handler raises is no failure of the program
        try:
            one = IN_FLIGHT.popleft()
        except IndexError:  # the handler of a signal has come first
            return
        try:
            one.token.block_until_ready()
        except Exception as error:  # the program's own reader sees it too; here its variables learn of it
            one.on_failure(one.peers.after_failure(one.name, error))


def look_for_dead() -> None:
    """Let peers learn of programs that have died, without waiting for those under way, nor for the lock."""
    for one in tuple(IN_FLIGHT):
        try:
            if one.token.is_ready():
                one.token.block_until_ready()
        except Exception as error:
            one.peers.after_failure(one.name, error)


def leave_to_runtime() -> None:
    """JAX's runtime has taken SIGTERM: what Python takes for its handler has no say, until another one is set."""
    global _of_the_runtime
    if _of_the_runtime is None:
        _of_the_runtime = _get_handler(signal.SIGTERM)


class uninterrupted:
    """Hold Ctrl-C, and signals that Python code handles, back in a `with` block: what is dispatched is committed."""

    __slots__ = ("before", "changed", "note", "noted")

    def __enter__(self) -> None:
        self.before: dict[int, Any] = {}
        self.changed: list[int] = []
        noted = self.noted = list[tuple[int, Any]]()
        self.note = lambda *came: noted.append(came)
        if threading.get_ident() == _MAIN:
            try:
                for number in _HELD_BACK:
                    handler = self.before[number] = _get_handler(number)
                    is_python = callable(handler) and handler is not _of_the_runtime
                    if is_python or (number == signal.SIGINT and handler == signal.SIG_DFL):
                        self.changed.append(number)
                        self.before[number] = _set_handler(number, self.note)  # which one that came before may have set
            except BaseException:  # of one that is not held back yet
                self.__exit__()
                raise

    def __exit__(self, *error: object) -> None:
        try:
            self._give_back()
        finally:
            self._pass_on()

    def _give_back(self) -> None:
        """The handlers, each of which may raise as soon as it is back."""
        try:
            while self.changed:
                number = self.changed[-1]
                if _get_handler(number) is self.note:
                    _set_handler(number, self.before[number])
                self.changed.pop()
        finally:
            if self.changed:
                self._give_back()

    def _pass_on(self) -> None:
        """What came, to those who wait for it, each of which may raise."""
        while self.noted:
            number, frame = self.noted.pop(0)
            handler = _get_handler(number)  # the one before may have set it
            try:
                if callable(handler):
                    handler(number, frame)
                else:
                    signal.raise_signal(number)  # which ends the process
            finally:
                self._pass_on()
