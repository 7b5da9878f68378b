"""Processes: one program in several, on JAX's own distributed runtime; and how a process leaves without hanging."""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys
import threading
from importlib.metadata import version
from time import monotonic
from types import TracebackType
from typing import Any

import jax
from jax.experimental import multihost_utils

from . import _agree, _store
from ._errors import PeerError, SynkError, entry

HEARTBEAT = 30  # seconds without a sign of life after which a process counts as dead
SHUTDOWN = 30  # seconds to wait for the others at the end
START = 120  # seconds to wait for them at the start
FOLLOWS = 75  # the exit code of a process that ends because another one has failed
TELL = 1.5  # seconds that process 0 gives the others to learn why it goes
# Before jaxlib 0.10 the others take two heartbeats to notice that process 0 is frozen; there their own number rules.
_TAKES_TWO = tuple(int(part) for part in version("jaxlib").split(".")[:2]) < (0, 10)
_LOOPBACK = ("127.", "localhost", "[::1]", "::1")

_watched: float | None = None
_armed = 0.0
_has_hook = False
_terminated = False
_handles_term = False


def start(
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    watchdog: float | None,
    exit_hook: bool,
    heartbeat: int,
    shutdown: int,
    start: int,
) -> None:
    """Join the other processes; where JAX's runtime has been started already, only what synk adds to it."""
    _check_watchdog(watchdog)
    if not _store.is_running():
        coordinator = coordinator or os.environ.get("SYNK_COORDINATOR")
        num_processes = _number(num_processes, "num_processes")
        process_id = _number(process_id, "process_id")
        given = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
        missing = [name for name, value in given.items() if value is None]
        if 0 < len(missing) < len(given):
            raise ValueError(
                f"synk.init: {', '.join(name for name in given if name not in missing)} given without "
                f"{' and '.join(missing)}. Give all three (or SYNK_COORDINATOR, SYNK_NUM_PROCESSES, SYNK_PROCESS_ID), "
                f"or none where a launcher is found."
            )
        if num_processes is not None and process_id is not None and not 0 <= process_id < num_processes:
            raise ValueError(
                f"synk.init: process_id is {process_id}, but num_processes is {num_processes}; the ids are from 0 to "
                f"{num_processes - 1}."
            )
        bind = None
        if coordinator is not None and coordinator.startswith(_LOOPBACK) and not os.environ.get(_BIND):
            bind = coordinator  # nobody on the network needs to reach it
        try:
            jax.distributed.initialize(
                coordinator,
                num_processes,
                process_id,
                initialization_timeout=start,
                heartbeat_timeout_seconds=-(-heartbeat // 2) if _TAKES_TWO and process_id else heartbeat,
                shutdown_timeout_seconds=shutdown,
                coordinator_bind_address=bind,
            )
        except ValueError as error:
            if missing:
                raise ValueError(
                    f"synk.init(distributed=True): no launcher was found ({error}). Give coordinator='host:port', "
                    f"num_processes and process_id, or start with `python -m synk launch`."
                ) from error
            raise
    _attend(exit_hook, shutdown)
    watch(watchdog)


_BIND = "JAX_COORDINATOR_BIND_ADDRESS"


def _number(value: Any, name: str) -> int | None:
    """An argument, or what the environment says of it."""
    if value is None:
        text = os.environ.get(f"SYNK_{name.upper()}")
        if text is None:
            return None
        if not text.isdigit():
            raise ValueError(f"synk.init: SYNK_{name.upper()} is {text!r}; set it to an integer >= 0.")
        return int(text)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"synk.init: {name} is {value!r}; give an integer.")
    return value


def _attend(exit_hook: bool, shutdown: int) -> None:
    global _has_hook
    if _has_hook or jax.process_count() == 1:
        return
    _has_hook = True
    stop = threading.Event()

    def leave(error: SynkError) -> None:
        if exit_hook:
            print(f"synk.{type(error).__name__}: {error}", file=sys.stderr)
            _exit(_code(error))

    progress = threading.Thread(target=_agree.attend(stop, leave), name="synk-progress", daemon=True)
    progress.start()
    atexit.register(_leave, stop, progress, exit_hook, shutdown)  # before the runtime's own, which waits for all others
    if exit_hook:
        before = sys.excepthook

        def die(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
            """A process that failed would wait for the others, and they for it: end at once."""
            faulthandler.cancel_dump_traceback_later()
            gone = _agree.as_peer_error(error)
            if gone is None:
                _agree.say_failed(f"{kind.__name__}: {error}")
            before(kind, error, traceback)
            if gone is not None and gone is not error:
                print(f"synk.{type(gone).__name__}: {gone}", file=sys.stderr)
            _agree.await_told(TELL)
            _exit(_code(gone))

        sys.excepthook = die


def _leave(stop: threading.Event, progress: threading.Thread, exit_hook: bool, shutdown: int) -> None:
    """At the end of the program: if the others go on without it, the runtime would wait for them, and they for it."""
    faulthandler.cancel_dump_traceback_later()
    if exit_hook:
        if _agree.ended() is not None:
            _agree.await_told(TELL)
            _exit(_code(_agree.ended()))
        others = _agree.await_ends(shutdown)
        if others is not None:
            _agree.say_failed("it has ended its program")
            print(f"synk: this process has ended its program, but {others}.", file=sys.stderr)
            _agree.await_told(TELL)
            _exit(1)
    stop.set()
    progress.join(shutdown)  # a thread that comes back from the runtime into an ended Python aborts the process


def _code(error: SynkError | None) -> int:
    return FOLLOWS if isinstance(error, PeerError) else 1


def _exit(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # closed, or a broken pipe
            pass
    os._exit(code)


def watch(seconds: float | None) -> None:
    """End this process, with the stacks of all its threads, once nothing has run for so many seconds."""
    global _watched, _armed
    _check_watchdog(seconds)
    if seconds is None:
        return
    # Process 0 ends last: it takes the store along, and with it those that have yet to show their stacks.
    is_first = _store.is_running() and jax.process_count() > 1 and jax.process_index() == 0
    _watched, _armed = seconds + TELL * is_first, 0.0
    alive()


def _check_watchdog(seconds: Any) -> None:
    if seconds is not None and (isinstance(seconds, bool) or not isinstance(seconds, int | float) or seconds <= 0):
        raise ValueError(f"synk.init: watchdog is {seconds!r}; give seconds > 0, or None.")


def alive() -> None:
    """Something runs: the watchdog starts to count again."""
    global _armed
    if _watched is not None:
        now = monotonic()
        if now - _armed > min(1.0, _watched / 10):
            _armed = now
            faulthandler.dump_traceback_later(_watched, exit=True, file=sys.__stderr__ or 2)


@entry
def preempted(step: int) -> bool:
    """Has this machine, or that of any process of the group, been told to stop (SIGTERM)?

    True on every process at the same step, some steps after the signal: save, and leave. Call it once a step, in every
    process, from the main thread.

    Args:
      step: the number of this step; larger with each call, and the same in all processes.

    Returns:
      Whether to stop now.

    Raises:
      SynkError: the preemption service of JAX is off.

    Example:
      >>> import synk
      >>> synk.preempted(1)
      False
    """
    global _handles_term
    if _store.is_running():
        try:
            return multihost_utils.reached_preemption_sync_point(step)
        except RuntimeError as error:
            raise SynkError(f"synk.preempted: {error} Leave jax_enable_preemption_service on.") from error
    if not _handles_term and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _note)
        _handles_term = True
    return _terminated


def _note(number: int, frame: Any) -> None:
    global _terminated
    _terminated = True
