"""Constants: large arrays that functions capture. Programs take them as arguments."""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any
from weakref import WeakValueDictionary

import jax
import numpy as np

from .group import Group
from .layout import put

# XLA's CPU compiler copies larger constants of a branch in each call, and takes seconds for 100 MB of constants.
LARGE = 1 << 16
# On CPUs devices read memory of this alignment where it lies: https://github.com/jax-ml/jax/issues/4486
_ALIGNMENT = 64


class Constant:
    """A large array that does not change any more. Equal arrays have one constant, as long as something holds it.

    Attributes:
      value: the array, in host memory.
      key: digest, dtype and shape, which tell it from other constants.
    """

    def __init__(self, value: np.ndarray, key: tuple[Any, ...]) -> None:
        self.value, self.key = value, key

    def on(self, group: Group) -> jax.Array:
        """Return the array on every replica; send it once a group."""
        home = group._home
        return home._cached(self, None, lambda: put(home, self.value, "replicated"))


# By digest, since two functions may capture copies of one table.
_by_key: WeakValueDictionary[tuple[Any, ...], Constant] = WeakValueDictionary()
# Equal captured arrays are sent once: found by the array's id, and by its bytes.
_by_array: WeakValueDictionary[int, Constant] = WeakValueDictionary()


def constant_of(array: np.ndarray, is_copied: bool) -> Constant:
    """Return the constant of an array, which `is_copied` where its owner may change it."""
    whole = np.ascontiguousarray(array)
    key = sha256(whole.reshape(-1).view(np.uint8).data).digest(), array.dtype, array.shape
    constant = _by_key.get(key)
    if constant is None:
        constant = Constant(_aligned_copy(whole) if is_copied else whole, key)
        _by_key[key] = _by_array[id(constant.value)] = constant
    return constant


def known_constant(array: Any) -> Constant | None:
    return _by_array.get(id(array))


def resolve(values: Sequence[Any], placed: Mapping[Constant, jax.Array]) -> list[Any]:
    """Put arguments of a program in the place of constants; those that are no arguments stand in the program."""
    return [placed.get(value, value.value) if isinstance(value, Constant) else value for value in values]


def _aligned_copy(array: np.ndarray) -> np.ndarray:
    memory = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
