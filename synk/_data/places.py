"""Places: where the rows of a `Data` lie, how they get there, and how a call takes them from there."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import numpy as np

from .._base.partition import lengths_of, split_rows
from .._runtime.dispatch import LOCK
from .._runtime.executable import replica_to_host
from .._runtime.group import Group
from .._runtime.layout import put, put_entries
from .._runtime.way import Layout
from .feed import InputFeed
from .host_buffers import fresh
from .overlap import Overlap, halo_of
from .selection import IndexKind, Selection
from .sources import Copy, HostSource, copy_rows
from .transfer import fill_parts

PlaceName: TypeAlias = Literal["host", "scatter", "broadcast"]


class Picks(NamedTuple):
    """The rows that a call takes of one argument, as far as programs depend on them.

    Attributes:
      rows: how many rows, without their neighbours.
      is_run: whether they are consecutive.
      index: the form of the index by which programs pick them.
      is_on_replicas: whether `batch_s` picks among each replica's rows; then `rows` counts all rows.
      has_batch_s: whether the call has a `batch_s`, for this argument or another one.
      is_sliced: whether a replica runs its rows in slices.
      overlap: the neighbours that come with the rows.
      block: rows of a block, where replicas get whole blocks.
    """

    rows: int
    is_run: bool = True
    index: IndexKind = "slice"  # type: ignore[assignment]  # a tuple has a method of that name
    is_on_replicas: bool = False
    has_batch_s: bool = False
    is_sliced: bool = False
    overlap: Overlap | None = None
    block: int | None = None


@dataclass(frozen=True)
class Place:
    """A place where the rows of a `Data` can lie.

    Attributes:
      layout: the layout of the rows on the devices; None where they stay on the host.
      bring: put the first rows of a source on the devices: `bring(group, source, rows, dtype)`.
      choose_feed: choose how a call takes the rows: `choose_feed(group, rows, is_in_memory, picks)` returns a feed,
        and whether replicas first send one another the rows that the call picks. None: send the rows from the host.
    """

    layout: Layout | None
    bring: Callable[[Group, HostSource, int, np.dtype], jax.Array]
    choose_feed: Callable[[Group, int, bool, Picks], tuple[InputFeed, bool] | None]

    def abstract(self, group: Group, shape: tuple[int, ...], dtype: np.dtype) -> jax.ShapeDtypeStruct:
        if self.layout == "replicated":
            return jax.ShapeDtypeStruct(shape, dtype)
        return jax.ShapeDtypeStruct((group.size, -(-shape[0] // group.size), *shape[1:]), dtype)


class ReplicaRows:
    """Rows that were made on the replicas. The first read on the host copies them there, in all processes together."""

    def __init__(self, group: Group, stacked: jax.Array, rows: int) -> None:
        self.shape, self.dtype = (rows, *stacked.shape[2:]), stacked.dtype
        self._at: tuple[Group, jax.Array] | None = (group, stacked)
        self._host: np.ndarray | None = None

    def __getitem__(self, index: Any) -> np.ndarray:
        if self._host is None:
            with LOCK:
                self._bring()
        assert self._host is not None
        return self._host[index]

    def _bring(self) -> None:
        if self._at is None:
            return
        group, stacked = self._at
        # All processes take part in the reads below. A process that reads alone would wait in a collective for the
        # others.
        group._peers.agree(f"a read of rows on the replicas, {self.dtype}{list(self.shape)}", "")
        parts = enumerate(split_rows(self.shape[0], group.size))
        self._host = np.concatenate([replica_to_host(group, stacked, "stacked", r, part.rows) for r, part in parts])
        # A write to the copy would not reach the rows on the replicas.
        self._host.flags.writeable = False
        # The `Data` alone decides how long the rows stay on the devices.
        self._at = None


def replicate_rows(group: Group, source: HostSource, rows: int, dtype: np.dtype) -> jax.Array:
    buffer = fresh((rows, *source.shape[1:]), dtype)
    copy_rows(source, None, [Copy(buffer, 0)])
    # CPU devices may share the buffer, to which nobody else writes.
    return put(group, buffer, "replicated")


def scatter_rows(group: Group, source: HostSource, rows: int, dtype: np.dtype) -> jax.Array:
    parts, ranks = split_rows(rows, group.size), group._local_ranks
    whole = fresh((len(ranks), parts[0].rows, *source.shape[1:]), dtype)
    starts, counts = [parts[rank].start for rank in ranks], [parts[rank].rows for rank in ranks]
    fill_parts(whole, source, Selection(None, 0, rows), starts, counts)
    return put(group, whole, "stacked") if group._has_one_device else put_entries(group, [*whole[:, None]])


def _stay(group: Group, source: HostSource, rows: int, dtype: np.dtype) -> Any:
    raise AssertionError("rows on the host lie on no device")


def _send(group: Group, rows: int, is_in_memory: bool, picks: Picks) -> None:
    """Send the rows from the host."""


def _feed_of_replicated(group: Group, rows: int, is_in_memory: bool, picks: Picks) -> tuple[InputFeed, bool]:
    """Let each replica pick its rows from all rows, which it has."""
    kind: IndexKind = picks.index if picks.overlap is None else "gather"
    return InputFeed("replicated", kind, rows, picks.overlap), False


def _feed_of_scattered(group: Group, rows: int, is_in_memory: bool, picks: Picks) -> tuple[InputFeed, bool] | None:
    """Let each replica take its own rows, or pick from them; exchange rows where others have those that it wants."""
    overlap, held = picks.overlap, -(-rows // group.size)
    if picks.is_on_replicas:
        return InputFeed("stacked", picks.index, held), False
    # `batch_s` gives replicas unequal rows, but minibatch data is split evenly.
    if picks.has_batch_s:
        return None
    of_slice: IndexKind | None = "slice" if picks.is_sliced else None
    # A part of whole data begins where its replica's rows do, unless it is a slice of them. Blocks are dealt out in
    # another way than data.
    if picks.is_run and picks.rows == rows and picks.block is None:
        return InputFeed("stacked", of_slice, held, overlap, 0 if overlap is None else rows), False
    if group.size == 1 and overlap is None:
        return InputFeed("stacked", picks.index, held), False
    # CPU devices share the host's memory, so there is nothing to gain by an exchange.
    if group.platform == "cpu" and is_in_memory:
        return None
    longest = max(lengths_of(picks.rows, group.size, picks.block)) + halo_of(overlap)
    return InputFeed("stacked", of_slice, longest, overlap), True


PLACES: dict[str, Place] = {
    "host": Place(None, _stay, _send),
    "scatter": Place("stacked", scatter_rows, _feed_of_scattered),
    "broadcast": Place("replicated", replicate_rows, _feed_of_replicated),
}
