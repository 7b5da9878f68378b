"""Save point: processes agree on an item of a loop, before which all of them save.

Clocks differ, so processes that decide alone would save at different items. Process 0 calls. A thread of each process
hears the call, publishes the item that its loop has begun, and holds the loop until process 0 has answered: with the
item after the largest. Keys lie outside the numbered exchanges, which all processes make at the same item. The
preemption service of JAX works in the same way:
https://github.com/openxla/xla/blob/main/xla/tsl/distributed_runtime/preemption/preemption_sync_manager.cc
"""

import atexit
import contextlib
import threading
from itertools import count
from typing import Any

import jax

from . import coordinator as store
from .agreement import PATIENCE, PEERS

_END = "end"


class SavePoint:
    """The items of a loop before which all processes of a group save; `loop` is its number in the program."""

    # The save point of the latest loop of all processes, whose thread may run still.
    _latest: "SavePoint | None" = None

    def __init__(self, loop: int, is_shared: bool) -> None:
        self._folder, self._calls = f"synk/loop/{loop}", 0
        # The item that the loop has begun last, and the agreed one with what is to be done there.
        self._item = 0
        self._agreed: tuple[int, str] | None = None
        # Held by the thread while processes agree.
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="synk-save-point", daemon=True) if is_shared else None
        if self._thread is not None:
            # All processes have left the loop before, perhaps by a break: they have loaded for this one.
            if SavePoint._latest is not None:
                SavePoint._latest.end()
            SavePoint._latest = self
            self._thread.start()

    def call(self, what: str) -> None:
        """Call for a save, of a kind that `reached` returns; for process 0 alone."""
        if self._thread is None:
            self._agreed = self._item, what
        else:
            self._put_call(what)

    def reached(self, item: int) -> str | None:
        """Return what to save before an item, at the agreed one and after it until `answered`."""
        # Wait while processes agree.
        with self._lock:
            self._item = item
            return None if self._agreed is None or item < self._agreed[0] else self._agreed[1]

    def answered(self, item: int) -> None:
        """Note that what was called for is saved, before an item. The next call may have come already."""
        with self._lock:
            if self._agreed is not None and self._agreed[0] <= item:
                self._agreed = None

    def end(self) -> None:
        """End the thread, once all processes have left the loop."""
        if self._thread is not None:
            with contextlib.suppress(Exception):  # the store may be gone
                if jax.process_index() == 0:
                    self._put_call(_END)
            # Until the thread has heard that, it answers others.
            self._thread.join(10 * PATIENCE)

    def leave(self) -> None:
        """Wait for the thread, which would abort the process if it came back from the runtime after Python's end."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(10 * PATIENCE)

    def _put_call(self, what: str) -> None:
        store.put(f"{self._folder}/{self._calls}/call", what)
        self._calls += 1

    def _listen(self) -> None:
        """Hear calls, and agree, as long as the loop goes on."""
        # The store may be gone, or another process. The loop itself finds that out.
        with contextlib.suppress(Exception):
            for number in count():
                folder = f"{self._folder}/{number}/"
                while (what := store.wait(f"{folder}call", PATIENCE)) is None:
                    if self._is_over.is_set():
                        return
                if what == _END:
                    return
                with self._lock:
                    self._agreed = self._agree(folder), what
                # All processes have come to this call, so they have read the answer to the one before.
                if number and jax.process_index() == 0:
                    store.delete(f"{self._folder}/{number - 1}")

    def _agree(self, folder: str) -> int:
        """Publish the item that the loop has begun, and return the item that process 0 answers."""
        store.put(f"{folder}at/{jax.process_index()}", str(self._item))
        if jax.process_index() == 0:
            items = [int(_wait(f"{folder}at/{rank}")) for rank in range(jax.process_count())]
            store.put(f"{folder}before", str(max(items) + 1))
        return int(_wait(f"{folder}before"))


def _wait(key: str) -> str:
    """Wait for a value of another process; raise if it has failed or ended."""
    while (value := store.wait(key, PATIENCE)) is None:
        if (end := PEERS.find_end()) is not None:
            raise end
    return value


def _leave_latest(*_: Any) -> None:
    if SavePoint._latest is not None:
        SavePoint._latest.leave()


atexit.register(_leave_latest)
