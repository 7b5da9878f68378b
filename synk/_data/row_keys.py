"""Row keys: one PRNG key a row, so that noise does not depend on who runs the row."""

import jax

from .._base.errors import public_api


@public_api
def row_keys(key: jax.Array, rows: int) -> jax.Array:
    """Give every row a key of its own: noise per row is then the same for any replicas and slices.

    Scatter the keys beside the rows and draw with `jax.vmap`. A single key that is broadcast gives every replica the
    *same* noise. `jax.random.fold_in(key, synk.rank())` gives each replica its own, but repeats over slices;
    `synk.part_key(key)` gives each part its own. Both depend on how many replicas there are.

    Args:
      key: a typed key (`jax.random.key`) or a raw one (`jax.random.PRNGKey`).
      rows: how many, >= 1.

    Returns:
      Keys, of shape (rows,) for a typed key, (rows, 2) for a raw one: row i has `jax.random.fold_in(key, i)`, for any
      number of rows.

    Raises:
      ValueError: `rows` is below 1.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np, synk
      >>> @synk.function(reduce="concat")
      ... def noisy(x, keys):
      ...     return x + jax.vmap(jax.random.normal)(keys)
      >>> x, keys = np.zeros(7, np.float32), synk.row_keys(jax.random.key(0), 7)
      >>> bool(jnp.all(noisy(x, keys, num_slices=2) == noisy.serial(x, keys)))
      True
    """
    if rows < 1:
        raise ValueError(f"synk.row_keys: {rows} rows were asked for; give at least 1.")
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jax.numpy.arange(rows, dtype=jax.numpy.uint32))
