"""Liveness: how a process learns that another one has died, and how it leaves without hanging.

Who is told: a process that fails writes why to `synk/failed/RANK` of the store (`publish_failure`). The heartbeat
thread of each other process reads it within `BEAT` seconds; its program reads it at its next exchange.

Who ends whom: each process ends itself (`_leave`). JAX's runtime ends a process when process 0 is gone, and all
processes when one has sent no heartbeat for `heartbeat` seconds. The launcher ends what is left. About the runtime:
https://docs.jax.dev/en/latest/fault_tolerance.html
"""

import atexit
import contextlib
import faulthandler
import os
import sys
import threading
from functools import partial
from time import sleep
from typing import Any, NoReturn

import jax

from .._base.errors import PeerError, SynkError
from .._runtime.dispatch import call_in_helpers, look_for_dead
from . import coordinator as store
from .agreement import PEERS, failure_notice, publish_failure

BEAT = 0.5  # seconds between two looks of the heartbeat thread
EXIT_SECONDS = 5  # for an exit, beside the time that the runtime waits for the other processes
NOTICE_SECONDS = 1.5  # for which process 0 stays when it fails
EXIT_PEER_FAILED = 75  # the exit code of a process that ends because another one has failed

_LEAVING = threading.RLock()  # never released: the first thread that leaves has the last word
# A process attends to the others once, however many groups it makes.
_is_attending = False


def attend(exit_hook: bool, shutdown: int) -> None:
    global _is_attending
    if _is_attending or jax.process_count() == 1:
        return
    _is_attending = True
    stop = threading.Event()
    heartbeat = threading.Thread(target=_heartbeat, args=(stop, exit_hook), name="synk-heartbeat", daemon=True)
    heartbeat.start()
    # Handlers run in reverse order: this one before the runtime's own, which waits for the others, dead or not.
    atexit.register(_at_exit, stop, heartbeat, exit_hook, shutdown)
    call_in_helpers(partial(_leave_alone, sys.excepthook))
    if exit_hook:
        sys.excepthook = partial(_at_error, sys.excepthook)


def _leave_alone(excepthook: Any) -> None:
    """Make a forked helper end as any program does: it is no process of the group, and has none of its threads."""
    atexit.unregister(_at_exit)
    sys.excepthook = excepthook


def _heartbeat(stop: threading.Event, exit_hook: bool) -> None:
    """Publish the progress of this process, and end it when another one has failed."""
    # A thread, since a program that waits for a dead process inside the runtime never comes back to end itself.
    me, published = jax.process_index(), -1
    while not stop.wait(BEAT):
        try:
            number, what = PEERS.progress
            if number != published:
                published = number
                store.put(f"synk/at/{me}", f"{number} {what}")
            look_for_dead()  # the others are told of a program that died, whatever the main thread is doing
            error = failure_notice(store.get_all("synk/failed/"))
        except Exception:  # the store is gone: the runtime ends this process
            return
        # First the program itself may notice, and print its traceback.
        if error is not None and not stop.wait(BEAT / 2) and PEERS.ended is None:
            error = PEERS.end(error)
            if exit_hook:
                _leave(error, is_told=False)


def _at_error(before: Any, kind: type[BaseException], error: BaseException, traceback: Any) -> None:
    """End this process at once after an uncaught error: it would wait for the others, and they for it."""
    faulthandler.cancel_dump_traceback_later()
    gone = PEERS.translate_error(error)
    if gone is None:
        publish_failure(f"{kind.__name__}: {error}")
    # The user's own hook, or Python's, prints the traceback first: os._exit below runs nothing more.
    before(kind, error, traceback)
    _leave(gone, is_told=gone is None or gone is error, code=130 if kind is KeyboardInterrupt else 1)


def _at_exit(stop: threading.Event, heartbeat: threading.Thread, exit_hook: bool, shutdown: int) -> None:
    """Wait for the other processes at the end of the program, or leave if they go on without this one."""
    faulthandler.cancel_dump_traceback_later()
    if exit_hook:
        if PEERS.ended is not None:
            _leave(PEERS.ended)
        if (others := _wait_until_all_end(shutdown + EXIT_SECONDS)) is not None:
            publish_failure("it has ended its program")
            print(f"synk: this process has ended its program, but {others}.", file=sys.stderr)
            _leave(None)
    stop.set()
    # A thread that comes back from the runtime when Python has ended aborts the process.
    heartbeat.join(shutdown)


def _wait_until_all_end(limit: int) -> str | None:
    """Wait until all processes have ended their programs, however long they work. Return why one of them cannot."""
    with contextlib.suppress(Exception):  # the store may be gone
        store.put(f"synk/ended/{jax.process_index()}", "it has ended its program")
        while len(store.get_all("synk/ended/")) < jax.process_count():
            for rank, at in store.get_all("synk/at/").items():
                number, what = at.split(" ", 1)
                if int(number) > PEERS.progress[0]:
                    return f"process {rank} goes on with {what}"
            for rank, why in store.get_all("synk/failed/").items():
                return f"process {rank} has failed: {why}"
            sleep(0.02)
        # Only the exit of Python is left. The launcher is told how many seconds that may take at most.
        if folder := os.environ.get("SYNK_EXITS_FOLDER"):
            with open(f"{folder}/{os.getpid()}", "w") as file:
                file.write(str(limit))
    return None


def _leave(error: SynkError | None, is_told: bool = True, code: int = 1) -> NoReturn:
    """End this process now, with `code`, or with the code which tells that another process has failed."""
    _LEAVING.acquire()
    if not is_told:
        print(f"synk.{type(error).__name__}: {error}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or a broken pipe
            stream.flush()
    # The store lives in process 0, and the runtime ends the others without it: first they read why.
    if jax.process_index() == 0:
        sleep(NOTICE_SECONDS)
    # Python's own end would wait for the runtime, which waits for the other processes.
    os._exit(EXIT_PEER_FAILED if isinstance(error, PeerError) else code)
