"""Flat: a shared variable that keeps one buffer a dtype behind its tree; and `synk.shared`, which makes both kinds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import keystr

from . import _leaves
from ._engine import lie, once
from ._errors import entry
from ._group import PyTree
from ._leaves import own, refuse_traced, struct
from ._shared import Shared, new_name
from ._trace import Value, as_data, as_keys, key_of


class Slot(NamedTuple):
    """Where a leaf lies: in which buffer, and from where."""

    buffer: int
    start: int
    shape: tuple[int, ...]


class Flat(Shared):
    """A shared variable whose leaves are cut from one buffer a dtype."""

    def __init__(self, value: PyTree, name: str | None) -> None:
        name = name or new_name()
        leaves, treedef = jax.tree_util.tree_flatten_with_path(value)
        self._seen_paths = tuple(keystr(path) for path, _ in leaves)
        for path, leaf in leaves:
            refuse_traced(leaf, f"{name}{keystr(path)}: its value")
        held = [own(leaf, f"{name}{keystr(path)}", True) for path, leaf in leaves]
        data = [as_data(leaf) for leaf in held]
        shapes = tuple(struct(leaf) for leaf in data)
        self._seen = Value(treedef, shapes, tuple(map(key_of, held)))
        dtypes = list(dict.fromkeys(shape.dtype for shape in shapes))
        ends = [0 for _ in dtypes]
        slots: list[Slot] = []
        for shape in shapes:
            at = dtypes.index(shape.dtype)
            slots.append(Slot(at, ends[at], shape.shape))
            ends[at] += prod(shape.shape)
        self.slots, self._buffers = tuple(slots), len(dtypes)
        host = [np.asarray(leaf).astype(shape.dtype, copy=False) for leaf, shape in zip(data, shapes, strict=True)]
        names = [dtype.name for dtype in dtypes]
        super().__init__(dict(zip(names, self._joined(host, np), strict=True)), name, borrow=True)
        # Sorted by the dictionary: where each buffer has gone.
        order = sorted(range(len(names)), key=names.__getitem__)
        self.slots = tuple(slot._replace(buffer=order.index(slot.buffer)) for slot in slots)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}; flat, {len(self.slots)} leaves)"

    @property
    def seen(self) -> Value:
        """What the user sees of its value: tree, shapes and keys."""
        return self._seen

    @property
    def seen_paths(self) -> tuple[str, ...]:
        """Of the leaves that the user sees."""
        return self._seen_paths

    def seen_leaves(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves that the user sees, keys as raw data, from the buffers; both may have axes in front."""
        cut = cutter(self.slots)
        if all(isinstance(leaf, np.ndarray | jax.core.Tracer) for leaf in leaves):
            return cut(*leaves)
        ins, outs = lie("everywhere", len(leaves)), lie("everywhere", len(self.slots))
        return once(self.home, cut, ins, outs, leaves)

    def kept_leaves(self, leaves: Sequence[Any]) -> list[Any]:
        """The reverse, without axes in front."""
        is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
        return self._joined(leaves, jnp) if is_traced else self._joined([np.asarray(leaf) for leaf in leaves], np)

    def conform(self, new: PyTree, like: Value, call: str, any_rows: bool = False) -> list[Any]:
        """Check a new value's tree, shapes and dtypes; return its buffers."""
        paths, treedef = jax.tree_util.tree_flatten_with_path(new)
        if treedef != self._seen.treedef:
            raise ValueError(
                f"{call}: the new value of {self.name} has the tree {treedef}, but {self.name} has "
                f"{self._seen.treedef}. A new value keeps tree, shapes and dtypes."
            )
        leaves = [
            _leaves.conform(leaf, shape, key, f"{self.name}{path}", call, True)
            for (_, leaf), shape, key, path in zip(
                paths, self._seen.shapes, self._seen.keys, self._seen_paths, strict=True
            )
        ]
        return self.kept_leaves(leaves)

    def unflatten(self, leaves: Sequence[Any]) -> PyTree:
        """Buffers as the user's tree, raw key data as keys."""
        return self._seen.treedef.unflatten(map(as_keys, self.seen_leaves(leaves), self._seen.keys))

    def rows_of(self, rank: int) -> int | None:
        """None: it has no rows."""
        return None

    def _joined(self, leaves: Sequence[Any], numpy: Any) -> list[Any]:
        parts: list[list[Any]] = [[] for _ in range(self._buffers)]
        for slot, leaf in zip(self.slots, leaves, strict=True):
            parts[slot.buffer].append(leaf.reshape(-1))
        return [numpy.concatenate(each) for each in parts]


@lru_cache(maxsize=256)
def cutter(slots: tuple[Slot, ...]) -> Callable[..., list[Any]]:
    """What cuts leaves from buffers; both may have axes in front."""

    def cut(*buffers: Any) -> list[Any]:
        leaves: list[Any] = []
        for at, start, shape in slots:
            buffer, stop = buffers[at], start + prod(shape)
            is_host = isinstance(buffer, np.ndarray)
            part = buffer[..., start:stop] if is_host else lax.slice_in_dim(buffer, start, stop, axis=-1)
            leaves.append(part.reshape((*buffer.shape[:-1], *shape)))
        return leaves

    return cut


@entry
def shared(value: PyTree, name: str | None = None, *, borrow: bool = False, flat: bool = False) -> Shared:
    """Make a shared variable: every replica starts with a copy of `value` and keeps its own between calls.

    It is placed on the group of its first use; making one starts no device.

    Args:
      value: a pytree of arrays and numbers, per replica; float64 narrows as JAX does.
      name: what messages call it.
      borrow: whether memory may be shared with `value` where that saves a copy.
      flat: whether to keep one buffer a dtype behind the tree: a call then takes and returns as many arrays, where it
        took one a leaf (a few microseconds each). Reading and assigning `value` cuts and joins them inside the
        program, which then takes longer to compile. It cannot hold rows.

    Returns:
      The variable.

    Raises:
      TypeError: a leaf is no array.

    Example:
      >>> import jax.numpy as jnp, numpy as np, synk
      >>> w = synk.shared(np.float32(1.0), name="w")
      >>> @synk.function(reduce="mean")
      ... def step(x):
      ...     return jnp.mean(x * w.value)
      >>> @step.then
      ... def step(slope):
      ...     w.value = w.value - 0.1 * slope
      >>> step(np.array([1.0, 2.0, 3.0], np.float32))
      >>> round(float(w.value), 3)
      0.8
    """
    return Flat(value, name) if flat else Shared(value, name, borrow)
