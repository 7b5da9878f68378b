"""Skeletons: programs over the rows of all replicas that communicate while they run."""

from collections.abc import Callable, Hashable, Sequence
from types import FunctionType
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import keystr, tree_flatten_with_path

from .._base.errors import shown
from .._base.jax_context import is_traced, trace_options
from .._base.partition import lengths_of
from .._base.pytree import SCALARS, PyTree, key_of, narrow, refuse_sparse, to_jax
from .._call.binding import told_apart
from .._call.compose import in_blocks, own_mesh, place_traced, run_inlined
from .._call.execute import run
from .._call.parts import spare_rows
from .._data.dataset import data_of_replicas, resident, source_of
from .._reductions.collectives import all_gather
from .._runtime.dispatch import LOCK
from .._runtime.executable import Executable, ProgramSpec
from .._runtime.layout import layouts
from .._runtime.way import replica_axis
from .._tracing.context import current_trace, stateless
from .._tracing.names import Names
from .._variables.collectives import rows_held
from ..errors import SynkError
from ..typing import Data, Group, Shared

Leaves: TypeAlias = Sequence[jax.Array]
Results: TypeAlias = Literal["concat", "scatter"]


class RowTree(NamedTuple):
    """A tree of arrays that share their rows.

    Attributes:
      leaves: `Data` that lies on the replicas; arrays under a trace.
      tree: the structure of the tree.
      rows: the number of rows.
    """

    leaves: list[Any]
    tree: Any
    rows: int

    def structs(self, *rows: int) -> list[jax.ShapeDtypeStruct]:
        """Return shapes and dtypes of this many rows, or without a number of one row without its axis."""
        return [jax.ShapeDtypeStruct((*rows, *leaf.shape[1:]), narrow(leaf.dtype)) for leaf in self.leaves]


def row_tree(tree: PyTree, what: str, name: str, group: Group) -> RowTree:
    if current_trace() is not None:
        raise SynkError(f"{name}: it runs over all replicas, so not inside a synk function, which has its own rows.")
    refuse_sparse(f"{name}: {what}", tree)
    pairs, treedef = tree_flatten_with_path(tree)
    leaves: list[Any] = []
    for path, leaf in pairs:
        where = f"{name}: {what}{keystr(path)}"
        if isinstance(leaf, Shared):
            if is_traced():
                raise SynkError(
                    f"{where} is the shared variable {leaf.name}, of which jit, grad or vmap would keep the value of "
                    f"now. Pass {leaf.name}.value as an argument."
                )
            leaves.append(rows_held(leaf, group, where))
        elif key_of(leaf) is not None or (isinstance(leaf, Data) and leaf._key is not None):
            raise TypeError(f"{where} holds typed PRNG keys, which do not combine; give jax.random.key_data of them.")
        elif isinstance(leaf, SCALARS) or np.ndim(leaf) == 0:
            raise ValueError(f"{where} is a scalar and has no rows; give arrays, rows first.")
        elif is_traced() or isinstance(leaf, jax.core.Tracer):
            leaves.append(to_jax(leaf[:] if isinstance(leaf, Data) else leaf, where))
        else:
            is_there = isinstance(leaf, Data) and leaf.place == "scatter" and source_of(leaf) is not None
            leaves.append(leaf if is_there else Data(leaf, where, "scatter"))
        if len(leaves[-1]) != len(leaves[0]) or not len(leaves[0]):
            raise ValueError(
                f"{where} has {len(leaves[-1])} rows, {what}{keystr(pairs[0][0])} {len(leaves[0])}. Arrays share their "
                f"rows, at least one."
            )
    if not leaves:
        raise ValueError(f"{name}: {what} is {shown(tree)}, which has no array; give arrays, rows first.")
    return RowTree(leaves, treedef, len(leaves[0]))


def without_state(fn: Callable[..., PyTree], name: str) -> Callable[..., PyTree]:
    """Return a user's function of rows as one that refuses shared variables and calls over all replicas."""
    # Programs are kept by the function and the names that it reads, so they may depend on nothing else.
    if not (callable(fn) and isinstance(fn, Hashable)):
        raise TypeError(f"{name}: it is given {shown(fn)}; give a function of rows, which has a hash.")

    def call(*args: PyTree) -> PyTree:
        with stateless(f"{name}: its function", "It has rows alone: pass its value beside them, or use synk.function."):
            return fn(*args)

    return call


class Skeleton(NamedTuple):
    """A program over the rows of all replicas.

    Attributes:
      name: what messages call it.
      fn: the user's function.
      key: what `body` depends on, beside `fn` and the shapes of its arguments.
      body: runs on one replica's rows. A shorter replica has one more row behind its own, a real one.
      num_results: the number of leaves that `body` returns.
      results: "scatter" to leave results on their replicas, "concat" to gather them.
    """

    name: str
    fn: Callable[..., Any]
    key: Any
    body: Callable[[Leaves], list[jax.Array]]
    num_results: int
    results: str


def run_skeleton(group: Group, skeleton: Skeleton, arguments: Sequence[RowTree]) -> list[Any]:
    name, rows = skeleton.name, arguments[0].rows
    if skeleton.results not in ("concat", "scatter"):
        raise ValueError(f'{name}: results are {skeleton.results!r}; use "concat" or "scatter".')
    leaves = [leaf for tree in arguments for leaf in tree.leaves]
    lengths = [lengths_of(len(leaf), group.size) for leaf in leaves]
    is_inlined = any(not isinstance(leaf, Data) for leaf in leaves)
    # A Data holds real arrays, and under jit or grad there are tracers alone.
    stays = skeleton.results == "scatter" and not is_inlined

    def body(*values: jax.Array) -> list[jax.Array]:
        results = skeleton.body(_filled(values, lengths))
        return results if stays else all_rows(results, lengths[0])

    outs = layouts("stacked" if stays else "replicated", skeleton.num_results)
    if is_inlined:
        with own_mesh(name, group):
            # Tracers lie wherever their trace likes, so rows are brought into equal blocks by equations of the trace.
            blocks = [in_blocks(leaf, counts, None) for leaf, counts in zip(leaves, lengths, strict=True)]
            mapped = jax.jit(group._way.map(body, layouts("rows", len(blocks)), outs))
            return list(run_inlined(group, mapped, [place_traced(group, block, "rows") for block in blocks]))

    def compile() -> Executable:
        shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
        return Executable(group, ProgramSpec(body, [layouts("stacked", len(arrays))], [shapes], outs, name=name))

    with LOCK:
        arrays = [resident(leaf, group) for leaf in leaves]
        key = (skeleton.key, stays, trace_options(), tuple([(a.shape, a.dtype) for a in arrays]), tuple(lengths))
        fn: Any = skeleton.fn
        # A plain function equals itself alone, and its programs go with it. Other callables may be equal to a new one.
        owner, which = (fn, None) if isinstance(fn, FunctionType) else (run_skeleton, told_apart(fn))
        kept: list[tuple[Names, Executable]] = group._cached(owner, (which, *key), list)
        if not (kept and kept[0][0].are_same()):
            # The names are read after the trace, in which the function may change them.
            program = compile()
            kept[:] = [(Names([fn]), program)]
        program = kept[0][1]
        results = run(name, program, [arrays], advice='Let results stay where they are made ("scatter").')
    return [data_of_replicas(group, leaf, rows, None, f"{name}(...)") for leaf in results] if stays else results


def _filled(values: Leaves, lengths: Sequence[tuple[int, ...]]) -> Leaves:
    """Put a real row behind the rows of shorter replicas; `lengths` has the rows of each replica for each array."""
    rank, leaves = lax.axis_index(replica_axis()), list(values)
    # Whatever lies behind the rows would otherwise reach the user's function, and NaN made of it the gradients.
    uneven = {i: leaves[i] for i, counts in enumerate(lengths) if counts[-1] < counts[0]}
    # The first replica has rows.
    spares = spare_rows(uneven, rank == 0, may_lack=any(counts[-1] == 0 for counts in lengths))
    for i, spare in spares.items():
        is_longest = rank < lengths[i].count(lengths[i][0])
        # On CPU this is cheaper than a select over all rows.
        leaves[i] = leaves[i].at[-1].set(jnp.where(is_longest, leaves[i][-1], spare[0]))
    return leaves


def all_rows(values: Leaves, lengths: Sequence[int]) -> list[jax.Array]:
    """Gather the rows of all replicas, without those that fill up shorter ones."""
    # Rows that fill up shorter replicas lie behind the real ones of each.
    valid = np.concatenate([rank * lengths[0] + np.arange(count) for rank, count in enumerate(lengths)])
    return [lax.collapse(leaf, 0, 2).at[valid].get() for leaf in all_gather(values)]
