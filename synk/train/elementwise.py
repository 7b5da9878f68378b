"""Elementwise: whether an optimizer of optax's treats each number alone, so that it may run on shards of parameters."""

from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from .._base.pytree import PyTree
from .._reductions.shard_ops import shard_shape
from .._tracing.equations import called_by, equations
from .optimizer import update_of

# Primitives of JAX that treat each number alone: https://docs.jax.dev/en/latest/jax.lax.html
_ELEMENTWISE = frozenset(
    "abs acos acosh add and asin asinh atan atan2 atanh cbrt ceil clamp complex conj convert_element_type copy copy_p "
    "cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le lgamma log "
    "log1p logistic lt max min mul ne neg nextafter not or population_count pow real reduce_precision rem round rsqrt "
    "select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan "
    "tanh xor broadcast_in_dim reshape".split()
)
_LOSS = jax.ShapeDtypeStruct((), jnp.float32)
_BY_SHAPE = "what it does depends on the shapes of parameters"


class ElementwiseOptimizer:
    """An optimizer of optax's that treats each number of its parameters alone.

    It is tried on the whole and on shards: its update is traced with both, and nothing runs. Both traces must have the
    same equations with the same constants, and only elementwise equations may differ in shapes. So numbers never mix,
    also in steps and at magnitudes that a run of a few steps would not reach, as in `optax.MultiSteps`.

    Attributes:
      is_cut: for each leaf of the optimizer's state whether it has a number for each number of a parameter.
      update: computes updates and the new state from gradients, state, parameters and the loss, of shards too.
    """

    def __init__(self, call: str, optimizer: Any, params: PyTree) -> None:
        """Try the optimizer on a tree of shapes; raise ValueError if it mixes numbers."""
        self._call, self._init, self._params, self.update = call, optimizer.init, params, update_of(optimizer)
        # The whole comes first, so that the optimizer's own errors stay what they are.
        self._state = jax.eval_shape(optimizer.init, params)
        self._program = jax.make_jaxpr(self.update)(params, self._state, params, _LOSS)
        self.is_cut = self.check_shards(2)

    def check_shards(self, replicas: int) -> tuple[bool, ...]:
        """Return which leaves of the state are cut into shards.

        Raises:
          ValueError: the optimizer does anything else to the shards of this many replicas than to the whole.
        """
        params = jax.tree.map(lambda shape: shard_with_axes(shape, replicas), self._params)
        try:
            state = jax.eval_shape(self._init, params)
            program = jax.make_jaxpr(self.update)(params, state, params, _LOSS)
        except Exception as error:  # an optimizer may do anything with shapes
            raise self._refusal(_BY_SHAPE) from error
        if jax.tree.structure(state) != jax.tree.structure(self._state):
            raise self._refusal(_BY_SHAPE)
        pairs = [*zip(jax.tree.leaves(self._state), jax.tree.leaves(state), strict=True)]
        if any(shard.shape not in (leaf.shape, shard_with_axes(leaf, replicas).shape) for leaf, shard in pairs):
            raise self._refusal("its state has other shapes than the parameters")
        difference = _difference(self._program, program)
        if difference is not None:
            raise self._refusal(difference)
        return tuple(leaf.shape != shard.shape for leaf, shard in pairs)

    def _refusal(self, reason: str) -> ValueError:
        return ValueError(
            f"{self._call}: shard_optimizer=True gives each replica a shard of every parameter, which takes an "
            f"optimizer that treats each number alone. This one does not: {reason}. To clip by the global norm use "
            f"clip=."
        )


def is_sharded(shape: jax.ShapeDtypeStruct) -> bool:
    """Return whether a parameter is cut into shards. A single number is not, nor is an empty array."""
    return shape.size > 1


def shard_with_axes(shape: jax.ShapeDtypeStruct, replicas: int) -> jax.ShapeDtypeStruct:
    """Return the shape of a shard as optimizers see it.

    It has as many axes as the whole, since masks tell matrices from biases by their axes.
    """
    if not is_sharded(shape):
        return shape
    return jax.ShapeDtypeStruct((*shard_shape(shape, replicas).shape, *(1 for _ in shape.shape[1:])), shape.dtype)


def _difference(whole: Any, shards: Any) -> str | None:
    """Tell what differs between the traces of an update of the whole and of shards; None if nothing does."""
    if _constants(whole) != _constants(shards):
        return _BY_SHAPE
    for ours, theirs in zip_longest(equations(whole.jaxpr), equations(shards.jaxpr)):
        if ours is None or theirs is None or _outline(ours) != _outline(theirs):
            return _BY_SHAPE
        # Functions and branches that an equation calls follow it in both traces.
        if _shapes(ours) != _shapes(theirs) and ours.primitive.name != "cond" and called_by(ours) is None:
            if not _is_elementwise(ours):
                return f"it mixes them ({ours.primitive.name})"
    return None


def _is_elementwise(equation: Any) -> bool:
    """Return whether each number of the result comes from the same place in operands, or from an operand of size 1."""
    if equation.primitive.name not in _ELEMENTWISE or equation.params.get("dimensions") is not None:
        return False
    size = equation.outvars[0].aval.size
    return all(variable.aval.size in (1, size) for variable in equation.invars)


def _shapes(equation: Any) -> list[tuple[int, ...]]:
    return [variable.aval.shape for variable in (*equation.invars, *equation.outvars)]


def _outline(equation: Any) -> tuple[str, ...]:
    """Describe an equation without shapes: its primitive, numbers, simple parameters and constants."""
    numbers = [variable.val for variable in equation.invars if isinstance(variable, Literal)]
    simple = {k: v for k, v in equation.params.items() if isinstance(v, bool | int | float | str | np.dtype)}
    inner = [_constants(value) for value in jax.tree.leaves([*equation.params.values()])]
    return equation.primitive.name, repr(numbers), repr(sorted(simple.items())), repr(inner)


def _constants(function: Any) -> list[bytes]:
    """Return the constants of a closed jaxpr; none of anything else."""
    return [np.asarray(constant).tobytes() for constant in getattr(function, "consts", ())]
