"""Liveness: one program in several processes, on JAX's own runtime; and how a process leaves without hanging."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from time import monotonic, sleep
from types import TracebackType
from typing import Any

import jax

from .._base.errors import PeerError, SynkError
from . import kv_store
from .agreement import PEERS, failure_notice

HEARTBEAT = 30  # seconds without a sign of life after which a process counts as dead
SHUTDOWN = 30  # seconds to wait for the others at the end
START = 120  # seconds to wait for them at the start
EXIT_PEER_FAILED = 75  # the exit code of a process that ends because another one has failed
# Before jaxlib 0.10 the others take two heartbeats to notice that process 0 is frozen; there their own number rules.
_TAKES_TWO = tuple(int(part) for part in version("jaxlib").split(".")[:2]) < (0, 10)
_LOOPBACK = ("127.", "localhost", "[::1]", "::1")
_BIND = "JAX_COORDINATOR_BIND_ADDRESS"

_has_hooks = False


@dataclass(frozen=True)
class StartOptions:
    """How this process finds the others, as `synk.init` has it; times in seconds."""

    coordinator: str | None
    num_processes: int | None
    process_id: int | None
    exit_hook: bool
    heartbeat: int
    shutdown: int
    start: int


def start(options: StartOptions) -> None:
    """Join the other processes; where JAX's runtime has been started already, only what synk adds to it."""
    global _has_hooks
    if not kv_store.is_running():
        _initialize(options)
    if _has_hooks or jax.process_count() == 1:
        return
    _has_hooks = True
    stop = threading.Event()
    heartbeat = start_heartbeat(stop, options.exit_hook)
    # Before the runtime's own, which waits for all others.
    atexit.register(_at_exit, stop, heartbeat, options.exit_hook, options.shutdown)
    if options.exit_hook:
        sys.excepthook = _exit_at_error(sys.excepthook)


def _initialize(options: StartOptions) -> None:
    coordinator = options.coordinator or os.environ.get("SYNK_COORDINATOR")
    num_processes = _number(options.num_processes, "num_processes")
    process_id = _number(options.process_id, "process_id")
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
    # Nobody on the network needs to reach a coordinator on the loopback device.
    is_local = coordinator is not None and coordinator.startswith(_LOOPBACK) and not os.environ.get(_BIND)
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            initialization_timeout=options.start,
            heartbeat_timeout_seconds=-(-options.heartbeat // 2) if _TAKES_TWO and process_id else options.heartbeat,
            shutdown_timeout_seconds=options.shutdown,
            coordinator_bind_address=coordinator if is_local else None,
        )
    except ValueError as error:
        if missing:
            raise ValueError(
                f"synk.init(distributed=True): no launcher was found ({error}). Give coordinator='host:port', "
                f"num_processes and process_id, or start with `python -m synk launch`."
            ) from error
        raise


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


def start_heartbeat(stop: threading.Event, exit_hook: bool, every: float = 0.5) -> threading.Thread:
    """Let a thread publish how far this process is, and end it when process 0 does.

    A program under way with the others does not come back to say so.
    """

    def run() -> None:
        me, at = jax.process_index(), -1
        while not stop.wait(every):
            try:
                number, what = PEERS.launches
                if number != at:
                    at = number
                    kv_store.put(f"synk/at/{me}", f"{number} {what}")
                why = kv_store.get("synk/failed/0") if me else None
                error = failure_notice({} if why is None else {"0": why}) if me else None
            except Exception:  # the store is gone: the runtime ends this process
                return
            if error is not None and not stop.wait(every / 2) and PEERS.ended is None:
                error = PEERS.end(error)
                if exit_hook:
                    print(f"synk.{type(error).__name__}: {error}", file=sys.stderr)
                    _exit(_code(error))

    thread = threading.Thread(target=run, name="synk-heartbeat", daemon=True)
    thread.start()
    return thread


def _exit_at_error(before: Callable[..., Any]) -> Callable[..., None]:
    """A hook for uncaught errors: this process would wait for the others, and they for it, so it ends at once."""

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        faulthandler.cancel_dump_traceback_later()
        gone = PEERS.explain(error)
        if gone is None:
            _publish_failure(f"{kind.__name__}: {error}")
        before(kind, error, traceback)
        if gone is not None and gone is not error:
            print(f"synk.{type(gone).__name__}: {gone}", file=sys.stderr)
        wait_until_notified(kv_store.NOTICE_SECONDS)
        _exit(_code(gone))

    return hook


def _at_exit(stop: threading.Event, heartbeat: threading.Thread, exit_hook: bool, shutdown: int) -> None:
    """At the end of the program: if the others go on without it, the runtime would wait for them, and they for it."""
    faulthandler.cancel_dump_traceback_later()
    if exit_hook:
        if PEERS.ended is not None:
            wait_until_notified(kv_store.NOTICE_SECONDS)
            _exit(_code(PEERS.ended))
        others = _wait_until_all_end(shutdown)
        if others is not None:
            _publish_failure("it has ended its program")
            print(f"synk: this process has ended its program, but {others}.", file=sys.stderr)
            wait_until_notified(kv_store.NOTICE_SECONDS)
            _exit(1)
    stop.set()
    heartbeat.join(shutdown)  # a thread that comes back from the runtime into an ended Python aborts the process


def _publish_failure(why: str) -> None:
    with contextlib.suppress(Exception):  # nobody may be there to read it
        kv_store.put(f"synk/failed/{jax.process_index()}", why[:300])


def wait_until_notified(seconds: float) -> None:
    """The store lives in process 0: before it exits, give the other processes so many seconds to read why."""
    until = monotonic() + seconds
    with contextlib.suppress(Exception):
        while jax.process_index() == 0 and monotonic() < until:
            know = {*kv_store.list("synk/notified/"), *kv_store.list("synk/failed/")} - {"0"}
            if len(know) == jax.process_count() - 1:
                return
            sleep(0.05)


def _wait_until_all_end(seconds: float) -> str | None:
    """Wait until all processes have ended their programs; if one goes on with what needs this one, or has failed, what
    it says."""
    until = monotonic() + seconds
    with contextlib.suppress(Exception):  # the store may be gone
        kv_store.put(f"synk/ended/{jax.process_index()}", "it has ended its program")
        while monotonic() < until and len(kv_store.list("synk/ended/")) < jax.process_count():
            for rank, at in kv_store.list("synk/at/").items():
                number, what = at.split(" ", 1)
                if int(number) > PEERS.launches[0]:
                    return f"process {rank} goes on with {what}"
            for rank, why in kv_store.list("synk/failed/").items():
                return f"process {rank} has failed: {why}"
            sleep(0.02)
    return None


def _code(error: SynkError | None) -> int:
    return EXIT_PEER_FAILED if isinstance(error, PeerError) else 1


def _exit(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or a broken pipe
            stream.flush()
    os._exit(code)
