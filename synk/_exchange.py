"""Exchange: rows picked by a global batch from scattered data, brought from the replicas that hold them."""

from __future__ import annotations

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._engine import Body, once
from ._group import AXIS, Group
from ._split import cut


def exchange(group: Group, data: jax.Array, rows: int, index: np.ndarray) -> jax.Array:
    """Give each replica its part of the rows picked.

    Only rows that were picked travel: each replica sends each other what it wants, in rounds of one all-to-all of a
    fixed size, which one round nearly always meets where rows are picked at random. The index is data.

    Args:
      data: stacked, of shape (replicas, n, ...): each replica's part of the rows.
      rows: how many rows there are in all.
      index: of shape (b,), which of them.

    Returns:
      Stacked, of shape (replicas, m, ...): each replica's part of those picked, filled up to as many with real ones.
    """
    picked = cut(len(index), group.size)
    tall = picked[0].rows
    blocks = [index[np.minimum(part.start + np.arange(tall), len(index) - 1)] for part in picked]
    flat = np.concatenate(blocks).astype(np.int32)
    placed = jax.make_array_from_callback(flat.shape, group.everywhere, flat.__getitem__)
    return once(group, _body(group.size, rows, tall), ["stacked", "everywhere"], ["stacked"], [data, placed])[0]


@lru_cache(maxsize=1024)
def _body(size: int, rows: int, tall: int) -> Body:
    """The program: `size` replicas hold `rows` rows, and each wants `tall` of them."""
    shares = [part.rows for part in cut(rows, size)]
    ends = np.cumsum(shares).astype(np.int32)
    starts = (ends - shares).astype(np.int32)
    expected = tall / size
    room = min(tall, int(np.ceil(expected + 4 * expected**0.5)) + 4)  # of one message, in rows

    def body(data: jax.Array, index: jax.Array) -> list[jax.Array]:
        rank = lax.axis_index(AXIS)
        dtype, is_small = data.dtype, data.dtype.itemsize < 4 and jnp.issubdtype(data.dtype, jnp.floating)
        if is_small:  # which some back ends widen on the way, and some NaNs with it
            data = lax.bitcast_convert_type(data, jnp.uint8 if dtype.itemsize == 1 else jnp.uint16)
        wanted = index.reshape(size, tall)  # by each replica
        owner = jnp.searchsorted(ends, wanted.ravel(), side="right").reshape(size, tall).astype(jnp.int32)
        # Whatever has one owner and one receiver is numbered: its place in their messages, round by round.
        is_of = owner[:, :, None] == jnp.arange(size, dtype=jnp.int32)[None, None]
        order = jnp.cumsum(is_of, axis=1, dtype=jnp.int32)
        number = jnp.take_along_axis(order, owner[:, :, None], axis=2)[:, :, 0] - 1
        rounds = (jnp.max(order[:, -1]) + room - 1) // room  # the same on all replicas
        mine, where = owner == rank, wanted - jnp.asarray(starts)[rank]
        receiver = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32)[:, None], (size, tall))
        slot_owner, slot = owner[rank], number[rank]

        def exchanged(turn: jax.Array | int) -> jax.Array:
            """The rows that this turn brings, each where it belongs; others are any."""
            column = jnp.where(mine, number - turn * room, -1)
            column = jnp.where(column < 0, room, column)  # beyond the message: dropped
            message = jnp.zeros((size, room), jnp.int32).at[receiver, column].set(where, mode="drop")
            sent = data.at[message].get(mode="promise_in_bounds")
            got = lax.all_to_all(sent, AXIS, 0, 0).reshape(size * room, *data.shape[1:])
            place = slot_owner * room + jnp.clip(slot - turn * room, 0, room - 1)
            return got.at[place].get(mode="promise_in_bounds")

        def later(turn: jax.Array, before: jax.Array) -> jax.Array:
            is_new = (slot // room == turn).reshape(tall, *[1] * (data.ndim - 1))
            return jnp.where(is_new, exchanged(turn), before)

        rows = lax.fori_loop(1, rounds, later, exchanged(0))
        return [lax.bitcast_convert_type(rows, dtype) if is_small else rows]

    return body
