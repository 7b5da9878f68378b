"""Outputs: the leaves that a function returned, with the reductions that its user named."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path, tree_map_with_path

from .._base.pytree import PyTree, as_data, key_of, narrowed, refuse_two_bits
from .monoid import Gathered, Merge, Monoid
from .reduction import (
    MEAN_OF_ROWS,
    MERGE_IN_ORDER,
    PER_PART,
    REDUCTIONS,
    WEIGHT,
    WEIGHTED,
    Reduced,
    Reduction,
    Weighted,
    reduction_of,
)
from .tree import by_block

MERGE = REDUCTIONS["merge"]
# Reductions that may travel in a wire format.
SUMS = (REDUCTIONS["sum"], REDUCTIONS["mean"], MEAN_OF_ROWS, WEIGHTED)


PerPart: TypeAlias = Literal["", "all", "sums"]


class OutputLeaf(NamedTuple):
    """One leaf that `fn` returned.

    Attributes:
      path: its place in the tree, as messages write it.
      op: the name of its op, for messages.
      reduced: how it combines.
      key: the PRNG implementation of typed keys, whose raw data combines; None for other leaves.
    """

    path: str
    op: str
    reduced: Reduced
    key: Any


class Merged(NamedTuple):
    """A Monoid among the outputs.

    Attributes:
      first: the number of the first leaf of its state.
      size: how many leaves its state has.
      merge: its functions.
      results: the leaves of its answer.
    """

    first: int
    size: int
    merge: Merge
    results: tuple[OutputLeaf, ...]


class OutputSpec(NamedTuple):
    """The structure of the value that `fn` returned.

    Attributes:
      leaves: all leaves that combine, weights included.
      items: the outputs in the order of the tree: numbers of leaves, and Monoids. Weights are no outputs.
      treedef: the tree of the outputs.
    """

    leaves: tuple[OutputLeaf, ...]
    items: tuple[int | Merged, ...]
    treedef: Any

    @property
    def reduced(self) -> list[Reduced]:
        """Return how each leaf combines."""
        return [leaf.reduced for leaf in self.leaves]

    @property
    def merged(self) -> list[Merged]:
        """Return the Monoids."""
        return [item for item in self.items if isinstance(item, Merged)]

    def least_rows(self, wanted: Container[int]) -> int:
        """Return the number of rows that a call needs at least for the answers of the wanted leaves."""
        return max([item.merge.least_rows for item in self.merged if item.first in wanted], default=1)

    @property
    def results(self) -> list[OutputLeaf]:
        """Return the leaves of the outputs."""
        groups = [item.results if isinstance(item, Merged) else (self.leaves[item],) for item in self.items]
        return [leaf for group in groups for leaf in group]

    @property
    def keys(self) -> list[Any]:
        """Return the PRNG implementation of each leaf of the outputs."""
        return [leaf.key for leaf in self.results]

    def needed_for(self, picked: Sequence[int]) -> list[int]:
        """Return the numbers of the leaves that the picked outputs are made of, weights included."""
        sources = [leaves for leaves, count in map(_sizes, self.items) for _ in range(count)]
        needed = {number for i in picked for number in sources[i]}
        return sorted(needed | {w for i in needed if (w := self.leaves[i].reduced.weight) is not None})

    @property
    def staying(self) -> list[int]:
        """Return the numbers of the outputs that stay on the replicas that made them."""
        return [i for i, leaf in enumerate(self.results) if leaf.reduced.reduction.collective == "stay"]

    @property
    def source_leaf(self) -> list[int | None]:
        """Return for each output the number of its leaf, None for the answer of a Monoid."""
        groups = [[None] * len(item.results) if isinstance(item, Merged) else [item] for item in self.items]
        return [number for group in groups for number in group]

    def finish(self, combined: Mapping[int, jax.Array], present: Any) -> list[Any]:
        """Make the outputs from combined leaves.

        Args:
          combined: the combined leaves, by number. Outputs whose leaves are left out become None.
          present: as in `Merge.merge_all`.
        """
        outputs: list[Any] = []
        for item in self.items:
            leaves, count = _sizes(item)
            if any(i not in combined for i in leaves):
                outputs += [None] * count
            elif isinstance(item, Merged):
                state = [combined[item.first + i] for i in range(item.size)]
                reductions = {self.leaves[item.first + i].reduced.reduction for i in range(item.size)}
                if reductions != {REDUCTIONS["concat"]}:
                    state = item.merge.merge_all(state, present if reductions == {MERGE} else None)
                outputs += item.merge.finish(state)
            else:
                outputs.append(combined[item])
        return outputs


def _sizes(item: int | Merged) -> tuple[range, int]:
    """Return the numbers of the leaves that an item is made of, and its number of outputs."""
    if isinstance(item, Merged):
        return range(item.first, item.first + item.size), len(item.results)
    return range(item, item + 1), 1


class OutputRules(NamedTuple):
    """The rules for outputs of one part.

    Attributes:
      ops: the reductions, a prefix of the outputs.
      name: the function's name in messages.
      rows: the rows of the part, None if there are no rows.
      is_sliced: whether a replica has several parts.
      per_part: the outputs whose parts `f.check` wants as they are.
      is_over: whether the call is a batch of `f.over`.
      neighbours: how many rows before and after its own rows the part sees.
      wires: the wire formats of sums, a prefix of the outputs.
      block: the rows of a block, if parts are blocks that combine by a tree.
    """

    ops: PyTree
    name: str
    rows: int | None
    is_sliced: bool
    per_part: PerPart
    is_over: bool = False
    neighbours: tuple[int, int] = (0, 0)
    wires: PyTree = None
    block: int | None = None


def check_ops(outputs: PyTree, name: str) -> PyTree:
    """Check a tree of ops and return it as one of reductions."""
    return jax.tree.map(lambda op: reduction_of(op, name), outputs, is_leaf=lambda op: op is None)


def pack_outputs(rules: OutputRules, out: PyTree) -> tuple[list[jax.Array], OutputSpec]:
    """Flatten the value that `fn` returned for one part, and match its leaves with the ops.

    The weight of a Weighted follows its values.
    """
    leaves: list[OutputLeaf] = []
    arrays: list[jax.Array] = []
    items: list[int | Merged] = []
    plain = jax.tree.map(_whole, out, is_leaf=is_whole)
    wires = {path: said for path, said, _ in _match(rules.wires, plain, rules.name, "wire", rules.wires) if said}

    def add(path: str, reduction: Reduction, value: Any, weight: int | None = None, is_of_monoid: bool = False) -> None:
        reduction = MEAN_OF_ROWS if rules.is_over and reduction is REDUCTIONS["mean"] else reduction
        array = _as_array(value, f"{rules.name}: output{path}")
        reduction = reduction if rules.block is None else by_block(reduction, as_data(array).dtype)
        reduced = Reduced(reduction, as_data(array).dtype, weight)
        if reduction in SUMS:
            reduced = reduced._replace(wire=wires.get(path))
        leaf = OutputLeaf(path, reduction.name, reduced, key_of(array))
        _check(leaf, array, rules, is_of_monoid)
        is_kept = rules.per_part == "all" or (rules.per_part and reduction in SUMS)
        if is_kept and not is_of_monoid and reduction is not WEIGHT:
            leaf = leaf._replace(reduced=Reduced(PER_PART, leaf.reduced.dtype))
        leaves.append(leaf)
        arrays.append(as_data(array))

    def add_monoid(path: str, value: Monoid) -> None:
        first, is_gathered = len(leaves), isinstance(value, Gathered)
        merge = Merge(value, f"{rules.name}: output{path}")
        in_order = MERGE_IN_ORDER if rules.is_over and merge.has_order else MERGE
        for sub, leaf in tree_leaves_with_path(value.state):
            add(path + keystr(sub), REDUCTIONS["concat"] if is_gathered else in_order, leaf, is_of_monoid=True)
        answer = tree_leaves_with_path(merge.answer)
        results = [OutputLeaf(path + keystr(sub), "merge", Reduced(MERGE, leaf.dtype), None) for sub, leaf in answer]
        items.append(Merged(first, len(leaves) - first, merge, tuple(results)))

    names = jax.tree.map(lambda reduction: reduction.name, rules.ops)
    for path, reduction, value in _match(rules.ops, out, rules.name, "outputs", names):
        if isinstance(value, Monoid):
            _check_monoid(f"output{path}", reduction, value, rules.name)
            add_monoid(path, value)
            continue
        if reduction is MERGE:
            raise TypeError(
                f'{rules.name}: output{path} is combined by "merge", so it must be a synk.Monoid, as synk.stats makes '
                f"them; this one is {_kind(value)}."
            )
        if not isinstance(value, Weighted):
            items.append(len(leaves))
            add(path, reduction, value)
            continue
        _check_weighted(f"output{path}", reduction, value, rules.name)
        inside = tree_leaves_with_path(value.value)
        weight = len(leaves) + len(inside)
        for sub, leaf in inside:
            items.append(len(leaves))
            add(path + keystr(sub), replace(WEIGHTED, collective=reduction.collective), leaf, weight)
        add(f"{path}.weight", WEIGHT, value.weight)
    return arrays, OutputSpec(tuple(leaves), tuple(items), jax.tree.structure(plain))


def pack_result(out: PyTree) -> tuple[list[jax.Array], tuple[Any, tuple[Any, ...]]]:
    """Flatten the value that `then` returned."""
    leaves, treedef = jax.tree.flatten(out)
    arrays = [_as_array(leaf, "then: a result") for leaf in leaves]
    return [as_data(array) for array in arrays], (treedef, tuple(map(key_of, arrays)))


def is_whole(value: Any) -> bool:
    """Check for a Weighted or a Monoid, which combine in ways of their own."""
    return isinstance(value, Weighted | Monoid)


def _kind(value: Any) -> str:
    """Return what a user would call a value: a tracer is an array."""
    return "an array" if isinstance(value, jax.Array) else f"a {type(value).__name__}"


def _whole(value: Any) -> Any:
    """Return the output that a Weighted or Monoid becomes, or a value of the same tree."""
    if isinstance(value, Monoid):
        return jax.eval_shape(lambda state: Monoid(state, value.merge, value.finish).value, value.state)
    return value.value if isinstance(value, Weighted) else value


def _match(prefix: PyTree, out: PyTree, name: str, what: str, given: PyTree) -> list[tuple[str, Any, Any]]:
    """List (path, entry of the prefix, leaf) for each leaf that was returned. Messages show the prefix as `given`."""
    matches: list[tuple[str, Any, Any]] = []

    def match(start: Any, said: Any, subtree: Any) -> None:
        for path, value in tree_leaves_with_path(subtree, is_leaf=is_whole):
            matches.append((keystr((*start, *path)), said, value))

    try:
        tree_map_with_path(match, _as_sequence_of(out, prefix), out, is_leaf=lambda said: said is None)
    except ValueError as error:
        raise ValueError(
            f"{name}: {what}={given!r} is no prefix of what it returned, whose tree is {jax.tree.structure(out)}. "
            f"Name one {'op' if what == 'outputs' else what} for each output, or one for all."
        ) from error
    return matches


def _as_sequence_of(out: PyTree, prefix: PyTree) -> PyTree:
    """Return a prefix as a list or a tuple, whichever `fn` returned."""
    return type(out)(prefix) if {type(out), type(prefix)} == {list, tuple} else prefix


def _check_weighted(where: str, reduction: Reduction, value: Weighted, name: str) -> None:
    if reduction.name != "mean":
        raise ValueError(f'{name}: {where} is Weighted, which goes with "mean", but its op is {reduction.name!r}.')
    _refuse_nested(where, value.value, name)
    if jnp.ndim(value.weight):
        shape = jnp.shape(value.weight)
        raise ValueError(f"{name}: the weight of {where} has shape {shape}; a part has one scalar weight.")


def _refuse_nested(where: str, inside: PyTree, name: str) -> None:
    if any(map(is_whole, jax.tree.leaves(inside, is_leaf=is_whole))):
        raise ValueError(f"{name}: {where} holds a Weighted or Monoid inside another one. Return them side by side.")


def _check_monoid(where: str, reduction: Reduction, value: Monoid, name: str) -> None:
    _refuse_nested(where, value.state, name)
    # "sum" is the default, which users need not change for a Monoid.
    if reduction.name not in ("merge", "sum"):
        raise ValueError(f'{name}: {where} is a Monoid, which goes with "merge", but its op is {reduction.name!r}.')


def _as_array(value: Any, what: str) -> jax.Array:
    if getattr(value, "dtype", None) == jax.dtypes.float0:
        raise TypeError(
            f"{what} is float0, as gradients of integers and booleans are, which holds no numbers. Leave it out, or "
            f"return zeros in its place."
        )
    if isinstance(value, jax.Array):
        refuse_two_bits(value, what)
        return narrowed(value)
    is_number = isinstance(value, bool | int | float | complex | np.generic | np.ndarray)
    if is_number and np.asarray(value).dtype.kind in "biufcV":
        return jnp.asarray(value)
    raise TypeError(f"{what} is a {type(value).__name__}; return arrays and numbers.")


def _check(leaf: OutputLeaf, array: jax.Array, rules: OutputRules, is_of_monoid: bool = False) -> None:
    where = f"{rules.name}: output{leaf.path}"
    several, portion = ("over", "batch") if rules.is_over else ("num_slices > 1", "slice")
    of_parts = f"a callable, which gets the part of every {portion}"
    by_name = "" if rules.is_over else " A broadcast argument reaches then by its name: then=lambda total, key: ..."
    if leaf.key is not None and leaf.op not in ("concat", "scatter", "stack", "first", "first part"):
        others = '"concat"' if rules.is_sliced else '"concat", "stack" or None'
        raise TypeError(f"{where} holds PRNG keys, which do not combine by {leaf.op!r}; use {others}.{by_name}")
    if leaf.op == "scatter" and rules.is_over:
        raise ValueError(
            f'{where}: "scatter" keeps rows where they were made, but over takes rows in another order than '
            f'they lie in. Use "concat".'
        )
    if rules.block is not None and leaf.op in ("stack", "first", "callable", "scatter"):
        raise ValueError(
            f"{where}: {leaf.op!r} shows which replica has made what, so it does not go with blocks={rules.block}: "
            f'that answer depends on none. Use an op that combines, or "concat".'
        )
    if leaf.op in ("stack", "first") and rules.is_sliced:
        other = of_parts if leaf.key is None else '"concat", of a key a row'
        raise ValueError(
            f"{where}: {leaf.op!r} takes one part a replica, so it does not go with {several}. Use {other}."
            f"{by_name if leaf.key is not None or leaf.op == 'first' else ''}"
        )
    is_rows = leaf.reduced.reduction.has_row_entries
    if is_rows and (array.ndim == 0 or (rules.rows is not None and array.shape[0] != rules.rows)):
        before, after = rules.neighbours
        if array.ndim and rules.rows is not None and array.shape[0] == rules.rows + before + after:
            raise ValueError(
                f"{where} has {array.shape[0]} rows, but only {rules.rows} of those that the part sees are its own. "
                f"Return its own alone: out[{before or ''}:{-after if after else ''}]."
            )
        if is_of_monoid:
            raise ValueError(
                f"{where} is a statistic of {rules.rows} rows, but was given an array of shape {array.shape}. Give it "
                f"an entry a row; reshape the array before the call."
            )
        other = of_parts if rules.is_sliced else '"stack" for one entry a replica'
        raise ValueError(
            f'{where} has shape {array.shape} for {rules.rows} rows; "{leaf.op}" needs one output row for each input '
            f"row. Use {other}."
        )
