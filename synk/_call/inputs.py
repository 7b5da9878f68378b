"""Inputs: the arguments of a call, checked, and which rows of the scattered ones it takes."""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .._base.errors import checked_integer
from .._base.partition import lengths_of
from .._base.pytree import SCALARS, as_data, check_fits, is_number, key_of, narrow
from .._data.dataset import Data, is_result, source_of
from .._data.overlap import halo_of
from .._data.process_rows import ProcessLocalRows, rows_of_processes, rows_of_replicas
from .._data.selection import (
    ReplicaSelection,
    Selection,
    merge_replicas,
    select,
    select_on_replicas,
)
from .._data.sources import Source, as_source
from .._data.transfer import gather_rows
from .._runtime.group import Group
from .._variables.combine import rows_held
from .._variables.variable import Shared
from .binding import KEEP_OUTSIDE, BoundArguments
from .row_input import Picks, RowCall, RowInput, row_input

_NO_ROWS = Selection(None, 0, 0)
AUTO = "auto"  # for num_slices: as few as fit into memory


class RowInputs(NamedTuple):
    """The scattered arguments of a call, checked."""

    each: tuple[RowInput, ...]  # one an argument
    lengths: tuple[int, ...] | None  # rows of each replica; None where nothing has brought any yet
    on_replicas: ReplicaSelection | None = None  # where `batch_s` picks from rows that lie on the replicas
    is_process_local: bool = False  # whether each process brings rows of its own


class Arguments(NamedTuple):
    """Leaves as arrays, numbers, `Data` or rows of this process: typed PRNG keys as raw data, and the kind of each
    leaf's keys in the order of the tree."""

    scattered: list[Any]
    broadcast: list[Any]
    keys: tuple[Any, ...]


def check_leaves(bound: BoundArguments, name: str, group: Group | None = None, is_abstract: bool = False) -> Arguments:
    """Check what users have passed; `group` is where shared variables live, None under a trace."""
    spec, values = bound.spec, list(bound.leaves)
    overlapping = [i for i, overlap in zip(spec.scattered, spec.overlaps, strict=True) if overlap is not None]
    keys: list[Any] = [None] * len(values)
    for i, leaf in enumerate(values):
        if isinstance(leaf, jax.Array):
            if not isinstance(leaf.dtype, np.dtype):
                keys[i], values[i] = key_of(leaf), as_data(leaf)
                if leaf.ndim == 0 and i in spec.scattered:
                    raise _no_rows(name, spec.names[i])
        elif (type(leaf) is np.ndarray or isinstance(leaf, np.generic)) and is_number(leaf.dtype):
            pass
        elif isinstance(leaf, Data):
            keys[i] = leaf._key
        elif isinstance(leaf, jax.ShapeDtypeStruct):
            if not is_abstract:
                raise TypeError(
                    f"{name}: argument {spec.names[i]} is a shape alone, which compile and explain take; a call needs "
                    f"an array."
                )
            keys[i], values[i] = key_of(leaf), as_data(leaf)
        elif isinstance(leaf, Shared) and i in overlapping and group is not None:
            values[i] = rows_held(leaf, group, f"{name}: argument {spec.names[i]}")
            keys[i] = values[i]._key
        elif isinstance(leaf, ProcessLocalRows):
            if i in spec.broadcast:
                raise TypeError(f"{name}: argument {spec.names[i]} is synk.local rows, but it is broadcast.")
        elif not isinstance(leaf, SCALARS):
            values[i] = _as_array(leaf, f"{name}: argument {spec.names[i]}", spec.names[i] not in spec.parameters)
        elif isinstance(leaf, int):
            check_fits(leaf, f"{name}: argument {spec.names[i]}")
    return Arguments([values[i] for i in spec.scattered], [values[i] for i in spec.broadcast], tuple(keys))


def passes_variables(bound: BoundArguments) -> bool:
    """Is a shared variable among the arguments, whose rows the call takes as they are?"""
    return any([isinstance(leaf, Shared) for leaf in bound.leaves])


def _as_array(leaf: Any, what: str, is_in_tree: bool) -> Source:
    if isinstance(leaf, Shared):
        raise TypeError(
            f"{what} is the shared variable {leaf.name}; read {leaf.name}.value inside the function instead."
        )
    if isinstance(leaf, Mapping):
        raise TypeError(f"{what} is a {type(leaf).__name__}, whose items JAX does not see: pass dict(...) of it.")
    other = f"and {KEEP_OUTSIDE}" if is_in_tree else 'or pass it as "static"'
    return as_source(leaf, what, f"give arrays, numbers, {other}")


def check_slices(num_slices: Any, name: str) -> None:
    """`num_slices` is an integer >= 1, or "auto"."""
    if not (isinstance(num_slices, str) and num_slices == AUTO):
        checked_integer(num_slices, f"{name}: num_slices", 1, 'give an integer >= 1, or "auto"')


def select_rows(call: RowCall) -> RowInputs:
    """Check the scattered arguments of a call and what picks their rows: values, in every call."""
    name, names, leaves, (batch, batch_s, *_), group, data_group = call[:6]
    minibatch: list[int] = []  # brings the rows of the batch itself
    resident_ones: list[int] = []  # lies on the replicas, where batch_s picks
    picked: list[int] = []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, ProcessLocalRows):
            if call.block is not None:
                raise ValueError(
                    f"{name}: synk.local rows stay where they are, but blocks={call.block} deals them out."
                )
            return _select_process_rows(call)
        is_data = isinstance(leaf, Data)
        if is_data and leaf.is_minibatch:
            minibatch.append(i)
        elif is_data and batch_s is not None and leaf.place == "scatter":
            resident_ones.append(i)
        else:
            picked.append(i)
    on_replicas = None
    if resident_ones:
        common_rows(name, names, leaves, resident_ones)
        lengths = lengths_of(len(leaves[resident_ones[0]]), (data_group or group).size)
        on_replicas = select_on_replicas(batch_s, lengths, name, names[resident_ones[0]])
    rows = common_rows(name, names, leaves, picked, batch=batch)
    if rows is None and batch is not None:
        raise ValueError(
            f"{name}: batch picks rows of scattered inputs, but {_nothing_to_pick(on_replicas, bool(minibatch))}"
        )
    selection = None if rows is None else select(batch, rows, name, names[picked[0]])
    count = None if selection is None else selection.rows
    if on_replicas is not None or minibatch:
        count = _agree_on_count(call, count, picked, on_replicas, minibatch)
    each: list[RowInput] = []
    for i, leaf in enumerate(leaves):
        overlap = call.overlaps[i] if call.overlaps else None
        if i in minibatch:
            picks = Picks(Selection(None, 0, count or 0), None, False)
        elif on_replicas is not None and i in resident_ones:
            chosen = merge_replicas(on_replicas) if data_group or overlap else Selection(None, 0, len(leaf))
            picks = Picks(chosen, batch_s, overlap is None)
        else:
            assert selection is not None
            picks = Picks(selection, batch, False)
        if overlap is not None or call.block is not None:
            dealt_out = lengths_of(count or 0, group.size, call.block)
            lengths = on_replicas.lengths if on_replicas and data_group is None else dealt_out
            picks = picks._replace(overlap=overlap, max_rows=max(lengths) + halo_of(overlap))
        each.append(row_input(call, leaf, picks))
    if on_replicas is not None and data_group is None:
        return RowInputs(tuple(each), on_replicas.lengths, on_replicas)
    return RowInputs(tuple(each), None if count is None else lengths_of(count, group.size, call.block))


def _select_process_rows(call: RowCall) -> RowInputs:
    """Rows of this process: over several they meet those of the others where the call runs."""
    name, names, group, data_group = call.name, call.names, call.group, call.data_group
    if call.request.batch_s is not None:
        raise ValueError(f"{name}: batch_s picks rows that live on the replicas; batch picks from synk.local rows.")
    if any(call.overlaps):
        raise ValueError(
            f"{name}: synk.local rows have neighbours in other processes, so they do not go with synk.Overlap. Give "
            f"every process all rows, or data that lies on the replicas."
        )
    for leaf, argument in zip(call.leaves, names, strict=True):
        if not isinstance(leaf, ProcessLocalRows):
            raise ValueError(
                f"{name}: argument {argument} is the same in all processes, but others hold synk.local rows. Mark all "
                f"scattered arguments of a call, or none."
            )
    home = data_group or group
    is_multi_process = home._is_multi_process
    sources: list[Any] = [leaf.source for leaf in call.leaves]
    try:
        rows = common_rows(name, names, sources, range(len(sources)), may_be_empty=is_multi_process)
        selection = select(call.request.batch, rows, name, names[0], is_part=is_multi_process) if rows else _NO_ROWS
    except Exception:
        if is_multi_process:
            refuse_together(home, name)
        raise
    lengths: tuple[int, ...] | None = None
    if is_multi_process:
        lengths = rows_of_replicas(home, selection.rows, name, _described(call))
        if not any(lengths):
            raise ValueError(f"{name}: argument {names[0]} has 0 rows in every process; a call needs at least one.")
        if data_group is not None:  # which takes all rows from here
            sources = [rows_of_processes(home, gather_rows(source, selection, source.dtype)) for source in sources]
            selection, lengths = Selection(None, 0, len(sources[0])), None
    each = [row_input(call, source, Picks(selection, None, False)) for source in sources]
    if lengths is None:
        return RowInputs(tuple(each), lengths_of(selection.rows, group.size))
    before = sum(lengths[: group._local_ranks.start])
    return RowInputs(tuple(one._replace(rows_before=before) for one in each), lengths, None, True)


def _described(call: RowCall) -> str:
    """A call with rows of this process, but for their number."""
    shapes = ", ".join(f"{narrow(leaf.dtype)}{list(leaf.shape[1:])}" for leaf in call.leaves)
    turn = "" if call.request.turn is None else f", item {call.request.turn} of a loop"
    return f"{call.name}(synk.local rows of {shapes}), num_slices={call.request.num_slices}{turn}"


def refuse_together(group: Group, name: str) -> None:
    """Tell the other processes, which are about to count rows, that this one cannot make its call."""
    rows_of_replicas(group, None, name, "")


def _nothing_to_pick(on_replicas: ReplicaSelection | None, has_minibatch: bool) -> str:
    if on_replicas is not None:
        return "batch_s has picked from all that this call has. Give one of the two."
    return "all that this call has is minibatch data." if has_minibatch else "this call has none."


def _agree_on_count(
    call: RowCall,
    rows: int | None,
    picked: Sequence[int],
    on_replicas: ReplicaSelection | None,
    minibatch: Sequence[int],
) -> int | None:
    """How many rows the call takes; all that picks or brings rows agrees."""
    name, names = call.name, call.names
    if on_replicas is not None:
        if rows is not None and rows != sum(on_replicas.lengths):
            raise ValueError(
                f"{name}: batch_s picks {sum(on_replicas.lengths)} rows of the data on the replicas, but "
                f"{names[picked[0]]} gives {rows} with them. Give as many; batch picks from it."
            )
        rows = sum(on_replicas.lengths)
    brought = common_rows(name, names, call.leaves, minibatch)
    if rows is not None and brought is not None and brought != rows:
        raise ValueError(
            f"{name}: {names[minibatch[0]]} is minibatch data of {brought} rows, but the call picks {rows}. "
            f"It has one row for each row picked."
        )
    return brought if rows is None else rows


def common_rows(
    name: str,
    names: Sequence[str],
    leaves: Sequence[Any],
    which: Sequence[int],
    may_be_empty: bool = False,
    batch: Any = None,
) -> int | None:
    """How many rows these arguments have, all the same; None where there are none. `batch` will pick of them."""
    rows: int | None = None
    for i in which:
        leaf = leaves[i]
        if isinstance(leaf, Data):
            source_of(leaf)  # SynkError where it was freed
        if isinstance(leaf, SCALARS) or leaf.ndim == 0:
            raise _no_rows(name, names[i])
        count = leaf.shape[0]
        if rows is None:
            rows = count
        elif count != rows:
            both = {names[i]: count, names[which[0]]: rows}
            raise ValueError(
                f"{name}: argument {names[i]} has {count} rows, but {names[which[0]]} has {rows}"
                f"{_cure_of_unequal(both, batch)}"
            )
    if rows == 0 and not may_be_empty:
        raise ValueError(f"{name}: argument {names[which[0]]} has 0 rows; a call needs at least one.")
    return rows


def _cure_of_unequal(rows: dict[str, int], batch: Any) -> str:
    """What to do with two arguments of other numbers of rows; of both, where `batch` picks as many as one has."""
    for (name, count), (_, held) in itertools.permutations(rows.items()):
        try:
            is_one_each = batch is not None and select(batch, held, "", "").rows == count
        except (IndexError, TypeError, ValueError):  # it picks of the other one
            continue
        if is_one_each:
            return (
                f", of which batch picks {count}. If {name} has one for each of these, pass "
                f'synk.data({name}, minibatch=True); if it has no rows, pass it as "broadcast".'
            )
    return '. Scattered ones share their rows; pass this one as "broadcast" if it has none to share.'


def _no_rows(name: str, argument: str) -> ValueError:
    said = f"{name}: argument {argument} is a scalar and has no rows to scatter."
    parameter = re.split(r"[.\[]", argument)[0]
    if parameter == argument:
        return ValueError(f'{said} Pass it as "broadcast": inputs={{"{parameter}": "broadcast"}}.')
    return ValueError(f'{said} Make it a parameter of its own, or give {parameter} a tree of modes, "broadcast" there.')


def values_given(given: Arguments, rows: RowInputs) -> list[Any]:
    """What a call runs on, in host memory: rows that are picked, what picks on the replicas, and broadcast arguments.
    Rows of this process alone are not among them, nor what lies on other processes too."""
    sources: list[Any] = []
    if not rows.is_process_local:
        sources = [source_of(leaf) if isinstance(leaf, Data) else leaf for leaf in given.scattered]
    values = [
        gather_rows(np.asarray(source) if isinstance(source, jax.Array) else source, one.selection, one.dtype)
        for source, one in zip(sources, rows.each, strict=False)
        if (source.is_fully_addressable if isinstance(source, jax.Array) else not is_result(source))
    ]
    values += [] if rows.on_replicas is None else [one.positions(0, one.rows) for one in rows.on_replicas.chosen]
    broadcast = [leaf[:] if isinstance(leaf, Data) else leaf for leaf in given.broadcast]
    return values + [leaf for leaf in broadcast if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable]
