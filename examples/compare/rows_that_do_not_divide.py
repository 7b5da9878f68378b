"""Rows that do not divide by the devices: `jax.shard_map` refuses them, and padding gives another mean.

    python examples/compare/rows_that_do_not_divide.py

Prints the mean of ten numbers by NumPy, by JAX on four devices, with and without the usual padding, what the check of
any program says of the padding, and the mean by synk.
"""

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import synk


def mapped(mesh):
    mean = jax.shard_map(
        lambda x: jax.lax.pmean(x.mean(), "replica"),
        mesh=mesh,
        in_specs=P("replica"),
        out_specs=P(),
        check_vma=False,
    )
    return jax.jit(mean)


def padded_mean(rows, mesh=None):
    mesh = mesh or Mesh(np.array(jax.devices()), "replica")
    return mapped(mesh)(np.pad(np.arange(rows, dtype=np.float32), (0, -rows % mesh.size)))


if __name__ == "__main__":
    group = synk.init(4)
    x = np.arange(10, dtype=np.float32)
    print(f"NumPy: {np.mean(x)}")
    try:
        print(f"jax {jax.__version__}, shard_map: {mapped(group.mesh)(x)}")
    except ValueError as error:
        print(f"jax {jax.__version__}, shard_map: refuses ({str(error).splitlines()[0][:60]}...)")
    padded = float(padded_mean(10, group.mesh))
    print(f"jax {jax.__version__}, shard_map of rows padded with zeros: {padded}")
    [cause] = synk.check_program(f"{__file__}:padded_mean").wrong
    print(f"the check of it: {cause.splitlines()[0]}")

    found = float(synk.function(lambda x: x.mean(), reduce="mean")(x))
    print(f"synk: {found}")
    assert found == np.mean(x) != padded
    assert cause.startswith("only where rows do not divide: rows of zeros")
