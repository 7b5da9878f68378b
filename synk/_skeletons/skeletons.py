"""Skeletons: programs over rows that lie on all replicas and communicate while they run, for any number of rows."""

from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import keystr, tree_flatten_with_path

from .._base.errors import SynkError, shown
from .._base.jax_context import is_traced, trace_options
from .._base.partition import lengths_of
from .._base.pytree import SCALARS, PyTree, key_of, narrow, to_jax
from .._base.turns import in_turn
from .._call.binding import told_apart
from .._call.compose import in_blocks, own_mesh, place_traced, run_inlined
from .._call.execute import run
from .._call.parts import spare_rows
from .._data.dataset import Data, data_of_replicas, is_result, resident, source_of
from .._reductions.collectives import all_gather, merge_leading_axes
from .._runtime.dispatch import LOCK
from .._runtime.engine import spmd
from .._runtime.executable import Executable, ProgramSpec
from .._runtime.group import AXIS, Group
from .._runtime.layout import layouts
from .._tracing.context import current_trace, stateless
from .._variables.combine import rows_held
from .._variables.variable import Shared

Leaves: TypeAlias = Sequence[jax.Array]
Results: TypeAlias = Literal["concat", "scatter"]


class RowTree(NamedTuple):
    """A tree of arrays that share their rows."""

    leaves: list[Any]  # data that lies on the replicas; under a trace arrays
    tree: Any
    rows: int

    def structs(self, *rows: int) -> list[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of so many rows, or of one without its axis."""
        return [jax.ShapeDtypeStruct((*rows, *leaf.shape[1:]), narrow(leaf.dtype)) for leaf in self.leaves]


def row_tree(tree: PyTree, what: str, name: str, group: Group) -> RowTree:
    """Check a tree of arrays."""
    if current_trace() is not None:
        raise SynkError(f"{name}: it runs over all replicas, so not inside a synk function, which has its own rows.")
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
            leaves.append(to_jax(leaf[:] if isinstance(leaf, Data) else leaf))
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
    """A user's function of rows, which may not read or write shared variables, nor call what runs over all replicas:
    programs are kept by the function alone."""
    if not callable(fn):
        raise TypeError(f"{name}: it is given {shown(fn)}; give a function of rows.")
    try:
        hash(fn)
    except TypeError:
        raise TypeError(
            f"{name}: {type(fn).__name__} has no hash, by which its programs are kept. Give a function."
        ) from None

    def call(*args: PyTree) -> PyTree:
        with stateless(f"{name}: its function", "It has rows alone: pass its value beside them, or use synk.function."):
            return fn(*args)

    return call


class Skeleton(NamedTuple):
    """A program over rows that lie on all replicas."""

    name: str
    fn: Callable[..., Any]  # the user's
    key: Any  # all that `body` depends on, beside it and the shapes of its arguments
    body: Callable[[Leaves], list[jax.Array]]  # of one replica's rows, filled up behind its own
    num_results: int
    results: str  # whether these stay where they are, or are gathered


def filled(values: Leaves, lengths: Mapping[int, Sequence[int]]) -> Leaves:
    """A replica's rows of some arrays, by their numbers, of so many on each, with a real one behind its own where
    others have one more."""
    rank, leaves = lax.axis_index(AXIS), list(values)
    may_lack = any(0 in each for each in lengths.values())
    spares = spare_rows({i: leaves[i] for i in lengths}, rank == 0, may_lack)  # the first replica has rows
    for i, spare in spares.items():
        is_longest = jnp.asarray(np.array(lengths[i]) == lengths[i][0])[rank]
        leaves[i] = leaves[i].at[-1].set(jnp.where(is_longest, leaves[i][-1], spare[0]))  # the cheapest on CPU
    return leaves


def run_skeleton(group: Group, skeleton: Skeleton, given: Sequence[RowTree]) -> list[Any]:
    """Run a program; its results have the rows of the first argument."""
    in_turn()
    name, rows = skeleton.name, given[0].rows
    if skeleton.results not in ("concat", "scatter"):
        raise ValueError(f'{name}: results are {skeleton.results!r}; use "concat" or "scatter".')
    leaves, counts = zip(*[(leaf, each.rows) for each in given for leaf in each.leaves], strict=True)
    # Behind rows that were made on the replicas lies anything; behind those that were sent a real one.
    made = {
        i: lengths_of(n, group.size)
        for i, (leaf, n) in enumerate(zip(leaves, counts, strict=True))
        if n % group.size and isinstance(leaf, Data) and is_result(source_of(leaf))
    }
    is_inlined = any(not isinstance(leaf, Data) for leaf in leaves)
    stays = skeleton.results == "scatter" and not is_inlined
    lengths = lengths_of(rows, group.size)
    valid = np.concatenate([rank * lengths[0] + np.arange(count) for rank, count in enumerate(lengths)])

    def body(*values: jax.Array) -> list[jax.Array]:
        found = skeleton.body(filled(values, made))
        return found if stays else [merge_leading_axes(each).at[valid].get() for each in all_gather(found)]

    outs = layouts("stacked" if stays else "replicated", skeleton.num_results)
    if is_inlined:
        with own_mesh(name, group):
            cut = [in_blocks(leaf, lengths_of(n, group.size), None) for leaf, n in zip(leaves, counts, strict=True)]
            mapped = jax.jit(spmd(group, body, layouts("rows", len(cut)), outs))
            return list(run_inlined(group, mapped, [place_traced(group, block, "rows") for block in cut]))

    def compile() -> Executable:
        shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
        return Executable(group, ProgramSpec(body, [layouts("stacked", len(arrays))], [shapes], outs, name=name))

    with LOCK:
        arrays = [resident(leaf, group) for leaf in leaves]
        key = (skeleton.key, stays, trace_options(), tuple([(a.shape, a.dtype) for a in arrays]), counts, (*made,))
        fn: Any = skeleton.fn
        # A plain function equals itself alone, and its programs go with it.
        owner, which = (fn, None) if isinstance(fn, FunctionType) else (run_skeleton, told_apart(fn))
        program: Executable = group._cached(owner, (which, *key), compile)
        found = run(name, program, [arrays], advice='Let results stay where they are made ("scatter").')
    return [data_of_replicas(group, each, rows, None, f"a result of {name}") for each in found] if stays else found
