"""Elementwise: check that an optimizer of optax's treats each number alone, so that it may run on shards."""

from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from .._base.pytree import PyTree
from .._reductions.shard_ops import shard_shape
from .._tracing.equations import called_by, equations
from .optimizer import Update

# Primitives of JAX that treat each number alone: https://docs.jax.dev/en/latest/jax.lax.html
_ELEMENTWISE = frozenset(
    "abs acos acosh add and asin asinh atan atan2 atanh cbrt ceil clamp complex conj convert_element_type copy copy_p "
    "cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le lgamma log "
    "log1p logistic lt max min mul ne neg nextafter not or population_count pow real reduce_precision rem round rsqrt "
    "select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan "
    "tanh xor broadcast_in_dim reshape".split()
)
_LOSS = jax.ShapeDtypeStruct((), jnp.float32)


def sharded_state(init: Callable[[PyTree], PyTree], update: Update, params: PyTree, replicas: int) -> tuple[bool, ...]:
    """Return which leaves of an optimizer's state are cut into shards if parameters of these shapes are.

    The update is traced with the whole and with shards for so many replicas; nothing runs. Both traces must have the
    same equations with the same constants, and only elementwise equations may differ in shapes. So numbers never mix,
    also in steps and at magnitudes that a run of a few steps would not reach, as in `optax.MultiSteps`.

    Raises:
      ValueError: the optimizer does anything else to shards than to the whole.
    """

    def traced(params: PyTree) -> tuple[PyTree, Any]:
        state = jax.eval_shape(init, params)
        return state, jax.make_jaxpr(update)(params, state, params, _LOSS)

    # The whole comes first, so that the optimizer's own errors stay what they are.
    whole_state, whole = traced(params)
    try:
        state, shards = traced(jax.tree.map(lambda shape: _shard_with_axes(shape, replicas), params))
    except Exception as error:  # an optimizer may do anything with shapes
        raise _refusal("error") from error
    leaves = jax.tree.leaves(whole_state)
    shapes = [shard.shape for shard in jax.tree.leaves(state)]
    if jax.tree.structure(state) != jax.tree.structure(whole_state) or any(
        shape not in (leaf.shape, _shard_with_axes(leaf, replicas).shape)
        for leaf, shape in zip(leaves, shapes, strict=True)
    ):
        raise _refusal("state")
    for ours, theirs in zip_longest(_outlines(whole), _outlines(shards), fillvalue=("end",)):
        if ours != theirs:
            raise _refusal(ours[0])
    return tuple(leaf.shape != shape for leaf, shape in zip(leaves, shapes, strict=True))


def is_sharded(shape: jax.ShapeDtypeStruct) -> bool:
    """Return whether a parameter is cut into shards. A single number is not, nor is an empty array."""
    return shape.size > 1


def _shard_with_axes(shape: jax.ShapeDtypeStruct, replicas: int) -> jax.ShapeDtypeStruct:
    """Return the shape of a shard as optimizers see it.

    A shard has as many axes as the whole, since masks tell matrices from biases by their axes.
    """
    if not is_sharded(shape):
        return shape
    return jax.ShapeDtypeStruct((*shard_shape(shape, replicas).shape, *(1 for _ in shape.shape[1:])), shape.dtype)


def _outlines(program: Any) -> Iterator[tuple[Any, ...]]:
    """Describe the constants and equations of a trace: all that must be the same for the whole and for shards."""
    yield "constants", _constants(program)
    for equation in equations(program.eqns):
        numbers = [variable.val for variable in equation.invars if isinstance(variable, Literal)]
        simple = {k: v for k, v in equation.params.items() if isinstance(v, bool | int | float | str | np.dtype)}
        inner = [_constants(value) for value in jax.tree.leaves([*equation.params.values()])]
        outline = equation.primitive.name, repr(numbers), repr(sorted(simple.items())), inner
        shapes = [variable.aval.shape for variable in (*equation.invars, *equation.outvars)]
        yield outline if _is_elementwise(equation) else (*outline, shapes)


def _is_elementwise(equation: Any) -> bool:
    """Return whether each number of the result comes from the same place in operands, or from an operand of size 1."""
    # Functions and branches that an equation calls follow it in a trace.
    if equation.primitive.name == "cond" or called_by(equation) is not None:
        return True
    if equation.primitive.name not in _ELEMENTWISE or equation.params.get("dimensions") is not None:
        return False
    size = equation.outvars[0].aval.size
    return all(variable.aval.size in (1, size) for variable in equation.invars)


def _constants(function: Any) -> list[bytes]:
    """Return the constants of a closed jaxpr; none of anything else."""
    return [np.asarray(constant).tobytes() for constant in getattr(function, "consts", ())]


def _refusal(where: str) -> ValueError:
    return ValueError(
        f"synk.train.step: shard_optimizer=True gives each replica a shard of every parameter, which takes an "
        f"optimizer that treats each number alone. This one mixes them, or depends on the shapes of parameters: see "
        f"its {where}. To clip by the global norm use clip=."
    )
