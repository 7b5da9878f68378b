"""Overlap: rows with their neighbours: which rows a part sees, and how replicas exchange those at their edges."""

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
from .._runtime.group import AXIS
from .transfer import PartRows

Edge: TypeAlias = Literal["nearest", "cyclic", "reflect", "fill"]
# Of np.pad; what is filled comes in programs.
_MODES: dict[str, Any] = {"nearest": "edge", "cyclic": "wrap", "reflect": "reflect", "fill": "edge"}


@dataclass(frozen=True, init=False)
class Overlap:
    """An input mode of `synk.function`: scattered rows, of which each part sees some of its neighbours' too.

    The function returns as many rows as are its own: `out[before:-after]` of what it makes of all it sees. Neighbours
    are neighbours in the selection of the call. Rows on the host and broadcast ones are cut so, without communication.
    Of scattered data only neighbours are exchanged; so with a shared variable that holds rows, which may be passed.

    Args:
      before: how many rows before its own a part sees.
      after: how many after them; None for as many as before.
      edge: what lies beyond the ends of the selection, as in `np.pad`: "nearest" (the last row again), "cyclic" (the
        other end), "reflect" (mirrored about the last row), or "fill".
      fill: the value of rows there, with `edge="fill"`.

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
    """How many rows more than its own a part sees."""
    return 0 if overlap is None else overlap.before + overlap.after


@lru_cache(maxsize=16)
def with_neighbours(rows: int, overlap: Overlap) -> np.ndarray:
    """The numbers of so many rows, and of those that stand before the first and after the last; where filled, any."""
    numbers = np.pad(np.arange(rows), (overlap.before, overlap.after), _MODES[overlap.edge])
    numbers.flags.writeable = False
    return numbers


def widened(parts: PartRows, overlap: Overlap | None) -> PartRows:
    """The rows of a launch with their neighbours, of a selection that begins with those before the first."""
    more = halo_of(overlap)
    counts = tuple([count + more if count else 0 for count in parts.counts])
    return parts._replace(max_rows=parts.max_rows + more, counts=counts) if more else parts


def fill_beyond(rows: jax.Array, overlap: Overlap | None, first_row: Any, total: Any) -> jax.Array:
    """A part's rows, those beyond the selection's ends filled; its own first row has this number, of so many."""
    if overlap is None or overlap.edge != "fill":
        return rows
    number = first_row - overlap.before + jnp.arange(rows.shape[0], dtype=jnp.int32)
    is_there = ((number >= 0) & (number < total)).reshape(-1, *[1] * (rows.ndim - 1))
    return jnp.where(is_there, rows, exactly(overlap.fill, rows.dtype, "synk.Overlap: fill"))


class _Message(NamedTuple):
    """What each replica sends to the one so many ranks on: which of its rows, and where the receiver puts them."""

    shift: int
    rows: np.ndarray  # (replicas, rows of the longest message)
    places: np.ndarray  # the same; one beyond the last for what is no row


class _Halos(NamedTuple):
    """How the parts of so many rows get their neighbours."""

    lengths: np.ndarray  # rows of each replica
    messages: tuple[_Message, ...]


@lru_cache(maxsize=256)
def _halos(rows: int, size: int, overlap: Overlap) -> _Halos:
    parts, numbers, halo = split_rows(rows, size), with_neighbours(rows, overlap), halo_of(overlap)
    starts = np.array([part.start for part in parts])
    moves: dict[int, list[tuple[int, int, int, int]]] = {}  # shift -> (owner, its row, receiver, place)
    for rank, (start, count) in enumerate(parts):
        wanted = np.delete(numbers[start : start + count + halo], np.s_[overlap.before : overlap.before + count])
        for place, number in enumerate(wanted if count else ()):
            owner = int(np.searchsorted(starts + [part.rows for part in parts], number, side="right"))
            moves.setdefault((rank - owner) % size, []).append((owner, int(number - starts[owner]), rank, place))
    messages: list[_Message] = []
    for shift, each in sorted(moves.items()):
        sent = [[move for move in each if move[0] == owner] for owner in range(size)]
        width = max(map(len, sent))
        send, put = np.zeros((size, width), np.int32), np.full((size, width), halo, np.int32)
        for of_owner in sent:
            for i, (owner, row, receiver, place) in enumerate(of_owner):
                send[owner, i], put[receiver, i] = row, place
        messages.append(_Message(shift, send, put))
    return _Halos(np.array([part.rows for part in parts], np.int32), tuple(messages))


def with_halos(array: jax.Array, rows: int, size: int, overlap: Overlap) -> jax.Array:
    """A replica's rows, of so many on all replicas, between their neighbours: one permutation a distance that rows come
    from. Those after its own follow these at once, also where others have more rows."""
    halos, rank = _halos(rows, size, overlap), lax.axis_index(AXIS)
    found = jnp.zeros((halo_of(overlap) + 1, *array.shape[1:]), array.dtype)
    for shift, send, put in halos.messages:
        rows_sent = array.at[jnp.asarray(send)[rank]].get(mode="promise_in_bounds")
        pairs = [(owner, (owner + shift) % size) for owner in range(size)]
        received = lax.ppermute(rows_sent, AXIS, pairs) if shift else rows_sent
        found = found.at[jnp.asarray(put)[rank]].set(received)
    before, after = found[: overlap.before], found[overlap.before : -1]
    whole = jnp.concatenate([before, array, jnp.zeros_like(after)])
    at = overlap.before + jnp.asarray(halos.lengths)[rank]
    return lax.dynamic_update_slice_in_dim(whole, after, at, 0) if overlap.after else whole
