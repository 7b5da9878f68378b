"""Watchdog: end a process that hangs, and show where."""

import faulthandler
import sys
from time import monotonic


class Watchdog:
    """A timer that prints the stacks of all threads and ends this process, once no program ran for some seconds."""

    # None while there is no watchdog: then a launch looks at no clock.
    seconds: float | None = None
    _armed = 0.0

    def start(self, seconds: float) -> None:
        self.seconds, self._armed = seconds, 0.0
        self.rearm()

    def rearm(self) -> None:
        """Count from 0 again: a program is about to run."""
        if self.seconds is not None:
            now = monotonic()
            # Starting faulthandler's timer costs more than looking at a clock.
            if now - self._armed > min(1.0, self.seconds / 10):
                self._armed = now
                faulthandler.dump_traceback_later(self.seconds, exit=True, file=sys.__stderr__ or 2)


# faulthandler has one timer a process.
WATCHDOG = Watchdog()
