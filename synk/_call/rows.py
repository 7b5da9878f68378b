"""Rows: bring each launch of a call the rows of its scattered arguments."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._base.pytree import as_data, too_large
from .._data.dataset import Data, is_result, source_of
from .._data.exchange import exchange, exchange_program
from .._data.feed import InputFeed
from .._data.overlap import widened, with_neighbours
from .._data.process_rows import rows_of_replicas
from .._data.selection import IndexKind, ReplicaSelection, Selection
from .._data.transfer import PartRows, cut_rows, gather_rows, is_cut_by_host, send_index, send_rows, send_rows_of_calls
from .._runtime.executable import Executable
from .._runtime.group import Group
from .._runtime.layout import constant, takes
from .binding import no_rows
from .parts import split_into_launches


class InputSpec(NamedTuple):
    """Way in which the rows of one scattered argument reach the replicas, whatever their values are.

    Attributes:
      leaf: the index of the argument among the leaves of the call.
      what: the argument in messages.
      read: takes the leaf and the group, and returns the rows on the host or the array on the devices; None if the leaf
        is that itself.
      feed: how the rows reach a replica's program.
      shape: the shape of one row.
      dtype: the dtype as JAX has it.
      scattered_rows: how many rows scattered data has, if replicas first exchange those that the call takes.
      is_whole: whether the argument is an array of JAX, and the call takes all of it as it is.
    """

    leaf: int
    what: str
    read: Callable[[Any, Group], Any] | None
    feed: InputFeed
    shape: tuple[int, ...]
    dtype: np.dtype
    scattered_rows: int | None = None
    is_whole: bool = False


class Rows(NamedTuple):
    """The rows of one call. Sequences have an entry for each scattered argument.

    Attributes:
      inputs: how the rows reach the replicas.
      sources: the rows on the host, or arrays on the devices.
      selections: the rows that the call takes; all of them, if scattered data keeps its rows.
      lengths: the number of rows of each replica; None if nothing brings rows.
      on_replicas: what `batch_s` picks of the rows on the replicas.
      rows_before: if each process brings rows of its own, how many rows of the call the processes before this one hold.
    """

    inputs: Sequence[InputSpec]
    sources: Sequence[Any]
    selections: Sequence[Selection]
    lengths: tuple[int, ...] | None
    on_replicas: ReplicaSelection | None = None
    rows_before: int | None = None


def read_array(leaf: Any, group: Group) -> Any:
    return as_data(leaf)


def read_source(leaf: Any, group: Group) -> Any:
    return source_of(leaf) if isinstance(leaf, Data) else leaf.source


def with_overlap(selection: Selection, feed: InputFeed) -> Selection:
    """Add neighbours to the rows of an argument that come from the host. The program itself exchanges others."""
    if feed.overlap is None or feed.held_rows:
        return selection
    among = with_neighbours(selection.rows, feed.overlap)
    index = among + selection.start if selection.indexes is None else selection.indexes[among]
    return Selection(index, 0, len(index))


def refuse_together(group: Group, name: str) -> None:
    """Tell the other processes, which are about to count rows, that this one cannot make its call."""
    rows_of_replicas(group, None, name, "")


def check_equal_counts(name: str, counts: dict[str, int]) -> None:
    if len(set(counts.values())) > 1:
        text = ", ".join(f"{rows} of {argument}" for argument, rows in counts.items())
        raise ValueError(
            f"{name}: this call gets different numbers of rows: {text}. batch and batch_s must pick as many, and "
            f"minibatch data has one row for each row that they pick."
        )


def common_rows(
    name: str, names: Sequence[str], leaves: Sequence[Any], which: Sequence[int], may_be_empty: bool = False
) -> int:
    """Return the number of rows that these arguments share; 0 for no argument."""
    rows = 0
    for i in which:
        leaf = leaves[i]
        shape = getattr(leaf, "shape", ())
        if not shape:
            raise no_rows(name, names[i])
        if not shape[0] and isinstance(leaf, Data):
            # This raises if the data was freed.
            source_of(leaf)
        if i == which[0]:
            rows = shape[0]
        if shape[0] != rows:
            raise ValueError(
                f"{name}: argument {names[i]} has {shape[0]} rows, but {names[which[0]]} has {rows}. Scattered ones "
                f"share their rows. {_instead_of_other_rows({names[j]: leaves[j] for j in (i, which[0])})}"
            )
    if which and not rows and not may_be_empty:
        raise ValueError(f"{name}: argument {names[which[0]]} has 0 rows, but needs one. Let loaders skip such items.")
    return rows


def _instead_of_other_rows(pair: dict[str, Any]) -> str:
    keys = [name for name, leaf in pair.items() if _has_keys(leaf)]
    if keys:
        return (
            f'Pass keys of replicas as "broadcast", inputs={{"{keys[0]}": "broadcast"}}, and use '
            f"{keys[0]}[synk.rank()]; synk.row_keys makes keys of rows."
        )
    return (
        'Pass an argument without rows, or with others of its own, as "broadcast", and one with a row for each row '
        "that batch picks as synk.data(..., minibatch=True)."
    )


def _has_keys(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", np.dtype(bool))
    return jnp.issubdtype(dtype, jax.dtypes.prng_key) or (dtype == np.uint32 and leaf.shape[1:] == (2,))


def values_on_host(rows: Rows, leaves: Sequence[Any], broadcast: Sequence[int]) -> list[Any]:
    """Return the values that all processes must have alike: rows and positions picked, and broadcast arguments."""
    # Rows of this process alone differ by design, and arrays that lie on other processes too cannot be read here.
    values: list[Any] = []
    for spec, selection in zip(rows.inputs, rows.selections, strict=True) if rows.rows_before is None else ():
        leaf = leaves[spec.leaf]
        source = source_of(leaf) if isinstance(leaf, Data) else as_data(leaf)
        if source.is_fully_addressable if isinstance(source, jax.Array) else not is_result(source):
            host = np.asarray(source) if isinstance(source, jax.Array) else source
            values.append(gather_rows(host, selection, np.dtype(host.dtype)))
    if rows.on_replicas is not None:
        values += [selection.positions(0, selection.rows) for selection in rows.on_replicas.chosen]
    whole = [leaf[:] if isinstance(leaf, Data) else as_data(leaf) for leaf in (leaves[i] for i in broadcast)]
    return values + [leaf for leaf in whole if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable]


def exchanged(group: Group, rows: Rows) -> Rows:
    """Let replicas exchange rows where a batch picks from all rows of scattered data."""
    for i, spec in enumerate(rows.inputs):
        if spec.scattered_rows is not None:
            parts = _parts_wanted(rows, spec)
            wanted = np.array([parts.positions(rows.selections[i], rank) for rank in range(group.size)])
            array = exchange(group, rows.sources[i], spec.scattered_rows, wanted)
            rows = rows._replace(sources=[*rows.sources[:i], array, *rows.sources[i + 1 :]])
    return rows


def exchange_programs(group: Group, rows: Rows) -> Iterator[tuple[int, Executable]]:
    """Yield the programs that `exchanged` runs, each with the number of the argument whose rows it brings."""
    for i, (spec, source) in enumerate(zip(rows.inputs, rows.sources, strict=True)):
        if spec.scattered_rows is not None:
            data = jax.ShapeDtypeStruct(source.shape, source.dtype)
            yield i, exchange_program(group, data, spec.scattered_rows, _parts_wanted(rows, spec).max_rows)


def _parts_wanted(rows: Rows, spec: InputSpec) -> PartRows:
    return widened(split_into_launches(rows.lengths or (), 1)[0], spec.feed.overlap)


def feed_rows(group: Group, rows: Rows, parts: PartRows) -> list[Any]:
    """Bring a launch its rows: for each argument an array, and an index where the program picks rows from it."""
    values: list[Any] = []
    # Arguments that share a selection share its index.
    indexes: dict[Any, Any] = {}
    for spec, source, selection in zip(rows.inputs, rows.sources, rows.selections, strict=True):
        if spec.is_whole:
            # The array is taken as it lies if its parts are those of the replicas; else it is cut first. One replica of
            # all devices takes rows as their group does.
            home = group._of or group
            is_there = source.sharding == home.stacked or (
                takes(home, source, "rows") and (home._has_one_device or not is_cut_by_host(home, source))
            )
            values.append(source if is_there else cut_rows(home, source))
            continue
        layout, index, overlap = spec.feed.layout, spec.feed.index, spec.feed.overlap
        if layout == "rows":
            asked = widened(parts, overlap)
            if rows.rows_before is not None:
                asked = asked._replace(starts=tuple([start - rows.rows_before for start in parts.starts]))
            try:
                values.append(send_rows(group, source, selection, asked, spec.dtype))
            except OverflowError as error:
                raise too_large(spec.what, error) from None
            continue
        values.append(source)
        if index is None:
            continue
        # By identity of the selection: comparing its indexes would take as long as sending them.
        key = (layout, index, id(selection), overlap)
        if key not in indexes:
            has_all = layout == "replicated" or (group.size == 1 and rows.on_replicas is None)
            indexes[key] = (
                send_index(group, _positions_of_all(group, selection, index, widened(parts, overlap)))
                if has_all
                else index_on_replicas(group, index, None if overlap else rows.on_replicas, parts)
            )
        values.append(indexes[key])
    return values


def feed_calls(group: Group, calls: Sequence[Rows], parts: PartRows, most: int) -> list[Any]:
    """Bring several calls in a row their rows, as `feed_rows` does for one."""
    values: list[Any] = []
    indexes: dict[Any, Any] = {}
    for i, (spec, source) in enumerate(zip(calls[0].inputs, calls[0].sources, strict=True)):
        selections = [rows.selections[i] for rows in calls]
        layout, index, overlap = spec.feed.layout, spec.feed.index, spec.feed.overlap
        if layout == "rows":
            sources = [rows.sources[i] for rows in calls]
            asked = widened(parts, overlap)
            values.append(send_rows_of_calls(group, sources, selections, asked, spec.dtype, most))
            continue
        # Data on the devices is one array for all calls, of which each has its own index.
        values.append(source)
        key = (index, id(selections[0]), overlap)
        if index is not None and key not in indexes:
            wide = widened(parts, overlap)
            each = [_positions_of_all(group, selection, index, wide) for selection in selections]
            indexes[key] = send_index(group, np.stack(each + each[-1:] * (most - len(each)), 1))
        if index is not None:
            values.append(indexes[key])
    return values


def _positions_of_all(group: Group, selection: Selection, kind: IndexKind, parts: PartRows) -> np.ndarray:
    if kind == "slice":
        return np.array([selection.start + start for start in parts.starts], np.int32)
    return np.array([parts.positions(selection, r) for r in range(group.size)], np.int32)


def index_on_replicas(group: Group, kind: IndexKind, chosen: ReplicaSelection | None, parts: PartRows) -> Any:
    """Send the index by which replicas pick the rows of a launch from those that they hold."""
    # Without a selection a replica runs slices of all its rows, each from its offset on.
    if chosen is None:
        return constant(group, "stacked", parts.offsets, "int32")
    replicas = list(zip(chosen.chosen, parts.offsets, parts.counts, strict=True))
    if kind == "slice":
        return send_index(group, np.array([s.start + o if n else 0 for s, o, n in replicas], np.int32))
    # Replicas with fewer rows read row 0 behind their own; programs drop what they compute of it.
    index = np.zeros((len(replicas), parts.max_rows), np.int32)
    for row, (selection, offset, count) in zip(index, replicas, strict=True):
        row[:count] = selection.positions(offset, offset + count)
    return send_index(group, index)
