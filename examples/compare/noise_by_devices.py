"""Random numbers on each device: by the usual key, the answer depends on how many devices there are.

    python examples/compare/noise_by_devices.py

Prints the mean of 12 noisy numbers on one device, on two and on four: by `jax.shard_map` with the device's number
folded into the key, with what the check of any program says of it, and by synk with a key for each row. `jax.jit` of
sharded rows draws as one device does.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import synk

x, key = np.arange(12, dtype=np.float32), jax.random.key(0)


def by_device(x, key):
    key = jax.random.fold_in(key, jax.lax.axis_index("i"))
    return jax.lax.pmean((x + jax.random.normal(key, x.shape)).mean(), "i")


def mapped_mean(devices):
    mesh = Mesh(np.array(devices), "i")
    each = jax.shard_map(by_device, mesh=mesh, in_specs=(P("i"), P()), out_specs=P(), check_vma=False)
    return jax.jit(each)(x, key)


def one_step():
    return mapped_mean(jax.devices())


@jax.jit
def whole(x, key):
    return (x + jax.random.normal(key, x.shape)).mean()


@synk.function(inputs=["x"], reduce="mean")
def by_row(x, key):
    noise = jax.vmap(lambda key: jax.random.normal(key))(synk.row_keys(key))
    return jnp.mean(x + noise)


if __name__ == "__main__":
    synk.init(4)
    alone = float(by_row.serial(x, key))
    mapped, jitted, found = [], [], []
    for devices in (1, 2, 4):
        mesh = Mesh(np.array(jax.devices()[:devices]), "i")
        mapped.append(float(mapped_mean(jax.devices()[:devices])))
        jitted.append(float(whole(jax.device_put(x, NamedSharding(mesh, P("i"))), key)))
        with synk.init(devices):
            found.append(float(by_row(x, key)))
    [cause] = synk.check_program(f"{__file__}:one_step", devices=[2, 3, 4]).wrong

    print(f"jax {jax.__version__}, shard_map on 1, 2, 4 devices: {mapped[0]:.4f} {mapped[1]:.4f} {mapped[2]:.4f}")
    print(f"the check of it: {cause.splitlines()[0]}")
    print(f"jax {jax.__version__}, jit: {jitted[0]:.4f} {jitted[1]:.4f} {jitted[2]:.4f}")
    print(f"synk: {found[0]:.4f} {found[1]:.4f} {found[2]:.4f}, and on one device alone {alone:.4f}")
    assert np.allclose(found, alone, atol=1e-6) and np.ptp(mapped) > 0.01
    assert cause.startswith("noise by shard")
