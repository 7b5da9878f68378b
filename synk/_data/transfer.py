"""Transfer: the rows of a selection, picked by threads, as one array over the group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .._runtime.dispatch import LOCK
from .._runtime.group import Group
from .._runtime.layout import put, sharding_of
from .host_buffers import acquire, acquire_parts
from .selection import Selection
from .sources import Reader, Rows, Source, copy_rows


class PartRows(NamedTuple):
    """The rows of one launch.

    Attributes:
      tall: of the longest part; others are filled up to as many.
      counts: of each replica's part.
      starts: where each part begins among all rows of the call.
      offsets: and among its replica's own.
    """

    tall: int
    counts: tuple[int, ...]
    starts: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of rows that parts have, most first."""
        return tuple(sorted(set(self.counts), reverse=True))

    def positions(self, selection: Selection, rank: int) -> np.ndarray:
        """Where this replica's rows lie in the source, filled up with real ones."""
        return _filled(selection, self.starts[rank], self.counts[rank], self.tall)


def _filled(selection: Selection, start: int, count: int, tall: int) -> np.ndarray:
    positions = selection.positions(start, start + count)
    if count == tall:
        return positions
    filler = positions[:1] if count else selection.positions(0, 1)
    return np.concatenate([positions, np.broadcast_to(filler, tall - count)])


def send_rows(group: Group, source: Source, selection: Selection, part_rows: PartRows, dtype: np.dtype) -> Any:
    """Bring each replica its rows of the selection, as one array of the layout "rows".

    The result never shares memory with an array of the user's, unless it is that `jax.Array` itself, in its place.
    """
    tall = part_rows.tall
    if isinstance(source, jax.Array):
        is_all = selection.indexes is None and len(source) == selection.rows == tall * group.size
        if is_all and source.dtype == dtype:
            return source if source.sharding == group.stacked else put(group, source, "stacked")
        host = to_host(group, source)
        if host is None:
            index = np.concatenate([part_rows.positions(selection, rank) for rank in range(group.size)])
            return put(group, _take(source, index.astype(np.int32)).astype(dtype), "stacked")
        source = host
    shape = (tall * group.size, *source.shape[1:])
    if group.has_one_device:
        whole = acquire(shape, dtype)
        _fill([whole[rank * tall : (rank + 1) * tall] for rank in range(group.size)], source, selection, part_rows)
        return whole  # One device: let the compiled call transfer the NumPy array itself; a device_put is slower.
    ranks = group.local_ranks
    parts = acquire_parts(len(ranks), (tall, *shape[1:]), dtype)
    here = part_rows._replace(
        counts=part_rows.counts[ranks.start : ranks.stop], starts=part_rows.starts[ranks.start : ranks.stop]
    )
    _fill(parts, source, selection, here)

    def part_at(index: Any) -> np.ndarray:
        return parts[(index[0].start or 0) // tall - ranks.start]

    return jax.make_array_from_callback(shape, sharding_of(group, "rows"), part_at)


def _fill(parts: Sequence[np.ndarray], source: np.ndarray | Reader, selection: Selection, rows: PartRows) -> None:
    """Copy each part's rows, and real rows after them."""
    copies: list[Rows] = []
    short: list[tuple[np.ndarray, int]] = []
    for part, start, count in zip(parts, rows.starts, rows.counts, strict=True):
        if count:
            copies.append(selection.into(part[:count], source, start))
        if count < len(part):
            short.append((part, count))
            if count == 0 and selection.rows:
                copies.append(selection.into(part[:1], source, 0))
    copy_rows(copies)
    for part, count in short:
        # A process that holds no rows at all has no real ones; then nothing reads what it has.
        part[max(count, 1) if selection.rows else 0 :] = part[:1] if selection.rows else 0


def send_index(group: Group, values: np.ndarray) -> Any:
    """Small numbers, one entry a replica on axis 0; fresh ones, since devices may read them in place."""
    if group.has_one_device:
        return values  # as above
    return jax.make_array_from_callback(values.shape, group.stacked, values.__getitem__)


def to_host(group: Group, source: Source) -> np.ndarray | Reader | None:
    """A source as what threads can copy from; None where that would bring it from a device."""
    if not isinstance(source, jax.Array):
        return source
    is_here = source.is_fully_addressable or source.is_fully_replicated
    return np.asarray(source) if is_here and (group.platform == "cpu" or group.is_multi_process) else None


def gather_rows(source: np.ndarray | Reader, selection: Selection, dtype: np.dtype) -> np.ndarray:
    """The rows of a selection in host memory of their own."""
    buffer = acquire((selection.rows, *source.shape[1:]), dtype)
    copy_rows([selection.into(buffer, source, 0)])
    return buffer


def even_parts(rows: int, replicas: int) -> PartRows:
    """Rows that divide, each replica's part whole."""
    tall = rows // replicas
    return PartRows(tall, (tall,) * replicas, tuple(range(0, rows, tall)), (0,) * replicas)


def place_rows_ahead(group: Group, source: Source, selection: Selection, dtype: np.dtype, is_cut: bool = True) -> Any:
    """Rows cut over the replicas for a later call; where they do not divide or shall not be cut, in own memory."""
    host = to_host(group, source)
    if is_cut and selection.rows % group.size == 0:
        parts = even_parts(selection.rows, group.size)
        if host is not None:
            sent = send_rows(group, source, selection, parts, dtype)
            return put(group, sent, "rows") if isinstance(sent, np.ndarray) else sent
        with LOCK:  # programs pick rows on devices
            return send_rows(group, source, selection, parts, dtype)
    if host is not None:
        return gather_rows(host, selection, dtype)
    with LOCK:
        return source[selection.positions(0, selection.rows)].astype(dtype)  # type: ignore[index]  # on devices


@jax.jit
def _take(source: jax.Array, index: jax.Array) -> jax.Array:
    return source.at[index].get(mode="promise_in_bounds")
