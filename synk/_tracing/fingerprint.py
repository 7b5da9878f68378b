"""Fingerprint: whether two traces compute the same, as far as equations, constants and callbacks tell."""

import functools
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from hashlib import sha256
from types import CodeType, FunctionType, MethodType
from typing import Any

import jax
import jax.core
import numpy as np
from jax.extend import linear_util
from jax.extend.core import Literal

from .._base.pytree import key_of

_DEEPEST = 4  # functions that a callback holds in its cells, and these in theirs
_EXACT = (int, str, bytes, bool, type(None))  # as their repr tells
# Rules of jax.custom_jvp and jax.custom_vjp: new objects in each trace, and no part of what is computed without them.
_RULES = frozenset(("jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd", "out_trees"))


def fingerprint(closed: Any) -> Hashable:
    """Return what is equal for closed jaxprs that compute the same: the digest of a text, and objects beside it."""
    teller = _Teller()
    with jax.ensure_compile_time_eval():  # a trace may be under way around the call
        text = repr(teller.closed(closed))
    return sha256(text.encode()).digest(), tuple(teller.objects)


class _Object:
    """An object that no text tells: equal to itself and, of JAX's own, to what it calls equal."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return hash(type(self.value))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Object) or type(self.value) is not type(other.value):
            return False
        is_by_value = isinstance(self.value, CodeType | set) or _is_of_jax(self.value)
        return self.value is other.value or (is_by_value and bool(self.value == other.value))


def _is_of_jax(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] in ("jax", "jaxlib")


class _Teller:
    """Tells a jaxpr as nested tuples of exact values; inner jaxprs and constants that occur again as the first time."""

    def __init__(self) -> None:
        self.objects: list[_Object] = []
        self._told: dict[int, tuple[Any, int]] = {}  # by id: what must live, and its number

    def closed(self, closed: Any) -> Any:
        """Tell a closed jaxpr and its constants."""
        # In JAX 0.12 a closed jaxpr and its jaxpr are one object, which must not count as told already.
        return self._once(closed, lambda: (self._jaxpr(closed.jaxpr), [self._constant(each) for each in closed.consts]))

    def _once(self, value: Any, tell: Any) -> Any:
        if id(value) in self._told:
            return "again", self._told[id(value)][1]
        self._told[id(value)] = value, len(self._told)
        return tell()

    def _constant(self, const: Any) -> Any:
        return self._once(const, lambda: self._array(const))

    def _array(self, const: Any) -> Any:
        array = np.asarray(jax.random.key_data(const) if key_of(const) is not None else const)
        return array.dtype.name, array.shape, sha256(array.tobytes()).digest() if array.size > 64 else array.tobytes()

    def jaxpr(self, jaxpr: Any) -> Any:
        """Tell a jaxpr without its constants."""
        return self._once(jaxpr, lambda: self._jaxpr(jaxpr))

    def _jaxpr(self, jaxpr: Any) -> Any:
        numbers: dict[Any, int] = {}

        def takes(atoms: Iterable[Any]) -> list[Any]:
            return [self._array(atom.val) if isinstance(atom, Literal) else numbers[atom] for atom in atoms]

        def makes(variables: Iterable[Any]) -> list[Any]:
            for variable in variables:
                numbers[variable] = len(numbers)
            return [(getattr(v.aval, "shape", None), str(getattr(v.aval, "dtype", None))) for v in variables]

        found: list[Any] = [makes((*jaxpr.constvars, *jaxpr.invars))]
        for each in jaxpr.eqns:
            params = [(name, None if name in _RULES else self._value(value)) for name, value in each.params.items()]
            found.append((each.primitive.name, takes(each.invars), makes(each.outvars), params))
        return found, takes(jaxpr.outvars)

    def _value(self, value: Any, depth: int = 0) -> Any:
        """Tell a parameter of an equation, or what a callback among them holds, which is deeper."""
        kind = type(value)
        if kind in _EXACT or issubclass(kind, float | complex | Enum | np.dtype):
            return kind.__name__, repr(value)
        if isinstance(value, np.generic):
            return kind.__name__, self._constant(value)
        if depth <= _DEEPEST and (parts := _parts(value)) is not None:
            return kind.__name__, [self._value(each, depth + 1) for each in parts]
        if isinstance(value, tuple):
            return kind.__name__, [self._value(each, depth) for each in value]
        if issubclass(kind, set | frozenset) and (depth == 0 or kind is frozenset):
            return kind.__name__, sorted([repr(self._value(each)) for each in value])
        if kind is dict and not value:
            return "{}"  # as JAX makes one in each trace
        if hasattr(value, "jaxpr") and hasattr(value, "consts"):
            return self.closed(value)
        if hasattr(value, "eqns"):
            return self.jaxpr(value)
        if _is_of_jax(value) and (about := getattr(value, "__dict__", None)) and not isinstance(value, type):
            # A record, which JAX makes anew in each trace.
            return kind.__name__, self._once(value, lambda: [(name, self._value(about[name], depth)) for name in about])
        # What a callback holds and may change, as a list that it appends to, it reads when it runs.
        return (kind.__name__, "object", self._object(value)) if depth else self._parameter(value)

    def _parameter(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, np.ndarray | jax.Array) and not isinstance(value, jax.core.Tracer):
            return kind.__name__, self._constant(value)
        if isinstance(value, list):
            return kind.__name__, [self._value(each) for each in value]
        if isinstance(value, Mapping):
            return kind.__name__, [(self._value(key), self._value(value[key])) for key in value]
        if isinstance(value, linear_util.WrappedFun):
            return kind.__name__
        if is_dataclass(value) and not isinstance(value, type):
            return kind.__name__, [self._value(getattr(value, field.name, None)) for field in fields(value)]
        return kind.__name__, "object", self._object(value)

    def _object(self, value: Any) -> int:
        self.objects.append(_Object(value))
        return len(self.objects)


def _parts(value: Any) -> list[Any] | None:
    """Return what a function is made of, which may be a new object in each trace."""
    if isinstance(value, functools.partial):
        return [value.func, value.args, *value.keywords.items()]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, FunctionType):
        cells = [_content(cell) for cell in value.__closure__ or ()]
        return [value.__code__, value.__defaults__, value.__kwdefaults__, *cells]
    return None


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None
