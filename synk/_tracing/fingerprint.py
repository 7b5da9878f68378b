"""Fingerprint: a value that is equal for two traces with the same equations, constants and callbacks."""

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

# Callbacks hold functions in their cells, which hold functions in theirs: look so many levels deep.
_DEEPEST = 4
# Types whose repr says all.
_EXACT = (int, str, bytes, bool, type(None))
# Rules of jax.custom_jvp and jax.custom_vjp. They are new objects in each trace, and belong to gradients alone.
_RULES = frozenset(("jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd", "out_trees"))


def fingerprint(closed: Any) -> Hashable:
    """Return a value that is equal for closed jaxprs that compute the same: a digest, and objects without a text."""
    teller = _Teller()
    # A trace may be under way around the call.
    with jax.ensure_compile_time_eval():
        text = repr(teller.closed(closed))
    return sha256(text.encode()).digest(), tuple(teller.objects)


class _Object:
    """An object without a text. It is equal to itself; objects of JAX are equal by their own rules."""

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
    """A writer of jaxprs as nested tuples of exact values. A jaxpr or constant that occurs again is a number."""

    def __init__(self) -> None:
        self.objects: list[_Object] = []
        # By id: the object, kept alive so that its id stays its own, and its number.
        self._told: dict[int, tuple[Any, int]] = {}

    def closed(self, closed: Any) -> Any:
        """Return a closed jaxpr and its constants as tuples."""
        # In JAX 0.12 a closed jaxpr and its jaxpr are one object, which must not count as told already.
        return self._once(closed, lambda: (self._jaxpr(closed.jaxpr), list(map(self._constant, closed.consts))))

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
        """Return a jaxpr without its constants as tuples."""
        return self._once(jaxpr, lambda: self._jaxpr(jaxpr))

    def _jaxpr(self, jaxpr: Any) -> Any:
        numbers: dict[Any, int] = {}

        def takes(atoms: Iterable[Any]) -> list[Any]:
            return [self._array(atom.val) if isinstance(atom, Literal) else numbers[atom] for atom in atoms]

        def makes(variables: Iterable[Any]) -> list[Any]:
            for variable in variables:
                numbers[variable] = len(numbers)
            return [(getattr(v.aval, "shape", None), str(getattr(v.aval, "dtype", None))) for v in variables]

        told: list[Any] = [makes((*jaxpr.constvars, *jaxpr.invars))]
        for equation in jaxpr.eqns:
            named = equation.params.items()
            params = [(name, None if name in _RULES else self._value(value)) for name, value in named]
            told.append((equation.primitive.name, takes(equation.invars), makes(equation.outvars), params))
        return told, takes(jaxpr.outvars)

    def _value(self, value: Any, depth: int = 0) -> Any:
        """Return a parameter of an equation as tuples. Values that a callback holds are deeper than 0."""
        kind = type(value)
        if kind in _EXACT or issubclass(kind, float | complex | Enum | np.dtype):
            return kind.__name__, repr(value)
        if isinstance(value, np.generic):
            return kind.__name__, self._constant(value)
        if depth <= _DEEPEST and (parts := _parts(value)) is not None:
            return kind.__name__, [self._value(part, depth + 1) for part in parts]
        if isinstance(value, tuple):
            return kind.__name__, [self._value(entry, depth) for entry in value]
        if issubclass(kind, set | frozenset) and (depth == 0 or kind is frozenset):
            return kind.__name__, sorted([repr(self._value(entry)) for entry in value])
        # JAX makes an empty dict in each trace.
        if kind is dict and not value:
            return "{}"
        if hasattr(value, "jaxpr") and hasattr(value, "consts"):
            return self.closed(value)
        if hasattr(value, "eqns"):
            return self.jaxpr(value)
        if _is_of_jax(value) and (about := getattr(value, "__dict__", None)) and not isinstance(value, type):
            # A record of JAX's, which is a new object in each trace.
            return kind.__name__, self._once(value, lambda: [(name, self._value(about[name], depth)) for name in about])
        # A callback reads what it holds when it runs, so the contents of a list do not count now.
        return (kind.__name__, "object", self._object(value)) if depth else self._parameter(value)

    def _parameter(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, np.ndarray | jax.Array) and not isinstance(value, jax.core.Tracer):
            return kind.__name__, self._constant(value)
        if isinstance(value, list):
            return kind.__name__, [self._value(entry) for entry in value]
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
    """Return the parts of a function, which may be a new object in each trace. Return None for other values."""
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
    except ValueError:
        # The cell is empty.
        return None
