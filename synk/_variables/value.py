"""Value: the tree of a shared variable, how its leaves are stored, and checks of new values."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import keystr, tree_flatten_with_path

from .._base.pytree import (
    SCALARS,
    PyTree,
    abstract_array,
    as_data,
    as_keys,
    bits_of,
    fitting,
    is_number,
    key_of,
    named,
    narrow,
    narrowed,
    number_dtype,
    refuse_tracer,
    refuse_two_bits,
)
from .._runtime.layout import is_everywhere
from .._tracing.context import current_trace
from .storage import Buffers, Packed, Shapes, Shards, Storage, storage_of

# The most bytes of a leaf that shares an array with others, or stays whole where others lie in shards. A program takes
# about 4 us on a GPU for each array, and copies so few bytes in less.
SMALL = 1 << 16
# The most leaves that share an array. XLA's CPU compiler makes a kernel for each place in an array from which a leaf is
# cut, and the same kernels serve arrays of one shape: with more leaves in an array, programs compile for longer. There
# leaves of one node of the tree share arrays, of any shape: those of each layer then lie at the same places. Elsewhere
# leaves of one shape do, of any node.
LEAVES_A_BUFFER = 16


@dataclass(frozen=True, eq=False)
class ValueSpec:
    """The tree of a value, and how its *logical* leaves, which the user sees, are *stored*.

    Attributes:
      paths: of the logical leaves, as messages write them.
      keys: the PRNG implementation of each logical leaf; None for plain arrays.
      storage: how the logical leaves are stored.
    """

    treedef: Any
    paths: tuple[str, ...]
    keys: tuple[Any, ...]
    storage: Storage

    @property
    def shapes(self) -> Shapes:
        """Return the shapes of the first logical leaves, typed keys as raw data. Rows may change axis 0."""
        return self.storage.shapes

    def tree(self, stored: Sequence[Any]) -> PyTree:
        """Rebuild the user's tree from stored leaves: split packed buffers, and make typed keys of raw key data."""
        return self.treedef.unflatten(map(as_keys, self.storage.unpack(*stored), self.keys))


def spec_of_value(value: PyTree, name: str, borrow: bool, sharded: bool) -> tuple[ValueSpec, list[Any]]:
    """Return the spec of a first value, and its logical leaves: copies unless `borrow` allows to share memory.

    `sharded` tells whether large leaves lie in shards. Else small ones may share arrays.
    """
    leaves, treedef = tree_flatten_with_path(value)
    paths = tuple(keystr(path) for path, _ in leaves)
    arrays: list[Any] = []
    for path, (_, leaf) in zip(paths, leaves, strict=True):
        refuse_tracer(leaf, f"{name}{path}: its value")
        is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
        with named(f"{name}{path}"):
            arrays.append(leaf if is_shape else as_array(leaf, f"{name}{path}"))
    # One shape among the leaves makes the variable one of shapes alone, for programs that are compiled and not run.
    is_abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in arrays)
    data = [abstract_array(as_data(leaf)) if is_abstract else as_data(leaf) for leaf in arrays]
    shapes = tuple(abstract_array(leaf) for leaf in data)
    nodes, alike = _buffers(shapes, [path[:-1] for path, _ in leaves]), _buffers(shapes, [s.shape for s in shapes])
    # The number of arrays tells both ways apart, so there is one where both have as many.
    buffers = nodes, nodes if len(nodes) == len(alike) else alike
    storage = storage_of(Storage, shapes)
    if sharded:
        storage = storage_of(Shards, shapes, *buffers, tuple(s.size * s.dtype.itemsize > SMALL for s in shapes))
    # Leaves are concatenated on the host, which cannot read arrays of other processes.
    elif all(map(_is_readable, data)) and min(map(len, buffers)) < len(shapes):
        storage = storage_of(Packed, shapes, *buffers)
    # Arrays of JAX are copied in any case: programs overwrite those that a variable has.
    copied = [i for i, leaf in enumerate(data) if isinstance(leaf, jax.Array) or not (borrow or is_abstract)]
    for i, copy in zip(copied, copies_of([data[i] for i in copied]), strict=True):
        data[i] = copy
    return ValueSpec(treedef, paths, tuple(map(key_of, arrays)), storage), data


def _buffers(shapes: Sequence[jax.ShapeDtypeStruct], marks: Sequence[Any]) -> Buffers:
    """Choose which leaves share an array: small ones of one dtype and one mark, a node of the tree or a shape."""
    alike: dict[Any, list[int]] = {}
    for i, (shape, mark) in enumerate(zip(shapes, marks, strict=True)):
        # XLA packs numbers below a byte in ways of its own.
        is_small = 0 < shape.size * shape.dtype.itemsize <= SMALL and bits_of(shape.dtype) >= 8
        alike.setdefault((shape.dtype, mark) if is_small else i, []).append(i)
    groups = [some[at : at + LEAVES_A_BUFFER] for some in alike.values() for at in range(0, len(some), LEAVES_A_BUFFER)]
    return tuple(map(tuple, groups))


def _is_readable(leaf: Any) -> bool:
    # An array that lies on devices of other processes too cannot be brought to this host alone.
    return not isinstance(leaf, jax.Array) or is_everywhere(leaf)


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
    # Inside a function a new value is a tracer of that trace, which is right.
    if current_trace() is None:
        refuse_tracer(leaf, f"{call}: the new value of {name}")
    with named(f"{call}: the new value of {name}"):
        # A Python number takes the old dtype, as it does in arithmetic; an int may become a float, a float no int.
        if isinstance(leaf, SCALARS) and _kind(np.asarray(leaf).dtype) <= _kind(like.dtype):
            leaf = np.asarray(leaf, like.dtype)
        leaf = as_array(leaf, name)
    if key_of(leaf) != key:
        is_key = "is no PRNG key" if key_of(leaf) is None else f"is a PRNG key of {key_of(leaf)}"
        was_key = "is none" if key is None else f"one of {key}"
        raise TypeError(f"{call}: the new value of {name} {is_key}, but its old one {was_key}.")
    leaf = as_data(leaf)
    if leaf.shape[any_rows:] != like.shape[any_rows:] or leaf.ndim != len(like.shape):
        raise ValueError(
            f"{call}: the new value of {name} has shape {leaf.shape}, but its old one has {like.shape}. "
            f"A new value keeps tree, shapes and dtypes."
        )
    have, is_weak = leaf.dtype, getattr(leaf, "weak_type", False)
    if have != like.dtype and not (is_weak and _kind(have) <= _kind(like.dtype)):
        is_there = narrow(like.dtype) == like.dtype
        remedy = f"Convert it, e.g. with new.astype({like.dtype.name!r})" if is_there else "Turn jax_enable_x64 on"
        if jnp.issubdtype(have, jnp.floating) and jnp.issubdtype(like.dtype, jnp.integer):
            remedy = f"Make {name} of floats: synk.shared(0.0), not 0. {remedy}, only where fractions may be lost"
        raise TypeError(
            f"{call}: the new value of {name} has dtype {have.name}, but its old one has {like.dtype.name}. {remedy}."
        )
    return lax.convert_element_type(leaf, like.dtype) if is_weak else leaf


def as_array(leaf: Any, name: str) -> Any:
    """Return a leaf as an array, in the same memory if it is one already; TypeError if it cannot be one."""
    if isinstance(leaf, jax.Array | np.ndarray):
        refuse_two_bits(leaf, name)
    if isinstance(leaf, jax.Array):
        return narrowed(leaf)
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError(f"{name}: this leaf is a masked array, whose mask would be lost; give .filled(...).")
    if isinstance(leaf, str | bytes) or not (np.isscalar(leaf) or hasattr(leaf, "__array__")):
        raise TypeError(
            f"{name}: a shared variable holds arrays, but this leaf is a {type(leaf).__name__}. "
            f"Keep it outside, e.g. with equinox.partition(model, equinox.is_array)."
        )
    array = np.asarray(leaf, number_dtype(leaf) if isinstance(leaf, SCALARS) else None)
    if not is_number(array.dtype):
        raise TypeError(f"{name}: a shared variable holds numbers that JAX has, but this leaf has dtype {array.dtype}.")
    return fitting(array, narrow(array.dtype)).astype(narrow(array.dtype), copy=False)


def copies_of(arrays: Sequence[Any]) -> list[Any]:
    """Copy arrays: those of NumPy and small ones in host memory, all others that lie alike by one program."""
    is_large = [isinstance(a, jax.Array) and (a.nbytes > SMALL or not is_everywhere(a)) for a in arrays]
    copies: list[Any] = [array if large else np.array(array) for array, large in zip(arrays, is_large, strict=True)]
    alike: dict[Any, list[int]] = {}
    for i in compress(range(len(copies)), is_large):
        alike.setdefault(copies[i].sharding, []).append(i)
    # In a trace around this line the program would give tracers.
    with jax.ensure_compile_time_eval():
        # One program takes arrays of one sharding alone; one for all of these costs one launch.
        for numbers in alike.values():
            for i, copy in zip(numbers, _copied([copies[i] for i in numbers]), strict=True):
                copies[i] = copy
    return copies


@jax.jit
def _copied(arrays: list[jax.Array]) -> list[jax.Array]:
    # Without jnp.copy, jit returns the argument's own buffer.
    return [*map(jnp.copy, arrays)]


def _kind(dtype: np.dtype) -> int:
    """Return the place of a dtype in bool, int, float, complex. A Python number fits its own place and higher ones."""
    kinds = (np.bool_, np.integer, np.floating, np.complexfloating)
    return next((i for i, kind in enumerate(kinds) if jnp.issubdtype(dtype, kind)), 0)
