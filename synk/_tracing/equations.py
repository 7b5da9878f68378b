"""Equations: how the equations of jaxprs nest, a walk and a fold over them, what they do, and their work."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from jax.interpreters.partial_eval import dce_jaxpr

from .._runtime.way import replica_axis

# Primitives that call a function with their arguments as they are.
CALLS = frozenset(("jit", "call", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat2"))

# Rules of jax.custom_jvp and jax.custom_vjp, which JAX traces on demand. Each returns a jaxpr and its constants first.
RULES = frozenset(("jvp_jaxpr_fun", "fwd_jaxpr_thunk"))

# Primitives of JAX that treat each number alone: https://docs.jax.dev/en/latest/jax.lax.html
ELEMENTWISE = frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex "
    "conj convert_element_type copy copy_p cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge "
    "gt igamma igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max "
    "min mul mulhi ne neg nextafter not one_minus_square or polygamma population_count pow random_gamma_grad real "
    "reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic "
    "shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor zeta".split()
)


def functions_in(equation: Any) -> list[Any]:
    """Return the functions inside an equation, as jaxprs or closed jaxprs."""
    # Parameters hold functions by many names (jaxpr, branches, cond_jaxpr, ...), also in tuples, and these names change
    # between versions of JAX; that they have equations does not.
    return [value for value in jax.tree.leaves([*equation.params.values()]) if hasattr(value, "eqns")]


def called_by(equation: Any) -> tuple[Any, Sequence[Any]] | None:
    """Return the jaxpr that an equation calls with its arguments as they are, and its constants; None for others."""
    if equation.primitive.name not in CALLS:
        return None
    inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    return getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())


def equations(given: Iterable[Any], is_at_top: bool = False) -> Iterator[Any]:
    """Yield equations, each followed by those of the functions inside; at the top only by those that run once, which
    are in no loop and no branch."""
    for equation in given:
        yield equation
        for inner in functions_in(equation):
            if not is_at_top or equation.primitive.name in CALLS:
                yield from equations(inner.eqns, is_at_top)


def fold(
    jaxpr: Any, consts: Iterable[Any], args: Iterable[Any], rule: Callable[[Any, list[Any]], Iterable[Any]]
) -> list[Any]:
    """Give each variable of a jaxpr a value, and return the values of its results.

    Args:
      jaxpr: the function.
      consts, args: the values of its constants and arguments.
      rule: takes an equation and the values of its operands, and returns those of its results. It is called for each
        equation in order, and says itself what becomes of inner functions. A literal is its own value.
    """
    # In JAX 0.12 a jaxpr whose constants are not attached counts their variables among its arguments.
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atoms: Iterable[Any]) -> list[Any]:
        return [atom if isinstance(atom, Literal) else values[atom] for atom in atoms]

    for equation in jaxpr.eqns:
        values |= zip(equation.outvars, rule(equation, read(equation.invars)), strict=True)
    return read(jaxpr.outvars)


def number(value: Any) -> Any:
    """Return what a literal stands for, any other value as it is."""
    return value.val if isinstance(value, Literal) else value


def bind(equation: Any, values: Iterable[Any]) -> list[Any]:
    """Evaluate an equation on arrays, as `jax.core.eval_jaxpr` does."""
    given = equation.primitive.get_bind_params(equation.params)
    # JAX below 0.10 returns functions apart from the other parameters. Drop this when we require jax>=0.10.
    functions, params = given if isinstance(given, tuple) else ((), given)
    with equation.ctx.manager:
        results = equation.primitive.bind(*functions, *values, **params)
    return list(results) if equation.primitive.multiple_results else [results]


def is_over_axis(equation: Any) -> bool:
    # psum and its like say axes, all others axis_name.
    names = equation.params.get("axis_name", equation.params.get("axes", ()))
    return replica_axis() in (names if isinstance(names, tuple) else (names,))


def draws_by_rbg(equation: Any) -> bool:
    """Check whether an equation draws by a generator whose numbers under `jax.vmap` depend on the other keys."""
    # jax.vmap draws all keys of such a generator by one call (https://docs.jax.dev/en/latest/jax.random.html), so a row
    # would depend on those beside it. Unwrapping a key draws nothing.
    name = equation.primitive.name
    if name == "rng_bit_generator" or not name.startswith("random_"):
        return name == "rng_bit_generator"
    has_key = any(str(getattr(v.aval, "dtype", "")) in ("key<rbg>", "key<urbg>") for v in equation.invars)
    return has_key and name != "random_unwrap"


def narrowest_float(all_equations: Iterable[Any]) -> np.dtype | None:
    shapes = [variable.aval for equation in all_equations for variable in equation.outvars]
    dtypes = {shape.dtype for shape in shapes if hasattr(shape, "dtype")}
    floats = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)]
    # Of float16 and bfloat16, with as many bits, bfloat16 is coarser.
    return min(floats, key=lambda dtype: (jnp.finfo(dtype).bits, -jnp.finfo(dtype).eps), default=None)


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
        # rhs_spec begins with the axis of output features, each of which has this many taps.
        taps = kernel.size // max(kernel.shape[features], 1)
        # A dilated input, as in gradients of strided convolutions, is mostly zeros, which cost nothing.
        return 2 * equation.outvars[0].aval.size * taps // prod(params["lhs_dilation"] or (1,))
    # Elementwise work is left out: products dominate wherever the count matters.
    inside = [sum(map(_flops_of, inner.eqns)) for inner in functions_in(equation)]
    if name == "cond":
        return min(inside, default=0)
    return sum(inside) * (params["length"] if name == "scan" else 1)
