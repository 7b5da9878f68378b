"""Arguments: what users pass to a function, as arrays in their places; checked before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from . import _engine
from ._bind import Layout
from ._data import Data
from ._group import Group
from ._local import Local
from ._shared import Shared
from ._sources import Source, as_source
from ._trace import as_data, key_of, settings

SCALARS = (bool, int, float, complex)


def arrays(name: str, layout: Layout, leaves: Sequence[Any], places: Sequence[int]) -> tuple[list[Any], list[Any]]:
    """Leaves as arrays or `Data`, typed PRNG keys as raw data; and what kind of keys they were."""
    arrays, keys = [], []
    for place in places:
        leaf, key = leaves[place], None
        if isinstance(leaf, jax.Array):
            if not isinstance(leaf.dtype, np.dtype):
                key, leaf = key_of(leaf), as_data(leaf)
        elif isinstance(leaf, Data):
            key = leaf.key
        elif isinstance(leaf, Local):
            if place in layout.broadcast:
                raise TypeError(f"{name}: argument {layout.names[place]} is synk.local rows, but it is broadcast.")
        elif not isinstance(leaf, SCALARS):
            leaf = _as_array(leaf, f"{name}: argument {layout.names[place]}")
        arrays.append(leaf)
        keys.append(key)
    return arrays, keys


def _as_array(leaf: Any, what: str) -> Source:
    if isinstance(leaf, Shared):
        raise TypeError(
            f"{what} is the shared variable {leaf.name}; read {leaf.name}.value inside the function instead."
        )
    return as_source(leaf, what, 'give arrays, numbers, or pass it as "static"')


class Scalars:
    """Python numbers on every replica, each placed once: a learning rate that stays costs nothing."""

    def __init__(self) -> None:
        self._placed: dict[Any, jax.Array] = {}

    def everywhere(self, group: Group, leaf: Any, home: Group | None) -> jax.Array:
        """Bring a broadcast argument to every replica; data is there already, unless another group is its home."""
        if isinstance(leaf, Data):
            is_there = leaf.place == "broadcast" and home is None
            return leaf.resident(group) if is_there else _engine.everywhere(group, leaf[:])
        if not isinstance(leaf, SCALARS):
            return _engine.everywhere(group, leaf)
        placed = self.placed(group, leaf)
        if placed is None:
            if len(self._placed) > 256:
                self._placed.clear()
            placed = self._placed[_key(group, leaf)] = _engine.sent(group, jax.numpy.asarray(leaf), "everywhere")
        return placed

    def placed(self, group: Group, leaf: Any) -> jax.Array | None:
        """A number that is on every replica already."""
        return self._placed.get(_key(group, leaf))


def _key(group: Group, leaf: Any) -> Any:
    return group, settings(), type(leaf), leaf, str(leaf)  # the text tells -0.0 from 0.0, and finds NaN again


def check_slices(num_slices: Any, name: str) -> None:
    """`num_slices` is an integer >= 1."""
    if isinstance(num_slices, bool) or not isinstance(num_slices, int | np.integer):
        raise TypeError(f"{name}: num_slices is {num_slices!r}; give an integer >= 1.")
    if num_slices < 1:
        raise ValueError(f"{name}: num_slices is {num_slices}; give an integer >= 1.")


def checked_subset(subset: Any, name: str) -> tuple[Any, ...]:
    """`output_subset` is a list of indexes or keys."""
    if isinstance(subset, str) or not isinstance(subset, Sequence):
        raise TypeError(f"{name}: output_subset is {subset!r}; give a list of indexes or keys.")
    if not all(isinstance(each, int | str) for each in subset):
        raise TypeError(f"{name}: output_subset holds {subset!r}; give indexes or keys alone.")
    return tuple(subset)
