"""Equations: what there is in a jaxpr, inner functions included, and the work it asks for."""

from collections.abc import Iterator
from math import prod
from typing import Any

import jax


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations, those of inner functions too."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in _inner(equation):
            yield from equations(inner)


def flops(jaxpr: Any) -> int:
    """Multiplications and additions of its matrix products and convolutions; of branches those of the longest, of a
    loop without a fixed number of rounds those of one."""
    return sum(map(_flops_of, jaxpr.eqns))


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
    each = [flops(inner) for inner in _inner(equation)]
    if name == "cond":
        return max(each, default=0)
    return sum(each) * (params["length"] if name == "scan" else 1)


def _inner(equation: Any) -> Iterator[Any]:
    for value in jax.tree.leaves(tuple(equation.params.values())):
        inner = getattr(value, "jaxpr", value)
        if hasattr(inner, "eqns"):
            yield inner
