"""Value: the tree of a shared variable, how its leaves are stored, and the check that a new value keeps both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import keystr, tree_flatten_with_path

from .._base.pytree import PyTree, abstract_array, as_data, as_keys, key_of, narrow, refuse_tracer
from .._tracing.context import current_trace


class Slot(NamedTuple):
    """Where a leaf is stored in buffers: which one, and from where."""

    buffer: int
    start: int
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class ValueSpec:
    """The tree of a value, and how its *logical* leaves, which the user sees, are *stored*.

    Attributes:
      treedef: the user's tree.
      paths: of the logical leaves, as messages write them.
      keys: the PRNG implementation of each, None for plain arrays.
      shapes: of each, raw key data where it is a typed key; of what holds rows axis 0 may change.
      slots: where each is stored in one buffer a dtype; None where leaves are stored as they are.
    """

    treedef: Any
    paths: tuple[str, ...]
    keys: tuple[Any, ...]
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    slots: tuple[Slot, ...] | None = None

    def pack(self, leaves: Sequence[Any]) -> list[Any]:
        """Stored leaves from logical ones."""
        if self.slots is None:
            return list(leaves)
        is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
        numpy: Any = jnp if is_traced else np
        parts: dict[int, list[Any]] = {}
        for slot, leaf in sorted(zip(self.slots, leaves, strict=True), key=lambda pair: pair[0].buffer):
            parts.setdefault(slot.buffer, []).append(numpy.asarray(leaf).reshape(-1))
        return [numpy.concatenate(each) for each in parts.values()]

    def unpack(self, stored: Sequence[Any]) -> list[Any]:
        """Logical leaves from stored ones, which may have axes in front."""
        return list(stored) if self.slots is None else unpacker(self.slots)(*stored)

    def tree(self, stored: Sequence[Any]) -> PyTree:
        """Stored leaves as the user's tree, raw key data as keys."""
        return self.treedef.unflatten(map(as_keys, self.unpack(stored), self.keys))


@lru_cache(maxsize=256)
def unpacker(slots: tuple[Slot, ...]) -> Callable[..., list[Any]]:
    """What cuts leaves from buffers; both may have axes in front."""

    def unpack(*buffers: Any) -> list[Any]:
        leaves: list[Any] = []
        for at, start, shape in slots:
            buffer, stop = buffers[at], start + prod(shape)
            is_host = isinstance(buffer, np.ndarray)
            part = buffer[..., start:stop] if is_host else lax.slice_in_dim(buffer, start, stop, axis=-1)
            leaves.append(part.reshape((*buffer.shape[:-1], *shape)))
        return leaves

    return unpack


def spec_of_value(value: PyTree, name: str, borrow: bool, is_flat: bool) -> tuple[ValueSpec, list[Any]]:
    """The spec of a first value, and its stored leaves, which are synk's own unless borrowed."""
    leaves, treedef = tree_flatten_with_path(value)
    paths = tuple(keystr(path) for path, _ in leaves)
    for path, (_, leaf) in zip(paths, leaves, strict=True):
        refuse_tracer(leaf, f"{name}{path}: its value")
    # What is flat is copied into its buffers anyway.
    owned = [
        as_owned_array(leaf, f"{name}{path}", borrow or is_flat) for path, (_, leaf) in zip(paths, leaves, strict=True)
    ]
    data = [as_data(leaf) for leaf in owned]
    shapes = tuple(abstract_array(leaf) for leaf in data)
    spec = ValueSpec(treedef, paths, tuple(map(key_of, owned)), shapes, _slots(shapes) if is_flat else None)
    if is_flat:
        data = [np.asarray(leaf).astype(shape.dtype, copy=False) for leaf, shape in zip(data, shapes, strict=True)]
    return spec, spec.pack(data)


def _slots(shapes: Sequence[jax.ShapeDtypeStruct]) -> tuple[Slot, ...]:
    """One buffer a dtype, in the order in which dtypes come."""
    dtypes = list(dict.fromkeys(shape.dtype for shape in shapes))
    ends = [0 for _ in dtypes]
    slots: list[Slot] = []
    for shape in shapes:
        at = dtypes.index(shape.dtype)
        slots.append(Slot(at, ends[at], shape.shape))
        ends[at] += prod(shape.shape)
    return tuple(slots)


def conform(
    spec: ValueSpec, new: PyTree, shapes: Sequence[jax.ShapeDtypeStruct], name: str, call: str, any_rows: bool = False
) -> list[Any]:
    """Check a new value against the logical `shapes` of the old one; return its logical leaves, keys as raw data."""
    leaves, treedef = tree_flatten_with_path(new)
    if treedef != spec.treedef:
        raise ValueError(
            f"{call}: the new value of {name} has the tree {treedef}, but {name} has {spec.treedef}. "
            f"A new value keeps tree, shapes and dtypes."
        )
    return [
        _conform_leaf(leaf, shape, key, f"{name}{path}", call, any_rows)
        for (_, leaf), shape, key, path in zip(leaves, shapes, spec.keys, spec.paths, strict=True)
    ]


def _conform_leaf(leaf: Any, like: jax.ShapeDtypeStruct, key: Any, name: str, call: str, any_rows: bool) -> Any:
    if isinstance(leaf, bool | int | float | complex) and _fits(np.asarray(leaf).dtype, like.dtype):
        leaf = np.asarray(leaf, like.dtype)
    if current_trace() is None:
        refuse_tracer(leaf, f"{call}: the new value of {name}")
    if not isinstance(leaf, jax.Array):
        leaf = as_owned_array(leaf, name, borrow=True)
    if key_of(leaf) != key:
        is_key = "is no PRNG key" if key_of(leaf) is None else "is a typed PRNG key"
        was_key = "is none" if key is None else "is a typed PRNG key"
        raise TypeError(f"{call}: the new value of {name} {is_key}, but its old one {was_key}.")
    leaf = as_data(leaf)
    start = 1 if any_rows else 0
    if leaf.shape[start:] != like.shape[start:] or leaf.ndim != len(like.shape):
        raise ValueError(
            f"{call}: the new value of {name} has shape {leaf.shape}, but its old one has {like.shape}. "
            f"A new value keeps tree, shapes and dtypes."
        )
    have = jax.dtypes.canonicalize_dtype(leaf.dtype)
    if have != like.dtype and not (getattr(leaf, "weak_type", False) and _fits(have, like.dtype)):
        raise TypeError(
            f"{call}: the new value of {name} has dtype {have.name}, but its old one has {like.dtype.name}. "
            f"Convert it, e.g. with new.astype({like.dtype.name!r})."
        )
    if isinstance(leaf, jax.Array) and (have != like.dtype or leaf.weak_type):
        return lax.convert_element_type(leaf, like.dtype)
    return leaf


def as_owned_array(leaf: Any, name: str, borrow: bool) -> Any:
    """A leaf as an array of synk's own; TypeError where it is none."""
    if isinstance(leaf, jax.Array):
        if borrow or isinstance(leaf, jax.core.Tracer):
            return leaf
        if key_of(leaf) is not None:
            return as_keys(jnp.array(as_data(leaf), copy=True), key_of(leaf))
        return jnp.array(leaf, copy=True)
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError(f"{name}: this leaf is a masked array, whose mask would be lost; give .filled(...).")
    if isinstance(leaf, str | bytes) or not (np.isscalar(leaf) or hasattr(leaf, "__array__")):
        raise TypeError(
            f"{name}: a shared variable holds arrays, but this leaf is a {type(leaf).__name__}. "
            f"Keep it outside, e.g. with equinox.partition(model, equinox.is_array)."
        )
    array = np.asarray(leaf) if borrow else np.array(leaf)
    if array.dtype.kind in "OSUMm":
        raise TypeError(f"{name}: a shared variable holds numbers, but this leaf has dtype {array.dtype}.")
    wanted = narrow(array.dtype)
    return array if array.dtype == wanted else array.astype(wanted)


def _fits(number: np.dtype, dtype: np.dtype) -> bool:
    """May a Python number of this dtype take the other, as in jnp: bool, int, float, complex?"""
    kinds = (np.bool_, np.integer, np.floating, np.complexfloating)
    return max(jnp.issubdtype(dtype, kind) * i for i, kind in enumerate(kinds)) >= max(
        jnp.issubdtype(number, kind) * i for i, kind in enumerate(kinds)
    )
