"""Liveness: one program in several processes, on JAX's own runtime; and how a process leaves without hanging."""

import atexit
import contextlib
import faulthandler
import os
import sys
import threading
from functools import partial
from time import monotonic, sleep
from typing import Any, NoReturn

import jax

from .._base.errors import PeerError, SynkError
from .._runtime.dispatch import JAXLIB
from . import kv_store
from .agreement import PEERS, failure_notice

BEAT = 0.5  # seconds between looks at process 0
EXIT_PEER_FAILED = 75  # the exit code of a process that ends because another one has failed

_is_attending = False


def initialize(
    coordinator: str | None, num_processes: Any, process_id: Any, heartbeat: int, shutdown: int, start: int
) -> None:
    """Join the other processes, unless JAX's runtime has been started already; arguments are those of `synk.init`."""
    if kv_store.is_running():
        return
    coordinator = coordinator or os.environ.get("SYNK_COORDINATOR")
    num_processes, process_id = _number("num_processes", num_processes), _number("process_id", process_id)
    _check(coordinator, num_processes, process_id)
    # Before jaxlib 0.10 the others take two of their own heartbeats to notice that process 0 is frozen.
    halved = JAXLIB < (0, 10) and process_id
    # Nobody on the network needs to reach a coordinator on the loopback device.
    is_local = coordinator is not None and coordinator.startswith(("127.", "localhost", "[::1]", "::1"))
    is_bound = is_local and not os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            initialization_timeout=start,
            heartbeat_timeout_seconds=-(-heartbeat // 2) if halved else heartbeat,
            shutdown_timeout_seconds=shutdown,
            coordinator_bind_address=coordinator if is_bound else None,
        )
    except ValueError as error:
        if coordinator is not None:
            raise
        raise ValueError(
            f"synk.init(distributed=True): no launcher was found ({error}). Give coordinator='host:port', "
            f"num_processes and process_id, or start with `python -m synk launch`."
        ) from error


def _number(name: str, value: Any) -> int | None:
    """An argument, or what the environment says of it."""
    if value is not None:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"synk.init: {name} is {value!r}; give an integer.")
        return value
    variable = f"SYNK_{name.upper()}"
    text = os.environ.get(variable)
    if text is not None and not text.isdigit():
        raise ValueError(f"synk.init: {variable} is {text!r}; set it to an integer >= 0.")
    return None if text is None else int(text)


def _check(coordinator: str | None, num_processes: int | None, process_id: int | None) -> None:
    """All are given, or none; and they fit."""
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


def attend(exit_hook: bool, shutdown: int) -> None:
    """From now on follow the other processes, and leave without hanging."""
    global _is_attending
    if _is_attending or jax.process_count() == 1:
        return
    _is_attending = True
    stop = threading.Event()
    heartbeat = threading.Thread(target=_heartbeat, args=(stop, exit_hook), name="synk-heartbeat", daemon=True)
    heartbeat.start()
    # Before the runtime's own, which waits for all others.
    atexit.register(_at_exit, stop, heartbeat, exit_hook, shutdown)
    if exit_hook:
        sys.excepthook = partial(_at_error, sys.excepthook)


def _heartbeat(stop: threading.Event, exit_hook: bool) -> None:
    """Publish how far this process is, and end it when process 0 does: a program under way with the others does not
    come back to say so."""
    me, at = jax.process_index(), -1
    while not stop.wait(BEAT):
        try:
            number, what = PEERS.launches
            if number != at:
                at = number
                kv_store.put(f"synk/at/{me}", f"{number} {what}")
            if me == 0:
                continue
            why = kv_store.get("synk/failed/0")
            error = failure_notice({} if why is None else {"0": why})
        except Exception:  # the store is gone: the runtime ends this process
            return
        if error is not None and not stop.wait(BEAT / 2) and PEERS.ended is None:
            error = PEERS.end(error)
            if exit_hook:
                _leave(error, is_told=False)


def _at_error(before: Any, kind: type[BaseException], error: BaseException, traceback: Any) -> None:
    """At an uncaught error this process would wait for the others, and they for it, so it ends at once."""
    faulthandler.cancel_dump_traceback_later()
    gone = PEERS.explain(error)
    if gone is None:
        _publish_failure(f"{kind.__name__}: {error}")
    before(kind, error, traceback)
    _leave(gone, is_told=gone is None or gone is error)


def _at_exit(stop: threading.Event, heartbeat: threading.Thread, exit_hook: bool, shutdown: int) -> None:
    """At the end of the program: if the others go on without it, the runtime would wait for them, and they for it."""
    faulthandler.cancel_dump_traceback_later()
    if exit_hook:
        if PEERS.ended is not None:
            _leave(PEERS.ended)
        others = _wait_until_all_end(shutdown)
        if others is not None:
            _publish_failure("it has ended its program")
            print(f"synk: this process has ended its program, but {others}.", file=sys.stderr)
            _leave(None)
    stop.set()
    heartbeat.join(shutdown)  # a thread that comes back from the runtime into an ended Python aborts the process


def _publish_failure(why: str) -> None:
    with contextlib.suppress(Exception):  # nobody may be there to read it
        kv_store.put(f"synk/failed/{jax.process_index()}", why[:300])


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


def _leave(error: SynkError | None, is_told: bool = True) -> NoReturn:
    """End this process now; its code tells whether another one has failed."""
    if not is_told:
        print(f"synk.{type(error).__name__}: {error}", file=sys.stderr)
    until = monotonic() + kv_store.NOTICE_SECONDS
    with contextlib.suppress(Exception):
        # The store lives in process 0: the others are to read why it goes.
        while jax.process_index() == 0 and monotonic() < until:
            know = {*kv_store.list("synk/notified/"), *kv_store.list("synk/failed/")} - {"0"}
            if len(know) == jax.process_count() - 1:
                break
            sleep(0.05)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or a broken pipe
            stream.flush()
    os._exit(EXIT_PEER_FAILED if isinstance(error, PeerError) else 1)
