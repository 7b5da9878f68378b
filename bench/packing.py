"""Packing: up to which size leaves should share one buffer in an all-reduce.

    python bench/packing.py [--replicas 2,4] [--sizes 4,16,32,64,128] [--rounds 40] [--json OUT]

Claim: on CPU devices 64 leaves of up to 64 KB are combined sooner packed than one by one; of 128 KB no longer.
"""

import argparse
from statistics import median
from time import perf_counter

import jax
import numpy as np
from record import about, cpu_devices, heading, save

import synk
from synk._reductions import collectives
from synk._variables.access import bind

LEAVES = 64


def make(size, limit):
    """A function that takes the mean of as many leaves, packed up to `limit` bytes, and keeps it."""
    collectives.PACK_BYTES = limit
    w = synk.shared([np.zeros(size // 4, np.float32)] * LEAVES)
    f = synk.function(lambda x: [leaf + x[0] for leaf in w.value], reduce="mean")
    f.then(lambda means: setattr(w, "value", means))
    x = np.zeros(synk.size(), np.float32)

    def step():
        f(x)
        jax.block_until_ready(bind(w, synk.group()).leaves)

    step()  # compiles, under this limit
    return step


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", default="2,4")
    parser.add_argument("--sizes", default="4,16,32,64,128", help="KB")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json")
    options = parser.parse_args()
    counts, sizes = ([int(n) for n in text.split(",")] for text in (options.replicas, options.sizes))
    cpu_devices(max(counts))
    found = about("packing") | {"leaves": LEAVES, "rounds": options.rounds, "results": []}
    print(f"{heading(found)}; medians of {options.rounds}, us")
    for replicas in counts:
        with synk.init(replicas):
            for size in sizes:
                ways = {"alone": make(size * 1024, 0), "packed": make(size * 1024, 1 << 30)}
                times = {name: [] for name in ways}
                for _ in range(options.rounds):
                    for name, step in ways.items():
                        start = perf_counter()
                        step()
                        times[name].append(perf_counter() - start)
                alone, packed = (1e6 * median(times[name]) for name in ("alone", "packed"))
                print(f"{replicas} replicas, {size:3} KB: alone {alone:.0f}, packed {packed:.0f}, {packed / alone:.2f}")
                found["results"].append({"replicas": replicas, "KB": size, "alone us": alone, "packed us": packed})
    save(options.json, found)


if __name__ == "__main__":
    main()
