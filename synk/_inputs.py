"""Inputs: the scattered arguments of a call, which of their rows it takes, and how these reach the replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from . import _engine
from ._arguments import SCALARS
from ._data import Data
from ._exchange import exchange
from ._feed import Feed
from ._group import Group, group
from ._local import Local, lengths_of, rows_of_all
from ._rows import LocalRows, Selection, gather_rows, how_picked, place, put, select, select_local, taken_together
from ._sources import Source, is_in_memory, narrow


class Input(NamedTuple):
    """One scattered argument."""

    source: Source  # on the host; or the resident array
    selection: Selection  # which rows; of scattered data that keeps its rows, all
    feed: Feed
    shape: tuple[int, ...]  # of one row
    dtype: np.dtype
    exchanged: int | None = None  # where a global batch picks from scattered rows: how many there are
    before: int = 0  # rows of the call that lie before the source's, in other processes


class Inputs(NamedTuple):
    """The scattered arguments of a call."""

    each: tuple[Input, ...]
    rows: int | None  # taken in all; None where nothing is scattered
    local: LocalRows | None  # where `batch_s` picks from scattered data
    is_exchanged: bool  # whether replicas have yet to give each other rows
    is_local: bool = False  # whether each process brings rows of its own


def inputs(
    name: str, names: Sequence[str], leaves: Sequence[Any], batch: Any, batch_s: Any, current: Group, home: Group | None
) -> Inputs:
    """Check the scattered arguments and what picks their rows.

    Args:
      names: of the arguments, as messages call them.
      leaves: arrays and data, one an argument.
      current: the group that runs them.
      home: the group that scattered data lies in, where `current` is another one and takes all rows from the host.
    """
    if any(isinstance(leaf, Local) for leaf in leaves):
        return _local_inputs(name, names, leaves, batch, batch_s, current, home)
    minibatch = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Data) and leaf.is_minibatch]
    picked = [i for i in range(len(leaves)) if i not in minibatch]
    scattered = [i for i in picked if isinstance(leaves[i], Data) and leaves[i].place == "scatter"]
    local = None
    if batch_s is not None and scattered:
        common_rows(name, names, leaves, scattered)
        parts = leaves[scattered[0]].parts(home or current)
        local = select_local(batch_s, [part.rows for part in parts], name, names[scattered[0]])
        picked = [i for i in picked if i not in scattered]
    rows = common_rows(name, names, leaves, picked)
    if rows is None and batch is not None:
        raise ValueError(
            f"{name}: batch picks rows of scattered inputs, but {_none_to_pick(local is not None, bool(minibatch))}"
        )
    selection = None if rows is None else select(batch, rows, name, names[picked[0]])
    taken = _taken(name, names, leaves, selection, picked, local, minibatch)
    each: list[Input] = []
    for i, leaf in enumerate(leaves):
        if i in minibatch:
            chosen, form = Selection(None, 0, taken or 0), None
        elif local is not None and i in scattered:
            chosen, form = (taken_together(local), batch_s) if home else (Selection(None, 0, len(leaf)), batch_s)
        else:
            assert selection is not None
            chosen, form = selection, batch
        is_local = local is not None and i in scattered
        each.append(_input(leaf, chosen, form, is_local, batch_s is not None, current, home))
    return Inputs(tuple(each), taken, None if home else local, any([one.exchanged for one in each]))


def _local_inputs(
    name: str, names: Sequence[str], leaves: Sequence[Any], batch: Any, batch_s: Any, current: Group, home: Group | None
) -> Inputs:
    """Rows of this process: over several they meet those of the others where the call runs."""
    if batch_s is not None:
        raise ValueError(f"{name}: batch_s picks rows that live on the replicas; batch picks from synk.local rows.")
    for leaf, argument in zip(leaves, names, strict=True):
        if not isinstance(leaf, Local):
            raise ValueError(
                f"{name}: argument {argument} is the same in all processes, but others hold synk.local rows. Mark all "
                f"scattered arguments of a call, or none."
            )
    spans = (home or current).spans
    sources: list[Any] = [leaf.source for leaf in leaves]
    rows = common_rows(name, names, sources, range(len(sources)), is_local=spans)
    none = Selection(None, 0, 0)
    selection = select(batch, rows, name, names[0]) if rows else none
    if home is not None and spans:  # which takes all rows from here
        sources = [rows_of_all(gather_rows(source, selection, source.dtype)) for source in sources]
        selection = Selection(None, 0, len(sources[0]))
    if home is not None or not spans:
        each = [_input(source, selection, None, False, False, current, home) for source in sources]
        return Inputs(tuple(each), selection.rows, None, False)
    lengths = lengths_of(current, selection.rows)
    if not any(lengths):
        raise ValueError(f"{name}: argument {names[0]} has 0 rows in every process; a call needs at least one.")
    before = sum(lengths[: current.mine.start])
    each = [_input(s, selection, batch, False, False, current, None)._replace(before=before) for s in sources]
    return Inputs(tuple(each), sum(lengths), LocalRows(lengths, (none,) * len(lengths), lengths), False, True)


def _none_to_pick(is_local: bool, is_minibatch: bool) -> str:
    if is_local:
        return "batch_s has picked from all that this call has. Give one of the two."
    return "all that this call has is minibatch data." if is_minibatch else "this call has none."


def _taken(
    name: str, names: Sequence[str], leaves: Sequence[Any], selection: Selection | None, picked: Sequence[int],
    local: LocalRows | None, minibatch: Sequence[int],
) -> int | None:  # fmt: skip
    """How many rows the call takes; all that picks or brings rows agrees."""
    rows = None if selection is None else selection.rows
    if local is not None:
        if rows is not None and rows != sum(local.lengths):
            raise ValueError(
                f"{name}: batch_s picks {sum(local.lengths)} rows of the data on the replicas, but {names[picked[0]]} "
                f"gives {rows} with them. Give as many; batch picks from it."
            )
        rows = sum(local.lengths)
    brought = common_rows(name, names, leaves, minibatch)
    if rows is not None and brought is not None and brought != rows:
        raise ValueError(
            f"{name}: {names[minibatch[0]]} is minibatch data of {brought} rows, but the call picks {rows}. "
            f"It has one row for each row picked."
        )
    return brought if rows is None else rows


def common_rows(
    name: str, names: Sequence[str], leaves: Sequence[Any], which: Sequence[int], is_local: bool = False
) -> int | None:
    """How many rows these arguments have, all the same; None where there are none. Other processes may have some."""
    rows: int | None = None
    for i in which:
        leaf = leaves[i]
        if isinstance(leaf, Data):
            _ = leaf.source  # SynkError where it was freed
        if isinstance(leaf, SCALARS) or leaf.ndim == 0:
            raise ValueError(
                f'{name}: argument {names[i]} is a scalar and has no rows to scatter. Pass it as "broadcast": '
                f'inputs={{"{names[i].split("[")[0].split(".")[0]}": "broadcast"}}.'
            )
        count = leaf.shape[0]
        if rows is None:
            rows = count
        elif count != rows:
            raise ValueError(
                f"{name}: argument {names[i]} has {count} rows, but {names[which[0]]} has {rows}. Scattered ones "
                f'share their rows; pass this one as "broadcast" if it has none to share.'
            )
    if rows == 0 and not is_local:
        raise ValueError(f"{name}: argument {names[which[0]]} has 0 rows; a call needs at least one.")
    return rows


def _input(
    leaf: Any, selection: Selection, form: Any, is_local: bool, is_uneven: bool, current: Group, home: Group | None
) -> Input:
    if not isinstance(leaf, Data):
        return Input(leaf, selection, Feed(), leaf.shape[1:], narrow(leaf.dtype))
    shape, dtype = leaf.row_shape, narrow(leaf.dtype)
    how = how_picked(form)
    # Its own parts are what minibatch data of a call with other parts must not give.
    if leaf.place == "host" or home is not None or (leaf.place == "scatter" and is_uneven and not is_local):
        return Input(leaf.source, selection, Feed(), shape, dtype)
    is_all = selection.indexes is None and selection.rows == len(leaf)
    is_global = leaf.place == "scatter" and current.size > 1 and not (is_local or is_all)
    if is_global and current.platform == "cpu" and is_in_memory(leaf.source):
        return Input(leaf.source, selection, Feed(), shape, dtype)  # which these devices' rows lie in, too
    array = leaf.resident(current)
    if leaf.place == "broadcast":
        return Input(array, selection, Feed("everywhere", how, len(leaf)), shape, dtype)
    if is_local or is_all:
        return Input(array, selection, Feed("stacked", how if is_local else "window", array.shape[1]), shape, dtype)
    if not is_global:  # one replica has all rows
        return Input(array, selection, Feed("stacked", how, array.shape[1]), shape, dtype)
    tall = -(-selection.rows // current.size)
    return Input(array, selection, Feed("stacked", "window", tall), shape, dtype, exchanged=len(leaf))


def picked_from(name: str, names: Sequence[str], leaves: Sequence[Any], batch: Any) -> list[jax.Array]:
    """The scattered arguments of a traced call, their rows picked; a traced batch picks them as the program runs."""
    if isinstance(batch, jax.core.Tracer):
        if not jnp.issubdtype(batch.dtype, jnp.integer) or batch.ndim != 1:
            raise TypeError(f"{name}: a traced batch is a 1-d integer array; this one is {batch.dtype}{batch.shape}.")
        if any(isinstance(leaf, Data) and leaf.is_minibatch for leaf in leaves):
            raise ValueError(f"{name}: minibatch data cannot go with a traced batch. Pass its array.")
        inputs(name, names, leaves, None, None, group(), group())
        # Its values are not known yet, so not checked: rows that are not there are NaN, and never another row.
        return [jnp.asarray(leaf).at[batch].get(mode="fill") for leaf in leaves]
    picked: list[jax.Array] = []
    for each in inputs(name, names, leaves, batch, None, group(), group()).each:
        array, index = jnp.asarray(each.source), each.selection.indexes
        start, rows = each.selection.start, each.selection.rows
        picked.append((array[start : start + rows] if index is None else array[index]).astype(each.dtype))
    return picked


def gathered(current: Group, given: Inputs) -> Inputs:
    """Where a global batch picks from scattered data, the rows picked in their place."""
    each = tuple([_exchanged(current, one) if one.exchanged else one for one in given.each])
    return given._replace(each=each, is_exchanged=False)


def _exchanged(current: Group, one: Input) -> Input:
    assert isinstance(one.source, jax.Array)
    wanted = one.selection.positions(0, one.selection.rows)
    return one._replace(source=exchange(current, one.source, one.exchanged or 0, wanted), exchanged=None)


class Window(NamedTuple):
    """What one launch takes: of ranks `start` to `stop`, so many rows each."""

    start: int
    stop: int
    rows: int
    begins: Sequence[int]  # where the rows of each begin among all that the call takes
    offsets: Sequence[int]  # and among its own
    local: LocalRows | None = None
    meant: range | None = None  # other ranks run on any rows
    is_local: bool = False  # whether other processes have rows that this one has not


def send(group: Group, each: Sequence[Input], window: Window) -> list[jax.Array]:
    """Bring a launch its rows, or what picks them."""
    part = group.span(window.start, window.stop)
    values: list[jax.Array] = []
    picks: dict[Any, jax.Array] = {}
    for source, selection, feed, shape, dtype, _, before in each:
        if feed.how == "given":
            begins = window.begins
            if before or window.is_local:
                here = [begin - before for begin in begins]
                source, selection, begins = _filled(source, selection, here, window.rows, shape)
            values.append(place(part, source, selection, begins, window.rows, dtype, True))
            continue
        key = (feed.lies, feed.how, id(selection))
        if key not in picks:
            has_all = feed.lies == "everywhere" or (group.size == 1 and window.local is None)
            picks[key] = _pick(part, feed, selection, window) if has_all else local_pick(part, feed.how, window)
        values += [_engine.restrict(group, window.start, window.stop, source, feed.lies), picks[key]]  # type: ignore[arg-type]  # a resident one is an array
    return values


def _filled(
    source: Any, selection: Selection, begins: Sequence[int], rows: int, shape: tuple[int, ...]
) -> tuple[Any, Selection, list[int]]:
    """Where this process has fewer rows than a program takes, copies of what it has; nothing comes of them."""
    if selection.rows >= rows:
        return source, selection, [min(max(begin, 0), selection.rows - rows) for begin in begins]
    some = gather_rows(source, selection, source.dtype) if selection.rows else np.zeros((1, *shape), source.dtype)
    filled = some[np.arange(rows) % len(some)]
    return filled, Selection(None, 0, rows), [0 for _ in begins]


def _pick(part: Group, feed: Feed, selection: Selection, window: Window) -> jax.Array:
    """What picks a launch's rows among all."""
    if feed.how == "window":
        return put(part, np.array([selection.start + begin for begin in window.begins], np.int32))
    index = [selection.positions(begin, begin + window.rows) for begin in window.begins]
    return put(part, np.array(index, np.int32))


def local_pick(part: Group, how: str, window: Window) -> jax.Array:
    """What picks a launch's rows among those that each replica holds."""
    if window.local is None:
        return _engine.constant(part, "stacked", tuple(window.offsets), "int32")
    chosen = window.local.chosen[window.start : window.stop]
    meant = [window.meant is None or rank in window.meant for rank in range(window.start, window.stop)]
    if how == "window":
        starts = [s.start + o if m else 0 for s, o, m in zip(chosen, window.offsets, meant, strict=True)]
        return put(part, np.array(starts, np.int32))
    none = np.zeros(window.rows, np.int64)
    index = [
        s.positions(o, o + window.rows) if m else none for s, o, m in zip(chosen, window.offsets, meant, strict=True)
    ]
    return put(part, np.array(index, np.int32))
