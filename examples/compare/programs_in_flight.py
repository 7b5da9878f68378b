"""A loop that does not wait: below jaxlib 0.12, 33 programs over several CPU devices can stop for good.

    python examples/compare/programs_in_flight.py

Starts 200 small programs over four CPU devices without waiting for any, by `jax.jit(jax.shard_map)` and by synk, each
in a process of its own that is ended after 15 seconds.
"""

import subprocess
import sys

import jax

PLAIN = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
jax.config.update("jax_num_cpu_devices", 4)
mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
f = jax.jit(jax.shard_map(lambda x: jax.lax.psum(jnp.sin(x @ x).sum(), "i"), mesh=mesh, in_specs=P("i"), out_specs=P()))
x = np.ones((400, 100), np.float32)
print(sum([float(y) for y in [f(x) for _ in range(200)]]) != 0)
"""
SYNK = """
import jax.numpy as jnp, numpy as np, synk
synk.init(4)
f = synk.function(lambda x: jnp.sin(x @ x).sum())
x = np.ones((400, 100), np.float32)
print(sum([float(y) for y in [f(x) for _ in range(200)]]) != 0)
"""


def ends(program):
    try:
        done = subprocess.run([sys.executable, "-c", program], timeout=15, capture_output=True, text=True, check=True)
    except subprocess.TimeoutExpired:
        return "stands still"
    return "ends" if done.stdout.strip() == "True" else done.stdout


print(f"jax {jax.__version__}, shard_map: {ends(PLAIN)}")
found = ends(SYNK)
print(f"synk: {found}")
assert found == "ends"
