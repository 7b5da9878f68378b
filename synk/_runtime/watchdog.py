"""Watchdog: end a process that hangs, and show where."""

import faulthandler
import sys
from time import monotonic


class Watchdog:
    """Ends this process, with the stacks of all its threads, once nothing has run for so many seconds."""

    _seconds: float | None = None
    _armed = 0.0

    def start(self, seconds: float) -> None:
        """Count from now on."""
        self._seconds, self._armed = seconds, 0.0
        self.rearm()

    def rearm(self) -> None:
        """Something is about to run: start to count again."""
        if self._seconds is not None:
            now = monotonic()
            if now - self._armed > min(1.0, self._seconds / 10):
                self._armed = now
                faulthandler.dump_traceback_later(self._seconds, exit=True, file=sys.__stderr__ or 2)


WATCHDOG = Watchdog()
