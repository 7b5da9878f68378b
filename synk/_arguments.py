"""Arguments: what users pass to a function, as arrays in their places; checked before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from . import _engine
from ._bind import Layout
from ._group import Group
from ._shared import Shared
from ._trace import as_data, key_of, settings

SCALARS = (bool, int, float, complex)


def arrays(name: str, layout: Layout, leaves: Sequence[Any], places: Sequence[int]) -> tuple[list[Any], list[Any]]:
    """Leaves as arrays, typed PRNG keys as raw data; and what kind of keys they were."""
    arrays, keys = [], []
    for place in places:
        leaf, key = leaves[place], None
        if isinstance(leaf, jax.Array):
            if not isinstance(leaf.dtype, np.dtype):
                key, leaf = key_of(leaf), as_data(leaf)
        elif type(leaf) is not np.ndarray:
            leaf = _as_array(leaf, f"{name}: argument {layout.names[place]}")
        if type(leaf) is np.ndarray and (leaf.dtype.kind in "OSUMm" or leaf.dtype.names):
            raise TypeError(f"{name}: argument {layout.names[place]} has dtype {leaf.dtype}; give numbers or booleans.")
        if type(leaf) is np.ndarray and not leaf.dtype.isnative:
            leaf = leaf.astype(leaf.dtype.newbyteorder("="))
        arrays.append(leaf)
        keys.append(key)
    return arrays, keys


def _as_array(leaf: Any, what: str) -> Any:
    if isinstance(leaf, SCALARS):
        return leaf
    if isinstance(leaf, Shared):
        raise TypeError(
            f"{what} is the shared variable {leaf.name}; read {leaf.name}.value inside the function instead."
        )
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError(f"{what} is a masked array, whose mask would be lost; give .filled(...).")
    if isinstance(leaf, str | bytes) or not (hasattr(leaf, "__array__") or isinstance(leaf, np.generic)):
        raise TypeError(f'{what} is a {type(leaf).__name__}; give arrays, numbers, or pass it as "static".')
    return np.asarray(leaf)


def common_rows(function: str, sources: Sequence[Any], layout: Layout) -> int | None:
    """How many rows the scattered arguments have, all the same; None where there are none."""
    rows: int | None = None
    first = ""
    for place, source in zip(layout.scattered, sources, strict=True):
        name = layout.names[place]
        if isinstance(source, SCALARS) or source.ndim == 0:
            raise ValueError(
                f'{function}: argument {name} is a scalar and has no rows to scatter. Pass it as "broadcast": '
                f'inputs={{"{name.split("[")[0].split(".")[0]}": "broadcast"}}.'
            )
        if rows is None:
            rows, first = source.shape[0], name
        elif source.shape[0] != rows:
            raise ValueError(
                f"{function}: argument {name} has {source.shape[0]} rows, but {first} has {rows}. Scattered ones "
                f'share their rows; pass this one as "broadcast" if it has none to share.'
            )
    if rows == 0:
        raise ValueError(f"{function}: argument {first} has 0 rows; a call needs at least one.")
    return rows


class Scalars:
    """Python numbers on every replica, each placed once: a learning rate that stays costs nothing."""

    def __init__(self) -> None:
        self._placed: dict[Any, jax.Array] = {}

    def everywhere(self, group: Group, leaf: Any) -> jax.Array:
        """Bring a broadcast argument to every replica."""
        if not isinstance(leaf, SCALARS):
            return _engine.everywhere(group, leaf)
        key = (group, settings(), type(leaf), leaf, str(leaf))  # the text tells -0.0 from 0.0, and finds NaN again
        if key not in self._placed:
            if len(self._placed) > 256:
                self._placed.clear()
            self._placed[key] = jax.device_put(jax.numpy.asarray(leaf), group.everywhere)
        return self._placed[key]


def check_slices(num_slices: Any, name: str) -> None:
    """`num_slices` is an integer >= 1."""
    if isinstance(num_slices, bool) or not isinstance(num_slices, int | np.integer):
        raise TypeError(f"{name}: num_slices is {num_slices!r}; give an integer >= 1.")
    if num_slices < 1:
        raise ValueError(f"{name}: num_slices is {num_slices}; give an integer >= 1.")


def check_batches(name: str, has_input: bool, batch: Any, batch_s: Any) -> None:
    """What picks rows finds rows to pick from."""
    if batch_s is not None:
        raise ValueError(
            f"{name}: batch_s picks rows that live on the replicas, but none of its inputs do. Use batch for rows in "
            f"host memory."
        )
    if batch is not None and not has_input:
        raise ValueError(f"{name}: batch picks rows of scattered inputs, but this call has none.")


def checked_subset(subset: Any, name: str) -> tuple[Any, ...]:
    """`output_subset` is a list of indexes or keys."""
    if isinstance(subset, str) or not isinstance(subset, Sequence):
        raise TypeError(f"{name}: output_subset is {subset!r}; give a list of indexes or keys.")
    if not all(isinstance(each, int | str) for each in subset):
        raise TypeError(f"{name}: output_subset holds {subset!r}; give indexes or keys alone.")
    return tuple(subset)
