"""Dispatch: the lock of calls, commits that signals cannot split, and the number of programs in flight."""

import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, NamedTuple, TypeAlias

OnFailure: TypeAlias = Callable[[Exception], None]

# signal.signal wraps these in look-ups of enum members, by exceptions, which cost some microseconds of each call.
_set_handler: Callable[[int, Any], Any] = getattr(sys.modules.get("_signal"), "signal", signal.signal)
_get_handler: Callable[[int], Any] = getattr(sys.modules.get("_signal"), "getsignal", signal.getsignal)
# Ctrl-C, the end of a job, and time limits.
_HELD_BACK = tuple(int(getattr(signal, name)) for name in ("SIGINT", "SIGTERM", "SIGALRM") if hasattr(signal, name))

LOCK = threading.RLock()
_MAIN = threading.main_thread().ident

# A CPU device admits 32 computations. Below jaxlib 0.12 one more program over several devices blocks its thread pool
# for good, unless somebody waits for it. Four programs in flight keep every core busy. Drop this at jaxlib>=0.12.
MAX_IN_FLIGHT = 4
JAXLIB = tuple(int(part) for part in version("jaxlib").split(".")[:2])
CPU_CAN_WEDGE = JAXLIB < (0, 12)


class InFlight(NamedTuple):
    """A program that was launched.

    Attributes:
      token: one output of the program, a `jax.Array`, to wait on.
      on_failure: called with the error if the program dies.
      peers: the `Peers` of its group, which learn of a failure first.
      name: the program's name in messages.
    """

    token: Any
    on_failure: OnFailure
    peers: Any
    name: str


IN_FLIGHT: deque[InFlight] = deque()
# The Python handler of SIGTERM that JAX's runtime replaced by one of its own, which Python does not see.
_replaced_by_runtime: Any = None


def wait_for_capacity(is_limited: bool) -> None:
    """Wait until one more program may be in flight, if the number is limited. Forget old programs that have ended."""
    while len(IN_FLIGHT) >= MAX_IN_FLIGHT and (is_limited or IN_FLIGHT[0].token.is_ready()):
        _retire()


def retire_finished() -> None:
    """Forget the programs that have ended. Mark variables of programs that died as lost."""
    with LOCK:
        while IN_FLIGHT and IN_FLIGHT[0].token.is_ready():
            _retire()


def ignore_failure(error: Exception) -> None:
    """Do nothing: JAX itself raises the error where results of the program are read."""


def drain() -> None:
    """Wait for every program that synk has launched."""
    with LOCK:
        while IN_FLIGHT:
            _retire()


def _retire() -> None:
    # An error that a signal handler raises must not count as a failure of the program.
    with uninterrupted():
        try:
            program = IN_FLIGHT.popleft()
        except IndexError:
            # A signal handler that ran just before has retired it.
            return
        try:
            program.token.block_until_ready()
        except Exception as error:
            # Whoever reads the results sees the error too. Here the program's variables learn of it.
            program.on_failure(program.peers.after_failure(program.name, error))


def look_for_dead() -> None:
    """Tell peers of programs that have died. Wait for no program, and not for the lock."""
    for program in tuple(IN_FLIGHT):
        try:
            if program.token.is_ready():
                program.token.block_until_ready()
        except Exception as error:
            program.peers.after_failure(program.name, error)


def leave_to_runtime() -> None:
    """Note that JAX's runtime has taken SIGTERM: the handler that Python reports is not called any more."""
    global _replaced_by_runtime
    if _replaced_by_runtime is None:
        _replaced_by_runtime = _get_handler(signal.SIGTERM)


class uninterrupted:
    """Hold back signals with Python handlers inside a `with` block, so that a dispatched program is also committed.

    Python runs handlers in the main thread, between two instructions (https://docs.python.org/3/library/signal.html),
    so other threads need no protection.
    """

    __slots__ = ("before", "note", "noted")

    def __enter__(self) -> None:
        # The handlers to restore, by signal, and the signals that came.
        self.before: dict[int, Any] = {}
        noted = self.noted = list[tuple[int, Any]]()
        self.note = lambda *came: noted.append(came)
        if threading.get_ident() != _MAIN:
            return
        try:
            for number in _HELD_BACK:
                handler = _get_handler(number)
                is_python = callable(handler) and handler is not _replaced_by_runtime
                if is_python or (number == signal.SIGINT and handler == signal.SIG_DFL):
                    self.before[number] = handler
                    # A signal that came since `_get_handler` may have changed the handler.
                    self.before[number] = _set_handler(number, self.note)
        except BaseException:
            # A signal that is not held back yet has raised.
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        """Restore the handlers, then deliver the signals that came. A handler may raise; the rest follows then."""
        try:
            while self.before:
                number = next(reversed(self.before))
                if _get_handler(number) is self.note:
                    _set_handler(number, self.before[number])
                del self.before[number]
            while self.noted:
                number, frame = self.noted.pop(0)
                # The handler of the signal before may have set another one.
                handler = _get_handler(number)
                if callable(handler):
                    handler(number, frame)
                else:
                    # The default action ends the process.
                    signal.raise_signal(number)
        finally:
            if self.before or self.noted:
                self.__exit__()
