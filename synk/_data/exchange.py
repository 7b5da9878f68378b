"""Exchange: send rows that a batch picks from scattered data between the replicas."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._base.partition import split_rows
from .._runtime.executable import Executable, ProgramSpec, run_collective
from .._runtime.group import Group
from .._runtime.layout import put
from .._runtime.way import Body, Layouts, replica_axis

# The data, and the index.
_INS: Layouts = ["stacked", "replicated"]
_OUTS: Layouts = ["stacked"]


def exchange(group: Group, data: jax.Array, rows: int, wanted: np.ndarray) -> jax.Array:
    """Give each replica the rows that it wants: `wanted` has row numbers, (replicas, rows of the longest part)."""
    # The index is an argument of the program, not a constant, so that other picks of as many rows compile nothing.
    index = put(group, wanted.astype(np.int32).ravel(), "replicated")
    body = _body(group.size, rows, wanted.shape[1])
    return run_collective(group, body, _INS, _OUTS, [data, index])[0]


def exchange_program(group: Group, data: jax.ShapeDtypeStruct, rows: int, max_rows: int) -> Executable:
    index = jax.ShapeDtypeStruct((group.size * max_rows,), np.int32)
    body = _body(group.size, rows, max_rows)
    spec = ProgramSpec(body, [_INS], [[data, index]], _OUTS, name="exchange")
    return group._cached(body, ("explained", data.shape, data.dtype), lambda: Executable(group, spec))


@lru_cache(maxsize=1024)
def _body(size: int, rows: int, max_rows: int) -> Body:
    starts = np.array([part.start for part in split_rows(rows, size)], np.int32)
    # The rows of one message: the expected number of random picks, and four standard deviations.
    expected = max_rows / size
    capacity = min(max_rows, int(np.ceil(expected + 4 * expected**0.5)) + 4)

    def body(data: jax.Array, index: jax.Array) -> list[jax.Array]:
        rank = lax.axis_index(replica_axis())
        dtype, is_small = data.dtype, data.dtype.itemsize < 4 and jnp.issubdtype(data.dtype, jnp.floating)
        # Some back ends widen small floats on the way, which changes the bits of NaN.
        if is_small:
            data = lax.bitcast_convert_type(data, jnp.uint8 if dtype.itemsize == 1 else jnp.uint16)
        wanted = index.reshape(size, max_rows)
        owner = jnp.searchsorted(starts, wanted, side="right").astype(jnp.int32) - 1
        number, largest = _number_by_pair(owner)
        local, outgoing = wanted - jnp.asarray(starts)[rank], jnp.where(owner == rank, number, -1)
        sender, incoming = owner[rank], number[rank]

        def exchanged(turn: jax.Array | int) -> jax.Array:
            """Return the rows of one round in their places. Other places hold any rows."""
            got = _all_to_all_rows(data, local, outgoing - turn * capacity, capacity)
            at = sender * capacity + jnp.clip(incoming - turn * capacity, 0, capacity - 1)
            return got.at[at].get(mode="promise_in_bounds")

        def later(turn: jax.Array, before: jax.Array) -> jax.Array:
            is_new = (incoming // capacity == turn).reshape(max_rows, *[1] * (data.ndim - 1))
            return jnp.where(is_new, exchanged(turn), before)

        # Only picked rows travel, in rounds of one all-to-all of a fixed size, since XLA needs the size of a message.
        # For random picks one round is nearly always enough; a sorted batch, whose rows all lie on one replica, takes
        # several.
        received = lax.fori_loop(1, (largest + capacity - 1) // capacity, later, exchanged(0))
        return [lax.bitcast_convert_type(received, dtype) if is_small else received]

    return body


def _number_by_pair(owner: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Number the rows of each (owner, receiver) pair, and count the rows of the largest pair."""
    is_of = owner[:, :, None] == jnp.arange(len(owner), dtype=jnp.int32)[None, None]
    # Row i of a pair travels in round i // capacity, at position i % capacity.
    order = jnp.cumsum(is_of, axis=1, dtype=jnp.int32)
    return jnp.take_along_axis(order, owner[:, :, None], axis=2)[:, :, 0] - 1, jnp.max(order[:, -1])


def _all_to_all_rows(data: jax.Array, rows: jax.Array, position: jax.Array, capacity: int) -> jax.Array:
    """Send each receiver the rows whose position in its message is at least 0 and below the capacity."""
    receiver = jnp.broadcast_to(jnp.arange(len(rows), dtype=jnp.int32)[:, None], rows.shape)
    # Positions beyond the message are dropped.
    column = jnp.where(position < 0, capacity, position)
    message = jnp.zeros((len(rows), capacity), jnp.int32).at[receiver, column].set(rows, mode="drop")
    outgoing = data.at[message].get(mode="promise_in_bounds")
    return lax.all_to_all(outgoing, replica_axis(), 0, 0).reshape(len(rows) * capacity, *data.shape[1:])
