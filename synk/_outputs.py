"""Outputs: what a function returned, leaf by leaf, each with the op that its user named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path, tree_map_with_path

from . import _ops
from ._group import PyTree
from ._ops import Leaf, Weighted
from ._trace import as_data, as_keys, key_of


class Outputs(NamedTuple):
    """The structure of what `fn` returned."""

    leaves: tuple[Leaf, ...]
    keep: tuple[int, ...]  # those that are outputs; the weight of a Weighted is none
    treedef: Any  # of the outputs


class Result(NamedTuple):
    """The structure of what a call returns: which of its leaves, of which tree."""

    treedef: Any
    keys: tuple[Any, ...]
    picked: tuple[int, ...]
    has_keys: bool

    def tree(self, leaves: Sequence[jax.Array]) -> PyTree:
        """Leaves as the user's tree, raw key data as keys."""
        return self.treedef.unflatten(map(as_keys, leaves, self.keys) if self.has_keys else leaves)


def result_of(treedef: Any, keys: Sequence[Any], picked: Sequence[int]) -> Result:
    """A result of these leaves, of whose keys some are typed PRNG keys'."""
    return Result(treedef, tuple(keys), tuple(picked), any(key is not None for key in keys))


class _Item(NamedTuple):
    path: str
    op: Any
    value: Any
    weight: int | None = None
    is_output: bool = True


def check_ops(outputs: PyTree, function: str) -> PyTree:
    """Check a tree of ops and return it with every op under its one name."""
    return jax.tree.map(lambda op: _ops.canonical(op, function), outputs, is_leaf=lambda op: op is None)


def pack_outputs(
    ops: PyTree, function: str, rows: int | None, is_sliced: bool, is_raw: bool, out: PyTree
) -> tuple[list[jax.Array], Outputs]:
    """Flatten what `fn` returned for one part of so many rows, and match it with the ops."""
    items = list(_items(ops, function, out))
    arrays = [_as_array(item.value, f"{function}: output{item.path}") for item in items]
    leaves = [
        Leaf(item.path, item.op, _kind(item.op), as_data(array).dtype, key_of(array), item.weight)
        for item, array in zip(items, arrays, strict=True)
    ]
    for leaf, array in zip(leaves, arrays, strict=True):
        _check(leaf, array, function, rows, is_sliced)
    if is_raw:
        leaves = [
            leaf if leaf.op in ("weighted", "weight") else leaf._replace(op=as_is, kind="parts") for leaf in leaves
        ]
    plain = jax.tree.map(lambda v: v.value if _is_weighted(v) else v, out, is_leaf=_is_weighted)
    keep = tuple(i for i, item in enumerate(items) if item.is_output)
    return [as_data(array) for array in arrays], Outputs(tuple(leaves), keep, jax.tree.structure(plain))


def as_is(parts: jax.Array) -> jax.Array:
    """The op that combines nothing."""
    return parts


def pack_result(out: PyTree) -> tuple[list[jax.Array], tuple[Any, tuple[Any, ...]]]:
    """Flatten what `then` returned."""
    leaves, treedef = jax.tree.flatten(out)
    arrays = [_as_array(leaf, "then: a result") for leaf in leaves]
    return [as_data(array) for array in arrays], (treedef, tuple(map(key_of, arrays)))


def pick(tree: PyTree, subset: Sequence[Any], function: str) -> tuple[Any, ...]:
    """The entries of the top level that `output_subset` names, in its order."""
    if not isinstance(tree, tuple | list | Mapping):
        raise ValueError(
            f"{function}: output_subset={list(subset)} names entries of a tuple, list or dict of outputs, but there is "
            f"one output."
        )
    names = list(tree) if isinstance(tree, Mapping) else list(range(-len(tree), len(tree)))
    for name in subset:
        if name not in names:
            error = KeyError if isinstance(tree, Mapping) else IndexError
            has = f"the keys {names}" if isinstance(tree, Mapping) else f"{len(tree)} outputs"
            raise error(f"{function}: output_subset names {name!r}, but there are {has}.")
    return tuple(tree[name] for name in subset)


def _is_weighted(value: Any) -> bool:
    return isinstance(value, Weighted)


def _items(ops: PyTree, function: str, out: PyTree) -> Iterator[_Item]:
    """The leaves of what was returned in tree order, each with its op; a Weighted's weight follows its values."""
    found: list[tuple[Any, str, Any]] = []

    def match(prefix: Any, op: Any, subtree: Any) -> None:
        for path, value in tree_leaves_with_path(subtree, is_leaf=_is_weighted):
            found.append((_ops.canonical(op, function), keystr((*prefix, *path)), value))

    try:
        # None is an op here, not an empty tree.
        tree_map_with_path(match, ops, out, is_leaf=lambda op: op is None)
    except ValueError as error:
        raise ValueError(
            f"{function}: outputs={ops!r} is no prefix of what it returned, whose tree is {jax.tree.structure(out)}. "
            f"Name one op for each output, or one for all."
        ) from error
    count = 0
    for op, path, value in found:
        items = list(_weighted(op, path, value, function, count) if _is_weighted(value) else [_Item(path, op, value)])
        count += len(items)
        yield from items


def _weighted(op: Any, path: str, value: Weighted, function: str, count: int) -> Iterator[_Item]:
    if op != "mean":
        raise ValueError(f'{function}: output{path} is Weighted, which goes with "mean", but its op is {op!r}.')
    if jnp.ndim(value.weight):
        raise ValueError(
            f"{function}: the weight of output{path} has shape {jnp.shape(value.weight)}; a part has one scalar weight "
            f"for all of its value."
        )
    inside = tree_leaves_with_path(value.value)
    for sub, leaf in inside:
        yield _Item(path + keystr(sub), "weighted", leaf, weight=count + len(inside))
    yield _Item(f"{path}.weight", "weight", value.weight, is_output=False)


def _as_array(value: Any, what: str) -> jax.Array:
    if isinstance(value, jax.Array):
        return value
    if (
        isinstance(value, bool | int | float | complex | np.generic | np.ndarray)
        and np.asarray(value).dtype.kind in "biufcV"
    ):
        return jnp.asarray(value)
    raise TypeError(f"{what} is a {type(value).__name__}; return arrays and numbers.")


def _kind(op: Any) -> _ops.Kind:
    return "parts" if callable(op) else "sum" if op in ("weighted", "weight") else _ops.KINDS[op]


def _check(leaf: Leaf, array: jax.Array, function: str, rows: int | None, is_sliced: bool) -> None:
    where = f"{function}: output{leaf.path}"
    if leaf.key is not None and (callable(leaf.op) or leaf.op not in ("concat", "stack", "first")):
        raise TypeError(f'{where} holds PRNG keys, which do not combine by {leaf.op!r}; use "concat", "stack" or None.')
    if leaf.op in ("stack", "first") and is_sliced:
        raise ValueError(
            f"{where}: {leaf.op!r} takes one part a replica, so it does not go with num_slices > 1. Use a callable, "
            f"which gets the part of every slice."
        )
    if leaf.kind == "rows" and (array.ndim == 0 or (rows is not None and array.shape[0] != rows)):
        raise ValueError(
            f'{where} has shape {array.shape} for {rows} rows; "concat" needs one output row for each input row. '
            f'Use "stack" for one entry a replica.'
        )
