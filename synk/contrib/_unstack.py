"""Unstack: one value of a state that is stacked, with an equal entry for each device, as programs of pmap keep it."""

from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from .._base.errors import public_api


@public_api
def unstack(tree: Any, *, check: bool = True) -> Any:
    """Return one value of a stacked state of `jax.pmap`: entry 0 of each leaf, read from its first shard here.

    Args:
      tree: a pytree of arrays with an entry a device on axis 0, all of one length; typed PRNG keys too.
      check: whether to compare the entries, which brings those on this machine to the host one by one.

    Returns:
      The same tree without axis 0, of arrays of JAX; take it to `synk.shared`, or use it as it is.

    Raises:
      ValueError: a leaf has no axis 0, or another length than the first; or its entries differ in some bit.

    Example:
      >>> import jax.numpy as jnp, synk.contrib
      >>> state = {"w": jnp.zeros((4, 3)), "step": jnp.full(4, 7)}
      >>> synk.contrib.unstack(state)["step"].item()
      7
    """
    leaves, treedef = tree_flatten_with_path(tree)
    lengths = {keystr(path): len(leaf) if np.ndim(leaf) else None for path, leaf in leaves}
    for name, length in lengths.items():
        first = next(iter(lengths.values()))
        if length in (None, 0) or length != first:
            has = (
                "no axis 0"
                if length is None
                else f"{length} entries on axis 0, {next(iter(lengths)) or 'the first'} {first}"
            )
            raise ValueError(
                f"synk.contrib.unstack: leaf{name} has {has}. A stacked state has one entry a device in every leaf."
            )
    return treedef.unflatten([_entry(keystr(path), leaf, check) for path, leaf in leaves])


def _entry(name: str, leaf: Any, check: bool) -> jax.Array:
    """Return the first entry of a leaf; compare it with the others if asked to."""
    key = None
    if isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        key, leaf = jax.random.key_impl(leaf), jax.random.key_data(leaf)
    # By shard: indexing a leaf that lies over processes is refused, and gathering it would need the memory of all
    # entries.
    shards = [shard.data for shard in leaf.addressable_shards] if isinstance(leaf, jax.Array) else [leaf]
    first = np.asarray(shards[0])[0]
    if check:
        for shard in shards:
            if any(entry.tobytes() != first.tobytes() for entry in np.asarray(shard)):
                raise ValueError(
                    f"synk.contrib.unstack: entries of leaf{name} differ, so it is no value that all devices share. "
                    'Keep it as rows: pass it as a scattered argument, or to synk.data(..., place="scatter").'
                )
    # A copy: JAX would share the memory of the view, and keep the whole stacked leaf.
    entry = jax.numpy.asarray(np.array(first))
    return entry if key is None else jax.random.wrap_key_data(entry, impl=key)
