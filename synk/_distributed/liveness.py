"""Liveness: how processes follow each other, and leave without hanging."""

import atexit
import builtins
import contextlib
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Mapping
from functools import partial
from time import monotonic, sleep
from typing import Any, NoReturn

import jax

from .._base.errors import PeerError, SynkError
from .._runtime.dispatch import look_for_dead
from . import kv_store
from .agreement import PEERS, failure_notice, publish_failure

BEAT = 0.5  # seconds between looks at process 0
EXIT_PEER_FAILED = 75  # the exit code of a process that ends because another one has failed

_LEAVING = threading.RLock()  # held to the end by the thread that ends this process: its code and words are the first
_is_attending = False
_exit_code = 0  # with which the program has called sys.exit
_EXITS = (sys, "exit"), (builtins, "exit"), (builtins, "quit")  # Python without its site has the first alone


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
    exits = {(place, name): getattr(place, name) for place, name in _EXITS if hasattr(place, name)}
    os.register_at_fork(after_in_child=partial(_leave_alone, sys.excepthook, exits))
    if exit_hook:
        sys.excepthook = partial(_at_error, sys.excepthook)
        for (place, name), exit_ in exits.items():
            setattr(place, name, partial(_noted_exit, exit_))


def _leave_alone(excepthook: Any, exits: Mapping[tuple[Any, str], Any]) -> None:
    """A helper that is forked is no process of the group, and has none of its threads: it ends as any program does."""
    atexit.unregister(_at_exit)
    sys.excepthook = excepthook
    for (place, name), exit_ in exits.items():
        setattr(place, name, exit_)
    if not callable(signal.getsignal(signal.SIGTERM)):  # the runtime's, which waits to be asked
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _heartbeat(stop: threading.Event, exit_hook: bool) -> None:
    """Publish how far this process is, and end it when the others cannot go on: a program under way with them does not
    come back to say so."""
    me, at = jax.process_index(), -1
    grace = BEAT / 2 if me else kv_store.NOTICE_SECONDS  # for the program itself to notice; process 0 goes last
    while not stop.wait(BEAT):
        try:
            number, what = PEERS.launches
            if number != at:
                at = number
                kv_store.put(f"synk/at/{me}", f"{number} {what}")
            look_for_dead()  # of which the others are told, whatever this program is doing
            error = failure_notice(kv_store.list("synk/failed/"))
        except Exception:  # the store is gone: the runtime ends this process
            return
        if error is not None and not stop.wait(grace) and PEERS.ended is None:
            error = PEERS.end(error)
            if exit_hook:
                _leave(error, is_told=False)


def _noted_exit(before: Any, status: Any = None, /) -> NoReturn:
    """Note with which code the program is about to end: at its very end nothing tells."""
    global _exit_code
    if threading.current_thread() is threading.main_thread():
        _exit_code = status if isinstance(status, int) else int(status is not None)
    before(status)
    raise SystemExit(status)


def _at_error(before: Any, kind: type[BaseException], error: BaseException, traceback: Any) -> None:
    """At an uncaught error this process would wait for the others, and they for it, so it ends at once."""
    faulthandler.cancel_dump_traceback_later()
    gone = PEERS.translate_error(error)
    if gone is None:
        publish_failure(f"{kind.__name__}: {error}")
    before(kind, error, traceback)
    _leave(gone, is_told=gone is None or gone is error, code=130 if kind is KeyboardInterrupt else 1)


def _at_exit(stop: threading.Event, heartbeat: threading.Thread, exit_hook: bool, shutdown: int) -> None:
    """At the end of the program: if the others go on without it, the runtime would wait for them, and they for it."""
    faulthandler.cancel_dump_traceback_later()
    if exit_hook:
        if PEERS.ended is not None:
            _leave(PEERS.ended, code=_exit_code or 1)
        others = _wait_until_all_end(shutdown)
        if others is not None:
            publish_failure("it has ended its program")
            print(f"synk: this process has ended its program, but {others}.", file=sys.stderr)
            _leave(None, code=_exit_code or 1)
    stop.set()
    heartbeat.join(shutdown)  # a thread that comes back from the runtime into an ended Python aborts the process


def _wait_until_all_end(seconds: float) -> str | None:
    """Wait until all processes have ended their programs, however long they work on alone: the heartbeat ends this one
    if they die, and it would end them. If one goes on with what needs this one, or has failed, what it says."""
    until = monotonic() + seconds
    with contextlib.suppress(Exception):  # the store may be gone
        kv_store.put(f"synk/ended/{jax.process_index()}", "it has ended its program")
        while len(ended := kv_store.list("synk/ended/")) < jax.process_count():
            if monotonic() > until:
                until = float("inf")
                alive = ", ".join(str(rank) for rank in range(jax.process_count()) if str(rank) not in ended)
                print(f"synk: this process has ended, and waits for process {alive}, still at work.", file=sys.stderr)
            for rank, at in kv_store.list("synk/at/").items():
                number, what = at.split(" ", 1)
                if int(number) > PEERS.launches[0]:
                    return f"process {rank} goes on with {what}"
            for rank, why in kv_store.list("synk/failed/").items():
                return f"process {rank} has failed: {why}"
            sleep(0.02)
    return None


def _leave(error: SynkError | None, is_told: bool = True, code: int = 1) -> NoReturn:
    """End this process now, with this code or the one that tells that another process has failed."""
    _LEAVING.acquire()
    if not is_told:
        print(f"synk.{type(error).__name__}: {error}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or a broken pipe
            stream.flush()
    until = monotonic() + kv_store.NOTICE_SECONDS
    with contextlib.suppress(Exception):  # the store may be gone
        kv_store.put(f"synk/left/{jax.process_index()}", "it has said why")
        # It lives in process 0, without which JAX's runtime ends the others.
        while jax.process_index() == 0 and monotonic() < until:
            if len(kv_store.list("synk/left/")) == jax.process_count():
                sleep(BEAT / 2)  # they have said so, and are about to end
                break
            sleep(0.05)
    os._exit(EXIT_PEER_FAILED if isinstance(error, PeerError) else code & 0xFF or 1)
