"""Fingerprint: a value that is equal for two traces with the same equations, constants and callbacks."""

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from hashlib import sha256
from itertools import count, islice
from types import CodeType, FunctionType, MethodType
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from .._base.pytree import key_of
from .._runtime.constants import known_constant
from .equations import RULES, fold
from .names import content

# Callbacks hold functions in their cells, which hold functions in theirs: look so many levels deep.
_DEEPEST = 4
# Types whose repr says all.
_EXACT = (int, str, bytes, bool, type(None))
# What gradients alone read. Each trace makes it anew.
_OF_GRADIENTS = RULES | {"bwd", "out_trees"}


def fingerprint(closed: Any) -> Hashable:
    """Return a value that is equal for closed jaxprs that compute the same: a digest, and objects without a text."""
    # Objects of Python have no exact text, so they stay beside the digest and are compared by identity.
    writer = _Writer()
    # A trace may be under way around the call.
    with jax.ensure_compile_time_eval():
        text = repr(writer.closed(closed))
    return sha256(text.encode()).digest(), tuple(writer.objects)


def without_objects(record: Hashable) -> Hashable:
    if isinstance(record, tuple):
        return tuple([without_objects(entry) for entry in record if not isinstance(entry, ByIdentity)])
    return record


class ByIdentity:
    """An object without a text. It is equal to itself; objects of JAX are equal by their own rules."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        # Values may have no hash, and equality by value needs equal hashes: the type is all that both kinds share.
        return hash(type(self.value))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ByIdentity) or type(self.value) is not type(other.value):
            return False
        is_by_value = isinstance(self.value, CodeType) or _is_of_jax(self.value)
        return self.value is other.value or (is_by_value and bool(self.value == other.value))


def _is_of_jax(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] in ("jax", "jaxlib")


def _field_names(value: Any) -> Sequence[str]:
    if isinstance(value, type):
        return ()
    # Records of JAX are dataclasses or plain classes; those of jaxlib in C have neither, and count by identity.
    return [field.name for field in fields(value)] if is_dataclass(value) else list(getattr(value, "__dict__", ()))


class _Writer:
    """A writer of jaxprs as nested tuples of exact values. A jaxpr or constant that occurs again is a number."""

    def __init__(self) -> None:
        self.objects: list[ByIdentity] = []
        # By id: the object, kept alive so that its id stays its own, and its number.
        self._written: dict[int, tuple[Any, int]] = {}

    def closed(self, closed: Any) -> Any:
        # In JAX 0.12 a closed jaxpr and its jaxpr are one object, so the jaxpr must not count as written already.
        return self._jaxpr(closed.jaxpr), [self._once(const, self._array) for const in closed.consts]

    def _once(self, value: Any, write: Callable[[Any], Any]) -> Any:
        if id(value) in self._written:
            return "again", self._written[id(value)][1]
        self._written[id(value)] = value, len(self._written)
        return write(value)

    def _array(self, const: Any) -> Any:
        if (constant := known_constant(const)) is not None:
            return constant.key
        # Small arrays are written out, larger ones by their digest: the text would keep all their bytes.
        array = np.asarray(jax.random.key_data(const) if key_of(const) is not None else const)
        return array.dtype.name, array.shape, sha256(array.tobytes()).digest() if array.size > 64 else array.tobytes()

    def _jaxpr(self, jaxpr: Any) -> Any:
        # Variables are numbered in order, since their names and objects are new in each trace.
        numbers, written = count(), list[Any]()

        def takes(operands: Sequence[Any]) -> list[Any]:
            return [self._array(operand.val) if isinstance(operand, Literal) else operand for operand in operands]

        def makes(variables: Sequence[Any]) -> list[Any]:
            return [(getattr(v.aval, "shape", None), str(getattr(v.aval, "dtype", None))) for v in variables]

        def write(equation: Any, operands: list[Any]) -> Iterable[int]:
            params = [(key, self._value(value)) for key, value in equation.params.items() if key not in _OF_GRADIENTS]
            written.append((equation.primitive.name, takes(operands), makes(equation.outvars), params))
            return islice(numbers, len(equation.outvars))

        outs = fold(jaxpr, islice(numbers, len(jaxpr.constvars)), islice(numbers, len(jaxpr.invars)), write)
        return [makes((*jaxpr.constvars, *jaxpr.invars)), *written], takes(outs)

    def _value(self, value: Any, depth: int = 0) -> Any:
        """Return a parameter of an equation as tuples. Values that a callback holds are deeper than 0."""
        kind, name = type(value), type(value).__name__
        if kind in _EXACT or issubclass(kind, float | complex | Enum | np.dtype):
            return name, repr(value)
        if depth <= _DEEPEST and (parts := _parts(value)) is not None:
            return name, [self._value(part, depth + 1) for part in parts]
        # The order of a set may differ between two that are equal.
        if isinstance(value, set | frozenset):
            return name, sorted([repr(self._value(entry)) for entry in value])
        if hasattr(value, "eqns"):
            return self._once(value, self.closed if hasattr(value, "consts") else self._jaxpr)
        # A callback reads what it holds when it runs, so the contents of a list or an array do not count now.
        is_fixed = depth == 0
        if isinstance(value, tuple) or (is_fixed and isinstance(value, list)):
            return name, [self._value(entry, depth) for entry in value]
        # JAX makes an empty dict in each trace.
        if isinstance(value, dict) and (is_fixed or not value):
            return name, [(self._value(key), self._value(entry)) for key, entry in value.items()]
        if isinstance(value, np.generic) or (is_fixed and isinstance(value, np.ndarray | jax.Array)):
            return name, self._once(value, self._array)
        if _is_of_jax(value) and (names := _field_names(value)):
            # A record of JAX's, which is a new object in each trace.
            entries = [(name, getattr(value, name, None)) for name in names]
            return name, self._once(value, lambda _: [(key, self._value(entry, depth)) for key, entry in entries])
        self.objects.append(ByIdentity(value))
        return name, "object", len(self.objects)


def _parts(value: Any) -> list[Any] | None:
    """Return the parts of a function, which may be a new object in each trace. Return None for other values."""
    if isinstance(value, functools.partial):
        return [value.func, value.args, *value.keywords.items()]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, FunctionType):
        cells = map(content, value.__closure__ or ())
        return [value.__code__, value.__defaults__, value.__kwdefaults__, *cells]
    return None
