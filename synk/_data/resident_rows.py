"""Resident rows: all rows of a source on the devices, of which only those are sent again that were written."""

from typing import Any

import jax
import numpy as np

from .._base.partition import RowRange, split_rows
from .._base.turns import in_turn
from .._runtime.dispatch import LOCK
from .._runtime.executable import replica_to_host, run_collective
from .._runtime.group import Group
from .._runtime.layout import put, shards
from .host_buffers import fresh
from .selection import Selection
from .sources import HostSource, copy_rows
from .transfer import fill_parts


class ReplicaRows:
    """Rows that were made on the replicas, as an array of the host's that is brought there when it is first asked for;
    over processes by all of them together."""

    def __init__(self, group: Group, stacked: jax.Array, rows: int) -> None:
        self.shape, self.dtype = (rows, *stacked.shape[2:]), stacked.dtype
        self._at: tuple[Group, jax.Array] | None = (group, stacked)
        self._host: np.ndarray | None = None

    def __getitem__(self, index: Any) -> np.ndarray:
        if self._host is None:
            in_turn()
            with LOCK:
                self._bring()
        assert self._host is not None
        return self._host[index]

    def _bring(self) -> None:
        if self._at is None:
            return
        group, stacked = self._at
        group._peers.agree(f"a read of rows on the replicas, {self.dtype}{list(self.shape)}", "")
        parts = enumerate(split_rows(self.shape[0], group.size))
        self._host = np.concatenate([replica_to_host(group, stacked, "stacked", r, part.rows) for r, part in parts])
        self._host.flags.writeable = False
        self._at = None  # the data may have moved from the devices


def replicate_rows(
    group: Group, source: HostSource, rows: int, dtype: np.dtype, copy: jax.Array | None, stale: range
) -> jax.Array:
    """Bring every replica the first rows of a source, or where it has a copy of them those that are stale."""

    def read(start: int, count: int) -> jax.Array:
        buffer = fresh((count, *source.shape[1:]), dtype)
        copy_rows([Selection(None, start, count).into(buffer, source, 0)])
        return put(group, buffer, "replicated")  # CPU devices may share the buffer: no one else writes to it

    size = min(1 << (len(stale) - 1).bit_length(), rows)  # few sizes: each is a program
    if copy is None or 4 * size > rows or (group.platform == "cpu" and len(set(group.devices)) > 1):
        return read(0, rows)
    first = min(stale.start, rows - size)
    args = [copy, read(first, size), put(group, np.array([first], np.int32), "replicated")]
    return run_collective(group, _write_rows, ["replicated", "replicated", "replicated"], ["replicated"], args)[0]


def _write_rows(array: jax.Array, rows: jax.Array, start: jax.Array) -> list[jax.Array]:
    return [jax.lax.dynamic_update_slice_in_dim(array, rows, start[0], 0)]


def scatter_rows(
    group: Group, source: HostSource, rows: int, dtype: np.dtype, copy: jax.Array | None, stale: range
) -> jax.Array:
    """Bring each replica its part of the first rows, or where it has a copy of it the part if rows of it are stale."""
    parts = split_rows(rows, group.size)
    is_all = copy is None or group.is_simulated
    ranks = [rank for rank in group._local_ranks if is_all or _overlaps(parts[rank], stale)]
    whole = fresh((len(ranks), parts[0].rows, *source.shape[1:]), dtype)
    fill_parts([*whole], source, Selection(None, 0, rows), [parts[rank] for rank in ranks])
    if group.is_simulated:
        return put(group, whole, "stacked")
    placed = {} if copy is None else dict(zip(group._local_ranks, shards(group, copy), strict=True))
    placed |= {r: jax.device_put(buffer[None], group.devices[r]) for r, buffer in zip(ranks, whole, strict=True)}
    shape = (group.size, *whole.shape[1:])
    return jax.make_array_from_single_device_arrays(shape, group.stacked, [placed[r] for r in group._local_ranks])


def _overlaps(part: RowRange, stale: range) -> bool:
    return part.start < stale.stop and stale.start < part.start + part.rows


def index_within(index: Any, length: int) -> Any:
    """The same index of NumPy's where only so many first rows count, counted from 0 on."""
    first, *rest = (index or (...,)) if isinstance(index, tuple) else (index,)
    if first is ...:
        return (slice(length), ..., *rest)
    if isinstance(first, slice):
        run = range(length)[first]
        return (slice(run.start, run.stop if run.stop >= 0 else None, run.step), *rest)
    numbers = np.arange(length)[first]
    return (numbers if isinstance(numbers, np.ndarray) else int(numbers), *rest)


def touched_rows(index: Any, length: int) -> range:
    """The rows that an index of NumPy's may touch, from the first to the last."""
    first = (index[0] if index else ...) if isinstance(index, tuple) else index
    if isinstance(first, slice):
        run = range(length)[first]
        touched = np.array(run[:: max(1, len(run) - 1)])
    else:
        numbers = np.asarray(first)
        if numbers.dtype.kind in "iu":
            touched = numbers.astype(np.int64) % max(length, 1)
        elif numbers.dtype == bool and numbers.ndim == 1:
            touched = np.flatnonzero(numbers)
        else:
            return range(length)
    return range(int(touched.min()), int(touched.max()) + 1) if touched.size else range(0)
