"""Watchdog: end a process that hangs, and show where."""

from __future__ import annotations

import faulthandler
import sys
from time import monotonic

import jax

from .._runtime.group import Peers
from . import kv_store


class Watchdog(Peers):
    """The peers of a group in one process. There is one, which launches of all groups rearm."""

    def __init__(self) -> None:
        self._seconds: float | None = None
        self._armed = 0.0

    def start(self, seconds: float | None) -> None:
        """End this process, with the stacks of all its threads, once nothing has run for so many seconds."""
        if seconds is None:
            return
        # Process 0 ends last: it takes the store along, and with it those that have yet to show their stacks.
        is_first = kv_store.is_running() and jax.process_count() > 1 and jax.process_index() == 0
        self._seconds, self._armed = seconds + kv_store.NOTICE_SECONDS * is_first, 0.0
        self.rearm_watchdog()

    def rearm_watchdog(self) -> None:
        """Something is about to run: start to count again."""
        if self._seconds is not None:
            now = monotonic()
            if now - self._armed > min(1.0, self._seconds / 10):
                self._armed = now
                faulthandler.dump_traceback_later(self._seconds, exit=True, file=sys.__stderr__ or 2)


WATCHDOG = Watchdog()
