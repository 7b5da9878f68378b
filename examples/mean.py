"""A mean over rows that do not divide, on every device there is: prints `mean 4.5, serially 4.5`.

JAX_NUM_CPU_DEVICES=8 python examples/mean.py
"""

import jax.numpy as jnp
import numpy as np

import synk

ROWS = 10


@synk.function(reduce="mean")
def mean(x):
    return jnp.mean(x)


x = np.arange(ROWS, dtype=np.float32)
parallel, serial = float(mean(x)), float(mean.serial(x))
print(synk.group())  # 8 replicas: two of them had 2 rows, six had 1, and each row counts once
print(f"mean {parallel:.6g}, serially {serial:.6g}")
assert abs(parallel - serial) < 1e-6 and abs(serial - 4.5) < 1e-6
