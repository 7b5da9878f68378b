"""Pytree: leaves of trees: typed PRNG keys and their raw data, dtypes, and tracers, which nothing may keep."""

from collections.abc import Collection, Generator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeAlias

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from .errors import SynkError, shown
from .jax_context import config

PyTree: TypeAlias = Any
SCALARS = (bool, int, float, complex)


def as_keys(data: Any, impl: Any) -> Any:
    return data if impl is None else jax.random.wrap_key_data(data, impl=impl)


def key_of(leaf: Any) -> Any:
    """Return the PRNG implementation of a typed key array, None for any other leaf."""
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) or not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return None
    if isinstance(leaf, jax.Array):
        return jax.random.key_impl(leaf)
    # A shape has no implementation to ask for, but a traced key of that shape has.
    implementations: list[Any] = []
    jax.eval_shape(lambda key: implementations.append(jax.random.key_impl(key)), leaf)
    return implementations[0]


def is_prng_key(leaf: Any) -> bool:
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
        return False
    # A raw threefry key is two uint32 words; nothing else tells it from other arrays.
    return (leaf.ndim == 0 and key_of(leaf) is not None) or (leaf.shape == (2,) and leaf.dtype == np.uint32)


def check_key(key: Any, call: str) -> None:
    """Raise TypeError for a number in place of a PRNG key: users pass seeds."""
    dtype = getattr(key, "dtype", None)
    if dtype is None or (np.ndim(key) == 0 and not jnp.issubdtype(dtype, jax.dtypes.prng_key)):
        raise TypeError(f"{call}: the key is {shown(key)}; give a PRNG key, such as jax.random.key(0).")


def as_data(leaf: Any) -> Any:
    """Return the raw data of a typed PRNG key array; return any other leaf as it is."""
    if key_of(leaf) is None:
        return leaf
    return jax.random.key_data(leaf) if isinstance(leaf, jax.Array) else jax.eval_shape(jax.random.key_data, leaf)


@lru_cache(maxsize=256)
def is_number(dtype: np.dtype) -> bool:
    # JAX has small floats of its own, most of NumPy's kind "V", and no C long double, whose kind is that of floats.
    no_numbers = (np.void, np.longdouble, np.clongdouble)
    return dtype.kind not in "OSUMm" and dtype.fields is None and dtype.type not in no_numbers


@lru_cache(maxsize=256)
def bits_of(dtype: Any) -> int:
    """Return how many bits a number of a dtype has, which may be fewer than a byte."""
    # finfo and iinfo know int4 and float4, whose NumPy item is a whole byte; no function of JAX's knows keys.
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return 8 * dtype.itemsize
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.finfo(dtype).bits
    return jnp.iinfo(dtype).bits if jnp.issubdtype(dtype, jnp.integer) else 8 * np.dtype(dtype).itemsize


def refuse_two_bits(leaf: Any, what: str) -> None:
    """Raise TypeError for numbers below half a byte."""
    # Collectives of int2 give wrong numbers in jaxlib 0.8 to 0.12. XLA widens dtypes below a byte on their way:
    # https://github.com/openxla/xla/pull/31525
    if isinstance(leaf.dtype, np.dtype) and bits_of(leaf.dtype) < 4:
        raise TypeError(f"{what} is {leaf.dtype.name}, of which XLA sends wrong numbers between devices. Use int4.")


def narrow(dtype: np.dtype) -> np.dtype:
    """Return the dtype that JAX uses instead: 32 bits for 64 unless those are enabled, in the machine's byte order."""
    # The option is an argument, since a cached answer for one setting is wrong under the other.
    return _narrow(dtype, config.jax_enable_x64)


@lru_cache(maxsize=256)
def _narrow(dtype: np.dtype, is_x64: bool) -> np.dtype:
    # JAX refuses arrays of the other byte order, as files of NumPy may hold.
    return jax.dtypes.canonicalize_dtype(dtype.newbyteorder("="))


def number_dtype(number: Any) -> np.dtype:
    # bool comes first in SCALARS, since it is a subclass of int.
    return narrow(np.dtype(next(kind for kind in SCALARS if isinstance(number, kind))))


@lru_cache(maxsize=256)
def most_of(have: np.dtype, dtype: np.dtype) -> int:
    """Return the largest number of a dtype to which a cast may wrap integers around, 0 for other casts."""
    may_wrap = have.kind in "iu" and dtype.kind in "iu" and not np.can_cast(have, dtype)
    return np.iinfo(dtype).max if may_wrap else 0


def fitting(numbers: Any, dtype: np.dtype) -> Any:
    """Return numbers that will be cast to a dtype. Raise OverflowError for integers that would wrap around."""
    if most := most_of(numbers.dtype, dtype):
        numbers = np.asarray(numbers)
        # A disjunction has every bit of its numbers, and takes one pass where the extremes take two.
        if numbers.size and not 0 <= np.bitwise_or.reduce(numbers, axis=None) <= most:
            # NumPy refuses Python integers that do not fit, and casts its own ones silently.
            np.array([int(numbers.min()), int(numbers.max())], dtype)
    return numbers


def too_large(what: str, error: OverflowError) -> ValueError:
    return ValueError(f"{what}: {error}. Give smaller numbers (e.g. ids % size), floats, or set jax_enable_x64.")


@contextmanager
def named(what: str) -> Generator[None]:
    """Name the argument or variable in an error of integers that do not fit."""
    try:
        yield
    except OverflowError as error:
        raise too_large(what, error) from None


def array_of_list(values: list[Any], what: str) -> np.ndarray:
    try:
        return np.asarray(values)
    except ValueError as error:
        raise ValueError(f"{what} is a list that makes no array: {error}") from None


def refuse_sparse(what: str, tree: PyTree, broadcast: Collection[Any] = ()) -> None:
    """Raise TypeError for a sparse array, unless all its leaves are in `broadcast`."""
    # JAX's sparse arrays are pytrees whose static part has the number of all rows, also where a replica has fewer. A
    # matrix whose leaves all stay whole is right.
    for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: hasattr(node, "todense")):
        if hasattr(node, "todense") and not all(leaf in broadcast for leaf in jax.tree.leaves(node)):
            raise TypeError(
                f"{what}{jax.tree_util.keystr(path)} is a {type(node).__name__}, a sparse array, whose parts are none. "
                f"Give arrays of its indices and values, padded to as many in each row, or its .todense()."
            )


def is_weak(leaf: Any) -> bool:
    """Check whether a leaf takes the dtype of its partner in arithmetic, as Python numbers do."""
    # np.float64 is a float too, but strong; bool has no weak type in JAX.
    if isinstance(leaf, SCALARS):
        return not isinstance(leaf, bool | np.generic)
    return getattr(leaf, "weak_type", False)


def to_jax(leaf: Any, what: str) -> jax.Array:
    """Return an array or a number as a `jax.Array`. Inside a transformation the result may be a tracer."""
    with named(what):
        # JAX narrows silently: integers of 64 bits are looked at first, so that none wraps around.
        if isinstance(leaf, (jax.Array, *SCALARS)):
            return narrowed(jnp.asarray(leaf))
        return jnp.asarray(np.asarray(fitting(leaf, narrow(leaf.dtype)), narrow(leaf.dtype)))


def narrowed(array: jax.Array) -> jax.Array:
    """Return an array without 64-bit numbers, unless they are enabled now."""
    # Typed PRNG keys have dtypes of their own.
    if not isinstance(array.dtype, np.dtype) or array.dtype == narrow(array.dtype):
        return array
    # Values of a tracer, or in other processes, cannot be looked at here.
    if not isinstance(array, jax.core.Tracer) and (array.is_fully_addressable or array.is_fully_replicated):
        fitting(array, narrow(array.dtype))
    return array.astype(narrow(array.dtype))


def abstract_array(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))


def first_change(before: PyTree, after: PyTree, what: str) -> tuple[str, str, str] | None:
    """Return (place, before, after) of the first difference in structure, shape or dtype; `what` names the tree."""
    trees = jax.tree.structure(before), jax.tree.structure(after)
    if trees[0] != trees[1]:
        return f"the tree of {what}", str(trees[0]), str(trees[1])
    for (path, old), new in zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True):
        was, now = (f"{leaf.dtype.name}{list(leaf.shape)}" for leaf in (old, new))
        if was != now:
            return what + jax.tree_util.keystr(path), was, now
    return None


def exactly(value: Any, dtype: np.dtype, what: str) -> np.ndarray:
    """Return a user's number in a dtype. Raise ValueError if that would change the number."""
    refuse_tracer(value, what)
    array = np.asarray(value)
    is_number = array.dtype.kind in "biufcV" and (array.dtype.kind != "c" or dtype.kind == "c")
    # Compared as float64: in the narrow dtype the given number would be cast too, and found equal to its rounded self.
    # Floats may round, integers may not.
    with np.errstate(all="ignore"):
        cast = array.astype(dtype) if is_number else array
    if not is_number or (dtype.kind in "biu" and not np.array_equal(cast.astype(np.float64), array.astype(np.float64))):
        raise ValueError(f"{what} is {value!r}, which is no {np.dtype(dtype).name}. Give a number of that dtype.")
    return cast


def refuse_tracer(leaf: Any, what: str) -> None:
    """Raise SynkError for a tracer: it would outlive its trace."""
    if isinstance(leaf, jax.core.Tracer):
        raise SynkError(
            f"{what} is a traced one of jit, grad, vmap or the like, which nothing can keep. Return it from there, "
            f"and use what comes back."
        )
