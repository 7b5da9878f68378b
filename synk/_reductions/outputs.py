"""Outputs: what a function returned, leaf by leaf, each with the reduction that its user named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path, tree_map_with_path

from .._base.pytree import PyTree, as_data, as_keys, key_of
from .reduction import PER_PART, WEIGHT, WEIGHTED, Reduced, Reduction, Weighted, reduction_of


class OutputLeaf(NamedTuple):
    """One leaf of what `fn` returned.

    Attributes:
      path: in the tree, as messages write it.
      op: the op's name, for messages.
      reduced: how it combines.
      key: the PRNG implementation of a typed key, whose raw data combines.
    """

    path: str
    op: str
    reduced: Reduced
    key: Any


class OutputSpec(NamedTuple):
    """The structure of what `fn` returned.

    Attributes:
      leaves: all that combines.
      keep: those that are outputs; the weight of a Weighted is none.
      treedef: of the outputs.
    """

    leaves: tuple[OutputLeaf, ...]
    keep: tuple[int, ...]
    treedef: Any

    @property
    def reduced(self) -> list[Reduced]:
        """How each leaf combines."""
        return [leaf.reduced for leaf in self.leaves]


class ResultSpec(NamedTuple):
    """The structure of what a call returns: which of its leaves, of which tree."""

    treedef: Any
    keys: tuple[Any, ...]
    picked: tuple[int, ...]

    def tree(self, leaves: Sequence[jax.Array]) -> PyTree:
        """Leaves as the user's tree, raw key data as keys."""
        return self.treedef.unflatten(map(as_keys, leaves, self.keys) if any(self.keys) else leaves)


class OutputRules(NamedTuple):
    """What outputs of one part must keep to.

    Attributes:
      ops: a tree of reductions, a prefix of the outputs.
      name: what messages call the function.
      rows: of the part; None where there are none.
      is_sliced: whether a replica has several parts.
      per_part: whether every output's parts are kept as they come, for `f.check`.
    """

    ops: PyTree
    name: str
    rows: int | None
    is_sliced: bool
    per_part: bool


class _Item(NamedTuple):
    path: str
    reduction: Reduction
    value: Any
    weight: int | None = None
    is_output: bool = True


def check_ops(outputs: PyTree, name: str) -> PyTree:
    """Check a tree of ops and return it as one of reductions."""
    return jax.tree.map(lambda op: reduction_of(op, name), outputs, is_leaf=lambda op: op is None)


def pack_outputs(rules: OutputRules, out: PyTree) -> tuple[list[jax.Array], OutputSpec]:
    """Flatten what `fn` returned for one part, and match it with the ops."""
    items = list(_items(rules, out))
    arrays = [_as_array(item.value, f"{rules.name}: output{item.path}") for item in items]
    leaves = [
        OutputLeaf(
            item.path, item.reduction.name, Reduced(item.reduction, as_data(array).dtype, item.weight), key_of(array)
        )
        for item, array in zip(items, arrays, strict=True)
    ]
    for leaf, array in zip(leaves, arrays, strict=True):
        _check(leaf, array, rules)
    if rules.per_part:
        special = (WEIGHTED, WEIGHT)
        leaves = [
            leaf if leaf.reduced.reduction in special else leaf._replace(reduced=Reduced(PER_PART, leaf.reduced.dtype))
            for leaf in leaves
        ]
    plain = jax.tree.map(lambda v: v.value if _is_weighted(v) else v, out, is_leaf=_is_weighted)
    keep = tuple(i for i, item in enumerate(items) if item.is_output)
    return [as_data(array) for array in arrays], OutputSpec(tuple(leaves), keep, jax.tree.structure(plain))


def pack_result(out: PyTree) -> tuple[list[jax.Array], tuple[Any, tuple[Any, ...]]]:
    """Flatten what `then` returned."""
    leaves, treedef = jax.tree.flatten(out)
    arrays = [_as_array(leaf, "then: a result") for leaf in leaves]
    return [as_data(array) for array in arrays], (treedef, tuple(map(key_of, arrays)))


def result_spec(treedef: Any, keys: Sequence[Any], subset: Sequence[Any] | None, name: str) -> ResultSpec:
    """The structure of a call's result: all leaves, or those that `output_subset` names."""
    if subset is None:
        return ResultSpec(treedef, tuple(keys), tuple(range(treedef.num_leaves)))
    picked, treedef = jax.tree.flatten(_pick(treedef.unflatten(range(treedef.num_leaves)), subset, name))
    return ResultSpec(treedef, tuple(keys[i] for i in picked), tuple(picked))


def _pick(tree: PyTree, subset: Sequence[Any], name: str) -> tuple[Any, ...]:
    """The entries of the top level that `output_subset` names, in its order."""
    if not isinstance(tree, tuple | list | Mapping):
        raise ValueError(
            f"{name}: output_subset={list(subset)} names entries of a tuple, list or dict of outputs, but there is "
            f"one output."
        )
    names = list(tree) if isinstance(tree, Mapping) else list(range(-len(tree), len(tree)))
    for wanted in subset:
        if wanted not in names:
            error = KeyError if isinstance(tree, Mapping) else IndexError
            has = f"the keys {names}" if isinstance(tree, Mapping) else f"{len(tree)} outputs"
            raise error(f"{name}: output_subset names {wanted!r}, but there are {has}.")
    return tuple(tree[wanted] for wanted in subset)


def _is_weighted(value: Any) -> bool:
    return isinstance(value, Weighted)


def _items(rules: OutputRules, out: PyTree) -> Iterator[_Item]:
    """The leaves of what was returned in tree order, each with its op; a Weighted's weight follows its values."""
    found: list[tuple[Reduction, str, Any]] = []

    def match(prefix: Any, reduction: Reduction, subtree: Any) -> None:
        for path, value in tree_leaves_with_path(subtree, is_leaf=_is_weighted):
            found.append((reduction, keystr((*prefix, *path)), value))

    try:
        tree_map_with_path(match, rules.ops, out)
    except ValueError as error:
        names = jax.tree.map(lambda reduction: reduction.name, rules.ops)
        raise ValueError(
            f"{rules.name}: outputs={names!r} is no prefix of what it returned, whose tree is "
            f"{jax.tree.structure(out)}. Name one op for each output, or one for all."
        ) from error
    count = 0
    for reduction, path, value in found:
        items = [_Item(path, reduction, value)]
        if _is_weighted(value):
            items = list(_weighted_items(reduction, path, value, rules.name, count))
        count += len(items)
        yield from items


def _weighted_items(reduction: Reduction, path: str, value: Weighted, name: str, count: int) -> Iterator[_Item]:
    if reduction.name != "mean":
        raise ValueError(f'{name}: output{path} is Weighted, which goes with "mean", but its op is {reduction.name!r}.')
    if jnp.ndim(value.weight):
        raise ValueError(
            f"{name}: the weight of output{path} has shape {jnp.shape(value.weight)}; a part has one scalar weight "
            f"for all of its value."
        )
    inside = tree_leaves_with_path(value.value)
    for sub, leaf in inside:
        yield _Item(path + keystr(sub), WEIGHTED, leaf, weight=count + len(inside))
    yield _Item(f"{path}.weight", WEIGHT, value.weight, is_output=False)


def _as_array(value: Any, what: str) -> jax.Array:
    if isinstance(value, jax.Array):
        return value
    if (
        isinstance(value, bool | int | float | complex | np.generic | np.ndarray)
        and np.asarray(value).dtype.kind in "biufcV"
    ):
        return jnp.asarray(value)
    raise TypeError(f"{what} is a {type(value).__name__}; return arrays and numbers.")


def _check(leaf: OutputLeaf, array: jax.Array, rules: OutputRules) -> None:
    where = f"{rules.name}: output{leaf.path}"
    if leaf.key is not None and leaf.op not in ("concat", "stack", "first", "first part"):
        raise TypeError(f'{where} holds PRNG keys, which do not combine by {leaf.op!r}; use "concat", "stack" or None.')
    if leaf.op in ("stack", "first") and rules.is_sliced:
        raise ValueError(
            f"{where}: {leaf.op!r} takes one part a replica, so it does not go with num_slices > 1. Use a callable, "
            f"which gets the part of every slice."
        )
    is_rows = leaf.reduced.reduction.has_row_entries
    if is_rows and (array.ndim == 0 or (rules.rows is not None and array.shape[0] != rules.rows)):
        raise ValueError(
            f'{where} has shape {array.shape} for {rules.rows} rows; "concat" needs one output row for each input row. '
            f'Use "stack" for one entry a replica.'
        )
