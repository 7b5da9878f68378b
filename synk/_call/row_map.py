"""Row map: run a function of one row over all rows of a part."""

from typing import Any

import jax
import jax.numpy as jnp

from .._base.pytree import PyTree
from .._reductions.reduction import REDUCTIONS, Reduction
from .binding import ArgumentSpec
from .spec import FunctionSpec

# Ops that combine rows, and then parts.
_OF_ROWS = ("sum", "mean", "max", "min", "prod", "any", "all")
# Ops of an output with an entry a row.
_ENTRIES = ("concat", "scatter")


def check_row_ops(ops: PyTree, name: str) -> None:
    """Refuse ops that show parts, since a row knows none."""
    for op in jax.tree.leaves(ops):
        if op.name not in (*_OF_ROWS, *_ENTRIES, "same"):
            raise ValueError(
                f"{name}: the outputs of a row do not combine by {op.name!r}; use one of "
                f"{', '.join([*_ENTRIES, *_OF_ROWS, 'same'])}."
            )


def map_rows(function: FunctionSpec, spec: ArgumentSpec, rows: int | None, *args: Any, **kwargs: Any) -> PyTree:
    """Run `fn` on each of so many rows, and return its outputs with an entry a row, or combined over rows by their
    ops."""
    if rows is None:
        raise ValueError(f"{function.name}: it maps the rows of its arguments, but none of them is scattered.")
    leaves, treedef = jax.tree.flatten((args, kwargs))
    axes = [0 if i in spec.scattered else None for i in range(len(leaves))]

    def run(*leaves: Any) -> PyTree:
        args, kwargs = treedef.unflatten(leaves)
        return jax.tree.map(_as_array, spec.call(function.fn, args, kwargs))

    if rows == 1:
        # Without jax.vmap, loops and branches are those of a single row, and all bits are those of jax.pmap. Rows that
        # communicate do so over the replicas' axis.
        alone = [leaf if axis is None else leaf[0] for leaf, axis in zip(leaves, axes, strict=True)]
        mapped = jax.tree.map(lambda output: output[None], run(*alone))
    else:
        name = function.axis_name if function.of_one_row == "axis" else None
        mapped = jax.vmap(run, tuple(axes), axis_name=name, axis_size=rows)(*leaves)
    # Ops are a prefix of the outputs.
    return jax.tree.map(
        lambda op, outputs: jax.tree.map(lambda leaf: _combined(op, leaf), outputs), function.ops, mapped
    )


def _as_array(output: Any) -> Any:
    return output if isinstance(output, jax.Array) else jnp.asarray(output)


def _combined(op: Reduction, output: jax.Array) -> jax.Array:
    """Combine an output over the rows of a part, on axis 0, if its op does so."""
    if op == REDUCTIONS["same"]:
        return output[0]
    return getattr(jnp, op.name)(output, axis=0) if op.name in _OF_ROWS else output
