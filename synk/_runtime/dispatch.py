"""Dispatch: the lock of calls, commits that signals cannot split, and the number of programs in flight."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, TypeAlias

OnFailure: TypeAlias = Callable[[Exception], None]

# signal.signal wraps these in look-ups of enum members, by exceptions, which cost some microseconds of each call.
_set_handler: Callable[[int, Any], Any] = getattr(sys.modules.get("_signal"), "signal", signal.signal)
_get_handler: Callable[[int], Any] = getattr(sys.modules.get("_signal"), "getsignal", signal.getsignal)
# Ctrl-C, the end of a job, and time limits.
_HELD_BACK = tuple(int(getattr(signal, name)) for name in ("SIGINT", "SIGTERM", "SIGALRM") if hasattr(signal, name))

_SIGINT = int(signal.SIGINT)

# Calls and commits of all threads take turns: updates of a call take effect together.
LOCK = threading.RLock()
_get_ident = threading.get_ident
_MAIN = threading.main_thread().ident

# A CPU device admits 32 computations. Below jaxlib 0.12 one more program over several devices blocks its thread pool
# for good, unless somebody waits for it. Four programs in flight keep every core busy. Drop this at jaxlib>=0.12.
MAX_IN_FLIGHT = 4
JAXLIB = tuple(int(part) for part in version("jaxlib").split(".")[:2])
CPU_CAN_WEDGE = JAXLIB < (0, 12)


class InFlight:
    """A program that was launched, equal only to itself."""

    # The token is one output of the program, a `jax.Array`, to wait on. The peers of its group learn of a failure
    # before `on_failure` does.
    __slots__ = ("name", "on_failure", "peers", "token")

    def __init__(self, token: Any, on_failure: OnFailure, peers: Any, name: str) -> None:
        self.token, self.on_failure, self.peers, self.name = token, on_failure, peers, name


# In the order of their launches.
IN_FLIGHT: dict[InFlight, None] = {}
# The Python handler of SIGTERM that JAX's runtime replaced by one of its own, which Python does not see.
_replaced_by_runtime: Any = None


def wait_for_capacity(is_limited: bool) -> None:
    """Wait until one more program may be in flight, if the number is limited. Forget old programs that have ended."""
    # Where nothing limits the number, only programs that have ended are forgotten: a launch must not wait for the
    # devices.
    while len(programs := tuple(IN_FLIGHT)) >= MAX_IN_FLIGHT and (is_limited or programs[0].token.is_ready()):
        _retire(programs[0])


def retire_finished() -> None:
    """Forget the programs that have ended. Mark variables of programs that died as lost."""
    with LOCK:
        # A copy, since a signal handler that runs meanwhile may launch and retire programs too.
        for program in tuple(IN_FLIGHT):
            if not program.token.is_ready():
                return
            _retire(program)


def ignore_failure(error: Exception) -> None:
    """Leave the error to JAX, which raises it where results of the program are read."""


def drain() -> None:
    """Wait for every program that synk has launched."""
    with LOCK:
        while programs := tuple(IN_FLIGHT):
            for program in programs:
                _retire(program)


def _retire(program: InFlight) -> None:
    """Wait for a program, then forget it. If the program died, tell its variables."""
    try:
        program.token.block_until_ready()
    except Exception as error:
        with uninterrupted():
            # Asked again where no signal handler can raise, the program tells whether it died.
            death = _death_of(program)
            if death is not None:
                IN_FLIGHT.pop(program, None)
                # Whoever reads the results sees the error too. Here the program's variables learn of it.
                program.on_failure(program.peers.after_failure(program.name, death))
        # A handler raised, while the program ran or just as it died.
        if type(error) is not type(death):
            raise
    else:
        # A signal handler that ran just before may have retired it.
        IN_FLIGHT.pop(program, None)


def _death_of(program: InFlight) -> Exception | None:
    """Return the error of which a program died; None if it ended well or still runs."""
    try:
        if program.token.is_ready():
            program.token.block_until_ready()
    except Exception as error:
        return error
    return None


def look_for_dead() -> None:
    """Tell peers of programs that have died. Wait for no program, and not for the lock."""
    for program in tuple(IN_FLIGHT):
        if (death := _death_of(program)) is not None:
            program.peers.after_failure(program.name, death)


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

    __slots__ = ("before", "noted")

    def __enter__(self) -> None:
        # The handlers to restore, by signal, and the signals that came.
        self.before: dict[int, Any] = {}
        self.noted: list[tuple[int, Any]] = []
        if _get_ident() != _MAIN:
            return
        try:
            for number in _HELD_BACK:
                handler = _get_handler(number)
                if callable(handler):
                    # An enclosing block holds the signal back already.
                    if handler is _replaced_by_runtime or type(handler) is uninterrupted:
                        continue
                elif number != _SIGINT or handler != signal.SIG_DFL:
                    continue
                self.before[number] = handler
                # A signal that came since `_get_handler` may have changed the handler.
                self.before[number] = _set_handler(number, self)
        except BaseException:
            # A signal that is not held back yet has raised.
            self.__exit__()
            raise

    def __call__(self, number: int, frame: Any) -> None:
        self.noted.append((number, frame))

    def __exit__(self, *error: object) -> None:
        """Restore the handlers, then deliver the signals that came. A handler may raise; the rest follows then."""
        try:
            for number, handler in self.before.items():
                # What a block inside has set stays.
                if _get_handler(number) is self:
                    _set_handler(number, handler)
            while self.noted:
                number, frame = self.noted.pop(0)
                # The handler of the signal before may have set another one.
                handler = _get_handler(number)
                if callable(handler):
                    handler(number, frame)
                else:
                    # The default action ends the process.
                    signal.raise_signal(number)
        except BaseException:
            self.__exit__()
            raise


def _restore_handlers() -> None:
    """Give a forked helper the handlers that Python knows, so that `Process.terminate` and Ctrl-C end it."""
    for number in _HELD_BACK:
        handler = held = _get_handler(number)
        # Another thread forked the helper while the main thread was in a block.
        while type(handler) is uninterrupted:
            handler = handler.before[number]
        # The handler of JAX's runtime, in C++, notes SIGTERM and does nothing else.
        if handler is not held or (number == signal.SIGTERM and handler is _replaced_by_runtime):
            _set_handler(number, handler)


def call_in_helpers(act: Callable[[], object]) -> None:
    """Have each helper that is forked call a function first, where the system can fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=act)


call_in_helpers(_restore_handlers)
