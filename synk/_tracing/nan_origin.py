"""NaN origin: find the user's line that makes the first number that is not finite, equation by equation."""

import linecache
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp

from .equations import bind, called_by, fold, number

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
            fold(jaxpr, consts, args, partial(_checked, is_good))
    except _FoundLine as finding:
        return finding.line
    except Exception:
        # A collective, for example, does not run outside a program.
        return None
    return None


class _FoundLine(Exception):
    def __init__(self, line: str | None) -> None:
        self.line = line


def _checked(is_good: Callable[[Any], bool], equation: Any, operands: Iterable[Any]) -> list[Any]:
    """Evaluate an equation; raise its line if it is the origin."""
    operands, rule = [*map(number, operands)], partial(_checked, is_good)
    # Inner functions are entered, so that the line found is that of an operation, not of the call of a jitted function.
    inner = called_by(equation)
    results = bind(equation, operands) if inner is None else [*map(number, fold(*inner, operands, rule))]
    # Only the first equation with good operands is the origin; all that follow inherit its numbers.
    if all(map(is_good, operands)) and not all(map(is_good, results)):
        raise _FoundLine(_line_of(equation))
    return results


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
