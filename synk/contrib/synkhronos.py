"""Synkhronos's own spellings of what has another name here."""

from typing import Any

from ._base.errors import public_api
from ._data.dataset import Data, data
from ._data.places import PlaceName
from ._distributed.init import init
from ._runtime.group import Group


@public_api
def fork(n: int | None = None) -> Group:
    """Make the group, as `synk.init(n)` does; nothing is forked.

    Example:
      >>> import synk
      >>> with synk.fork(1) as group:
      ...     group.size
      1
    """
    return init(n)


@public_api
def build_inputs(*values: Any, place: PlaceName = "host", minibatch: bool = False) -> tuple[Data, ...]:
    """Make the data of a function's inputs, one of each array: `synk.data(value, place=place, minibatch=minibatch)`.

    Example:
      >>> import numpy as np, synk
      >>> x, y = synk.build_inputs(np.zeros((5, 2)), np.zeros(5))
      >>> x.shape, y.shape
      ((5, 2), (5,))
    """
    return tuple(data(value, place=place, minibatch=minibatch) for value in values)
