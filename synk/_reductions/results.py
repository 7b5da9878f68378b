"""Results: the outputs that a call returns, and their tree."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.tree_util import keystr, tree_leaves_with_path

from .._base.pytree import PyTree, as_keys


class ResultSpec(NamedTuple):
    """The structure of the result of a call.

    Attributes:
      treedef: the tree of the result.
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
    """Return the structure of a call's result: all leaves, or those that `output_subset` names."""
    if subset is None:
        return ResultSpec(treedef, tuple(keys), tuple(range(treedef.num_leaves)))
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
    names = list(tree) if is_dict else range(-len(tree), len(tree))
    for wanted in subset:
        if wanted not in names:
            error, has = (KeyError, f"the keys {names}") if is_dict else (IndexError, f"{len(tree)} outputs")
            raise error(f"{name}: output_subset names {wanted!r}, but there are {has}.")
    return tuple(tree[wanted] for wanted in subset)
