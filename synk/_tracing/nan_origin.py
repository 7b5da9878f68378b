"""NaN origin: find the user's line that makes the first number that is not finite, equation by equation."""

import linecache
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from .equations import called_by

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def is_finite(value: Any) -> bool:
    """Check that an array has no NaN and no infinity. Integers and other values are finite."""
    return not _has_floats(value) or bool(jnp.isfinite(value).all())


def _is_number(value: Any) -> bool:
    return not (_has_floats(value) and bool(jnp.isnan(value).any()))


def _has_floats(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def first_bad_line(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> str | None:
    """Run a jaxpr, and return the line that first turns finite numbers into NaN or infinity; if there is none, since
    infinity was there before, as in a mask, the line that first turns other numbers into NaN.

    Returns:
      The line, as 'model.py:58: h = jnp.log(x)'; None if there is none, or if the jaxpr cannot run by itself.
    """
    try:
        # Infinity often stands in masks on purpose, so a second run looks for NaN alone.
        for is_good in (is_finite, _is_number):
            _run(jaxpr, consts, args, is_good)
    except _FoundLine as finding:
        return finding.line
    except Exception:
        # A collective, for example, does not run outside a program.
        return None
    return None


class _FoundLine(Exception):
    def __init__(self, line: str | None) -> None:
        self.line = line


def _run(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], is_good: Callable[[Any], bool]) -> list[Any]:
    values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if hasattr(atom, "val") else values[atom]

    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        results = _results_of(equation, inputs, is_good)
        # Only the first equation with good operands is the origin; all that follow inherit its numbers.
        if all(map(is_good, inputs)) and not all(map(is_good, results)):
            raise _FoundLine(_line_of(equation))
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _results_of(equation: Any, inputs: Sequence[Any], is_good: Callable[[Any], bool]) -> list[Any]:
    # Inner functions are entered, so that the line found is that of an operation, not of the call of a jitted function.
    if (inner := called_by(equation)) is not None:
        return _run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), inputs, is_good)
    bind: Callable[..., Any] = equation.primitive.bind
    # JAX below 0.10 returns functions apart from the other parameters. Drop this when we require jax>=0.10.
    params = equation.primitive.get_bind_params(equation.params)
    functions, rest = params if isinstance(params, tuple) else ((), params)
    results = bind(*functions, *inputs, **rest)
    return list(results) if equation.primitive.multiple_results else [results]


def _line_of(equation: Any) -> str | None:
    """Return the innermost line of the user's that an equation comes from."""
    traceback = equation.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        name = frame.file_name
        if name.startswith(_PACKAGE) or "-packages" + os.sep in name or name.startswith("<frozen"):
            continue
        text = linecache.getline(name, frame.line_num).strip()
        return f"{os.path.basename(name)}:{frame.line_num}" + (f": {text}" if text else "")
    return None
