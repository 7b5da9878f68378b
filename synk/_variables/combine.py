"""Combine: what collectives share: arguments, checked; leaves and traced values, combined over the replicas."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._base.errors import shown
from .._base.partition import lengths_of, split_rows
from .._base.pytree import PyTree, as_data, as_keys, key_of
from .._data.dataset import Data, data_of_replicas
from .._data.selection import select
from .._data.transfer import gather_rows
from .._reductions import collectives, reduction
from .._reductions.reduction import ElementwiseOp
from .._runtime.engine import Body
from .._runtime.executable import broadcast_from, copy_to_replicas, run_collective
from .._runtime.group import AXIS, Group
from .._runtime.layout import Layout, constant, layouts, put
from .._tracing.context import TraceContext, current_trace
from .access import (
    bind,
    group_of,
    host_leaves,
    new_leaves,
    stacked_leaves,
    state_of_copies,
    state_of_leaves,
)
from .pieces import refuse_pieces
from .state import VariableState, refuse_inside, refuse_narrow, refuse_traced
from .variable import Shared

Variables: TypeAlias = Shared | Sequence[Shared]


def rows_held(variable: Shared, group: Group, what: str) -> Data:
    """The rows that a variable of one array holds now, as data that lies on the replicas."""
    state, spec = bind(variable, group), variable._spec
    lengths = state.rows_per_replica
    if len(spec.shapes) != 1 or spec.buffers is not None:
        raise TypeError(f"{what} is the shared variable {variable.name}, a tree; only one array can be passed.")
    if lengths is None or lengths != lengths_of(sum(lengths), group.size):
        held = "no rows" if lengths is None else f"{list(lengths)} rows"
        raise ValueError(
            f"{what} is the shared variable {variable.name}, which holds {held}, and not as synk.scatter deals them "
            f"out. Scatter them: synk.scatter({variable.name}, value)."
        )
    return data_of_replicas(group, state.leaves[0], sum(lengths), spec.keys[0], variable.name)


def each_of(variables: Any, call: str, with_rows: bool = False) -> list[Shared]:
    """One or several variables, as a list; ValueError where they are to hold rows and one cannot."""
    several = [variables] if isinstance(variables, Shared) else variables
    if not isinstance(several, list | tuple) or not all(isinstance(v, Shared) for v in several):
        raise TypeError(
            f"synk.{call}: {shown(variables)} is no shared variable (or list of them); make one by synk.shared."
        )
    for variable in several:
        refuse_inside(variable.name, call)
        refuse_traced(variable.name, f"synk.{call}")
        if call not in ("get_value", "get_lengths", "get_shapes", "save"):  # which read what is there
            refuse_narrow(variable._state.abstract, f"synk.{call}: {variable.name}")
        if call in ("scatter", "gather", "all_gather", "reduce", "all_reduce", "set_value"):
            refuse_pieces(variable, f"synk.{call}")
        if with_rows and variable._spec.buffers is not None:
            raise ValueError(
                f"synk.{call}: {variable.name} is flat, one buffer a dtype, so it cannot hold rows. Make it without "
                f"flat=True."
            )
    return list(several)


def each_with_value(variables: Any, value: Any, call: str, with_rows: bool = False) -> list[tuple[Shared, Any]]:
    """Each variable and a value for it."""
    each = each_of(variables, call, with_rows)
    values = [value] if isinstance(variables, Shared) else value
    if not isinstance(values, list | tuple) or len(values) != len(each):
        raise ValueError(f"synk.{call}: {len(each)} variables need a list of as many values.")
    return list(zip(each, values, strict=True))


def names_shared(variables: Any) -> bool:
    """Are these shared variables, rather than traced values?"""
    return any(isinstance(leaf, Shared) for leaf in jax.tree.leaves(variables))


def split_value(variable: Shared, new: PyTree, batch: Any, parts: int, call: str) -> list[list[np.ndarray]]:
    """The selected rows of a new value, cut for so many replicas."""
    leaves = [np.asarray(leaf) for leaf in new_leaves(variable, new, f"synk.{call}", borrow=True)]
    rows = {leaf.shape[0] if leaf.ndim else None for leaf in leaves}
    if len(rows) != 1 or None in rows:
        raise ValueError(
            f"synk.{call}: the leaves of {variable.name} have {rows} rows; all need as many, and one axis."
        )
    selection = select(batch, rows.pop() or 0, f"synk.{call}", variable.name)
    picked = [gather_rows(leaf, selection, leaf.dtype) for leaf in leaves]
    return [[leaf[start : start + count] for leaf in picked] for start, count in split_rows(selection.rows, parts)]


def state_of_first(variable: Shared) -> VariableState:
    """What it holds once every replica has what the first one holds."""
    group, state = group_of(variable), variable._state
    if variable._spec.is_cut is not None:
        return state_of_copies(variable, host_leaves(variable, 0))
    # Also where replicas are taken to be equal: a host callback may have made them differ; and so may what processes
    # begin with.
    is_new = variable._group is None
    own = copy_to_replicas(group, state.leaves, "stacked") if is_new else stacked_leaves(variable, group)
    leaves = broadcast_from(group, own, 0, state.layout)
    if state.rows_per_replica is not None:
        leaves = [put(group, leaf[:, : state.rows_per_replica[0]], "stacked") for leaf in leaves]
    return state_of_leaves(leaves, state.layout)


def gather_leaves(variable: Shared, call: str, nd_up: int, layout: Layout) -> list[jax.Array]:
    """Stored leaves of all replicas: stacked on a new axis, or their rows one after another."""
    state = bind(variable, group_of(variable))
    if nd_up:
        _refuse_unequal_rows(variable, state, call)
    elif any(not s.shape for s in state.abstract.shapes):
        raise ValueError(f"synk.{call}: {variable.name} has leaves without rows to concatenate; use gather(nd_up=1).")
    return _run(variable, _gather_body(nd_up, state.rows_per_replica), layout)


@lru_cache(maxsize=256)
def _gather_body(nd_up: int, rows: tuple[int, ...] | None) -> Body:
    def body(*leaves: jax.Array) -> list[jax.Array]:
        gathered = collectives.all_gather(leaves)
        if nd_up:
            return gathered
        if rows is None or len(set(rows)) == 1:
            return [collectives.merge_leading_axes(entries) for entries in gathered]
        return [jnp.concatenate([entries[rank, :n] for rank, n in enumerate(rows)]) for entries in gathered]

    return body


def reduce_leaves(
    variable: Shared,
    call: str,
    op: ElementwiseOp,
    weights: Sequence[float] | None,
    takers: Literal["all", "first", "none"],
) -> list[jax.Array]:
    """Stored leaves of all replicas, combined elementwise; stacked with the others' own where the first takes them."""
    name = _elementwise(op, call)
    spec, state = variable._spec, bind(variable, group_of(variable))
    _refuse_unequal_rows(variable, state, call)
    for shape, key, path in zip(spec.shapes, spec.keys, spec.paths, strict=True):
        if key is not None or (takers != "none" and reduction.result_dtype(shape.dtype, name) != shape.dtype):
            what = "PRNG keys" if key is not None else shape.dtype.name
            ops = [op for op in ("sum", "max", "min", "any") if reduction.result_dtype(shape.dtype, op) == shape.dtype]
            advice = f"{' or '.join(map(repr, ops))}, or " if key is None else ""
            raise TypeError(
                f'synk.{call}: {variable.name}{path} holds {what}, which "{name}" does not keep. '
                f"Use {advice}reduce(in_place=False)."
            )
    group, dtype = group_of(variable), jnp.result_type(float).name
    # Given as an argument, so that other weights take no other program.
    shares = constant(group, "replicated", _shares(weights, name, group.size, call), dtype)
    n = len(state.leaves)
    ins: list[Layout] = ["replicated", *layouts(state.layout, n)]
    outs = layouts(state.layout if takers == "all" else "stacked" if takers == "first" else "replicated", n)
    return run_collective(group, _reduce_body(name, takers == "first"), ins, outs, [shares, *state.leaves])


def state_of_reduced(variable: Shared, op: ElementwiseOp) -> VariableState:
    """What it holds once the first replica has the combination of all; the others keep theirs."""
    leaves = reduce_leaves(variable, "reduce", op, None, "first")
    by = "synk.reduce" if group_of(variable).size > 1 else ""
    return state_of_leaves(leaves, "stacked", variable._state.rows_per_replica, by)


def _run(variable: Shared, body: Body, layout: Layout) -> list[jax.Array]:
    """Run a program on the leaves of a variable that is bound."""
    state, n = variable._state, len(variable._state.leaves)
    return run_collective(group_of(variable), body, layouts(state.layout, n), layouts(layout, n), state.leaves)


@lru_cache(maxsize=256)
def _reduce_body(op: str, is_for_first: bool) -> Body:
    def body(shares: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
        context = current_trace()  # whose own rank does not make what is combined depend on it
        rank = lax.axis_index(AXIS) if context is None else context.rank
        weight = shares[rank]
        leaves = [reduction.Reduced(reduction.REDUCTIONS[op], array.dtype) for array in arrays]
        states = reduction.prepare_parts(arrays, leaves, reduction.PartInfo(weight, rank == 0))
        whole = reduction.combine_replicas(states, leaves, [None] * len(leaves), has_gradients=context is not None)
        if is_for_first:
            return [jnp.where(rank == 0, new, old) for new, old in zip(whole, arrays, strict=True)]
        return whole

    return body


def _elementwise(op: Any, call: str) -> str:
    name = reduction.reduction_of(op, f"synk.{call}").name
    if name not in reduction.ELEMENTWISE:
        names = ", ".join(reduction.ELEMENTWISE)
        raise ValueError(f"synk.{call}: op {op!r} does not combine elementwise; use one of {names}.")
    return name


def _shares(weights: Sequence[float] | None, op: str, size: int, call: str) -> tuple[float, ...]:
    if weights is None:
        return (1 / size,) * size
    given = [float(weight) for weight in weights]
    if op != "mean":
        raise ValueError(f'synk.{call}: weights go with "mean", but the op is {op!r}.')
    if len(given) != size or min(given) < 0 or not 0 < sum(given) < float("inf"):
        raise ValueError(f"synk.{call}: weights are {given}; give {size} numbers >= 0, one a replica, not all 0.")
    return tuple(weight / sum(given) for weight in given)


def _refuse_unequal_rows(variable: Shared, state: VariableState, call: str) -> None:
    rows = state.rows_per_replica
    if rows is not None and len(set(rows)) > 1:
        raise ValueError(
            f"synk.{call}: {variable.name} holds {list(rows)} rows on the replicas, but this needs as many on each. "
            f"Use all_gather, or gather with nd_up=0."
        )


def reduce_traced(context: TraceContext, tree: PyTree, op: ElementwiseOp, weights: Sequence[float] | None) -> PyTree:
    """Combine each leaf elementwise over the replicas, inside a function."""
    _check_axis(context, "all_reduce")
    name = _elementwise(op, "all_reduce")
    arrays, treedef = jax.tree.flatten(tree)
    shares = np.array(_shares(weights, name, context.size, "all_reduce"), jnp.result_type(float))
    return treedef.unflatten(_reduce_body(name, False)(jnp.asarray(shares), *map(jnp.asarray, arrays)))


def gather_traced(context: TraceContext, tree: PyTree) -> PyTree:
    """Concatenate each leaf's rows of all replicas, inside a function."""
    _check_axis(context, "all_gather")
    leaves, treedef = jax.tree.flatten(tree)
    arrays = [jnp.asarray(leaf) for leaf in leaves]
    if any(array.ndim == 0 for array in arrays):
        raise ValueError("synk.all_gather: a scalar has no rows to gather; give it an axis, as by value[None].")
    gathered = map(collectives.merge_leading_axes, collectives.all_gather([as_data(array) for array in arrays]))
    return treedef.unflatten([as_keys(rows, key_of(array)) for rows, array in zip(gathered, arrays, strict=True)])


def _check_axis(context: TraceContext, call: str) -> None:
    if not context.has_axis:
        pairs = " synk.pairs combines all pairs of rows, of any number." if call == "all_gather" else ""
        raise ValueError(context.without_axis(f"synk.{call} communicates inside") + pairs)
