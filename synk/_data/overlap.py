"""Overlap: parts that see neighbours of their rows, and the exchange of rows between replicas."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._base.errors import checked_integer, public_api
from .._base.partition import split_rows
from .._base.pytree import exactly
from .._runtime.way import replica_axis
from .transfer import PartRows

Edge: TypeAlias = Literal["nearest", "cyclic", "reflect", "fill"]
# Modes of np.pad. Programs fill in the rows of "fill".
_MODES: dict[str, Any] = {"nearest": "edge", "cyclic": "wrap", "reflect": "reflect", "fill": "edge"}


@dataclass(frozen=True, init=False)
class Overlap:
    """An input mode of `synk.function`: scattered rows, of which each part sees some of its neighbours' too.

    The function returns as many rows as are its own: `out[before:-after]` of what it makes of all it sees. Neighbours
    are neighbours in the selection of the call. Rows on the host and broadcast ones are cut so, without communication.
    Replicas exchange only the neighbours of scattered data, and of a shared variable that holds rows.

    Args:
      before: how many rows before its own a part sees.
      after: how many after them; None for as many as before.
      edge: what lies beyond the ends of the selection, as in `np.pad`: "nearest" (the last row again, an open end),
        "cyclic" (the other end), "reflect" (mirrored about the last row), or "fill" (a wall: every row there is
        `fill`).
      fill: the value of rows there, with `edge="fill"`; 0 by default.

    Raises:
      TypeError, ValueError: a width is no integer >= 0, or the edge is none of these.

    Example:
      >>> import numpy as np, synk
      >>> @synk.function(inputs={"x": synk.Overlap(1, edge="cyclic")}, reduce="concat")
      ... def smooth(x):
      ...     return (x[:-2] + x[1:-1] + x[2:]) / 3
      >>> smooth(np.array([0.0, 3.0, 6.0, 9.0, 12.0])).tolist()
      [5.0, 3.0, 6.0, 9.0, 7.0]
    """

    before: int
    after: int
    edge: Edge
    fill: Any

    @public_api
    def __init__(self, before: int, after: int | None = None, *, edge: Edge = "nearest", fill: Any = 0) -> None:
        after = before if after is None else after
        before, after = checked_integer(before, "synk.Overlap: before"), checked_integer(after, "synk.Overlap: after")
        if edge not in get_args(Edge):
            raise ValueError(f"synk.Overlap: edge is {edge!r}; use {', '.join(map(repr, get_args(Edge)))}.")
        if np.ndim(fill) or np.asarray(fill).dtype.kind not in "biufc":
            raise ValueError(f"synk.Overlap: fill is {fill!r}; give one number.")
        values = {"before": before, "after": after, "edge": edge, "fill": np.asarray(fill).item()}
        for name, value in values.items():
            object.__setattr__(self, name, value)


def halo_of(overlap: Overlap | None) -> int:
    return 0 if overlap is None else overlap.before + overlap.after


@lru_cache(maxsize=16)
def with_neighbours(rows: int, overlap: Overlap) -> np.ndarray:
    """Return the numbers of all rows, and of the rows beyond both ends. Rows that are filled have any number."""
    numbers = np.pad(np.arange(rows), (overlap.before, overlap.after), _MODES[overlap.edge])
    # The cache hands the same array to all callers.
    numbers.flags.writeable = False
    return numbers


def widened(parts: PartRows, overlap: Overlap | None) -> PartRows:
    """Add neighbours to the parts of a launch, for a selection that begins with the neighbours of the first row."""
    if overlap is None:
        return parts
    more = halo_of(overlap)
    counts = tuple([count + more if count else 0 for count in parts.counts])
    return parts._replace(max_rows=parts.max_rows + more, counts=counts)


def fill_beyond(rows: jax.Array, overlap: Overlap | None, first_row: Any, total: Any) -> jax.Array:
    """Fill the rows of a part that lie beyond the ends of the selection; `first_row` is the first of its own."""
    if overlap is None or overlap.edge != "fill":
        return rows
    number = first_row - overlap.before + jnp.arange(rows.shape[0], dtype=jnp.int32)
    is_there = ((number >= 0) & (number < total)).reshape(-1, *[1] * (rows.ndim - 1))
    return jnp.where(is_there, rows, exactly(overlap.fill, rows.dtype, "synk.Overlap: fill"))


class _Message(NamedTuple):
    """The rows that each replica sends to the replica `shift` ranks on.

    Attributes:
      shift: the distance of sender and receiver.
      rows: the rows of each sender: (replicas, rows of the longest message).
      places: where receivers put them, of the same shape. A place beyond the last one drops a row.
    """

    shift: int
    rows: np.ndarray
    places: np.ndarray


@lru_cache(maxsize=256)
def _halos(rows: int, size: int, overlap: Overlap) -> tuple[np.ndarray, list[_Message]]:
    """Plan the messages that bring all parts their neighbours. Return the rows of each replica too."""
    parts, numbers, halo = split_rows(rows, size), with_neighbours(rows, overlap), halo_of(overlap)
    starts = np.array([part.start for part in parts])
    # By shift: (owner, its row, receiver, place).
    moves: dict[int, list[tuple[int, int, int, int]]] = {}
    for rank, (start, count) in enumerate(parts):
        wanted = np.delete(numbers[start : start + count + halo], np.s_[overlap.before : overlap.before + count])
        for place, number in enumerate(wanted if count else ()):
            owner = int(np.searchsorted(starts + [part.rows for part in parts], number, side="right"))
            moves.setdefault((rank - owner) % size, []).append((owner, int(number - starts[owner]), rank, place))
    messages: list[_Message] = []
    for shift, moves_of_shift in sorted(moves.items()):
        sent = [[move for move in moves_of_shift if move[0] == owner] for owner in range(size)]
        width = max(map(len, sent))
        send, put = np.zeros((size, width), np.int32), np.full((size, width), halo, np.int32)
        for of_owner in sent:
            for i, (owner, row, receiver, place) in enumerate(of_owner):
                send[owner, i], put[receiver, i] = row, place
        messages.append(_Message(shift, send, put))
    return np.array([part.rows for part in parts], np.int32), messages


def with_halos(array: jax.Array, rows: int, size: int, overlap: Overlap) -> jax.Array:
    """Put a replica's rows between their neighbours. Those after follow the last row that is no filler."""
    (lengths, messages), rank = _halos(rows, size, overlap), lax.axis_index(replica_axis())
    # One place more takes the rows that are dropped.
    halo = jnp.zeros((halo_of(overlap) + 1, *array.shape[1:]), array.dtype)
    for shift, send, put in messages:
        rows_sent = array.at[jnp.asarray(send)[rank]].get(mode="promise_in_bounds")
        pairs = [(owner, (owner + shift) % size) for owner in range(size)]
        # One permutation for each distance that rows come from: on a ring of replicas that hold more rows than a halo
        # there are two.
        received = lax.ppermute(rows_sent, replica_axis(), pairs) if shift else rows_sent
        halo = halo.at[jnp.asarray(put)[rank]].set(received)
    before, after = halo[: overlap.before], halo[overlap.before : -1]
    whole = jnp.concatenate([before, array, jnp.zeros_like(after)])
    at = overlap.before + jnp.asarray(lengths)[rank]
    return lax.dynamic_update_slice_in_dim(whole, after, at, 0) if overlap.after else whole
