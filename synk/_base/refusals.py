"""Refusals: errors for objects that are used as arrays by mistake, which say where the array is."""

from collections.abc import Callable
from typing import Any, NoReturn

import jax
import numpy as np

from .errors import SynkError

_BINARY = "add sub mul truediv floordiv mod pow matmul divmod and or xor".split()
_ORDER = "lt le gt ge".split()
_UNARY = "neg pos abs invert int float complex index round".split()
_INDEXED = "getitem setitem delitem contains len bool".split()
_NUMBERS = (bool, int, float, complex, jax.Array)


def refuse_use(cls: type, say: Callable[[Any, str], str]) -> None:
    """Make a class raise TypeError for operations of arrays and trees that it does not define.

    Args:
      cls: the class.
      say: returns the message for an object and an attempt ("used as a number").
    """

    def refusal(how: str, allows_numpy: bool = False) -> Any:
        def refuse(self: Any, *others: Any, **options: Any) -> Any:
            if allows_numpy and isinstance(others[0], np.ndarray | np.generic):
                # Then NumPy asks `__array_ufunc__`, or takes the object as an array.
                return NotImplemented
            raise TypeError(say(self, how))

        return refuse

    def equal(self: Any, other: Any) -> Any:
        # np.float64 is a float too, but belongs to NumPy.
        if not isinstance(other, _NUMBERS) or isinstance(other, np.generic):
            return self is other or NotImplemented
        raise TypeError(say(self, "compared with a number"))

    # JAX looks up one of these attributes, and replaces a TypeError by a message that names no object. jnp.asarray
    # converts objects that NumPy can convert, and does not look up "sharding".
    of_jax = "sharding" if hasattr(cls, "__array__") else "__jax_array__"

    def no_member(self: Any, member: str) -> NoReturn:
        if member == of_jax:
            raise SynkError(say(self, "used as an array of JAX's"))
        raise AttributeError(member if member.startswith("_") else say(self, f"without .{member}"))

    operators = [*_BINARY, *(f"r{name}" for name in _BINARY), *_ORDER]
    members: dict[str, Any] = {"eq": equal, "hash": object.__hash__, "getattr": no_member}
    members |= dict.fromkeys(operators, refusal("used as a number", allows_numpy=True))
    members |= dict.fromkeys(_UNARY, refusal("used as a number"))
    if not hasattr(cls, "__getitem__"):
        members |= dict.fromkeys(_INDEXED, refusal("used as a tree or an array"))
    if not hasattr(cls, "__array__"):
        members |= dict.fromkeys(("array", "array_ufunc"), refusal("used as an array"))
    for name, refuse in members.items():
        setattr(cls, f"__{name}__", refuse)
