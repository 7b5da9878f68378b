"""Feed: how the rows of a scattered argument reach a replica's program: sent there, or picked from what lies there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
from jax import lax

from ._engine import Lies


class Feed(NamedTuple):
    """How one argument's rows come.

    Attributes:
      lies: how its array lies.
      how: "given" where that holds the very rows; else the array is resident and a second one says which: the first of
        consecutive rows ("window"), or the index of each ("take"), an entry a replica.
      size: rows of the resident array that a replica sees.
    """

    lies: Lies = "rows"
    how: Literal["given", "window", "take"] = "given"
    size: int = 0

    @property
    def ins(self) -> list[Lies]:
        """How its arrays lie."""
        return [self.lies] if self.how == "given" else [self.lies, "stacked"]


def fed(
    feeds: Sequence[Feed], values: Sequence[jax.Array], rows: int | None
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Each argument's rows on this replica, from the arrays of all of them; and what follows these."""
    rest = list(values)
    found: list[jax.Array] = []
    for feed in feeds:
        array = rest.pop(0)
        found.append(array if feed.how == "given" else rows_of(array, rest.pop(0), feed.how, rows or 0))
    return found, rest


def rows_of(array: jax.Array, pick: jax.Array, how: str, rows: int) -> jax.Array:
    """Rows of a resident array. What picks them was checked; it is data, so that other rows need no other program."""
    if how == "take":
        return array.at[pick].get(mode="promise_in_bounds")
    return array if array.shape[0] == rows else lax.dynamic_slice_in_dim(array, pick, rows)
