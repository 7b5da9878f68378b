"""Row keys: one PRNG key a row, so that noise does not depend on the replica that runs a row."""

from typing import Any

import jax
import jax.numpy as jnp

from .._base.errors import checked_integer, public_api
from .._base.jax_context import config
from .._base.pytree import check_key, key_of
from .._tracing.context import current_trace, own_row_numbers


@public_api
def row_keys(key: jax.Array, rows: int | None = None) -> jax.Array:
    """Give every row a key of its own: noise per row is then the same for any replicas and slices.

    Inside a function, `row_keys(key)` of a broadcast key gives those of the part's rows. Outside, `row_keys(key, rows)`
    gives those of so many, to scatter beside the rows; they stay with their rows where `batch` picks some. Draw with
    `jax.vmap`. Inside a function of one row (`synk.map`) `row_keys(key)` is that row's one key, to draw with as it is.
    A single key that is broadcast gives every replica the *same* noise.
    `jax.random.fold_in(key, synk.rank())` gives each replica its own, but repeats over slices; `synk.part_key(key)`
    gives each part its own. Both depend on how many replicas there are.

    Args:
      key: a typed key (`jax.random.key`) or a raw one (`jax.random.PRNGKey`).
      rows: how many, >= 1; inside a function left out, where the rows are those of the part.

    Returns:
      Keys, of shape (rows,) for a typed key, (rows, 2) for a raw one: row i has `jax.random.fold_in(key, i)`, for any
      number of rows. Inside `synk.map` a key of the shape of `key`.

    Raises:
      ValueError: `rows` is below 1, or given on a replica, where the rows of each would have the same keys again; or
        the key is one of JAX's "rbg" or "unsafe_rbg", whose draws under `jax.vmap` depend on the other rows.
      TypeError: `rows` is no number.
      SynkError: `rows` is left out where there are none.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np, synk
      >>> @synk.function(inputs=["x"], reduce="concat")
      ... def noisy(x, key):
      ...     return x + jax.vmap(jax.random.normal)(synk.row_keys(key))
      >>> x, key = np.zeros(7, np.float32), jax.random.key(0)
      >>> with synk.simulate(3):
      ...     noise = noisy(x, key, num_slices=2)
      >>> bool(jnp.all(noise == jax.vmap(jax.random.normal)(synk.row_keys(key, 7))))
      True
    """
    check_key(key, "synk.row_keys")
    refuse_rbg(str(key_of(key) or config.jax_default_prng_impl), "synk.row_keys")
    numbers = own_row_numbers("row_keys") if rows is None else jnp.arange(_checked(rows))
    fold_in = jax.vmap(jax.random.fold_in, (None, 0)) if numbers.ndim else jax.random.fold_in
    # fold_in takes unsigned numbers of 32 bits.
    return fold_in(key, numbers.astype(jnp.uint32))


def _checked(rows: Any) -> int:
    """Check a number of rows. Raise ValueError inside a function, where all replicas would get the same keys."""
    trace = current_trace()
    if trace is not None and trace.size and trace.rows is not None:
        raise ValueError(
            f"{trace.name}: synk.row_keys(key, {rows}) gives the rows of every replica the same keys. Leave the number "
            f"out here: synk.row_keys(key) gives each row its own."
        )
    return checked_integer(rows, "synk.row_keys: rows", 1, "give how many, at least 1, such as len(x)")


def refuse_rbg(generator: str, call: str) -> None:
    """Raise ValueError for generators whose draws under `jax.vmap` depend on the other keys."""
    # See the table of generators in https://docs.jax.dev/en/latest/jax.random.html.
    if generator in ("rbg", "unsafe_rbg"):
        raise ValueError(
            f"{call}: what an {generator} key draws under jax.vmap depends on the other rows, and so on replicas and "
            f'slices. Give one of jax.random.key(seed, impl="threefry2x32").'
        )
