"""Route: the short way of a call whose like has gone before: looked at by its form alone, then straight to its program.

What has no short way here, bad input among it, goes the long way, where everything is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any, NamedTuple

import jax
import numpy as np

from ._arguments import SCALARS, Scalars
from ._bind import Layout
from ._data import Data
from ._group import Group
from ._plan import Call, Plan
from ._program import Signature
from ._rows import Selection, are_below, place, put, selected
from ._run import Prepared
from ._task import Built
from ._trace import settings


class Arguments(NamedTuple):
    """A call's arguments, as they came."""

    layout: Layout
    leaves: Sequence[Any]
    batch: Any
    batch_s: Any


class Route(NamedTuple):
    """Where a call goes, and how its rows come."""

    signature: Signature
    built: Built
    rows: int  # of the call, on all replicas
    limit: int  # what its indexes are below
    begins: list[int]  # where the rows of each replica begin


def form(current: Group, given: Arguments, specs: tuple[Any, ...]) -> Any:
    """What decides which program a call runs and how its rows come; None for a call that goes the long way.

    `specs`: of the function's variables.
    """
    if given.batch is not None and given.batch_s is not None:
        return None
    picks = (_pick_form(given.batch), _pick_form(given.batch_s))
    forms = [*picks, *map(_form, given.leaves)]
    return None if None in forms else (current, given.layout, settings(), tuple(forms), specs)


def _pick_form(batch: Any) -> Any:
    """Of integer indexes their shape."""
    if batch is None:
        return ()
    return batch.shape if type(batch) is np.ndarray and batch.dtype.kind == "i" and batch.ndim else None


def _form(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):  # keys, which are not of NumPy's dtypes, become raw data on the long way
        return (leaf.shape, leaf.dtype, leaf.weak_type, leaf.sharding) if isinstance(leaf.dtype, np.dtype) else None
    if type(leaf) is np.ndarray:
        return leaf.shape, leaf.dtype
    if type(leaf) is Data:
        return leaf.form
    return type(leaf) if isinstance(leaf, SCALARS) else None


def route(signature: Signature, built: Built, call: Call, the_plan: Plan, given: Arguments) -> Route | None:
    """The way of calls like this one, if it is a short one."""
    group, local, lengths = signature.group, the_plan.local, the_plan.lengths
    if not the_plan.is_plain:
        return None
    sources = [given.leaves[i] for i in given.layout.scattered]
    for leaf, one in zip(sources, call.inputs.each, strict=True):
        is_there = isinstance(leaf, jax.Array) and leaf.sharding == group.stacked
        is_sent = one.feed.how == "given" and not group.spans and given.batch_s is None
        is_taken = one.feed.how == "take" and one.exchanged is None
        if not (is_taken or is_sent or (is_there and given.batch is None and given.batch_s is None)):
            return None
    limit = min(local.held) if local is not None else len(sources[0]) if sources else 0
    rows = lengths[0] if lengths else 0
    return Route(signature, built, rows * group.size, limit, [rank * rows for rank in range(group.size)])


def prepare(way: Route, given: Arguments, scalars: Scalars) -> Prepared | None:
    """Send the rows; None where the long way must look at the indexes."""
    signature = way.signature
    group = signature.group
    shape = (group.size, way.rows // group.size)
    selection, index = Selection(None, 0, way.rows), None
    if given.batch is not None:
        if not are_below(given.batch, way.limit):
            return None
        selection, index = selected(given.batch.astype(np.int64, copy=False)), given.batch.reshape(shape)
        if selection.indexes is None and selection.rows == way.limit:  # all: scattered ones stay where they lie
            return None
    elif given.batch_s is not None:
        if not are_below(given.batch_s, way.limit):
            return None
        index = np.broadcast_to(given.batch_s, shape)
    time = perf_counter()
    where = None  # what picks from rows that lie on the replicas, the same for all arguments
    if signature.local is not None or any([feed.how == "take" for feed in signature.feeds]):
        where = put(group, np.array(index, np.int32))
    values: list[Any] = []
    for i, feed, row in zip(given.layout.scattered, signature.feeds, signature.row_shapes, strict=True):
        leaf = given.leaves[i]
        if feed.how == "take":
            values += [leaf.resident(group), where]
        else:
            source = leaf.source if type(leaf) is Data else leaf
            values.append(place(group, source, selection, way.begins, shape[1], row.dtype, True))
    if signature.local is not None:
        values.append(where)
    signature.task.stats.sending += perf_counter() - time
    values += [scalars.everywhere(group, given.leaves[i], None) for i in given.layout.broadcast]
    return Prepared(way.built, values, None)
