"""Process rows: rows that one process alone holds."""

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from .._base.errors import public_api
from .._base.partition import split_rows
from .._base.pytree import refuse_tracer
from .._runtime.executable import run_collective
from .._runtime.group import AXIS, Group
from .._runtime.layout import put
from .selection import Selection
from .sources import HostSource, as_source
from .transfer import gather_rows


class ProcessLocalRows:
    """What `synk.local` returns: an argument whose rows are those of this process alone."""

    __slots__ = ("dtype", "ndim", "shape", "source")

    def __init__(self, source: HostSource) -> None:
        self.source = source
        self.shape, self.ndim, self.dtype = source.shape, source.ndim, source.dtype


@public_api
def local(value: Any) -> ProcessLocalRows:
    """Mark rows that this process alone holds, for the inputs of a function.

    The rows of the call are those of all processes, in the order of the processes. Each process deals its own out over
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
      >>> float(synk.function(jnp.mean, reduce="mean")(synk.local(np.arange(5.0))))
      2.0
    """
    refuse_tracer(value, "synk.local: its value")
    advice = "give one array; for a tree of them, jax.tree.map(synk.local, tree)"
    source = as_source(value, "synk.local: its value", advice)
    if source.ndim == 0:
        raise ValueError("synk.local: its value is a scalar and has no rows.")
    return ProcessLocalRows(np.asarray(source) if isinstance(source, jax.Array) else source)


def rows_of_replicas(group: Group, rows: int) -> tuple[int, ...]:
    """How many rows each replica has, where this process deals out so many over its own; all processes ask together."""
    own = np.zeros(group.size, np.int32)  # the others' entries are not looked at
    own[group._local_ranks] = [part.rows for part in split_rows(rows, len(group._local_ranks))]
    every = run_collective(group, _gather, ["stacked"], ["replicated"], [put(group, own, "stacked")])[0]
    return tuple(np.asarray(every).tolist())


def _gather(rows: jax.Array) -> list[jax.Array]:
    return [jax.lax.all_gather(rows, AXIS)]


def rows_of_processes(source: HostSource) -> np.ndarray:
    """The rows of all processes, in each of them."""
    host = gather_rows(source, Selection(None, 0, source.shape[0]), source.dtype)
    counts = multihost_utils.process_allgather(np.array([len(host)]))[:, 0]
    filled = np.zeros((int(counts.max()), *host.shape[1:]), host.dtype)
    filled[: len(host)] = host
    together = multihost_utils.process_allgather(filled.view(np.uint8))
    return np.concatenate([each.view(host.dtype)[:n] for each, n in zip(together, counts, strict=True)])
