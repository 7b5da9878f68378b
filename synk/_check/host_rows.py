"""Host rows: the rows of one call in host memory, to be taken in any order, as arguments of others."""

from typing import Any

import numpy as np

from .._base.pytree import as_keys
from .._call.binding import BoundArguments, CallOptions, check_leaves
from .._call.rows import RowCall, select_rows
from .._data.transfer import gather_rows, to_host
from .._runtime.group import Group
from .._runtime.layout import everywhere
from .views import one_device


class HostRows:
    """What a call picks of its scattered arguments, wherever these lie."""

    def __init__(self, bound: BoundArguments, name: str, options: CallOptions, group: Group) -> None:
        spec, looked = bound.spec, check_leaves(bound, name, group)
        self._bound, self._keys = bound, [looked.keys[place] for place in spec.scattered]
        rows = select_rows(RowCall(name, spec.scattered_names, looked.scattered, options, one_device(group), group))
        self._arrays = [self._gathered(group, one) for one in rows.each]

    def _gathered(self, group: Group, one: Any) -> np.ndarray:
        host = to_host(group, one.source)
        return gather_rows(everywhere(one.source) if host is None else host, one.selection, one.dtype)

    def __len__(self) -> int:
        return len(self._arrays[0])

    def take(self, rows: Any) -> BoundArguments:
        """The call's arguments with these of its rows alone."""
        leaves, index = list(self._bound.leaves), np.asarray(rows)
        for place, array, key in zip(self._bound.spec.scattered, self._arrays, self._keys, strict=True):
            leaves[place] = as_keys(array[index], key)
        return self._bound._replace(leaves=leaves)
