"""Collectives: shared variables across replicas, from the serial program; and traced values, inside a function."""

from collections.abc import Sequence
from typing import Any

from .._base.errors import public_api
from .._base.pytree import PyTree
from .._reductions.reduction import ElementwiseOp
from .._tracing.context import current_trace, eager
from . import access, combine
from .access import commit_all, group_of, state_of_leaves
from .combine import Variables, each_of, each_with_value
from .variable import Shared

# Each makes the new states of all its variables before any variable takes one: all change, or on any error none.


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
      ...     synk.set_value(0, w, np.ones(2, np.float32))
      ...     synk.broadcast(w)
      ...     w.value.tolist()
      [1.0, 1.0]
    """
    each = each_of(variables, "broadcast")
    with eager():
        if value is None:
            commit_all([(v, combine.state_of_first(v)) for v in each])
        else:
            news = each_with_value(variables, value, "broadcast")
            commit_all([(v, access.copied_state(v, new, "broadcast")) for v, new in news])


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
      ...     synk.get_lengths(w), w.get_value(1).tolist()
      ([3, 2, 2], [3, 4])
    """
    each = each_with_value(variables, value, "scatter", with_rows=True)
    with eager():
        parts = ((v, combine.split_value(v, new, batch, group_of(v).size, "scatter")) for v, new in each)
        commit_all([(v, access.state_of_rows(v, rows)) for v, rows in parts])


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
    each = each_of(variables, "gather", with_rows=not nd_up)
    if nd_up not in (0, 1):
        raise ValueError(f"synk.gather: nd_up={nd_up!r}; give 1 for a replica axis or 0 to concatenate rows.")
    with eager():
        return _like(variables, [v._spec.tree(combine.gather_leaves(v, "gather", nd_up, "replicated")) for v in each])


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
    context = current_trace()
    if context is not None and not combine.names_shared(variables):
        return combine.gather_traced(context, variables)
    each = each_of(variables, "all_gather", with_rows=True)
    with eager():
        gathered = [(v, combine.gather_leaves(v, "all_gather", 0, v._state.layout)) for v in each]
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
    each = each_of(variables, "reduce")
    with eager():
        if not in_place:
            return _like(variables, [v._spec.tree(combine.reduce_leaves(v, "reduce", op, None, "none")) for v in each])
        commit_all([(v, combine.state_of_reduced(v, op)) for v in each])


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
    if context is not None and not combine.names_shared(variables):
        return combine.reduce_traced(context, variables, op, weights)
    each = each_of(variables, "all_reduce")
    with eager():
        combined = [(v, combine.reduce_leaves(v, "all_reduce", op, weights, "all")) for v in each]
        commit_all([(v, state_of_leaves(leaves, v._state.layout)) for v, leaves in combined])


@public_api
def get_value(rank: int, variables: Variables) -> Any:
    """Return a copy of the value of one replica; see `Shared.get_value`.

    Example:
      >>> import numpy as np, synk
      >>> with synk.simulate(2):
      ...     synk.get_value(1, synk.shared(np.arange(2))).tolist()
      [0, 1]
    """
    return _like(variables, [variable.get_value(rank) for variable in each_of(variables, "get_value")])


@public_api
def set_value(rank: int, variables: Variables, value: PyTree, batch: Any = None) -> None:
    """Set the value on one replica; the others keep theirs.

    Args:
      rank: whose.
      variables: a shared variable or a list of them.
      value: the new value (for a list, a list of as many); its number of rows may differ.
      batch: which of its rows, as in a call; None for all.

    Raises:
      ValueError, TypeError, IndexError: as `Shared.set_value` and `synk.scatter`.

    Example:
      >>> import numpy as np, synk
      >>> with synk.simulate(2):
      ...     w = synk.shared(np.zeros(2, np.int32))
      ...     synk.set_value(1, w, np.arange(5, dtype=np.int32), batch=[4, 0, 3])
      ...     synk.get_lengths(w), w.get_value(1).tolist()
      ([2, 3], [4, 0, 3])
    """
    each = each_with_value(variables, value, "set_value", with_rows=batch is not None)
    with eager():
        if batch is not None:
            each = [(v, v._spec.tree(combine.split_value(v, new, batch, 1, "set_value")[0])) for v, new in each]
        commit_all([(v, access.state_with_rank(v, rank, new)) for v, new in each])


@public_api
def get_lengths(variables: Variables) -> Any:
    """Return the number of rows of the value on each replica, a list of ints in rank order (for a list, one each).

    Raises:
      ValueError: the value has no rows.

    Example:
      >>> import numpy as np, synk
      >>> with synk.simulate(2):
      ...     synk.get_lengths(synk.shared(np.zeros((3, 4))))
      [3, 3]
    """
    with eager():
        return _like(variables, [_lengths(variable) for variable in each_of(variables, "get_lengths")])


def _lengths(variable: Shared) -> list[Any]:
    found = [access.rows_of_rank(variable, rank) for rank in range(group_of(variable).size)]
    if None in found:
        raise ValueError(f"synk.get_lengths: the leaves of {variable.name} have no common axis 0, so it has no rows.")
    return found


@public_api
def get_shapes(variables: Variables) -> Any:
    """Return a list, in rank order, of the value's tree with the shape of each leaf (a list of such for a list).

    Example:
      >>> import numpy as np, synk
      >>> with synk.simulate(2):
      ...     synk.get_shapes(synk.shared(np.zeros((3, 4))))
      [(3, 4), (3, 4)]
    """
    with eager():
        return _like(variables, [_shapes(variable) for variable in each_of(variables, "get_shapes")])


def _shapes(variable: Shared) -> list[Any]:
    on_each = variable._state.rows_per_replica or (None,) * group_of(variable).size
    shapes = [[s.shape for s in access.logical_shapes(variable, rows)] for rows in on_each]
    return [variable._spec.treedef.unflatten(each) for each in shapes]


def _like(variables: Any, results: list[Any]) -> Any:
    return results[0] if isinstance(variables, Shared) else results
