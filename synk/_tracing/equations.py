"""Equations: the equations of a jaxpr and of inner functions, their work, and equations that occur twice."""

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from jax.interpreters.partial_eval import dce_jaxpr

from .._runtime.axis import replica_axis

# Primitives that call a function with their arguments as they are.
_CALLS = frozenset(("jit", "call", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat2"))


def called_by(equation: Any) -> Any:
    """Return the function that an equation calls with its arguments as they are, None for other equations."""
    params = equation.params
    return params.get("jaxpr", params.get("call_jaxpr")) if equation.primitive.name in _CALLS else None


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yield all equations, also those of inner functions."""
    for equation in jaxpr.eqns:
        yield equation
        yield from equations_inside(equation)


def equations_at_top(jaxpr: Any) -> Iterator[Any]:
    """Yield the equations that run once: not those in loops and branches."""
    for equation in jaxpr.eqns:
        yield equation
        inner = called_by(equation)
        if inner is not None:
            yield from equations_at_top(getattr(inner, "jaxpr", inner))


def equations_inside(equation: Any) -> Iterator[Any]:
    """Yield the equations of the functions inside one equation."""
    for inner in _inner(equation):
        yield from equations(inner)


def is_over_axis(equation: Any) -> bool:
    """Check whether an equation names the axis of the replicas."""
    names = equation.params.get("axis_name", equation.params.get("axes", ()))
    return replica_axis() in (names if isinstance(names, tuple) else (names,))


def draws_by_rbg(equation: Any) -> bool:
    """Check whether an equation draws by a generator whose numbers under `jax.vmap` depend on the other keys."""
    name = equation.primitive.name
    has_key = any(str(getattr(v.aval, "dtype", "")) in ("key<rbg>", "key<urbg>") for v in equation.invars)
    return name == "rng_bit_generator" or (has_key and name.startswith("random_") and name != "random_unwrap")


def narrowest_float(all_equations: Iterable[Any]) -> np.dtype | None:
    """Return the floating or complex dtype of the fewest bits that equations compute in."""
    shapes = [variable.aval for equation in all_equations for variable in equation.outvars]
    dtypes = {shape.dtype for shape in shapes if hasattr(shape, "dtype")}
    floats = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)]
    # Of float16 and bfloat16, with as many bits, bfloat16 is coarser.
    return min(floats, key=lambda dtype: (jnp.finfo(dtype).bits, -jnp.finfo(dtype).eps), default=None)


def merge_equal(jaxpr: Any) -> Any:
    """Return a jaxpr without equations that repeat an earlier one.

    XLA drops such equations too, but sooner for several devices than for one, and some of its rules depend on how often
    a value is used: A / broadcast(B) becomes A * broadcast(1 / B) only if B is used once. Bits would differ.
    """
    # By variable: an earlier variable of the same value.
    instead: dict[Any, Any] = {}
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
        except TypeError:
            # Its parameters have no hash.
            continue
        has_dropped = any(type(variable).__name__ == "DropVar" for variable in first)
        if first is not equation.outvars and not equation.effects and not has_dropped:
            instead |= zip(equation.outvars, first, strict=True)
            kept.pop()
    outs = [v if isinstance(v, Literal) else instead.get(v, v) for v in jaxpr.outvars]
    return jaxpr.replace(eqns=kept, outvars=outs)


def _merge_inside(value: Any) -> Any:
    """Return a parameter of an equation, with repeated equations of inner functions merged."""
    if isinstance(value, tuple | list):
        return type(value)(map(_merge_inside, value)) if type(value) in (tuple, list) else value
    # A closed jaxpr has a jaxpr.
    if hasattr(value, "jaxpr"):
        return value.replace(jaxpr=merge_equal(value.jaxpr))
    return merge_equal(value) if hasattr(value, "eqns") else value


def flops(jaxpr: Any, used: Sequence[bool]) -> int:
    """Count the multiplications and additions of matrix products and convolutions that the used outputs need.

    Branches count as the cheapest one, loops of an unknown length as one round.
    """
    return sum(map(_flops_of, dce_jaxpr(jaxpr, list(used))[0].eqns))


def _flops_of(equation: Any) -> int:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2 * equation.outvars[0].aval.size * prod(equation.invars[0].aval.shape[i] for i in contracted)
    if name == "conv_general_dilated":
        kernel, features = equation.invars[1].aval, params["dimension_numbers"].rhs_spec[0]
        taps = kernel.size // max(kernel.shape[features], 1)
        # A dilated input, as in gradients of strided convolutions, is mostly zeros, which cost nothing.
        return 2 * equation.outvars[0].aval.size * taps // prod(params["lhs_dilation"] or (1,))
    inside = [sum(map(_flops_of, inner.eqns)) for inner in _inner(equation)]
    if name == "cond":
        return min(inside, default=0)
    return sum(inside) * (params["length"] if name == "scan" else 1)


def _inner(equation: Any) -> Iterator[Any]:
    for value in jax.tree.leaves(tuple(equation.params.values())):
        inner = getattr(value, "jaxpr", value)
        if hasattr(inner, "eqns"):
            yield inner
