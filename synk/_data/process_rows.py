"""Process rows: rows that one process alone holds."""

import zlib
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from .._base.errors import public_api
from .._base.partition import split_rows
from .._base.pytree import key_of, refuse_tracer
from .._runtime.executable import run_collective, translate_peer_errors
from .._runtime.group import Group
from .._runtime.layout import put
from .._runtime.way import replica_axis
from .selection import Selection
from .sources import HostSource, as_source
from .transfer import gather_rows


class ProcessLocalRows:
    """An argument whose rows this process alone holds; made by `synk.local`."""

    __slots__ = ("dtype", "ndim", "shape", "source")

    def __init__(self, source: HostSource) -> None:
        self.source = source
        self.shape, self.ndim, self.dtype = source.shape, source.ndim, source.dtype

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(
            "synk.local rows are for the arguments of synk functions: a call, iterate, stream or over. All else takes "
            "rows that every process has, or a result that stays on the replicas (the op scatter)."
        )


@public_api
def local(value: Any) -> ProcessLocalRows:
    """Mark rows that this process alone holds, for the inputs of a function.

    The rows of the call are those of all processes, in the order of their replicas. Each process deals its own out over
    its own replicas, and `batch` picks from its own. In a group of one process they are all rows there are.

    Args:
      value: an array of shape (rows, ...), NumPy's or any that `synk.data` takes; processes may hold different numbers
        of rows, also none.

    Returns:
      What a function takes as a scattered argument. All scattered arguments of one call are local, or none is.

    Raises:
      TypeError: `value` is no array of numbers.

    Example:
      >>> import jax.numpy as jnp, numpy as np, synk
      >>> round(float(synk.function(jnp.mean, reduce="mean")(synk.local(np.arange(5.0)))), 4)
      2.0
    """
    refuse_tracer(value, "synk.local: its value")
    if key_of(value) is not None:
        raise TypeError("synk.local: its value is an array of typed PRNG keys; give jax.random.key_data of it.")
    advice = "give one array; for a tree of them, jax.tree.map(synk.local, tree)"
    source = as_source(value, "synk.local: its value", advice)
    if source.ndim == 0:
        raise ValueError("synk.local: its value is a scalar and has no rows.")
    return ProcessLocalRows(np.asarray(source) if isinstance(source, jax.Array) else source)


def rows_of_replicas(group: Group, rows: int | None, name: str, what: str) -> tuple[int, ...]:
    """Return the rows of each replica; `rows` are those of this process, None if it cannot make its call."""
    # Entries of other processes are not sent.
    # All processes call this together, one that must raise too: else the other processes would wait for its rows.
    # Beside its rows each process sends a checksum of `what`, by which all notice a call that differs.
    entries = np.zeros((group.size, 2), np.int32)
    parts = split_rows(rows or 0, len(group._local_ranks))
    entries[group._local_ranks, 0] = -1 if rows is None else [part.rows for part in parts]
    entries[group._local_ranks, 1] = zlib.crc32(what.encode()) >> 1
    with translate_peer_errors(group):
        (gathered,) = run_collective(group, _gather, ["stacked"], ["replicated"], [put(group, entries, "stacked")])
        every = np.asarray(gathered)
    if rows is None:
        return ()
    if (every[:, 0] < 0).any():
        failed = group.devices[int(every[:, 0].argmin())].process_index
        raise ValueError(
            f"{name}: process {failed} has refused its synk.local rows, and raises why. All leave this call together."
        )
    # All processes see that calls differ, so that all tell the others which call they are in.
    if len(set(every[:, 1].tolist())) > 1:
        group._peers.agree(what, what)
    return tuple(every[:, 0].tolist())


def _gather(rows: jax.Array) -> list[jax.Array]:
    return [jax.lax.all_gather(rows, replica_axis())]


def rows_of_processes(group: Group, source: HostSource) -> np.ndarray:
    """Copy the rows of all processes to each of them, in the order of their replicas."""
    host = gather_rows(source, Selection(None, 0, source.shape[0]), source.dtype)
    counts = multihost_utils.process_allgather(np.array([len(host)]))[:, 0]
    # All processes give one shape to the gather, so shorter ones are padded.
    filled = np.zeros((int(counts.max()), *host.shape[1:]), host.dtype)
    filled[: len(host)] = host
    # As bytes: process_allgather would narrow 64 bits where JAX has those switched off.
    together = multihost_utils.process_allgather(filled.view(np.uint8))
    order = dict.fromkeys(device.process_index for device in group.devices)
    return np.concatenate([together[i].view(host.dtype)[: counts[i]] for i in order])
