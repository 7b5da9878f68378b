"""BoundedCache: what a pure function of a key gave, for the keys asked for last."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

MAX_KEPT = 1024


class BoundedCache:
    """At most so many values, none of them None; the one not asked for the longest goes first.

    A failure is not kept. Threads may share it: keys are compared by users' code, which may let another thread in.
    """

    def __init__(self, most: int = MAX_KEPT) -> None:
        self._most = most
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = threading.RLock()

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The value for a key; made where there is none, and then the same for all who asked."""
        with self._lock:
            value = self._kept.get(key)
            if value is not None:
                self._kept.move_to_end(key)
                return value
        made = make()
        with self._lock:
            value = self._kept.setdefault(key, made)
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)
            return value
