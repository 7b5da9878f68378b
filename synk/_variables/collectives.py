"""Collectives: move and combine the values of shared variables, and of traced arrays inside a function."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._base.errors import public_api, shown
from .._base.jax_context import trace_state
from .._base.partition import lengths_of, split_rows
from .._base.pytree import PyTree, as_data, as_keys, key_of, refuse_sparse
from .._data.dataset import Data, data_of_replicas
from .._data.selection import select
from .._data.transfer import gather_rows
from .._reductions import reduction
from .._reductions.collectives import all_gather as gather_arrays
from .._reductions.reduction import ElementwiseOp
from .._runtime.executable import broadcast_from, copy_to_replicas, run_collective
from .._runtime.group import Group
from .._runtime.layout import constant, layouts
from .._runtime.way import Body, Layout, replica_axis
from .._tracing.context import NoAxisError, TraceContext, current_trace, eager
from .state import VariableState, refuse_narrow, state_of_leaves, state_of_rows
from .variable import (
    Shared,
    bind,
    commit_all,
    computed_state,
    group_of,
    logical_shapes,
    new_leaves,
    refuse_inside,
    refuse_traced,
    state_of_copies,
    state_of_value,
)

Variables: TypeAlias = Shared | Sequence[Shared]

# A collective makes the new states of all its variables before one variable takes its state: all change, or none.


@public_api
def broadcast(variables: Variables, value: PyTree = None) -> None:
    """Give every replica a value, or the first replica's.

    Args:
      variables: a shared variable or a list of them.
      value: the new value (for a list, a list of as many); None for what rank 0 holds.

    Raises:
      ValueError, TypeError: tree, shapes beyond the rows, or dtypes differ.

    Example:
      >>> import numpy as np, synk
      >>> with synk.simulate(2):
      ...     w = synk.shared(np.zeros(2, np.float32))
      ...     w.set_value(np.ones(2, np.float32), rank=0)
      ...     synk.broadcast(w)
      ...     w.value.tolist()
      [1.0, 1.0]
    """
    if value is None:
        checked = variables_of(variables, "broadcast")
        with eager():
            commit_all([(v, _state_of_first(v)) for v in checked])
    else:
        pairs = _with_values(variables, value, "broadcast")
        with eager():
            commit_all([(v, state_of_value(v, new, "broadcast")) for v, new in pairs])


@public_api
def scatter(variables: Variables, value: PyTree, batch: Any = None) -> None:
    """Deal the rows of a value out over the replicas: the variable then *holds rows*, which count as scattered input.

    Args:
      variables: a shared variable or a list of them.
      value: the rows (for a list, a list of as many values), of the variable's tree and dtypes, shaped like its value
        but for axis 0.
      batch: which rows, as in a call.

    Raises:
      ValueError: leaves have unequal rows, or shapes beyond the rows differ.
      IndexError: `batch` names rows that are not there.

    Example:
      >>> import numpy as np, synk
      >>> with synk.simulate(3):
      ...     w = synk.shared(np.zeros(1, np.int32))
      ...     synk.scatter(w, np.arange(7, dtype=np.int32))
      ...     w.get_value(0).tolist(), w.get_value(1).tolist()
      ([0, 1, 2], [3, 4])
    """
    pairs = _with_values(variables, value, "scatter")
    with eager():
        parts = ((v, _split_value(v, new, batch, group_of(v).size, "scatter")) for v, new in pairs)
        commit_all([(v, state_of_rows(group_of(v), rows)) for v, rows in parts])


@public_api
def gather(variables: Variables, nd_up: int = 1) -> Any:
    """Return the values of all replicas (a list for a list), lying on every one; the variables stay as they are.

    Args:
      variables: a shared variable or a list of them.
      nd_up: 1 adds an axis of replicas in front; 0 concatenates their rows, of any lengths, in rank order.

    Raises:
      ValueError: with `nd_up=1` the lengths differ.

    Example:
      >>> import numpy as np, synk
      >>> with synk.simulate(2):
      ...     w = synk.shared(np.zeros(1, np.int32))
      ...     synk.scatter(w, np.arange(3, dtype=np.int32))
      ...     synk.gather(w, nd_up=0).tolist()
      [0, 1, 2]
    """
    checked = variables_of(variables, "gather")
    if nd_up not in (0, 1):
        raise ValueError(f"synk.gather: nd_up={nd_up!r}; give 1 for a replica axis or 0 to concatenate rows.")
    with eager():
        return _like(variables, [v._spec.tree(_gather(v, "gather", nd_up, "replicated")) for v in checked])


@public_api
def all_gather(variables: Any) -> Any:
    """Give every replica all rows; inside a function, return all rows of a traced value, the same on every replica.

    Args:
      variables: a shared variable or a list of them, each of which takes the rows of all replicas, in rank order; or,
        inside a function, a pytree of traced arrays of this replica's rows.

    Raises:
      ValueError: inside a function where replicas have different rows.

    Example:
      >>> import numpy as np, synk
      >>> with synk.simulate(2):
      ...     w = synk.shared(np.zeros(1, np.int32))
      ...     synk.scatter(w, np.arange(3, dtype=np.int32))
      ...     synk.all_gather(w)
      ...     w.value.tolist()
      [0, 1, 2]
    """
    # Inside a function the argument tells: variables there are refused by `variables_of`, with what to do instead.
    context = current_trace()
    if context is not None and not _holds_variables(variables):
        return _gather_traced(context, variables)
    checked = variables_of(variables, "all_gather")
    with eager():
        gathered = [(v, _gather(v, "all_gather", 0, v._state.layout)) for v in checked]
        commit_all([(v, state_of_leaves(leaves, v._state.layout)) for v, leaves in gathered])


@public_api
def reduce(variables: Variables, op: ElementwiseOp = "mean", in_place: bool = True) -> Any:
    """Combine the values of all replicas elementwise on the first; the others keep theirs.

    Args:
      variables: a shared variable or a list of them.
      op: "sum", "mean", "max", "min", "prod", "any" or "all".
      in_place: whether rank 0 takes the combination; else nothing changes, and it is returned (a list for a list),
        lying on every replica.

    Raises:
      ValueError: lengths differ, or the op is not elementwise.
      TypeError: in place, the combination would have another dtype.

    Example:
      >>> import numpy as np, synk
      >>> with synk.simulate(3):
      ...     float(synk.reduce(synk.shared(np.float32(2.0)), "sum", in_place=False))
      6.0
    """
    checked = variables_of(variables, "reduce")
    with eager():
        if not in_place:
            return _like(variables, [_reduced_value(v, op) for v in checked])
        commit_all([(v, _state_of_reduced(v, op)) for v in checked])


@public_api
def all_reduce(variables: Any, op: ElementwiseOp = "mean", weights: Sequence[float] | None = None) -> Any:
    """Combine the values of all replicas elementwise on every one; inside a function, return that of traced values.

    Args:
      variables: a shared variable or a list of them; or, inside a function, a pytree of traced arrays.
      op: "sum", "mean", "max", "min", "prod", "any" or "all".
      weights: with "mean", one number a replica, e.g. the rows each has trained on.

    Raises:
      ValueError: lengths differ, the op is not elementwise, or weights do not fit.
      TypeError: a variable's combination would have another dtype.

    Example:
      >>> import numpy as np, synk
      >>> with synk.simulate(2):
      ...     w = synk.shared(np.zeros(1, np.float32))
      ...     w.set_value(np.ones(1, np.float32), rank=1)
      ...     synk.all_reduce(w, "mean", weights=[1, 3])
      ...     w.value.tolist()
      [0.75]
    """
    context = current_trace()
    if context is not None and not _holds_variables(variables):
        return _reduce_traced(context, variables, op, weights)
    checked = variables_of(variables, "all_reduce")
    with eager():
        combined = [(v, _reduce(v, "all_reduce", op, weights, "all")) for v in checked]
        commit_all([(v, state_of_leaves(leaves, v._state.layout)) for v, leaves in combined])


# Arguments.


def variables_of(variables: Any, call: str, is_read: bool = False) -> list[Shared]:
    """Check the variables of a call and return them as a list. Calls that only read give 64 bits as they are."""
    checked = [variables] if isinstance(variables, Shared) else variables
    if not isinstance(checked, list | tuple) or not all(isinstance(v, Shared) for v in checked):
        raise TypeError(
            f"synk.{call}: {shown(variables)} is no shared variable (or list of them); make one by synk.shared."
        )
    # All are checked before the first changes, so that a call with a wrong variable changes none.
    for variable in checked:
        refuse_inside(variable.name, call)
        refuse_traced(variable.name, f"synk.{call}")
        if not is_read:
            refuse_narrow(variable._state.abstract, f"synk.{call}: {variable.name}")
        if call in ("scatter", "gather", "all_gather", "reduce", "all_reduce"):
            variable._spec.storage.refuse(variable.name, f"synk.{call}")
    return list(checked)


def _with_values(variables: Any, value: Any, call: str) -> list[tuple[Shared, Any]]:
    checked = variables_of(variables, call)
    values = [value] if isinstance(variables, Shared) else value
    if not isinstance(values, list | tuple) or len(values) != len(checked):
        raise ValueError(f"synk.{call}: {len(checked)} variables need a list of as many values.")
    return list(zip(checked, values, strict=True))


def _like(variables: Any, results: list[Any]) -> Any:
    return results[0] if isinstance(variables, Shared) else results


def _holds_variables(tree: Any) -> bool:
    return any(isinstance(leaf, Shared) for leaf in jax.tree.leaves(tree))


def _split_value(variable: Shared, new: PyTree, batch: Any, parts: int, call: str) -> list[list[np.ndarray]]:
    """Select rows of a new value and cut them into parts, one a replica."""
    refuse_sparse(f"synk.{call}: {variable.name}", new)
    # Rows are cut on the host, so that no device needs memory for all of them.
    leaves = [np.asarray(leaf) for leaf in new_leaves(variable, new, f"synk.{call}", borrow=True)]
    rows = {leaf.shape[0] if leaf.ndim else None for leaf in leaves}
    if len(rows) != 1 or None in rows:
        raise ValueError(
            f"synk.{call}: the leaves of {variable.name} have {rows} rows; all need as many, and one axis."
        )
    selection = select(batch, rows.pop() or 0, f"synk.{call}", variable.name)
    picked = [gather_rows(leaf, selection, leaf.dtype) for leaf in leaves]
    return [[leaf[start : start + count] for leaf in picked] for start, count in split_rows(selection.rows, parts)]


def rows_held(variable: Shared, group: Group, what: str) -> Data:
    """Return the rows that a variable of one array holds as data that lies on the replicas."""
    state, spec = bind(variable, group), variable._spec
    lengths = state.rows_per_replica
    if len(spec.shapes) != 1:
        raise TypeError(f"{what} is the shared variable {variable.name}, a tree; only one array can be passed.")
    # Programs find a replica's rows by the lengths that scattered data has.
    if lengths is None or lengths != lengths_of(sum(lengths), group.size):
        held = "no rows" if lengths is None else f"{list(lengths)} rows"
        raise ValueError(
            f"{what} is the shared variable {variable.name}, which holds {held}, and not as synk.scatter deals them "
            f"out. Scatter them: synk.scatter({variable.name}, value)."
        )
    return data_of_replicas(group, state.leaves[0], sum(lengths), spec.keys[0], variable.name)


# Leaves of all replicas.


def _state_of_first(variable: Shared) -> VariableState:
    """Make the state in which every replica has what the first one holds."""
    # Replicas that are taken to be equal are copied too: a host callback may have made them differ, and so may the
    # values with which processes begin. A variable that is not placed yet is copied here and not bound, since binding
    # compares the values of processes.
    group, state = group_of(variable), variable._state
    if variable._group is not None:
        return variable._spec.storage.state_of_first(group, computed_state(variable))
    stacked = copy_to_replicas(group, state.leaves, "stacked")
    return state_of_copies(variable, broadcast_from(group, stacked, 0, "replicated"))


def _gather(variable: Shared, call: str, nd_up: int, layout: Layout) -> list[jax.Array]:
    group = group_of(variable)
    state = bind(variable, group)
    if nd_up:
        _refuse_unequal_rows(variable, state, call)
    elif any(not s.shape for s in logical_shapes(variable)):
        raise ValueError(f"synk.{call}: {variable.name} has leaves without rows to concatenate; use gather(nd_up=1).")
    return variable._spec.storage.gather(group, state, nd_up, layout)


def _reduce(
    variable: Shared,
    call: str,
    op: ElementwiseOp,
    weights: Sequence[float] | None,
    takers: Literal["all", "first", "none"],
) -> list[jax.Array]:
    """Combine the stored leaves of all replicas elementwise.

    If only the first takes the combination, return stacked leaves: the first entry is new, the others are old.
    """
    # Storages that have no value a replica are refused before, so stored leaves combine as logical ones do, packed or
    # not.
    name = _elementwise(op, call)
    group, spec = group_of(variable), variable._spec
    state = bind(variable, group)
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
    # Shares are an argument, so that other weights need no other program.
    shares = constant(group, "replicated", _shares(weights, name, group.size, call), jnp.result_type(float).name)
    count = len(state.leaves)
    ins: list[Layout] = ["replicated", *layouts(state.layout, count)]
    out: Layout = state.layout if takers == "all" else "stacked" if takers == "first" else "replicated"
    body = _reduce_body(name, takers == "first")
    return run_collective(group, body, ins, layouts(out, count), [shares, *state.leaves])


def _reduced_value(variable: Shared, op: ElementwiseOp) -> PyTree:
    # Read through the storage, since stored leaves may be packed.
    leaves, storage = _reduce(variable, "reduce", op, None, "none"), variable._spec.storage
    return variable._spec.tree(storage.read(group_of(variable), leaves, "replicated", "replicated"))


def _state_of_reduced(variable: Shared, op: ElementwiseOp) -> VariableState:
    """Make the state in which the first replica has the combination of all and the others keep their values."""
    leaves = _reduce(variable, "reduce", op, None, "first")
    by = "synk.reduce" if group_of(variable).size > 1 else ""
    return state_of_leaves(leaves, "stacked", variable._state.rows_per_replica, by)


# Cached: programs are kept by the identity of their bodies, so a new closure would compile again.
@lru_cache(maxsize=256)
def _reduce_body(op: str, is_for_first: bool) -> Body:
    def body(shares: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
        # The rank of a function's context is not noted as used: what is combined does not depend on it.
        context = current_trace()
        rank = lax.axis_index(replica_axis()) if context is None else context.rank
        weight = shares[rank]
        leaves = [reduction.OutputLeaf(reduction.REDUCTIONS[op], array.dtype) for array in arrays]
        states = reduction.prepare_part(arrays, leaves, weight, rank == 0)
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
    """Return each replica's part of a mean; equal parts without weights."""
    if weights is None:
        return (1 / size,) * size
    numbers = [float(weight) for weight in weights]
    if op != "mean":
        raise ValueError(f'synk.{call}: weights go with "mean", but the op is {op!r}.')
    if len(numbers) != size or min(numbers) < 0 or not 0 < sum(numbers) < float("inf"):
        raise ValueError(f"synk.{call}: weights are {numbers}; give {size} numbers >= 0, one a replica, not all 0.")
    return tuple(weight / sum(numbers) for weight in numbers)


def _refuse_unequal_rows(variable: Shared, state: VariableState, call: str) -> None:
    rows = state.rows_per_replica
    if rows is not None and len(set(rows)) > 1:
        raise ValueError(
            f"synk.{call}: {variable.name} holds {list(rows)} rows on the replicas, but this needs as many on each. "
            f"Use all_gather, or gather with nd_up=0."
        )


# Inside a function.


def _reduce_traced(context: TraceContext, tree: PyTree, op: ElementwiseOp, weights: Sequence[float] | None) -> PyTree:
    _check_axis(context, "all_reduce")
    name = _elementwise(op, "all_reduce")
    arrays, treedef = jax.tree.flatten(tree)
    shares = np.array(_shares(weights, name, context.size, "all_reduce"), jnp.result_type(float))
    return treedef.unflatten(_reduce_body(name, False)(jnp.asarray(shares), *map(jnp.asarray, arrays)))


def _gather_traced(context: TraceContext, tree: PyTree) -> PyTree:
    _check_axis(context, "all_gather")
    leaves, treedef = jax.tree.flatten(tree)
    arrays = [jnp.asarray(leaf) for leaf in leaves]
    if any(array.ndim == 0 for array in arrays):
        raise ValueError("synk.all_gather: a scalar has no rows to gather; give it an axis, as by value[None].")
    gathered = [lax.collapse(entries, 0, 2) for entries in gather_arrays([as_data(array) for array in arrays])]
    return treedef.unflatten([as_keys(rows, key_of(array)) for rows, array in zip(gathered, arrays, strict=True)])


def _check_axis(context: TraceContext, call: str) -> None:
    if not context.has_axis:
        pairs = " synk.contrib.pairs combines all pairs of rows, of any number." if call == "all_gather" else ""
        # Loops, branches and gradients have traces of their own.
        is_at_top = trace_state() == context.state
        raise NoAxisError(context.without_axis(f"synk.{call} communicates inside", is_at_top) + pairs)
    # Without rows all replicas have one value, and what it combines to tells how many they are.
    context.uses_size |= context.rows is None
