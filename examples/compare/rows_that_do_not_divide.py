"""Rows that do not divide by the devices: `jax.shard_map` refuses them, and padding gives another mean.

    python examples/compare/rows_that_do_not_divide.py

Prints the mean of ten numbers by NumPy, by JAX on four devices, with and without the usual padding, and by synk.
"""

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import synk

group = synk.init(4)
x = np.arange(10, dtype=np.float32)
print(f"NumPy: {np.mean(x)}")


@jax.jit
@jax.shard_map(mesh=group.mesh, in_specs=P("replica"), out_specs=P(), check_vma=False)
def mapped(x):
    return jax.lax.pmean(x.mean(), "replica")


try:
    print(f"jax {jax.__version__}, shard_map: {mapped(x)}")
except ValueError as error:
    print(f"jax {jax.__version__}, shard_map: refuses ({str(error).splitlines()[0][:60]}...)")
padded = float(mapped(np.pad(x, (0, 2))))
print(f"jax {jax.__version__}, shard_map of rows padded with zeros: {padded}")

found = float(synk.function(lambda x: x.mean(), reduce="mean")(x))
print(f"synk: {found}")
assert found == np.mean(x) != padded
