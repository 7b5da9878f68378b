"""Convert: expressions of PyTensor as functions that JAX traces, made anew for the shapes at hand.

In a trace every shape is known, so the graph is rewritten with shapes as constants. PyTensor's own JAX mode keeps them
symbolic, and fails where JAX must know them, as in the gradient of a scan.
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
from pytensor.configdefaults import config
from pytensor.graph.basic import Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.replace import clone_replace
from pytensor.link.jax.dispatch.basic import jax_funcify
from pytensor.tensor.basic import ARange


@jax_funcify.register(ARange)
def _arange(op: ARange, node: Any, **options: Any) -> Any:
    """PyTensor hands its own small constants to `jax.numpy.arange`, and int8 overflows at 128 (pytensor#2296)."""

    def as_number(bound: Any) -> int | float:
        bound = np.asarray(bound)  # raises of a tracer, as PyTensor's own does
        return int(bound) if bound.dtype.kind in "iub" else float(bound)

    return lambda *bounds: jnp.arange(*map(as_number, bounds), dtype=op.dtype)


class Converted:
    """Expressions as one JAX function of the values of their inputs; constants of the shapes that these have."""

    def __init__(self, inputs: Sequence[Variable], outputs: Sequence[Variable]) -> None:
        self._inputs = inputs
        self._outputs = outputs
        self._of_shapes = lru_cache(maxsize=32)(self._convert)

    def __call__(self, *values: jax.Array) -> list[jax.Array]:
        """The values of the expressions, each in the dtype that the graph says."""
        if not self._outputs:
            return []
        values = tuple(as_typed(value, variable) for value, variable in zip(values, self._inputs, strict=True))
        # PyTensor's conversions count on JAX's defaults, ask for 64 bits where it has none (see `as_typed`), and drop
        # assertions, which a trace cannot raise.
        with (
            jax.numpy_dtype_promotion("standard"),
            jax.numpy_rank_promotion("allow"),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", "Explicitly requested dtype|Skipping .* as JAX tracing", UserWarning)
            run = self._of_shapes(tuple(value.shape for value in values), jax.config.read("jax_enable_x64"))
            found = run(*values)
        return [as_typed(value, variable) for value, variable in zip(found, self._outputs, strict=True)]

    def _convert(self, shapes: tuple[tuple[int, ...], ...], has_64_bits: bool) -> Callable[..., Any]:
        of_shape: dict[Variable, Variable] = {
            variable: pt.tensor(name=variable.name, dtype=variable.type.dtype, shape=_static(shape, variable))
            for variable, shape in zip(self._inputs, shapes, strict=True)
        }
        outputs = clone_replace(list(self._outputs), replace=of_shape, rebuild_strict=False)
        with (
            jax.ensure_compile_time_eval(),  # so that constants are no part of the trace under way
            config.change_flags(traceback__limit=0),  # a tenth of the time; JAX names no node's origin
        ):
            graph = FunctionGraph(inputs=list(of_shape.values()), outputs=outputs, clone=True)
            mode: Any = get_mode("JAX")
            mode.optimizer.rewrite(graph)
            return jax_funcify(graph)


def _static(shape: Sequence[int], variable: Any) -> tuple[Any, ...]:
    """What PyTensor may know of a shape: an axis that happens to have one entry is none that it may broadcast."""
    known = variable.type.shape  # which is shorter where an op has stacked what replicas have
    return tuple(None if n == 1 and known[i : i + 1] != (1,) else n for i, n in enumerate(shape))


def as_typed(value: Any, variable: Variable) -> jax.Array:
    """A value in the dtype of its variable, as far as JAX has that."""
    return jnp.asarray(value, jax.dtypes.canonicalize_dtype(variable.type.dtype))
