"""Collectives: shared variables across replicas, from the serial program; and traced values, inside a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import _engine, _flight, _ops, _trace
from ._errors import SynkError, entry
from ._group import AXIS, Group, PyTree
from ._ops import Leaf, Op
from ._rows import gather_rows, select
from ._shared import Shared, outside
from ._split import cut
from ._trace import as_data, as_keys, key_of

Variables = Shared | Sequence[Shared]

ELEMENTWISE = ("sum", "mean", "max", "min", "prod", "any", "all")


def each_of(variables: Any, call: str) -> list[Shared]:
    """One or several variables, as a list."""
    several = [variables] if isinstance(variables, Shared) else variables
    if not isinstance(several, list | tuple) or not all(isinstance(v, Shared) for v in several):
        raise TypeError(f"synk.{call}: {variables!r} is no shared variable (or list of them); make one by synk.shared.")
    for variable in several:
        outside(variable, call)
        if _trace.is_traced():
            raise SynkError(
                f"synk.{call}: it runs when called, but {variable.name} is used inside jit, grad, vmap or the like, "
                f"which would run it once and never again. Call it outside."
            )
    return list(several)


def _refuse_flat(variables: Sequence[Shared], call: str) -> None:
    for variable in variables:
        if variable.is_flat:
            raise ValueError(
                f"synk.{call}: {variable.name} is flat, one buffer a dtype, so it cannot hold rows. Make it without "
                f"flat=True."
            )


def _values(variables: Any, value: Any, call: str) -> list[Any]:
    """One value for each variable."""
    if isinstance(variables, Shared):
        return [value]
    if not isinstance(value, list | tuple) or len(value) != len(variables):
        raise ValueError(f"synk.{call}: {len(variables)} variables need a list of as many values.")
    return list(value)


def _like(variables: Any, results: list[Any]) -> Any:
    return results[0] if isinstance(variables, Shared) else results


@entry
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
    with _flight.LOCK:
        if value is not None:
            for variable, new in zip(each, _values(variables, value, "broadcast"), strict=True):
                variable.place_copies(new, call="broadcast")
            return
        for variable in each:
            lies = variable.lies
            leaves = _engine.from_rank(variable.home, variable.stacked(variable.home), 0, lies)
            rows = None if variable.lengths is None else variable.lengths[0]
            variable.commit(leaves if rows is None else _cut_rows(variable.home, leaves, rows), lies)


def _cut_rows(home: Group, leaves: list[jax.Array], rows: int) -> list[jax.Array]:
    return [_engine.sent(home, leaf[:, :rows], "stacked") for leaf in leaves]


@entry
def scatter(variables: Variables, value: PyTree, batch: Any = None) -> None:
    """Deal the rows of a value out over the replicas: the variable then *holds rows*.

    Functions that read it see their replica's rows, which count as scattered input.

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
    each = each_of(variables, "scatter")
    _refuse_flat(each, "scatter")
    with _flight.LOCK:
        for variable, new in zip(each, _values(variables, value, "scatter"), strict=True):
            variable.place_rows(_parts(variable, new, batch, variable.home.size, "scatter"))


def _parts(variable: Shared, new: PyTree, batch: Any, parts: int, call: str) -> list[list[np.ndarray]]:
    """The selected rows of a new value, cut for so many replicas."""
    leaves = [np.asarray(leaf) for leaf in variable.conform(new, variable.describe(), f"synk.{call}", any_rows=True)]
    rows = {leaf.shape[0] if leaf.ndim else None for leaf in leaves}
    if len(rows) != 1 or None in rows:
        raise ValueError(
            f"synk.{call}: the leaves of {variable.name} have {rows} rows; all need as many, and one axis."
        )
    selection = select(batch, rows.pop() or 0, f"synk.{call}", variable.name)

    picked = [gather_rows(leaf, selection, leaf.dtype) for leaf in leaves]
    return [[leaf[start : start + count] for leaf in picked] for start, count in cut(selection.rows, parts)]


@entry
def gather(variables: Variables, nd_up: int = 1) -> Any:
    """Return the values of all replicas; the variables stay as they are.

    Args:
      variables: a shared variable or a list of them.
      nd_up: 1 adds an axis of replicas in front; 0 concatenates their rows, of any lengths, in rank order.

    Returns:
      The value (a list for a list), lying on every replica.

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
    each = each_of(variables, "gather")
    if not nd_up:
        _refuse_flat(each, "gather")
    if nd_up not in (0, 1):
        raise ValueError(f"synk.gather: nd_up={nd_up!r}; give 1 for a replica axis or 0 to concatenate rows.")
    with _flight.LOCK:
        return _like(variables, [v.unflatten(_gathered(v, "gather", nd_up, "everywhere")) for v in each])


@entry
def all_gather(variables: Any) -> Any:
    """Give every replica all rows; inside a function, of a traced value.

    Args:
      variables: a shared variable or a list of them, each of which takes the rows of all replicas, in rank order; or,
        inside a function, a pytree of traced arrays of this replica's rows.

    Returns:
      Inside a function all rows, the same on every replica; else nothing.

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
    if _trace.frame() is not None and not _names_shared(variables):
        _communicating("all_gather")
        leaves, treedef = jax.tree.flatten(variables)
        arrays = [jnp.asarray(leaf) for leaf in leaves]
        if any(array.ndim == 0 for array in arrays):
            raise ValueError("synk.all_gather: a scalar has no rows to gather; give it an axis, as by value[None].")
        gathered = [_ops.joined(g) for g in _ops.all_entries([as_data(array) for array in arrays])]
        return treedef.unflatten([as_keys(g, key_of(a)) for g, a in zip(gathered, arrays, strict=True)])
    each = each_of(variables, "all_gather")
    _refuse_flat(each, "all_gather")
    with _flight.LOCK:
        for variable in each:
            variable.commit(_gathered(variable, "all_gather", 0, variable.lies), variable.lies)
    return None


def _gathered(variable: Shared, call: str, nd_up: int, lies: _engine.Lies) -> list[jax.Array]:
    home, lengths = variable.home, variable.lengths
    leaves = variable.bind(home)
    _same_lengths(variable, call, nd_up == 0)
    if nd_up == 0 and any(not s.shape for s in variable.describe().shapes):
        raise ValueError(f"synk.{call}: {variable.name} has leaves without rows to concatenate; use gather(nd_up=1).")
    keep: tuple[int, ...] | None = None
    if lengths is not None and len(set(lengths)) > 1:
        tall = max(lengths)
        keep = tuple(int(i) for rank, n in enumerate(lengths) for i in rank * tall + np.arange(n))
    n = len(leaves)
    return _engine.once(home, _gather_body(nd_up, keep), _engine.lie(variable.lies, n), _engine.lie(lies, n), leaves)


@lru_cache(maxsize=256)
def _gather_body(nd_up: int, keep: tuple[int, ...] | None) -> Callable[..., list[jax.Array]]:
    def body(*leaves: jax.Array) -> list[jax.Array]:
        gathered = _ops.all_entries(leaves)
        if nd_up:
            return gathered
        flat = [_ops.joined(g) for g in gathered]
        return flat if keep is None else [f.at[np.array(keep)].get(mode="promise_in_bounds") for f in flat]

    return body


def _same_lengths(variable: Shared, call: str, any_lengths: bool) -> None:
    lengths = variable.lengths
    if not any_lengths and lengths is not None and len(set(lengths)) > 1:
        raise ValueError(
            f"synk.{call}: {variable.name} holds {list(lengths)} rows on the replicas, but this needs as many on each. "
            f"Use all_gather, or gather with nd_up=0."
        )


@entry
def reduce(variables: Variables, op: Op = "mean", in_place: bool = True) -> Any:
    """Combine the values of all replicas elementwise on the first; the others keep theirs.

    Args:
      variables: a shared variable or a list of them.
      op: "sum", "mean", "max", "min", "prod", "any" or "all".
      in_place: whether rank 0 takes the combination; else it is returned and nothing changes.

    Returns:
      None; without `in_place` the combination (a list for a list), lying on every replica.

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
    with _flight.LOCK:
        combined = [_combined(v, "reduce", op, None, in_place, "everywhere") for v in each]
        if not in_place:
            return _like(variables, [v.unflatten(leaves) for v, leaves in zip(each, combined, strict=True)])
        for variable, leaves in zip(each, combined, strict=True):
            n = len(leaves)
            held = variable.stacked(variable.home)
            mixed = _engine.once(
                variable.home,
                _on_first,
                [*_engine.lie("everywhere", n), *_engine.lie("stacked", n)],
                _engine.lie("stacked", n),
                [*leaves, *held],
            )
            alone = variable.home.size == 1
            variable.commit(mixed, "stacked", variable.lengths, equal=alone, culprit="synk.reduce")
    return None


def _on_first(*values: jax.Array) -> list[jax.Array]:
    n = len(values) // 2
    first = lax.axis_index(AXIS) == 0
    return [jnp.where(first, new, old) for new, old in zip(values[:n], values[n:], strict=True)]


@entry
def all_reduce(variables: Any, op: Op = "mean", weights: Sequence[float] | None = None) -> Any:
    """Combine the values of all replicas elementwise on every one; inside a function, traced values.

    Args:
      variables: a shared variable or a list of them; or, inside a function, a pytree of traced arrays.
      op: "sum", "mean", "max", "min", "prod", "any" or "all".
      weights: with "mean", one number a replica, e.g. the rows each has trained on.

    Returns:
      Inside a function the combination, the same on every replica; else nothing.

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
    current = _trace.frame()
    if current is not None and not _names_shared(variables):
        _communicating("all_reduce")
        return _reduce_traced(variables, _elementwise(op, "all_reduce"), weights, current.size)
    each = each_of(variables, "all_reduce")
    with _flight.LOCK:
        combined = [_combined(v, "all_reduce", op, weights, True, v.lies) for v in each]
        for variable, leaves in zip(each, combined, strict=True):
            variable.commit(leaves, variable.lies)
    return None


def _names_shared(variables: Any) -> bool:
    return isinstance(variables, Shared) or any(isinstance(leaf, Shared) for leaf in jax.tree.leaves(variables))


def _communicating(call: str) -> None:
    current = _trace.frame()
    if current is None:
        raise SynkError(f"synk.{call}: traced values communicate only inside a function.")
    if not current.communicates:
        raise ValueError(
            f"{current.name}: synk.{call} communicates inside, so every replica and slice needs as many rows. "
            f"Communicate in then, or give a number of rows that divides."
        )


def _elementwise(op: Op, call: str) -> str:
    name = _ops.canonical(op, f"synk.{call}")
    if name not in ELEMENTWISE:
        raise ValueError(f"synk.{call}: op {op!r} does not combine elementwise; use one of {', '.join(ELEMENTWISE)}.")
    return str(name)


def _reduce_traced(tree: PyTree, op: str, weights: Any, size: int) -> PyTree:
    arrays, treedef = jax.tree.flatten(tree)
    arrays = [jnp.asarray(array) for array in arrays]
    shares = _shares(weights, op, size, "all_reduce")
    return treedef.unflatten(_reduce_body(op, shares)(*arrays))


@lru_cache(maxsize=256)
def _reduce_body(op: str, shares: tuple[float, ...]) -> Callable[..., list[jax.Array]]:
    def body(*arrays: jax.Array) -> list[jax.Array]:
        current = _trace.frame()  # whose own rank does not make what is combined depend on it
        rank = lax.axis_index(AXIS) if current is None else current.rank
        weight = jnp.asarray(np.array(shares, np.dtype(jnp.result_type(float))))[rank]
        leaves = [Leaf("", op, _ops.KINDS[op], a.dtype) for a in arrays]
        return _ops.across(_ops.lift(arrays, leaves, weight, rank), leaves, None)

    return body


def _shares(weights: Sequence[float] | None, op: str, size: int, call: str) -> tuple[float, ...]:
    if weights is None:
        return (1 / size,) * size
    given = [float(weight) for weight in weights]
    if op != "mean":
        raise ValueError(f'synk.{call}: weights go with "mean", but the op is {op!r}.')
    if len(given) != size or min(given) < 0 or not 0 < sum(given) < float("inf"):
        raise ValueError(f"synk.{call}: weights are {given}; give {size} numbers >= 0, one a replica, not all 0.")
    return tuple(weight / sum(given) for weight in given)


def _combined(
    variable: Shared, call: str, op: Op, weights: Any, keeps_dtype: bool, lies: _engine.Lies
) -> list[jax.Array]:
    name = _elementwise(op, call)
    home = variable.home
    leaves = variable.bind(home)
    _same_lengths(variable, call, False)
    for shape, key, path in zip(variable.describe().shapes, variable.describe().keys, variable.paths, strict=True):
        narrow = _ops.narrowed(shape.dtype, name)
        if key is not None or (keeps_dtype and narrow != shape.dtype):
            what = "PRNG keys" if key is not None else shape.dtype.name
            raise TypeError(
                f'synk.{call}: {variable.name}{path} holds {what}, which "{name}" does not keep. '
                f'Use "sum", "max" or "min", or reduce(in_place=False).'
            )
    n = len(leaves)
    body = _reduce_body(name, _shares(weights, name, home.size, call))
    return _engine.once(home, body, _engine.lie(variable.lies, n), _engine.lie(lies, n), leaves)


@entry
def get_value(rank: int, variables: Variables) -> Any:
    """Return a copy of the value of one replica; see `Shared.get_value`.

    Example:
      >>> import numpy as np, synk
      >>> with synk.simulate(2):
      ...     synk.get_value(1, synk.shared(np.arange(2))).tolist()
      [0, 1]
    """
    return _like(variables, [variable.get_value(rank) for variable in each_of(variables, "get_value")])


@entry
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
    each = each_of(variables, "set_value")
    if batch is not None:
        _refuse_flat(each, "set_value")
    with _flight.LOCK:
        for variable, new in zip(each, _values(variables, value, "set_value"), strict=True):
            if batch is not None:
                new = variable.unflatten(_parts(variable, new, batch, 1, "set_value")[0])
            variable.set_rank(rank, new)


@entry
def get_lengths(variables: Variables) -> Any:
    """Return the number of rows of the value on each replica.

    Returns:
      A list of ints in rank order (a list of such for a list).

    Raises:
      ValueError: the value has no rows.

    Example:
      >>> import numpy as np, synk
      >>> with synk.simulate(2):
      ...     synk.get_lengths(synk.shared(np.zeros((3, 4))))
      [3, 3]
    """
    each = each_of(variables, "get_lengths")
    return _like(variables, [_lengths(variable) for variable in each])


def _lengths(variable: Shared) -> list[int]:
    found = [variable.rows_of(rank) for rank in range(variable.home.size)]
    if any(rows is None for rows in found):
        raise ValueError(f"synk.get_lengths: the leaves of {variable.name} have no common axis 0, so it has no rows.")
    return [rows for rows in found if rows is not None]


@entry
def get_shapes(variables: Variables) -> Any:
    """Return the shapes of the value on each replica.

    Returns:
      A list in rank order of shapes, one tuple of ints a leaf in the value's tree (a list of such for a list).

    Example:
      >>> import numpy as np, synk
      >>> with synk.simulate(2):
      ...     synk.get_shapes(synk.shared(np.zeros((3, 4))))
      [(3, 4), (3, 4)]
    """
    each = each_of(variables, "get_shapes")
    return _like(variables, [_shapes(variable) for variable in each])


def _shapes(variable: Shared) -> list[Any]:
    lengths = variable.lengths or (None,) * variable.home.size
    if variable.is_flat:
        return [variable.seen.treedef.unflatten([s.shape for s in variable.seen.shapes]) for _ in lengths]
    return [variable.treedef.unflatten([s.shape for s in variable.describe(rows).shapes]) for rows in lengths]
