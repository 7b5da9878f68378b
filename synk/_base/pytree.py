"""Pytree: leaves as JAX has them: typed PRNG keys and raw data, dtypes, tracers that nothing may keep."""

from functools import cache, lru_cache
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
    """Raw data as a typed PRNG key array, where `impl` names an implementation."""
    return data if impl is None else jax.random.wrap_key_data(data, impl=impl)


def key_of(leaf: Any) -> Any:
    """The PRNG implementation of a typed key array, None of anything else."""
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) or not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return None
    if isinstance(leaf, jax.Array):
        return jax.random.key_impl(leaf)
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), leaf)
    return found[0]


def is_prng_key(leaf: Any) -> bool:
    """Is it one PRNG key of JAX's, typed or raw?"""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
        return False
    return (leaf.ndim == 0 and key_of(leaf) is not None) or (leaf.shape == (2,) and leaf.dtype == np.uint32)


def check_key(key: Any, call: str) -> None:
    """TypeError for a number, as a seed is one."""
    dtype = getattr(key, "dtype", None)
    if dtype is None or (np.ndim(key) == 0 and not jnp.issubdtype(dtype, jax.dtypes.prng_key)):
        raise TypeError(f"{call}: the key is {shown(key)}; give a PRNG key, such as jax.random.key(0).")


def as_data(leaf: Any) -> Any:
    """A typed PRNG key array as raw data; anything else as it is."""
    if key_of(leaf) is None:
        return leaf
    return jax.random.key_data(leaf) if isinstance(leaf, jax.Array) else jax.eval_shape(jax.random.key_data, leaf)


@lru_cache(maxsize=256)
def is_number(dtype: np.dtype) -> bool:
    """Is it of numbers or booleans that JAX has? Its own small floats are among them, C's long double is not."""
    no_numbers = (np.void, np.longdouble, np.clongdouble)
    return dtype.kind not in "OSUMm" and dtype.fields is None and dtype.type not in no_numbers


@lru_cache(maxsize=256)
def bits_of(dtype: Any) -> int:
    """Return how many bits a number of a dtype has, which may be fewer than a byte."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.finfo(dtype).bits
    return jnp.iinfo(dtype).bits if jnp.issubdtype(dtype, jnp.integer) else 8 * np.dtype(dtype).itemsize


def refuse_two_bits(leaf: Any, what: str) -> None:
    """TypeError for numbers of less than half a byte, which XLA's collectives mix up (int2, jaxlib 0.8 to 0.12)."""
    if isinstance(leaf.dtype, np.dtype) and bits_of(leaf.dtype) < 4:
        raise TypeError(f"{what} is {leaf.dtype.name}, of which XLA sends wrong numbers between devices. Use int4.")


def narrow(dtype: np.dtype) -> np.dtype:
    """As JAX has it: 64 bits as 32 unless they are enabled, in the machine's order."""
    return _narrow(dtype, config.jax_enable_x64)


@lru_cache(maxsize=256)
def _narrow(dtype: np.dtype, is_x64: bool) -> np.dtype:
    return jax.dtypes.canonicalize_dtype(dtype.newbyteorder("="))


def number_dtype(number: Any) -> np.dtype:
    """The dtype that JAX gives a number of Python's."""
    kind = next(kind for kind in SCALARS if isinstance(number, kind))
    return _number_dtype(kind, config.jax_enable_x64)


@cache
def _number_dtype(kind: type, is_x64: bool) -> np.dtype:
    return jnp.asarray(kind()).dtype


def check_fits(number: int, what: str) -> None:
    """OverflowError where JAX's integers have no such number."""
    dtype = number_dtype(number)
    if dtype.kind == "i" and not np.iinfo(dtype).min <= number <= np.iinfo(dtype).max:
        raise OverflowError(f"{what} is {number}, which is no {dtype.name}. Give a float, or set jax_enable_x64.")


def array_of_list(values: list[Any], what: str) -> np.ndarray:
    """An array of a list of numbers; ValueError where it makes none, OverflowError where JAX has no such integers."""
    try:
        found = np.asarray(values)
    except ValueError as error:
        raise ValueError(f"{what} is a list that makes no array: {error}") from None
    if found.dtype.kind in "iu" and found.size and narrow(found.dtype) != found.dtype:
        for number in (found.min(), found.max()):
            check_fits(int(number), f"{what}: an entry")
    return found


def is_weak(leaf: Any) -> bool:
    """Does it take the dtype of what it meets, as Python's numbers do, and what JAX has made of them?"""
    if isinstance(leaf, SCALARS):
        return not isinstance(leaf, bool | np.generic)
    return getattr(leaf, "weak_type", False)


def to_jax(leaf: Any) -> jax.Array:
    """An array or a number as JAX's array, whatever its byte order; within a transformation, a part of it."""
    if isinstance(leaf, (jax.Array, *SCALARS)):
        return narrowed(jnp.asarray(leaf))
    return jnp.asarray(np.asarray(leaf, narrow(leaf.dtype)))


def narrowed(array: jax.Array) -> jax.Array:
    """The same without 64 bits that are switched off by now."""
    is_plain = isinstance(array.dtype, np.dtype)  # and no PRNG key
    return array.astype(narrow(array.dtype)) if is_plain and array.dtype != narrow(array.dtype) else array


def abstract_array(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a leaf as JAX will have it."""
    return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))


def first_change(before: PyTree, after: PyTree, what: str) -> tuple[str, str, str] | None:
    """Where two trees of arrays differ first, by which shape and dtype, or what trees: (where, was, is)."""
    trees = jax.tree.structure(before), jax.tree.structure(after)
    if trees[0] != trees[1]:
        return f"the tree of {what}", str(trees[0]), str(trees[1])
    for (path, old), new in zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True):
        was, now = (f"{leaf.dtype.name}{list(leaf.shape)}" for leaf in (old, new))
        if was != now:
            return what + jax.tree_util.keystr(path), was, now
    return None


def exactly(value: Any, dtype: np.dtype, what: str) -> np.ndarray:
    """A number of the user's as one of this dtype; ValueError where it would become another."""
    refuse_tracer(value, what)
    found = np.asarray(value)
    is_number = found.dtype.kind in "biufcV" and (found.dtype.kind != "c" or dtype.kind == "c")
    with np.errstate(all="ignore"):
        cast = found.astype(dtype) if is_number else found
    if not is_number or (dtype.kind in "biu" and not np.array_equal(cast.astype(np.float64), found.astype(np.float64))):
        raise ValueError(f"{what} is {value!r}, which is no {np.dtype(dtype).name}. Give a number of that dtype.")
    return cast


def refuse_tracer(leaf: Any, what: str) -> None:
    """SynkError where a value is traced: whoever keeps it would have it after its trace has ended."""
    if isinstance(leaf, jax.core.Tracer):
        raise SynkError(
            f"{what} is a traced one of jit, grad, vmap or the like, which nothing can keep. Return it from there, "
            f"and use what comes back."
        )
