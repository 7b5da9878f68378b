"""BoundedCache: results of pure functions, by key, for the keys used last."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

MAX_KEPT = 1024


class BoundedCache:
    """A cache of at most `most` values, none of them None. It drops the value that was not used for the longest.

    Failures are not kept. Threads may share the cache.
    """

    def __init__(self, most: int = MAX_KEPT) -> None:
        self._most = most
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = threading.RLock()

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the value of a key, or make it. Threads that ask at once get the same value."""
        # Comparing keys runs users' code (`__eq__`), which may switch threads: hold the lock. `make` may take minutes,
        # and runs without it.
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
