"""Packing: up to which size leaves should share one buffer in an all-reduce.

    python bench/packing.py

Claim: on CPU devices 64 leaves of up to 64 KB are combined sooner packed than one by one; of 128 KB no longer.
"""

import os
from statistics import median
from time import perf_counter

import jax
import numpy as np

import synk
from synk import _ops

REPLICAS, LEAVES, ROUNDS = (2, 4), 64, 40
SIZES = [4, 16, 32, 64, 128]  # KB


def make(size, limit):
    """A function that takes the mean of as many leaves, packed up to `limit` bytes, and keeps it."""
    _ops.PACK_BYTES = limit
    w = synk.shared([np.zeros(size // 4, np.float32)] * LEAVES)
    f = synk.function(lambda x: [leaf + x[0] for leaf in w.value], reduce="mean")
    f.then(lambda means: setattr(w, "value", means))
    x = np.zeros(synk.size(), np.float32)

    def step():
        f(x)
        jax.block_until_ready(w.bind(synk.group()))

    step()  # compiles, under this limit
    return step


def main():
    if os.environ.get("JAX_PLATFORMS", "cpu") == "cpu":
        jax.config.update("jax_num_cpu_devices", max(REPLICAS))
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {os.cpu_count()} cores; medians of {ROUNDS}, us")
    for replicas in REPLICAS:
        with synk.init(replicas):
            for size in SIZES:
                ways = {"alone": make(size * 1024, 0), "packed": make(size * 1024, 1 << 30)}
                times = {name: [] for name in ways}
                for _ in range(ROUNDS):
                    for name, step in ways.items():
                        start = perf_counter()
                        step()
                        times[name].append(perf_counter() - start)
                alone, packed = (1e6 * median(times[name]) for name in ("alone", "packed"))
                print(f"{replicas} replicas, {size:3} KB: alone {alone:.0f}, packed {packed:.0f}, {packed / alone:.2f}")


if __name__ == "__main__":
    main()
