"""Meetings: the items of a loop before which its processes meet, where process 0 says whether all save.

Clocks differ, so processes that decide alone would save at different items, and calls may be unchecked, so nothing else
tells the others. At each meeting process 0 plans the next one, by its clock and the pace so far: half of what is left
until a save is due, then the save. That makes some ten meetings a save.
"""

from time import monotonic

from .checkpoint_files import WRITER


class Meetings:
    """The plan of the meetings of one loop; `at` says after how many items the next one is."""

    def __init__(self, done: int, every: float | None) -> None:
        """Plan meetings behind items that are done, with a save `every` so many seconds."""
        # Without timed saves the loop never meets.
        self.at = float("inf") if every is None else done + 1
        self._every, self._first, self._pace = every or 0.0, done, 1.0
        # When the last save was, or the start, and after how many items.
        self._since, self._item = monotonic(), done

    def plan(self, done: int) -> tuple[bool, int]:
        """Return whether to save now, after so many items, and after how many more to meet again."""
        now = monotonic()
        if done > self._item:
            self._pace = (done - self._item) / max(now - self._since, 1e-9)
        is_due = now > self._since + self._every and WRITER.is_idle
        if is_due:
            self._since, self._item = now, done
        # A save that is due waits until the one before is written.
        left = max(self._since + self._every - now, self._every / 100)
        # The first items compile. So no meeting lies further ahead than the loop has come.
        return is_due, max(1, min(int(left / 2 * self._pace), done - self._first))
