"""BoundedCache: results of pure functions, by key, for the keys used last."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

MAX_KEPT = 1024


class BoundedCache:
    """A cache of at most `most` values, none of them None, that threads may share. It keeps no failures."""

    def __init__(self, most: int = MAX_KEPT) -> None:
        # A value is moved to the end only while the cache is more than half full, so most look-ups take no lock. A full
        # cache drops its first value: one not asked for since the cache was half full or, if there is none, the one not
        # asked for for the longest.
        self._most, self._half = most, most // 2
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = threading.RLock()

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the value of a key, or make it. Threads that ask at once get the same value."""
        # A look-up needs no lock, though comparing keys may run users' code (`__eq__`), which may switch threads.
        value = self._kept.get(key)
        if value is None:
            # This may take minutes.
            made = make()
            with self._lock:
                # Made outside the lock, since making may compile and ask this cache again. Threads that ask at once may
                # make the value twice; all get the first one that is noted, so that a spec or a plan has one identity.
                value = self._kept.setdefault(key, made)
                if len(self._kept) > self._most:
                    self._kept.popitem(last=False)
        elif len(self._kept) > self._half:
            with self._lock:
                # Another thread may have dropped the value.
                if key in self._kept:
                    self._kept.move_to_end(key)
        return value
