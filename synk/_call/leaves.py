"""Leaves: recognise each leaf of a call's arguments, tell its kind from its value, and bring broadcast ones to the
replicas."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.core
import numpy as np

from .._base.pytree import SCALARS, as_data, as_keys, is_number, is_weak, key_of, narrow, number_dtype
from .._data.dataset import Data, resident, source_of
from .._data.places import PLACES
from .._data.process_rows import ProcessLocalRows
from .._data.sources import as_source, is_in_memory
from .._data.staging import is_staged, send_copy
from .._runtime.group import Group
from .._runtime.layout import host_copy, put, replicate, takes
from .._variables.collectives import rows_held
from .._variables.variable import Shared
from .binding import KEEP_OUTSIDE, ArgumentSpec, BoundArguments, no_rows


class LeafSpec(NamedTuple):
    """Description of one leaf by all that programs and checks depend on: all but its values.

    Attributes:
      kind: "array" of JAX, "host" for arrays and files of rows on the host, "number", "data", "local" for rows of this
        process alone, or "shape" for one that stands for an array.
      shape: the shape; of PRNG keys that of the keys.
      dtype: the dtype; of typed PRNG keys their own.
      is_weak: whether it takes the dtype of its partner in arithmetic.
      key: the PRNG implementation of typed keys; None for other leaves.
      place: where the rows of data lie.
      is_minibatch: whether data brings the rows of the batch.
      is_in_memory: whether the rows of data are in the memory of the host.
      is_variable: whether it is the rows that a shared variable holds.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: Any
    is_weak: bool = False
    key: Any = None
    place: str = ""
    is_minibatch: bool = False
    is_in_memory: bool = False
    is_variable: bool = False

    @property
    def raw(self) -> jax.ShapeDtypeStruct:
        """Return shape and dtype of the leaf, of typed PRNG keys those of the raw data."""
        has_raw_data = self.key is None or isinstance(self.dtype, np.dtype)
        shape = jax.ShapeDtypeStruct(self.shape, self.dtype)
        return shape if has_raw_data else as_data(shape)


@lru_cache(maxsize=256)
def is_tracer_type(cls: type) -> bool:
    return issubclass(cls, jax.core.Tracer)


@lru_cache(maxsize=256)
def _is_array_type(cls: type) -> bool:
    """Check for a type of JAX's arrays, of which tracers are none."""
    return issubclass(cls, jax.Array) and not issubclass(cls, jax.core.Tracer)


def recognise_leaves(
    bound: BoundArguments, name: str, group: Group | None = None, is_abstract: bool = False
) -> tuple[Sequence[Any], list[Any]]:
    """Recognise each leaf that a user has passed by its kind, shape and dtype.

    Args:
      bound: the arguments.
      name: the function's name in messages.
      group: where shared variables live; None under a trace.
      is_abstract: whether shapes may stand for arrays.

    Returns:
      The leaves as arrays, numbers, files of rows, `Data` or rows of this process; and the part of each in the key of
      the kind of call, from which `spec_of_part` makes its `LeafSpec`.
    """
    # The commonest types come first, told by identity of the type: warm calls look at each leaf.
    leaves, parts = bound.leaves, list[Any]()
    for i, leaf in enumerate(leaves):
        cls = type(leaf)
        if cls is np.ndarray:
            parts.append((leaf.shape, leaf.dtype))
        elif cls is float or cls is int:
            parts.append(cls)
        elif _is_array_type(cls):
            dtype = leaf.dtype
            # JAX makes the aval of typed keys anew whenever it is asked for.
            parts.append(leaf.aval if isinstance(dtype, np.dtype) else (leaf.shape, dtype))
        elif cls is Data and leaf._spec_version == leaf._version:
            parts.append(leaf._spec)
        else:
            new, part = _recognise_leaf(leaf, i, bound, name, (group, is_abstract))
            parts.append(part)
            if new is not leaf:
                leaves = [*leaves[:i], new, *leaves[i + 1 :]]
    return leaves, parts


def spec_of_part(part: Any) -> LeafSpec:
    if isinstance(part, LeafSpec):
        return part
    # A Python number is known by its type alone, and False, 0 and 0.0 have the dtypes of all.
    if isinstance(part, type):
        return LeafSpec("number", (), number_dtype(part()), part is not bool)
    if isinstance(part, tuple):
        shape, dtype = part
        if isinstance(dtype, np.dtype):
            return LeafSpec("host", shape, dtype)
        return LeafSpec("array", shape, dtype, key=key_of(jax.ShapeDtypeStruct(shape, dtype)))
    # An aval of JAX.
    return LeafSpec("array", part.shape, part.dtype, part.weak_type)


def _recognise_leaf(
    leaf: Any, i: int, bound: BoundArguments, name: str, where: tuple[Group | None, bool]
) -> tuple[Any, Any]:
    """Recognise a leaf that is neither a plain array nor a plain number."""
    (group, is_abstract), spec, what = where, bound.spec, f"{name}: argument {bound.spec.names[i]}"
    is_scattered = i in spec.scattered
    if isinstance(leaf, Shared) and is_scattered and spec.overlaps[spec.scattered.index(i)] and group is not None:
        rows = rows_held(leaf, group, what)
        return rows, spec_of_data(rows)._replace(is_variable=True)
    if isinstance(leaf, jax.Array) or (isinstance(leaf, jax.ShapeDtypeStruct) and is_abstract):
        kind = "array" if isinstance(leaf, jax.Array) else "shape"
        return leaf, LeafSpec(kind, leaf.shape, leaf.dtype, is_weak(leaf), key_of(leaf))
    if isinstance(leaf, Data):
        return leaf, spec_of_data(leaf)
    if isinstance(leaf, ProcessLocalRows):
        if not is_scattered:
            raise TypeError(f"{what} is synk.local rows, but it is broadcast.")
        return leaf, LeafSpec("local", leaf.shape, leaf.dtype)
    if isinstance(leaf, np.generic) and is_number(leaf.dtype):
        return leaf, LeafSpec("number", (), leaf.dtype)
    if isinstance(leaf, SCALARS):
        return leaf, LeafSpec("number", (), number_dtype(leaf), is_weak(leaf))
    source = _as_source(leaf, what)
    if isinstance(source, jax.Array):
        return source, source.aval
    return source, LeafSpec("host", tuple(source.shape), source.dtype)


def spec_of_data(data: Data) -> LeafSpec:
    """Return the spec of data. Raise SynkError if it was freed."""
    version = data._version
    in_memory = is_in_memory(source_of(data))
    spec = LeafSpec("data", data.shape, data.dtype, False, data._key, data._place, data.is_minibatch, in_memory)
    # Kept until something is written: each warm call asks.
    data._spec, data._spec_version = spec, version
    return spec


def _as_source(leaf: Any, what: str) -> Any:
    if isinstance(leaf, Shared):
        raise TypeError(
            f"{what} is the shared variable {leaf.name}; read {leaf.name}.value inside the function instead, or pass "
            f"each variable as an argument of its own, outside lists, trees and *args."
        )
    if isinstance(leaf, Mapping):
        raise TypeError(f"{what} is a {type(leaf).__name__}, whose items JAX does not see: pass dict(...) of it.")
    return as_source(leaf, what, f'give arrays and numbers, or pass it as "static"; {KEEP_OUTSIDE}')


def check_leaves(spec: ArgumentSpec, specs: Sequence[LeafSpec], name: str) -> None:
    """Check what can be told without values: that leaves hold numbers, and scattered PRNG keys have rows."""
    for i, leaf in enumerate(specs):
        if isinstance(leaf.dtype, np.dtype) and not is_number(leaf.dtype):
            # `_as_source` raises: an empty array of the dtype has the message of a real one.
            _as_source(np.empty(0, leaf.dtype), f"{name}: argument {spec.names[i]}")
        if i in spec.scattered and leaf.key is not None and leaf.kind == "array" and not leaf.shape:
            raise no_rows(name, spec.names[i])


# Broadcast arguments.


def broadcast_aval(leaf: LeafSpec) -> tuple[tuple[int, ...], Any, bool]:
    # Programs take typed keys as they are. `Data` holds the raw data of keys.
    is_plain = isinstance(leaf.dtype, np.dtype)
    return leaf.shape, narrow(leaf.dtype) if is_plain else leaf.dtype, leaf.is_weak


def keys_of_data(spec: ArgumentSpec, specs: Sequence[LeafSpec]) -> tuple[Any, ...]:
    """Return the PRNG implementation of each leaf of which programs take raw data, None for others."""
    # Rows of keys come from the host like other rows, and `Data` holds raw data.
    return tuple(
        [leaf.key if i in spec.scattered or isinstance(leaf.dtype, np.dtype) else None for i, leaf in enumerate(specs)]
    )


# Takes the group and a leaf, and returns what programs take.
Placer = Callable[[Group, Any], Any]


def placer_of(leaf: LeafSpec, group: Group, is_used_once: bool, is_abstract: bool, is_at_home: bool) -> Placer:
    """Return the function that brings a broadcast argument to every replica or, if nothing runs, returns its shape.

    Args:
      leaf: the argument.
      group: the replicas.
      is_used_once: whether one program takes it.
      is_abstract: whether the call does not run.
      is_at_home: whether data of the call lies on the devices of this group.
    """
    if is_abstract:
        shape, dtype, is_weak = broadcast_aval(leaf)
        struct = jax.ShapeDtypeStruct(shape, dtype, weak_type=is_weak)
        return lambda group, leaf: struct
    if leaf.kind == "data":
        # Copies of the data may be there already.
        is_there = PLACES[leaf.place].layout == "replicated" and is_at_home
        return _resident if is_there else _replicate_data
    # An array that a program can take as it lies costs no copy; `_spread` asks in each call.
    if leaf.kind == "array":
        return _spread if leaf.dtype == broadcast_aval(leaf)[1] else _replicate
    if leaf.kind == "host" and not group._is_multi_process and is_staged(group, leaf.shape, narrow(leaf.dtype)):
        return _stage
    # The compiled call itself brings a host value to one device in a third of the time.
    if is_used_once and group._has_one_device:
        return _copy
    return _place_number if leaf.kind == "number" else _replicate


def stack_leaves(group: Group, leaves: Sequence[Any], most: int) -> Any:
    """Bring the values of a broadcast argument for several calls to every replica: an entry a call, and fillers."""
    key, values = key_of(leaves[0]), [host_copy(as_data(leaf)) for leaf in leaves]
    # Fillers keep one shape for fewer calls, so that a loop's last round needs no other program.
    whole = np.stack(values + values[-1:] * (most - len(values)))
    if key is None and group._has_one_device:
        return whole
    placed = put(group, whole, "replicated")
    return placed if key is None else as_keys(placed, key)


def _resident(group: Group, leaf: Any) -> jax.Array:
    # One replica of all devices takes the copies that the replicas have.
    return resident(leaf, group._home)


def _replicate_data(group: Group, leaf: Any) -> jax.Array:
    return replicate(group, leaf[:])


def _replicate(group: Group, leaf: Any) -> jax.Array:
    key = key_of(leaf)
    # Keys cannot be made of NumPy arrays, by which several processes place an array.
    return replicate(group, leaf) if key is None else as_keys(replicate(group, as_data(leaf)), key)


def _spread(group: Group, leaf: jax.Array) -> jax.Array:
    return leaf if takes(group, leaf, "replicated") else _replicate(group, leaf)


def _copy(group: Group, leaf: Any) -> np.ndarray:
    # A copy, since JAX may read the host's memory after the call returns, and the user may write there.
    return host_copy(leaf)


def _stage(group: Group, leaf: Any) -> jax.Array:
    staged = send_copy(group, leaf, narrow(leaf.dtype))
    return _replicate(group, leaf) if staged is None else staged


def _place_number(group: Group, leaf: Any) -> jax.Array:
    # A number that stays the same, such as a learning rate, is placed once. Its bits are the key: they tell -0.0 from
    # 0.0, and NaN equals itself.
    number = host_copy(leaf)
    key = number.dtype, number.tobytes()
    return group._cached(_place_number, key, lambda: put(group, number, "replicated"))
