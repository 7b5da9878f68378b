"""Leaves: what users give as the leaves of a shared variable, as arrays of one's own."""

from __future__ import annotations

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from . import _trace
from ._errors import SynkError
from ._sources import narrow
from ._trace import as_data, as_keys, key_of


def own(leaf: Any, name: str, borrow: bool) -> Any:
    """A leaf as an array of one's own; TypeError where it is none."""
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


def conform(leaf: Any, like: jax.ShapeDtypeStruct, key: Any, name: str, call: str, rows: bool | None) -> Any:
    """Check a shared variable's new leaf against its old one; of any rows, unless `rows` are kept. Keys as raw data."""
    if isinstance(leaf, bool | int | float | complex) and _fits(np.asarray(leaf).dtype, like.dtype):
        leaf = np.asarray(leaf, like.dtype)
    if _trace.frame() is None:
        refuse_traced(leaf, f"{call}: the new value of {name}")
    if not isinstance(leaf, jax.Array):
        leaf = own(leaf, name, borrow=True)
    if key_of(leaf) != key:
        raise TypeError(f"{call}: the new value of {name} {_is_key(leaf)}, but its old one {_was_key(key)}.")
    leaf = as_data(leaf)
    same = leaf.shape == like.shape if rows else leaf.shape[1:] == like.shape[1:] and leaf.ndim == len(like.shape)
    if not same:
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
        return jax.lax.convert_element_type(leaf, like.dtype)
    return leaf


def _fits(number: np.dtype, dtype: np.dtype) -> bool:
    """May a Python number of this dtype take the other, as in jnp: bool, int, float, complex?"""
    kinds = (np.bool_, np.integer, np.floating, np.complexfloating)
    return max(jnp.issubdtype(dtype, kind) * i for i, kind in enumerate(kinds)) >= max(
        jnp.issubdtype(number, kind) * i for i, kind in enumerate(kinds)
    )


def refuse_traced(leaf: Any, what: str) -> None:
    if isinstance(leaf, jax.core.Tracer):
        raise SynkError(
            f"{what} is a traced one of jit, grad, vmap or the like, which nothing can keep. Return it from there, "
            f"and use what comes back."
        )


def struct(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a leaf as JAX will have it."""
    return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))


def _is_key(leaf: Any) -> str:
    return "is no PRNG key" if key_of(leaf) is None else "is a typed PRNG key"


def _was_key(key: Any) -> str:
    return "is none" if key is None else "is a typed PRNG key"
