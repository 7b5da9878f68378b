"""Refusals: arithmetic, indexing and conversions tried on an object that is no array answer where its value is."""

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
    """Make a class refuse what it does not define itself of that which arrays and trees do.

    Args:
      cls: the class.
      say: makes the message, from an object and what was tried ("used as a number").
    """

    def refusal(how: str) -> Any:
        def refuse(self: Any, *others: Any, **options: Any) -> NoReturn:
            raise TypeError(say(self, how))

        return refuse

    def operator(self: Any, other: Any) -> Any:
        if isinstance(other, np.ndarray | np.generic):
            return NotImplemented  # NumPy asks `__array_ufunc__`, or takes the object as an array
        raise TypeError(say(self, "used as a number"))

    def equal(self: Any, other: Any) -> Any:
        if not isinstance(other, _NUMBERS) or isinstance(other, np.generic):  # np.float64 is a float
            return self is other or NotImplemented
        raise TypeError(say(self, "compared with a number"))

    # JAX looks one of these up without calling it, and replaces a TypeError by one that names no object. What NumPy can
    # convert refuses "sharding" alone, for which jnp.asarray, which converts it too, does not ask.
    of_jax = "sharding" if hasattr(cls, "__array__") else "__jax_array__"

    def no_member(self: Any, member: str) -> NoReturn:
        if member == of_jax:
            raise SynkError(say(self, "used as an array of JAX's"))
        raise AttributeError(member if member.startswith("_") else say(self, f"without .{member}"))

    found: dict[str, Any] = dict.fromkeys([*_BINARY, *(f"r{name}" for name in _BINARY), *_ORDER], operator)
    found |= dict.fromkeys(_UNARY, refusal("used as a number"))
    found |= {"eq": equal, "hash": object.__hash__, "getattr": no_member}
    if not hasattr(cls, "__getitem__"):
        found |= dict.fromkeys(_INDEXED, refusal("used as a tree or an array"))
    if not hasattr(cls, "__array__"):
        found |= dict.fromkeys(("array", "array_ufunc"), refusal("used as an array"))
    for name, refuse in found.items():
        setattr(cls, f"__{name}__", refuse)
