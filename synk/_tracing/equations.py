"""Equations: what there is in a jaxpr, inner functions included, the work it asks for, and what it does twice."""

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from .._runtime.group import AXIS

# Those that call a function with their very arguments.
_CALLS = frozenset(("jit", "call", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat2"))


def called_by(equation: Any) -> Any:
    """The function that an equation calls with its very arguments; None where it does something else."""
    params = equation.params
    return params.get("jaxpr", params.get("call_jaxpr")) if equation.primitive.name in _CALLS else None


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yield all equations, those of inner functions too."""
    for equation in jaxpr.eqns:
        yield equation
        yield from equations_inside(equation)


def equations_inside(equation: Any) -> Iterator[Any]:
    """Yield the equations of the functions inside one equation."""
    for inner in _inner(equation):
        yield from equations(inner)


def is_over_axis(equation: Any) -> bool:
    """Does it communicate over the axis of the replicas, or ask for a place on it?"""
    return AXIS in str(equation.params.get("axis_name", equation.params.get("axes", "")))


def narrowest_float(found: Iterable[Any]) -> np.dtype | None:
    """The dtype of the fewest bits that equations compute in, of floating and complex numbers."""
    shapes = [variable.aval for equation in found for variable in equation.outvars]
    dtypes = {shape.dtype for shape in shapes if hasattr(shape, "dtype")}
    floats = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)]
    # Of two with as many bits the coarser one.
    return min(floats, key=lambda dtype: (jnp.finfo(dtype).bits, -jnp.finfo(dtype).eps), default=None)


def merge_equal(jaxpr: Any) -> Any:
    """The same, in which no equation computes what an earlier one has.

    XLA's passes find such pairs sooner for several devices than for one, and some of its rules ask how often a value is
    used: A / broadcast(B) becomes A * broadcast(1 / B) where B is used once.
    """
    instead: dict[Any, Any] = {}  # by variable: an equal one
    seen: dict[Any, Any] = {}
    kept: list[Any] = []
    for equation in jaxpr.eqns:
        ins = [v if isinstance(v, Literal) else instead.get(v, v) for v in equation.invars]
        params = {name: _merge_inside(value) for name, value in equation.params.items()}
        kept.append(equation.replace(invars=ins, params=params))
        names = tuple((repr(v.val), str(v.aval)) if isinstance(v, Literal) else v for v in ins)
        key = (equation.primitive, names, tuple(sorted(equation.params.items(), key=lambda item: item[0])))
        try:
            first = seen.setdefault(key, equation.outvars)
        except TypeError:  # its parameters have no hash
            continue
        if first is not equation.outvars and not equation.effects and not any(map(_is_dropped, first)):
            instead |= zip(equation.outvars, first, strict=True)
            kept.pop()
    outs = [v if isinstance(v, Literal) else instead.get(v, v) for v in jaxpr.outvars]
    return jaxpr.replace(eqns=kept, outvars=outs)


def _merge_inside(value: Any) -> Any:
    """A parameter of an equation: of inner functions the same."""
    if isinstance(value, tuple | list):
        return type(value)(map(_merge_inside, value)) if type(value) in (tuple, list) else value
    if hasattr(value, "jaxpr"):  # with its constants
        return value.replace(jaxpr=merge_equal(value.jaxpr))
    return merge_equal(value) if hasattr(value, "eqns") else value


def _is_dropped(variable: Any) -> bool:
    return type(variable).__name__ == "DropVar"


def flops(jaxpr: Any, outs: Sequence[Any]) -> int:
    """Multiplications and additions of the matrix products and convolutions that these outputs of it need; of branches
    those of the shortest, of a loop without a fixed number of rounds those of one."""
    return _work_for(jaxpr, outs)[0]


def _work_for(jaxpr: Any, outs: Sequence[Any]) -> tuple[int, set[Any]]:
    """That, and which variables they need."""
    needed, found = {v for v in outs if not isinstance(v, Literal)}, 0
    for equation in reversed(jaxpr.eqns):
        if needed.isdisjoint(equation.outvars):
            continue
        used, inner = equation.invars, called_by(equation)
        if inner is None:
            found += _flops_of(equation)
        else:
            inner = getattr(inner, "jaxpr", inner)
            pairs = zip(inner.outvars, equation.outvars, strict=True)
            work, inside = _work_for(inner, [out for out, outer in pairs if outer in needed])
            found += work
            used = [outer for outer, own in zip(equation.invars, inner.invars, strict=True) if own in inside]
        needed.update(v for v in used if not isinstance(v, Literal))
    return found, needed


def _flops_of(equation: Any) -> int:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2 * equation.outvars[0].aval.size * prod(equation.invars[0].aval.shape[i] for i in contracted)
    if name == "conv_general_dilated":
        kernel, features = equation.invars[1].aval, params["dimension_numbers"].rhs_spec[0]
        taps = kernel.size // max(kernel.shape[features], 1)
        # Of a dilated input, as the gradient of a strided convolution has it, most entries are zeros, and cost nothing.
        return 2 * equation.outvars[0].aval.size * taps // prod(params["lhs_dilation"] or (1,))
    each = [flops(inner, inner.outvars) for inner in _inner(equation)]
    if name == "cond":
        return min(each, default=0)
    return sum(each) * (params["length"] if name == "scan" else 1)


def _inner(equation: Any) -> Iterator[Any]:
    for value in jax.tree.leaves(tuple(equation.params.values())):
        inner = getattr(value, "jaxpr", value)
        if hasattr(inner, "eqns"):
            yield inner
