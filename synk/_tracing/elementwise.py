"""Elementwise: whether a function treats each number of its arrays alone, so that pieces of them give pieces."""

from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from .._base.pytree import PyTree
from .equations import called_by, equations

_NUMBERWISE = frozenset(
    "abs acos acosh add and asin asinh atan atan2 atanh cbrt ceil clamp complex conj convert_element_type copy copy_p "
    "cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le lgamma log "
    "log1p logistic lt max min mul ne neg nextafter not or population_count pow real reduce_precision rem round rsqrt "
    "select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan "
    "tanh xor broadcast_in_dim".split()
)


class _Kind(IntEnum):
    """What an array is."""

    UNIFORM = 0  # one number, at every place
    OTHER = 1  # numbers that have nothing to do with pieces
    PIECE = 2  # numbers of which each replica has some


class _MixesError(Exception):
    """An equation mixes the numbers of a piece."""


def mixing(fn: Callable[..., PyTree], is_piece: PyTree, *args: PyTree) -> str | None:
    """What in a function mixes the numbers of arguments or results that lie in pieces; None where nothing does.

    Args:
      fn: a function of `args`, trees of shapes; it returns a tree of like structure as `is_piece` has.
      is_piece: a pair of trees of booleans: of the leaves of the arguments, and of those of the results.
      *args: shapes.
    """
    of_arguments, of_results = map(jax.tree.leaves, is_piece)
    closed = jax.make_jaxpr(fn)(*args)
    kinds = [
        _Kind.PIECE if one else _kind_of(variable.aval)
        for one, variable in zip(of_arguments, closed.jaxpr.invars, strict=True)
    ]
    try:
        found = _run(closed.jaxpr, [_kind_of(const) for const in closed.consts], kinds)
    except _MixesError as error:
        return str(error)
    wrong = [kind for one, kind in zip(of_results, found, strict=True) if kind == (_Kind.OTHER if one else _Kind.PIECE)]
    return "a result that has no number for each" if wrong else None


def asks_for_shapes(fn: Callable[..., PyTree], whole: Sequence[PyTree], pieces: Sequence[PyTree]) -> bool:
    """Does it do anything else to pieces than to the whole, of these shapes? Masks by size do, and so does what counts
    the numbers of an array."""
    traced = [jax.make_jaxpr(fn)(*args) for args in (whole, pieces)]
    both = [list(equations(closed.jaxpr)) for closed in traced]
    outlines = [[*map(_outline, each)] for each in both]
    if outlines[0] != outlines[1] or _constants(traced[0]) != _constants(traced[1]):
        return True
    for one, other in zip(*both, strict=True):
        name = one.primitive.name
        pairs = zip(one.invars, other.invars, strict=True)
        differs = any(a.aval.shape != b.aval.shape for a, b in pairs)
        if differs and name not in _NUMBERWISE and name not in ("cond", "reshape") and called_by(one) is None:
            return True
    return False


def _outline(equation: Any) -> tuple[str, str, str]:
    """An equation but for shapes: what it does, and by which numbers."""
    numbers = [variable.val for variable in equation.invars if isinstance(variable, Literal)]
    simple = {k: v for k, v in equation.params.items() if isinstance(v, bool | int | float | str | np.dtype)}
    return equation.primitive.name, repr(numbers), repr(sorted(simple.items()))


def _constants(closed: Any) -> list[bytes]:
    """The constants of a function and of those inside."""
    inner = [value for equation in equations(closed.jaxpr) for value in jax.tree.leaves([*equation.params.values()])]
    each = [closed, *(value for value in inner if hasattr(value, "consts"))]
    return [np.asarray(const).tobytes() for one in each for const in one.consts]


def _kind_of(array: Any) -> _Kind:
    return _Kind.UNIFORM if np.size(array) == 1 or array.size == 1 else _Kind.OTHER


def _run(jaxpr: Any, consts: Sequence[_Kind], kinds: Sequence[_Kind]) -> list[_Kind]:
    """What its results are, from what its constants and arguments are."""
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *kinds), strict=True))

    def kind(variable: Any) -> _Kind:
        return _kind_of(variable.aval) if isinstance(variable, Literal) else known[variable]

    for equation in jaxpr.eqns:
        results = _of_equation(equation, [kind(variable) for variable in equation.invars])
        known |= zip(equation.outvars, results, strict=True)
    return [kind(variable) for variable in jaxpr.outvars]


def _of_equation(equation: Any, kinds: list[_Kind]) -> list[_Kind]:
    name, params = equation.primitive.name, equation.params
    if name == "cond":
        each = [_run_closed(branch, kinds[1:]) for branch in params["branches"]]
        return [_joined(name, of_branches) for of_branches in zip(*each, strict=True)]
    if (inner := called_by(equation)) is not None:
        return _run_closed(inner, kinds)
    if _Kind.PIECE not in kinds:
        is_uniform = max(kinds, default=_Kind.OTHER) == _Kind.UNIFORM and name in _NUMBERWISE
        return [_Kind.UNIFORM if is_uniform else _kind_of(variable.aval) for variable in equation.outvars]
    if not _keeps_places(equation, kinds):
        raise _MixesError(name)
    return [_joined(name, kinds) for _ in equation.outvars]


def _keeps_places(equation: Any, kinds: Sequence[_Kind]) -> bool:
    """Does each number of a piece stay where it is?"""
    name, shape = equation.primitive.name, equation.outvars[0].aval.shape
    if name not in _NUMBERWISE and (name != "reshape" or equation.params.get("dimensions") is not None):
        return False
    pairs: Iterator[tuple[_Kind, Any]] = zip(kinds, equation.invars, strict=True)
    return all(variable.aval.shape == shape for kind, variable in pairs if kind == _Kind.PIECE)


def _run_closed(jaxpr: Any, kinds: Sequence[_Kind]) -> list[_Kind]:
    """Of an inner function, with its constants if it has some."""
    if hasattr(jaxpr, "consts"):
        return _run(jaxpr.jaxpr, [_kind_of(const) for const in jaxpr.consts], kinds)
    return _run(jaxpr, [], kinds)


def _joined(name: str, kinds: Sequence[_Kind]) -> _Kind:
    if _Kind.OTHER in kinds and _Kind.PIECE in kinds:
        raise _MixesError(name)
    return max(kinds)
