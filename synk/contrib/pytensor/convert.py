"""Convert: make JAX functions of PyTensor's expressions, one for each set of input shapes.

A trace of JAX knows every shape, so the graph is rewritten with shapes as constants. PyTensor's own JAX mode keeps
shapes symbolic, and fails where JAX must know them, as in the gradient of a scan.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytensor.tensor as pt
from pytensor.compile.mode import get_mode
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.configdefaults import config
from pytensor.graph.basic import Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.replace import clone_replace
from pytensor.link.jax.dispatch.basic import jax_funcify
from pytensor.tensor.basic import ARange

from .held import shared
from .walk import inputs_of


# PyTensor hands its own small constants to `jax.numpy.arange`, and int8 overflows at 128:
# https://github.com/pymc-devs/pytensor/issues/2296
@jax_funcify.register(ARange)
def _arange(op: ARange, node: Any, **options: Any) -> Any:
    """Convert `pt.arange` with Python numbers as bounds."""

    def as_number(bound: Any) -> int | float:
        bound = np.asarray(bound)  # raises for a tracer, as PyTensor's own conversion does
        return int(bound) if bound.dtype.kind in "iub" else float(bound)

    return lambda *bounds: jnp.arange(*map(as_number, bounds), dtype=op.dtype)


class Converted:
    """Expressions as a JAX function of their inputs, which reads shared variables by itself.

    Attributes:
      variables: the shared variables that the expressions read.
    """

    def __init__(self, inputs: Sequence[Variable], outputs: Sequence[Variable]) -> None:
        self.variables = [v for v in inputs_of(outputs) if isinstance(v, SharedVariable)]
        self._inputs = [*inputs, *self.variables]
        self._outputs = outputs
        # Rewriting a graph is slow, and uneven rows trace it for two numbers of rows.
        self._for_shapes = lru_cache(maxsize=32)(self._convert)

    def __call__(self, arguments: Sequence[Any]) -> list[jax.Array]:
        """Compute the expressions, each in the dtype that the graph says."""
        if not self._outputs:
            return []
        values = [*arguments, *[shared(variable).value for variable in self.variables]]
        values = [as_typed(value, variable) for value, variable in zip(values, self._inputs, strict=True)]
        # PyTensor's conversions count on JAX's default promotion. They warn where they ask for 64 bits that JAX has
        # switched off (see `as_typed`), and where they drop assertions, which a trace cannot raise.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Explicitly requested dtype|Skipping .* as JAX tracing", UserWarning)
            run = self._for_shapes(tuple(value.shape for value in values), jax.config.read("jax_enable_x64"))
            outputs = run(*values)
        return [as_typed(value, variable) for value, variable in zip(outputs, self._outputs, strict=True)]

    def _convert(self, shapes: tuple[tuple[int, ...], ...], has_64_bits: bool) -> Callable[..., Any]:
        shaped: dict[Variable, Variable] = {
            variable: pt.tensor(name=variable.name, dtype=variable.type.dtype, shape=_static_shape(shape, variable))
            for variable, shape in zip(self._inputs, shapes, strict=True)
        }
        outputs = clone_replace(list(self._outputs), replace=shaped, rebuild_strict=False)
        # Constants must be no part of the trace under way. Without tracebacks, which JAX shows for no node, rewriting
        # takes a tenth of the time.
        with jax.ensure_compile_time_eval(), config.change_flags(traceback__limit=0):
            graph = FunctionGraph(inputs=list(shaped.values()), outputs=outputs, clone=True)
            mode: Any = get_mode("JAX")
            mode.optimizer.rewrite(graph)
            return jax_funcify(graph)


def _static_shape(shape: Sequence[int], variable: Any) -> tuple[Any, ...]:
    """Return the shape to tell PyTensor, with None for an axis that may not broadcast but happens to have one entry."""
    known = variable.type.shape  # has fewer axes where the op "stack" added one
    return tuple(None if n == 1 and known[i : i + 1] != (1,) else n for i, n in enumerate(shape))


def as_typed(value: Any, variable: Variable) -> jax.Array:
    """Cast a value to the dtype of its variable, with 32 bits where JAX has 64 switched off."""
    return jnp.asarray(value, jax.dtypes.canonicalize_dtype(variable.type.dtype))
