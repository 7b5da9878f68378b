"""Transfer: send the rows of a selection, picked by threads, as one array of the group."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np

from .._base.pytree import narrowed
from .._runtime.dispatch import LOCK
from .._runtime.group import Group
from .._runtime.layout import constant, everywhere, host_copy, is_everywhere, is_placed, put
from .host_buffers import SMALL, acquire
from .selection import Selection
from .sources import Copy, HostSource, Source, copied_on_device, copy_rows
from .staging import send_staged, staging_buffers

# A copy of more bytes takes longer than the start of a program that cuts them.
CUT_BY_HOST_BYTES = 2**20


class PartRows(NamedTuple):
    """Rows that each replica takes in one launch. Tuples have an entry for each replica.

    Attributes:
      max_rows: rows of the longest part. Shorter parts are filled up to it.
      counts: the rows of each part.
      starts: where each part begins among all rows of the call.
      offsets: where each part begins among its replica's rows.
    """

    max_rows: int
    counts: tuple[int, ...]
    starts: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the numbers of rows that parts have, the largest first."""
        return tuple(sorted(set(self.counts), reverse=True))

    def positions(self, selection: Selection, rank: int) -> np.ndarray:
        """Return the places of a replica's rows in the source, filled up with places of real rows."""
        start, count = self.starts[rank], self.counts[rank]
        positions = selection.positions(start, start + count)
        if count == self.max_rows:
            return positions
        filler = positions[:1] if count else selection.positions(0, 1)
        return np.concatenate([positions, np.repeat(filler, self.max_rows - count)])


def send_rows(group: Group, source: Source, selection: Selection, part_rows: PartRows, dtype: np.dtype) -> Any:
    """Send each replica its rows of the selection: an array of layout "rows", or of NumPy, which programs send."""
    if (home := group._of) is not None:
        return send_rows(home, source, selection, _blocks(part_rows.max_rows, home.size), dtype)
    # A `jax.Array` that lies in its place is returned itself. Any other result shares no memory with the user's arrays.
    max_rows, has_one = part_rows.max_rows, group._has_one_device
    is_full = _is_full(group, source, selection, part_rows, dtype)
    is_whole = is_full and _is_whole(source, selection)
    if is_full and not group._is_multi_process and isinstance(source, np.ndarray):
        if source.nbytes // len(source) * selection.rows < SMALL:
            stop = selection.start + selection.rows
            return source[selection.start : stop].copy() if selection.indexes is None else source[selection.indexes]
    if isinstance(source, jax.Array):
        if is_whole:
            return source if is_placed(group, source, "rows") else cut_rows(group, source)
        host = to_host(group, source)
        if host is None:
            # No process has all rows, so the program picks them where they lie, and all processes run it.
            group._peers.before_launch("rows picked from an array that lies over the processes")
            index = np.concatenate([part_rows.positions(selection, rank) for rank in range(group.size)])
            rows = _take(source, index.astype(np.int32))
            return put(group, narrowed(rows).astype(dtype), "rows")
        source = host
    starts, counts, row = part_rows.starts, part_rows.counts, source.shape[1:]

    def fill(arrays: Any, ranks: range) -> None:
        parts = arrays[0].reshape(group.size, max_rows, *row) if has_one else arrays
        own = slice(ranks.start, ranks.stop)
        fill_parts(parts, source, selection, starts[own], counts[own])

    return _send_filled(group, (max_rows, *row), dtype, fill)


def send_rows_of_calls(
    group: Group,
    sources: Sequence[Source],
    selections: Sequence[Selection],
    part_rows: PartRows,
    dtype: np.dtype,
    most: int,
) -> Any:
    """Send each replica its rows of several calls, as one array of layout "stacked" with an entry a call on axis 1."""
    # The program has room for `most` calls, so one program serves shorter lists. Entries behind the last call hold
    # anything, since the program skips them.
    hosts = [everywhere(source) if isinstance(source, jax.Array) else source for source in sources]
    row, has_one = hosts[0].shape[1:], group._has_one_device

    def fill(arrays: Any, ranks: range) -> None:
        own = slice(ranks.start, ranks.stop)
        for call, (host, selection) in enumerate(zip(hosts, selections, strict=True)):
            parts = [*arrays[0][:, call]] if has_one else [array[0, call] for array in arrays]
            fill_parts(parts, host, selection, part_rows.starts[own], part_rows.counts[own])

    return _send_filled(group, (1, most, part_rows.max_rows, *row), dtype, fill)


def _send_filled(group: Group, entry: tuple[int, ...], dtype: np.dtype, fill: Callable[[Any, range], None]) -> Any:
    """Send each replica an entry of this shape, as one array cut over the replicas on axis 0."""
    # `fill` gets an array for each device, and the ranks whose entries go there.
    first, *rest = entry
    size, has_one = group.size, group._has_one_device
    # Replicas on one device share an array; others have one each.
    ranks = range(size) if has_one else group._local_ranks
    devices = group.devices[:1] if has_one else group.devices[ranks.start : ranks.stop]
    shape = (first * size if has_one else first, *rest)
    buffers = staging_buffers(group, devices, shape, dtype)
    if buffers is not None:
        fill([buffer.memory for buffer in buffers], ranks)
        sent = send_staged(group, buffers)
        if has_one:
            return sent[0]
        return jax.make_array_from_single_device_arrays((first * size, *rest), group.stacked, sent)
    arrays = acquire(len(devices), shape, dtype)
    fill(arrays, ranks)
    # The compiled call sends a NumPy array to one device faster than a device_put does. Over several devices it cuts a
    # small one at least as fast as JAX makes one array of the parts.
    if has_one or (arrays.nbytes < SMALL and not group._is_multi_process):
        return arrays.reshape(first * size, *rest)

    def part_at(index: Any) -> np.ndarray:
        return arrays[(index[0].start or 0) // first - ranks.start]

    return jax.make_array_from_callback((first * size, *rest), group.stacked, part_at)


@lru_cache(maxsize=64)
def _blocks(rows: int, size: int) -> PartRows:
    """Cut rows into equal blocks for so many devices. All filler comes behind the rows."""
    most = -(-rows // size)
    starts = tuple([min(most * rank, rows) for rank in range(size)])
    counts = tuple([min(most, rows - start) for start in starts])
    return PartRows(most, counts, starts, (0,) * size)


def is_cut_by_host(group: Group, source: Any) -> bool:
    """Check whether the host cuts an array of JAX sooner than a program does: a small one, on one CPU device."""
    is_on_cpus = group.platform == "cpu" and not (group._has_one_device or group._is_multi_process)
    is_small = is_on_cpus and source.nbytes <= CUT_BY_HOST_BYTES
    # jaxlib 0.10 crashes if a deleted array is asked whether it is ready.
    return is_small and len(source.sharding.device_set) == 1 and not source.is_deleted() and source.is_ready()


def cut_rows(group: Group, source: jax.Array) -> Any:
    """Cut an array of JAX, whose rows divide, over the replicas, or copy it for the program that cuts it."""
    if not is_cut_by_host(group, source):
        return put(group, source, "rows")
    return host_copy(source)


def fill_parts(
    parts: np.ndarray | Sequence[np.ndarray],
    source: HostSource,
    selection: Selection,
    starts: Sequence[int],
    counts: Sequence[int],
) -> None:
    """Copy each part the `counts` rows of the selection from `starts` on, and fill it up with real rows."""
    # A process without rows has no real ones, and nothing reads its parts. One without replicas has no parts.
    if not selection.rows or not len(parts):
        for part in parts:
            part[...] = 0
        return
    max_rows = len(parts[0])
    first, rows = selection.start, len(parts) * max_rows
    # Parts of consecutive rows, one after another in memory, are one copy.
    is_run = sum(counts) == rows == starts[-1] + max_rows - starts[0]
    if is_run and isinstance(parts, np.ndarray) and parts.flags.c_contiguous:
        whole = parts.reshape(rows, *parts.shape[2:])
        copy_rows(source, selection.indexes, [Copy(whole, first + starts[0])])
        return
    copies = [
        Copy(part[:count], first + start) if count else Copy(part[:1], first)
        for part, start, count in zip(parts, starts, counts, strict=True)
    ]
    copy_rows(source, selection.indexes, copies)
    for part, (copied, _) in zip(parts, copies, strict=True):
        part[len(copied) :] = part[:1]


def send_index(group: Group, values: np.ndarray) -> Any:
    """Place a new array of small numbers, one entry a replica on axis 0. Devices may read the array in place."""
    if values.ndim == 1 and not group._has_one_device:
        # The starts of slices come again in each epoch.
        return constant(group, "stacked", tuple(values.tolist()), "int32")
    return put(group, values, "stacked") if group._is_multi_process else values


def to_host(group: Group, source: Source) -> HostSource | None:
    """Return a source that threads can copy from; None if the rows lie on devices and should stay there."""
    if not isinstance(source, jax.Array):
        return source
    return everywhere(source) if _is_picked_by_host(group, source) else None


def _is_picked_by_host(group: Group, source: jax.Array) -> bool:
    if is_everywhere(source):
        return group.platform == "cpu" or group._is_multi_process
    return not group._is_multi_process


def is_sent_by_host(group: Group, source: Source, selection: Selection, part_rows: PartRows, dtype: np.dtype) -> bool:
    if group is not group._home:
        group, part_rows = group._home, _blocks(part_rows.max_rows, group._home.size)
    if not isinstance(source, jax.Array):
        return True
    if _is_full(group, source, selection, part_rows, dtype) and _is_whole(source, selection):
        return not is_placed(group, source, "rows") and is_cut_by_host(group, source)
    return _is_picked_by_host(group, source)


def _is_full(group: Group, source: Source, selection: Selection, part_rows: PartRows, dtype: np.dtype) -> bool:
    return selection.rows == part_rows.max_rows * group.size and source.dtype == dtype


def _is_whole(source: Source, selection: Selection) -> bool:
    return selection.indexes is None and len(source) == selection.rows


def gather_rows(source: HostSource, selection: Selection, dtype: np.dtype) -> np.ndarray:
    """Copy the rows of a selection to new host memory."""
    buffer = acquire(1, (selection.rows, *source.shape[1:]), dtype)[0]
    copy_rows(source, selection.indexes, [Copy(buffer, selection.start)])
    return buffer


def can_go_ahead(group: Group, source: Any) -> bool:
    return not (isinstance(source, jax.Array) and group._is_multi_process and not is_everywhere(source))


def copied_rows(group: Group, source: Source, selection: Selection, dtype: np.dtype) -> Any:
    """Copy the rows of a selection: to the host, or on devices if they lie there and should stay."""
    host = to_host(group, source)
    if host is not None:
        return gather_rows(host, selection, dtype)
    with LOCK:
        picked: Any = source[selection.positions(0, selection.rows)]
        return narrowed(picked).astype(dtype)


def rows_ahead(group: Group, source: Source, dtype: np.dtype) -> Any:
    """Send all rows of a source for a later call, cut over the replicas. Copy them where they do not divide."""
    # The owner of an array of JAX may donate it before the call.
    rows, whole = len(source), Selection(None, 0, len(source))
    if rows % group.size:
        return copied_rows(group, source, whole, dtype)
    if isinstance(source, jax.Array):
        source = copied_on_device(source)
    with LOCK:
        sent = send_rows(group, source, whole, _blocks(rows, group.size), dtype)
        return put(group, sent, "rows") if isinstance(sent, np.ndarray) else sent


@jax.jit
def _take(source: jax.Array, index: jax.Array) -> jax.Array:
    # The host has checked the index. Any other mode would check or clamp in the program.
    return source.at[index].get(mode="promise_in_bounds")
