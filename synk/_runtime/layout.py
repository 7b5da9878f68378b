"""Layout: how arrays of a group lie on its devices, and how values get there and back."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from .._base.pytree import fitting, narrow, narrowed, number_dtype
from .dispatch import LOCK
from .group import Group
from .way import Layout


def layouts(layout: Layout, count: int) -> list[Layout]:
    return [layout] * count


def sharding_of(group: Group, layout: Layout) -> NamedSharding:
    return getattr(group._way, layout)


def is_everywhere(array: jax.Array) -> bool:
    """Check whether this process can read the whole array."""
    return array.is_fully_addressable or array.is_fully_replicated


def everywhere(array: jax.Array) -> np.ndarray:
    """Copy a whole array to host memory. All processes over which the array lies call this together."""
    return np.asarray(array if is_everywhere(array) else multihost_utils.process_allgather(array, tiled=True))


def put(group: Group, value: Any, layout: Layout) -> jax.Array:
    """Place a global value in a layout. The result may share memory with a NumPy array."""
    where = sharding_of(group, layout)
    group._refuse_if_absent("a value to place")
    if isinstance(value, jax.Array) and not group._is_multi_process:
        return jax.device_put(value if value.is_fully_addressable else everywhere(value), where)
    if isinstance(value, jax.Array) and not is_everywhere(value):
        group._peers.before_launch(f"an argument ({describe_shapes([value])}) moved to its place")
        # The program is awaited here, so it does not count as one in flight.
        with LOCK:
            reshard = group._cached(group, where, lambda: jax.jit(lambda value: value, out_shardings=where))
            return jax.block_until_ready(reshard(value))
    host = np.asarray(value)
    # This takes half the time of jax.device_put:
    # https://docs.jax.dev/en/latest/_autosummary/jax.make_array_from_callback.html
    return jax.make_array_from_callback(host.shape, where, host.__getitem__)


def is_placed(group: Group, array: jax.Array, layout: Layout) -> bool:
    """Check whether an array lies where compiled programs want it, whatever the class of its sharding."""
    where = sharding_of(group, layout)
    return array.sharding == where or array.sharding.is_equivalent_to(where, array.ndim)


def takes(group: Group, array: jax.Array, layout: Layout) -> bool:
    """Check whether programs take an array from where it lies: from its place, or from a device that nobody has named,
    from which they spread it themselves."""
    # Asking typed keys for their sharding takes some microseconds.
    return not (array.committed or group._is_multi_process) or is_placed(group, array, layout)


def replicate(group: Group, leaf: Any) -> jax.Array:
    """Put a value on every replica. The result shares no memory with the user's NumPy arrays."""
    if isinstance(leaf, jax.Array):
        leaf = narrowed(leaf)
        return leaf if is_placed(group, leaf, "replicated") else put(group, leaf, "replicated")
    return put(group, host_copy(leaf), "replicated")


def host_copy(leaf: Any) -> np.ndarray:
    """Copy a leaf to a new NumPy array, in the dtype that JAX gives it."""
    # On CPUs JAX may share the memory of a NumPy array: https://github.com/jax-ml/jax/issues/37830
    if not hasattr(leaf, "dtype"):
        return np.array(leaf, number_dtype(leaf))
    dtype = narrow(leaf.dtype)
    return np.array(fitting(leaf, dtype), dtype)


def constant(group: Group, layout: Layout, values: Any, dtype: str) -> jax.Array:
    """Place a small array of numbers, given as nested tuples, once a group."""
    return group._cached(constant, (layout, values, dtype), lambda: put(group, np.array(values, dtype), layout))


def shards(group: Group, array: jax.Array) -> list[jax.Array]:
    """Return the single-device arrays of a global array that this process has, in rank order."""
    by_device = {shard.device: shard.data for shard in array.addressable_shards}
    return [by_device[group.devices[rank]] for rank in group._local_ranks]


def shard_of_rank(group: Group, array: jax.Array, rank: int) -> jax.Array:
    """Return the array on the device of one replica of this process. Simulated replicas share one array."""
    return array if group._way.shares_device else shards(group, array)[rank - group._local_ranks.start]


def local_replica_to_host(group: Group, array: jax.Array, layout: Layout, rank: int, rows: int | None) -> np.ndarray:
    """Return the entry of one replica of this process in host memory, cut to `rows` rows. On CPUs it is a view."""
    entry = np.asarray(shard_of_rank(group, array, rank))
    if layout != "replicated":
        entry = entry[rank if group._way.shares_device else 0, ...]
    return entry if rows is None else entry[:rows]


def set_replica(group: Group, array: jax.Array, new: Any, rank: int) -> jax.Array:
    """Return a stacked array with one replica's entry replaced. Other entries share memory with the old array."""
    if group._way.shares_device:
        return array.at[rank].set(new)
    parts = shards(group, array)
    if rank in group._local_ranks:
        parts[rank - group._local_ranks.start] = jax.device_put(np.array(new)[None], group.devices[rank])
    return jax.make_array_from_single_device_arrays(array.shape, group.stacked, parts)


def stack_parts(group: Group, parts: Sequence[Any], rows: int | None) -> jax.Array:
    """Stack one array a replica, each padded to `rows` rows. For None all have one shape."""
    group._refuse_if_absent("rows to place")
    shape = parts[0].shape if rows is None else (rows, *parts[0].shape[1:])

    def padded(part: Any) -> np.ndarray:
        full = np.zeros((1, *shape), part.dtype)
        full[0, ... if rows is None else slice(len(part))] = part
        return full

    return put_entries(group, [padded(parts[rank]) for rank in group._local_ranks])


def put_entries(group: Group, entries: Sequence[np.ndarray]) -> jax.Array:
    """Place an array of layout "stacked", given as the entry of each replica of this process: (1, ...)."""
    if group._has_one_device or group.size == 1:
        return put(group, np.concatenate(entries), "stacked")
    pairs = zip(entries, group._local_ranks, strict=True)
    placed = [jax.device_put(entry, group.devices[rank]) for entry, rank in pairs]
    return jax.make_array_from_single_device_arrays((group.size, *entries[0].shape[1:]), group.stacked, placed)


def describe_shapes(args: Sequence[Any]) -> str:
    shapes = [f"{a.dtype.name}{list(a.shape)}" for a in args[-6:]]
    return ", ".join([f"{len(args) - 6} more", *shapes] if len(args) > 6 else shapes)
