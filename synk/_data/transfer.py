"""Transfer: send the rows of a selection, picked by threads, as one array of the group."""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import jax
import numpy as np

from .._runtime.dispatch import LOCK
from .._runtime.group import Group
from .._runtime.layout import everywhere, is_everywhere, is_placed, put
from .host_buffers import acquire, acquire_parts
from .selection import Selection
from .sources import HostSource, Source, copied_on_device, copy_rows


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
    """Send each replica its rows of the selection, as one array of layout "rows".

    The result shares no memory with an array of the user's. A `jax.Array` that lies in its place is returned itself.
    """
    max_rows = part_rows.max_rows
    if isinstance(source, jax.Array):
        is_all = selection.indexes is None and len(source) == selection.rows == max_rows * group.size
        if is_all and source.dtype == dtype:
            return source if is_placed(group, source, "rows") else put(group, source, "rows")
        host = to_host(group, source)
        if host is None:
            group._peers.before_launch("rows picked from an array that lies over the processes")
            index = np.concatenate([part_rows.positions(selection, rank) for rank in range(group.size)])
            return put(group, _take(source, index.astype(np.int32)).astype(dtype), "rows")
        source = host
    shape, ranks = (max_rows * group.size, *source.shape[1:]), group._local_ranks
    ranges = zip(part_rows.starts, part_rows.counts, strict=True)
    if group._has_one_device:
        whole = acquire(shape, dtype)
        fill_parts([whole[at : at + max_rows] for at in range(0, len(whole), max_rows)], source, selection, ranges)
        # The compiled call sends a NumPy array to one device faster than a device_put does.
        return whole
    parts = acquire_parts(len(ranks), (max_rows, *shape[1:]), dtype)
    fill_parts(parts, source, selection, list(ranges)[ranks.start : ranks.stop])

    def part_at(index: Any) -> np.ndarray:
        return parts[(index[0].start or 0) // max_rows - ranks.start]

    return jax.make_array_from_callback(shape, group.stacked, part_at)


def fill_parts(
    parts: Sequence[np.ndarray], source: HostSource, selection: Selection, ranges: Iterable[tuple[int, int]]
) -> None:
    """Copy the rows of each part, given by (first row, number of rows), and fill the part up with real rows."""
    # A process without rows has no real ones. Nothing reads its parts then.
    if not selection.rows:
        for part in parts:
            part[:] = 0
        return
    copies = [
        selection.into(part[:count], source, start) if count else selection.into(part[:1], source, 0)
        for part, (start, count) in zip(parts, ranges, strict=True)
    ]
    copy_rows(copies)
    for part, copied in zip(parts, copies, strict=True):
        if len(copied.buffer) < len(part):
            part[len(copied.buffer) :] = part[:1]


def send_index(group: Group, values: np.ndarray) -> Any:
    """Place small numbers, one entry a replica on axis 0. They must be a new array: devices may read it in place."""
    if group._has_one_device:
        return values
    return jax.make_array_from_callback(values.shape, group.stacked, values.__getitem__)


def to_host(group: Group, source: Source) -> HostSource | None:
    """Return a source that threads can copy from; None if the rows lie on devices and should stay there."""
    if not isinstance(source, jax.Array):
        return source
    if not is_everywhere(source):
        return None if group._is_multi_process else everywhere(source)
    return np.asarray(source) if group.platform == "cpu" or group._is_multi_process else None


def gather_rows(source: HostSource, selection: Selection, dtype: np.dtype) -> np.ndarray:
    """Copy the rows of a selection to new host memory."""
    buffer = acquire((selection.rows, *source.shape[1:]), dtype)
    copy_rows([selection.into(buffer, source, 0)])
    return buffer


def can_go_ahead(group: Group, source: Any) -> bool:
    """Check whether rows of a source can be sent before their call; rows that lie over processes come by the call."""
    return not (isinstance(source, jax.Array) and group._is_multi_process and not is_everywhere(source))


def place_rows_ahead(group: Group, source: Source, selection: Selection, dtype: np.dtype, is_cut: bool = True) -> Any:
    """Send rows for a later call, cut over the replicas; copy them on the host if they do not divide or are not cut."""
    host, rows, size = to_host(group, source), selection.rows, group.size
    # Without a source on the host, programs pick the rows on devices.
    with LOCK if host is None else nullcontext():
        if is_cut and rows % size == 0:
            max_rows = rows // size
            parts = PartRows(max_rows, (max_rows,) * size, tuple(range(0, rows, max_rows)), (0,) * size)
            sent = send_rows(group, source, selection, parts, dtype)
            if isinstance(sent, np.ndarray):
                return put(group, sent, "rows")
            # The owner of an array of JAX may donate it before the call.
            is_shared = isinstance(source, jax.Array) and (sent is source or group._has_one_device)
            return copied_on_device(sent) if is_shared else sent
        if host is not None:
            return gather_rows(host, selection, dtype)
        # Here the source is an array of JAX.
        return source[selection.positions(0, rows)].astype(dtype)  # type: ignore[index]


@jax.jit
def _take(source: jax.Array, index: jax.Array) -> jax.Array:
    return source.at[index].get(mode="promise_in_bounds")
