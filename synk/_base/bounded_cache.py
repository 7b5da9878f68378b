"""BoundedCache: what a pure function of a key gave, for the keys asked for last."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

MAX_KEPT = 1024


class BoundedCache:
    """At most `MAX_KEPT` values; the one not asked for the longest goes first. A failure is not kept."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The value for a key; made where there is none."""
        kept = self._kept
        value = kept.get(key, kept)  # itself where there is none, since None is kept too
        if value is not kept:
            kept.move_to_end(key)
            return value
        value = kept[key] = make()
        if len(kept) > MAX_KEPT:
            kept.popitem(last=False)
        return value
