"""Outputs: the leaves that a function returned, with the reductions that its user named."""

from collections.abc import (
    Callable,
    Container,
    Hashable,
    Mapping,
    Sequence,
)
from dataclasses import replace
from typing import (
    Any,
    Literal,
    NamedTuple,
    TypeAlias,
)

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path, tree_map_with_path

from .._base.pytree import (
    SCALARS,
    PyTree,
    as_data,
    as_keys,
    key_of,
    refuse_sparse,
    refuse_two_bits,
    to_jax,
)
from .monoid import Merge, Monoid
from .reduction import (
    MERGE_IN_ORDER,
    PER_PART,
    REDUCTIONS,
    WEIGHT,
    WEIGHTED,
    OutputLeaf,
    Reduction,
    Weighted,
    reduction_of,
)
from .tree import by_block


class ResultSpec(NamedTuple):
    """The structure of the result of a call.

    Attributes:
      keys: the PRNG implementation of each leaf, None for other leaves.
      picked: the leaves of the outputs that are returned, by number.
    """

    treedef: Any
    keys: tuple[Any, ...]
    picked: tuple[int, ...]

    @property
    def paths(self) -> list[str]:
        """Return the place of each leaf in the tree, as messages write it."""
        return [
            keystr(path) for path, _ in tree_leaves_with_path(self.treedef.unflatten(range(self.treedef.num_leaves)))
        ]

    def tree(self, leaves: Sequence[Any]) -> PyTree:
        """Return leaves as the user's tree, with raw key data as typed keys."""
        if not any(self.keys):
            return self.treedef.unflatten(leaves)
        # A `Data` among the leaves holds raw key data.
        pairs = zip(leaves, self.keys, strict=True)
        return self.treedef.unflatten([as_keys(a, key) if isinstance(a, jax.Array) else a for a, key in pairs])


def result_spec(treedef: Any, keys: Sequence[Any], subset: Sequence[Any] | None, name: str) -> ResultSpec:
    if subset is None:
        return ResultSpec(treedef, tuple(keys), tuple(range(treedef.num_leaves)))
    # The tree is picked from with numbers in the place of leaves, which then name the leaves that are returned.
    picked, treedef = jax.tree.flatten(_pick(treedef.unflatten(range(treedef.num_leaves)), subset, name))
    return ResultSpec(treedef, tuple(keys[i] for i in picked), tuple(picked))


def _pick(tree: PyTree, subset: Sequence[Any], name: str) -> tuple[Any, ...]:
    """Pick the entries of the top level that `output_subset` names, in its order."""
    if not isinstance(tree, tuple | list | Mapping):
        raise ValueError(
            f"{name}: output_subset={list(subset)} names entries of a tuple, list or dict of outputs, but there is "
            f"one output."
        )
    is_dict = isinstance(tree, Mapping)
    # Indexes may be negative, as of any tuple.
    names = list(tree) if is_dict else range(-len(tree), len(tree))
    for wanted in subset:
        if wanted not in names:
            error, has = (KeyError, f"the keys {names}") if is_dict else (IndexError, f"{len(tree)} outputs")
            raise error(f"{name}: output_subset names {wanted!r}, but there are {has}.")
    return tuple(tree[wanted] for wanted in subset)


MERGE = REDUCTIONS["merge"]
# Reductions that may travel in a wire format.
SUMS = (REDUCTIONS["sum"], REDUCTIONS["mean"], WEIGHTED)


PerPart: TypeAlias = Literal["", "all", "sums"]


class OutputSpec(NamedTuple):
    """The structure of the value that `fn` returned.

    Attributes:
      leaves: all leaves that combine, weights included.
      items: the outputs in the order of the tree: indexes of leaves, and Monoids. Weights are no outputs.
    """

    leaves: tuple[OutputLeaf, ...]
    items: tuple[int | Merge, ...]
    treedef: Any

    def record(self, fingerprint: Callable[[Any], Hashable]) -> tuple[Any, ...]:
        """Return a record that tells the outputs from those of another trace, by fingerprints of jaxprs."""
        # A Monoid's functions are no equations of `fn`, so two traces with other merges would look the same.
        merges = [(merge.leaves, merge.has_order, *map(fingerprint, merge.traced())) for merge in self.merges]
        return self.treedef, self.leaves, *merges

    @property
    def merges(self) -> list[Merge]:
        return [item for item in self.items if isinstance(item, Merge)]

    def least_rows(self, wanted: Container[int]) -> int:
        """Return the number of rows that a call needs at least for the answers of the wanted leaves."""
        return max([merge.least_rows for merge in self.merges if merge.leaves.start in wanted], default=1)

    @property
    def results(self) -> list[OutputLeaf]:
        groups = [item.results if isinstance(item, Merge) else [self.leaves[item]] for item in self.items]
        return [leaf for group in groups for leaf in group]

    @property
    def keys(self) -> list[Any]:
        return [leaf.key for leaf in self.results]

    def needed_for(self, picked: Sequence[int]) -> list[int]:
        """Return the indexes of the leaves that the picked outputs are made of, weights included."""
        sources = list[Sequence[int]]()
        for item in self.items:
            sources += [item.leaves] * len(item.results) if isinstance(item, Merge) else [[item]]
        needed = {number for i in picked for number in sources[i]}
        return sorted(needed | {w for i in needed if (w := self.leaves[i].weight) is not None})

    @property
    def scattered(self) -> list[int]:
        """Return the indexes of the outputs that stay on the replicas that made them."""
        return [i for i, leaf in enumerate(self.results) if leaf.reduction.collective == "scatter"]

    def finish(self, combined: Mapping[int, Any], present: Any) -> list[Any]:
        """Make the outputs from combined leaves.

        Args:
          combined: the combined leaves, by index. Outputs whose leaves are left out become None.
          present: as in `Merge.merge_all`.
        """
        outputs: list[Any] = []
        for item in self.items:
            if not isinstance(item, Merge):
                outputs.append(combined.get(item))
            elif any(i not in combined for i in item.leaves):
                outputs += [None] * len(item.results)
            else:
                state = [combined[i] for i in item.leaves]
                if not item.is_gathered:
                    # Blocks and `f.over` gather an entry a part that exists, so the mask of replicas says nothing of
                    # those.
                    is_by_replica = all(self.leaves[i].reduction == MERGE for i in item.leaves)
                    state = item.merge_all(state, present if is_by_replica else None)
                outputs += item.finish(state)
        return outputs


class OutputRules(NamedTuple):
    """The rules for outputs of one part.

    Attributes:
      ops: the reductions, a prefix of the outputs.
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
    return jax.tree.map(lambda op: reduction_of(op, name), outputs, is_leaf=lambda op: op is None)


def pack_outputs(rules: OutputRules, out: PyTree) -> tuple[list[jax.Array], OutputSpec]:
    """Flatten the value that `fn` returned for one part, and match its leaves with the ops.

    The weight of a Weighted follows its values.
    """
    leaves: list[OutputLeaf] = []
    arrays: list[jax.Array] = []
    items: list[int | Merge] = []
    # Wires and the result have the user's tree, in which a Weighted or Monoid stands for what it becomes.
    plain = jax.tree.map(_whole, out, is_leaf=is_whole)
    wires = {path: said for path, said, _ in match_prefix(rules.wires, plain, rules.name, "wire") if said}

    def add(path: str, reduction: Reduction, value: Any, weight: int | None = None, is_of_monoid: bool = False) -> None:
        array = _as_array(value, f"{rules.name}: output{path}")
        # Keys travel as raw data; `ResultSpec` makes them keys again.
        dtype = as_data(array).dtype
        # `f.over` learns the number of all rows at its end, so it divides by the total weight there.
        reduction = WEIGHTED if rules.is_over and reduction is REDUCTIONS["mean"] else reduction
        reduction = reduction if rules.block is None else by_block(reduction, dtype)
        leaf = OutputLeaf(reduction, dtype, path, key_of(array), weight)
        _check_leaf(leaf, array, rules, is_of_monoid)
        if reduction in SUMS:
            leaf = leaf._replace(wire=wires.get(path))
        # Rows are the parts' own already, and a Monoid's state means nothing alone.
        is_kept = (rules.per_part == "all" and not reduction.has_row_entries) or (rules.per_part and reduction in SUMS)
        if is_kept and not is_of_monoid and reduction is not WEIGHT:
            leaf = leaf._replace(reduction=replace(PER_PART, name=reduction.name), weight=None, wire=None)
        leaves.append(leaf)
        arrays.append(as_data(array))

    for path, reduction, value in match_prefix(rules.ops, out, rules.name, "outputs"):
        _check_output(f"{rules.name}: output{path}", reduction, value)
        if isinstance(value, Monoid):
            merge = Merge(value, len(leaves), path, rules.name)
            items.append(merge)
            merging = MERGE_IN_ORDER if rules.is_over and merge.has_order else MERGE
            merging = REDUCTIONS["concat"] if merge.is_gathered else merging
            for sub, leaf in tree_leaves_with_path(value.state):
                add(path + keystr(sub), merging, leaf, is_of_monoid=True)
        elif isinstance(value, Weighted):
            inside = tree_leaves_with_path(value.value)
            # The weight is added behind all leaves of its value, so its number is known before.
            weight = len(leaves) + len(inside)
            for sub, leaf in inside:
                items.append(len(leaves))
                add(path + keystr(sub), replace(WEIGHTED, collective=reduction.collective), leaf, weight)
            add(f"{path}.weight", WEIGHT, value.weight)
        else:
            items.append(len(leaves))
            add(path, reduction, value)
    return arrays, OutputSpec(tuple(leaves), tuple(items), jax.tree.structure(plain))


def pack_result(out: PyTree) -> tuple[list[jax.Array], tuple[Any, tuple[Any, ...]]]:
    leaves, treedef = jax.tree.flatten(out)
    arrays = [_as_array(leaf, "then: a result") for leaf in leaves]
    return [as_data(array) for array in arrays], (treedef, tuple(map(key_of, arrays)))


def is_whole(value: Any) -> bool:
    """Check for a Weighted or a Monoid, which combine in ways of their own."""
    return isinstance(value, Weighted | Monoid)


def _whole(value: Any) -> Any:
    """Return the output that a Weighted or Monoid becomes, or a value of the same tree."""
    if isinstance(value, Monoid):
        # Only the tree is needed: `finish` may be expensive, or fail on the state of one part.
        return jax.eval_shape(lambda state: Monoid(state, value.merge, value.finish).value, value.state)
    return value.value if isinstance(value, Weighted) else value


def match_prefix(prefix: PyTree, out: PyTree, name: str, option: str) -> list[tuple[str, Any, Any]]:
    """List (path, entry of the prefix, leaf) for each leaf that was returned. The prefix is the value of `option`."""
    matches: list[tuple[str, Any, Any]] = []

    def match(start: Any, said: Any, subtree: Any) -> None:
        if option == "outputs" and said.name not in ("same", "first"):
            refuse_sparse(f"{name}: output{keystr(start)}", subtree)
        for path, value in tree_leaves_with_path(subtree, is_leaf=is_whole):
            matches.append((keystr((*start, *path)), said, value))

    # A list of ops may stand for a tuple of outputs, and the reverse.
    if {type(out), type(prefix)} == {list, tuple}:
        prefix = type(out)(prefix)
    try:
        tree_map_with_path(match, prefix, out, is_leaf=lambda said: said is None)
    except ValueError as error:
        names = jax.tree.map(lambda said: getattr(said, "name", said), prefix)
        raise ValueError(
            f"{name}: {option}={names!r} is no prefix of what it returned, whose tree is {jax.tree.structure(out)}. "
            f"Name one for each output, or one for all."
        ) from error
    return matches


def _check_output(where: str, reduction: Reduction, value: Any) -> None:
    """Refuse a Weighted or Monoid under another op than its own, or inside another one."""
    if isinstance(value, Monoid):
        # "sum" is the default, which users need not change for a Monoid.
        inside, kind, ops = value.state, "a Monoid", ("merge", "sum")
    elif isinstance(value, Weighted):
        inside, kind, ops = value.value, "Weighted", ("mean",)
    elif reduction is MERGE:
        raise TypeError(
            f'{where} is combined by "merge", but is no Monoid. Return a synk.Monoid, as synk.stats makes them.'
        )
    else:
        return
    if reduction.name not in ops:
        raise ValueError(f'{where} is {kind}, which goes with "{ops[0]}", but its op is {reduction.name!r}.')
    if isinstance(value, Weighted) and jnp.ndim(value.weight):
        raise ValueError(f"{where}: its weight has shape {jnp.shape(value.weight)}; a part has one scalar weight.")
    if any(map(is_whole, jax.tree.leaves(inside, is_leaf=is_whole))):
        raise ValueError(f"{where} holds a Weighted or Monoid inside another one. Return them side by side.")


def _as_array(value: Any, what: str) -> jax.Array:
    # float0 is a void dtype to NumPy, as JAX's small floats are, so the check of kinds below would let it pass.
    if getattr(value, "dtype", None) == jax.dtypes.float0:
        raise TypeError(
            f"{what} is float0, as gradients of integers and booleans are, which holds no numbers. Leave it out, or "
            f"return zeros in its place."
        )
    if isinstance(value, jax.Array):
        refuse_two_bits(value, what)
    elif not isinstance(value, (np.generic, np.ndarray, *SCALARS)) or np.asarray(value).dtype.kind not in "biufcV":
        raise TypeError(f"{what} is a {type(value).__name__}; return arrays and numbers.")
    return to_jax(value, what)


def _check_leaf(leaf: OutputLeaf, array: jax.Array, rules: OutputRules, is_of_monoid: bool) -> None:
    """Refuse an output that does not go with its op in this kind of call."""
    where, op = f"{rules.name}: output{leaf.path}", leaf.reduction.name
    # `f.over` takes no function that has a `then`.
    by_name = "" if rules.is_over else " A broadcast argument reaches then by its name: then=lambda total, key: ..."
    if leaf.key is not None and op not in ("concat", "scatter", "stack", "same", "first", "first part"):
        raise TypeError(
            f'{where} holds PRNG keys, which do not combine by {op!r}; use "concat", "stack", "same" or None.{by_name}'
        )
    option, refused = "num_slices > 1", ("stack", "first", "same") if rules.is_sliced else ()
    if rules.is_over and op != "stack":
        option, refused = "over", ("first", "same", "scatter")
    if rules.block is not None:
        option, refused = f"blocks={rules.block}", ("stack", "first", "same", "scatter", "callable")
    if op == "same" and op in refused:
        raise ValueError(
            f'{where}: "same" is for a value that all replicas have made from all rows, so it does not go with '
            f"{option}, where a part has some of them. Use an op that combines."
        )
    if op in refused:
        raise ValueError(
            f"{where}: {op!r} shows which replica has made what, so it does not go with {option}. Use an op that "
            f'combines, or else use "concat".{by_name}'
        )
    # Without rows (None) each replica's value is taken as its rows.
    if not leaf.reduction.has_row_entries or (array.ndim and rules.rows in (None, array.shape[0])):
        return
    before, after = rules.neighbours
    if array.ndim and rules.rows is not None and array.shape[0] == rules.rows + before + after:
        raise ValueError(
            f"{where} has {array.shape[0]} rows, but only {rules.rows} of those that the part sees are its own. "
            f"Return its own alone: out[{before or ''}:{-after if after else ''}]."
        )
    cure = (
        "Give the statistic an entry a row; reshape the array before the call."
        if is_of_monoid
        else 'Use a callable, which gets all parts, or without slices "stack" for one entry a replica.'
    )
    raise ValueError(
        f'{where} has shape {array.shape} for {rules.rows} rows; "{op}" needs one output row for each input row. {cure}'
    )
