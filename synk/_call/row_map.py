"""Row map: run a function of one row over all rows of a part."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._base.pytree import PyTree
from .._reductions.monoid import Monoid
from .._reductions.outputs import is_whole, match_prefix
from .._reductions.reduction import ELEMENTWISE, WEIGHT, WEIGHTED, Reduction, Weighted
from .._tracing.context import current_trace
from .spec import CallSpec, FunctionSpec

_OPS = ("concat", "scatter", *ELEMENTWISE, "same")


def check_row_ops(ops: PyTree, name: str) -> None:
    """Refuse ops that show parts, since a row knows none."""
    for op in jax.tree.leaves(ops):
        if op.name not in _OPS:
            raise ValueError(f"{name}: outputs of a row do not combine by {op.name!r}; use one of {', '.join(_OPS)}.")


def map_rows(function: FunctionSpec, call: CallSpec, rows: int | None, /, *args: Any, **kwargs: Any) -> PyTree:
    """Run `fn` on each of so many rows, and return its outputs with an entry a row, or combined over rows by their
    ops."""
    if rows is None:
        raise ValueError(f"{function.name}: it maps the rows of its arguments, but none of them is scattered.")
    context = current_trace()
    assert context is not None
    is_axis = function.of_one_row == "axis"
    if is_axis and not (context.has_axis and 1 in (rows, context.size)):
        raise ValueError(
            f'{function.name}: its rows communicate over "{function.axis_name}", which takes one row on each replica '
            f"(here {context.size}), and no slices or batches. Give as many rows at once, or leave out axis_name."
        )
    # On a single replica rows that communicate take the places of replicas.
    context.size *= rows if is_axis else 1
    rank = context.rank
    arguments, treedef = jax.tree.flatten((args, kwargs))
    # The number of each row goes through the map with it, for synk.row_numbers and synk.row_keys.
    leaves = [jnp.arange(rows, dtype=jnp.int32), *arguments]
    axes = [0, *(0 if i in call.arguments.scattered else None for i in range(len(arguments)))]

    def run(row: Any, *leaves: Any) -> PyTree:
        args, kwargs = treedef.unflatten(leaves)
        # Set while the function of one row is traced, and reset for outputs, which belong to the part.
        context.row, context.rank = row, context.first_row + row if is_axis else rank
        try:
            return jax.tree.map(jnp.asarray, call.arguments.call(function.fn, *args, **kwargs))
        finally:
            context.row, context.rank = None, rank

    def rows_at(index: Any) -> list[Any]:
        return [leaf if axis is None else leaf[index] for leaf, axis in zip(leaves, axes, strict=True)]

    if rows == 1:
        # Without jax.vmap, loops and branches are those of a single row, and all bits are those of jax.pmap. Rows that
        # communicate do so over the replicas' axis.
        mapped = jax.tree.map(lambda output: output[None], run(*rows_at(0)))
    else:
        run_all = jax.vmap(run, tuple(axes), axis_name=function.axis_name if is_axis else None, axis_size=rows)
        mapped = _without_weightless(run_all, leaves, rows_at) if call.is_composed else run_all(*leaves)
    matches = match_prefix(function.ops, mapped, function.name, "outputs")
    outputs = [_combined(op, output, f"{function.name}: output{path}") for path, op, output in matches]
    return jax.tree.structure(mapped, is_leaf=is_whole).unflatten(outputs)


def _without_weightless(run: Callable[..., PyTree], leaves: list[Any], rows_at: Callable[[Any], list[Any]]) -> PyTree:
    """Run all rows so that none of weight 0 brings NaN into gradients: for values, a row with a weight replaces it."""
    outputs, treedef = jax.tree.flatten(run(*leaves), is_leaf=is_whole)
    for i, output in enumerate(outputs):
        # What has effects runs once.
        if isinstance(output, Weighted) and output.weight.ndim == 1 and not jax.make_jaxpr(run)(*leaves).effects:
            counts = output.weight != 0
            again = run(*rows_at(jnp.where(counts, leaves[0], counts.argmax())))
            outputs[i] = Weighted(jax.tree.leaves(again, is_leaf=is_whole)[i].value, output.weight)
    return treedef.unflatten(outputs)


def _combined(op: Reduction, output: Any, where: str) -> Any:
    """Combine an output over the rows of a part, on axis 0, if its op does so."""
    if isinstance(output, Monoid):
        raise ValueError(f"{where} is a Monoid, a statistic of many rows, but synk.map runs one: use synk.function.")
    if isinstance(output, Weighted):
        # What does not go with its op, or has no scalar for its weight, is refused with the other outputs of parts.
        if op.name != "mean" or output.weight.ndim != 1:
            return output
        weights = WEIGHT.prepare(output.weight, None)
        return Weighted(jax.tree.map(lambda leaf: _over_rows(WEIGHTED, leaf, weights), output.value), weights.sum())
    if op.name in ELEMENTWISE:
        return _over_rows(WEIGHTED if op.name == "mean" else op, output, jnp.ones(len(output)))
    # Other ops take one row's value: "same", and "first", which a check puts in place of the user's.
    return output if op.has_row_entries else output[0]


def _over_rows(op: Reduction, rows: jax.Array, weights: jax.Array) -> jax.Array:
    """Combine the rows of a part to the part's value. Integers may become wider, as those of `jnp.sum` do."""
    states = jax.vmap(op.prepare)(rows, weights)
    whole = op.finalize(getattr(jnp, op.collective)(states, axis=0), weights.sum())
    return whole.astype(rows.dtype) if jnp.issubdtype(rows.dtype, jnp.inexact) else whole
