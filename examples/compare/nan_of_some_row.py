"""A row that makes NaN: JAX says in which operation, and not of which row.

    python examples/compare/nan_of_some_row.py

Prints what `jax_debug_nans` says of 1,000 numbers, of which one is negative and has no logarithm, and what synk says.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import synk

group = synk.init(4)
x = np.random.default_rng(0).uniform(1, 2, 1000).astype(np.float32)
x[617] = -1
with np.errstate(invalid="ignore"):
    print(f"NumPy: row {np.flatnonzero(np.isnan(np.log(x)))[0]}")


def mean_log(x):
    return jnp.mean(jnp.log(x))


mapped = jax.shard_map(
    lambda x: jax.lax.pmean(mean_log(x), "replica"), mesh=group.mesh, in_specs=P("replica"), out_specs=P()
)
try:
    with jax.debug_nans(True):
        jax.jit(mapped)(x)
except FloatingPointError as error:
    said = str(error).splitlines()[0]
    print(f"jax {jax.__version__}, jax_debug_nans: {said}")
    assert "617" not in said

blame = synk.function(mean_log, reduce="mean").blame(x)
print(f"synk: {str(blame).splitlines()[0]}")
assert "617" in str(blame)
