"""Collectives: shared variables across replicas, by synk beside `jax.lax` by hand.

    python bench/collectives.py [--replicas 2,4,8] [--sizes 1e3,1e5,1e7,1e8] [--rounds 100] [--json OUT]

Claim: gather, all_reduce, and broadcast of what a replica holds, cost what the same program written by hand costs; new
values from the host cost another copy. Interleaved in one run; medians. An elementwise `x + 1` over the same arrays is
the floor. `size` is what each replica holds (all_reduce, broadcast) or all of them together (scatter, gather), and GB/s
are of that size.
"""

import argparse
from statistics import median
from time import perf_counter

import jax
from record import about, cpu_devices, heading, save

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", default="2,4,8")
    parser.add_argument("--sizes", default="1e3,1e5,1e7,1e8", help="bytes")
    parser.add_argument("--rounds", type=int, default=100, help="for small arrays; fewer for large ones, 3 at least")
    parser.add_argument("--json")
    options = parser.parse_args()
    counts = [int(n) for n in options.replicas.split(",")]
    cpu_devices(max(counts))

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import synk
from synk._variables.variable import bind


class Hand:
    """Arrays and programs on a mesh, by hand."""

    def __init__(self, replicas):
        self.mesh = Mesh(np.array(jax.devices()[:replicas]), ("replica",), axis_types=(AxisType.Auto,))
        self.cut, self.everywhere = NamedSharding(self.mesh, P("replica")), NamedSharding(self.mesh, P())

    def program(self, body, out):
        """One over arrays that are cut."""
        return jax.jit(jax.shard_map(body, mesh=self.mesh, in_specs=P("replica"), out_specs=out, check_vma=False))

    def put(self, value, sharding):
        """On the devices, in memory that is not the user's, as synk's is not. Replicas on CPUs may share it."""
        return jax.device_put(value.copy(), sharding)


def own_copies(value):
    """A variable of which each replica holds a value of its own."""
    variable = synk.shared(value)
    variable.set_value(value, rank=0)
    return variable


def ways(operation, replicas, size):
    """By synk, by hand and the floor: functions that start one and return what to wait for."""
    group, hand = synk.init(replicas), Hand(replicas)
    numbers = int(size) // 4 // replicas * replicas
    value = np.full(numbers, 0, np.float32)  # which sums leave as they are
    is_whole = operation in ("scatter", "gather")
    x = hand.put(value if is_whole else np.full((replicas, numbers), 0, np.float32), hand.cut)
    plus = hand.program(lambda x: x + 1, P("replica"))
    found = {"x + 1": lambda: plus(x)}
    if operation == "scatter":
        held = synk.shared(value[:1])

        def by_synk():
            synk.scatter(held, value)
            return bind(held, group).leaves

        return {"synk": by_synk, "by hand": lambda: hand.put(value, hand.cut), **found}
    if operation == "gather":
        held = synk.shared(value[:1])
        synk.scatter(held, value)
        gather = hand.program(lambda x: lax.all_gather(x, "replica", tiled=True), P())
        return {"synk": lambda: synk.gather(held, nd_up=0), "by hand": lambda: gather(x), **found}

    held = own_copies(value)
    if operation == "all_reduce":
        total = hand.program(lambda x: lax.psum(x[0], "replica"), P())

        def by_synk():
            synk.all_reduce(held, "sum")
            return bind(held, group).leaves

    elif operation == "broadcast":

        def first(x):
            mine = lax.axis_index("replica") == 0
            return lax.psum(jnp.where(mine, x[0], 0), "replica")

        total = hand.program(first, P())

        def by_synk():
            synk.broadcast(held)
            return bind(held, group).leaves

    else:

        def by_synk():
            synk.broadcast(held, value)
            return bind(held, group).leaves

        return {"synk": by_synk, "by hand": lambda: hand.put(value, hand.everywhere), **found}
    return {"synk": by_synk, "by hand": lambda: total(x), **found}


OPERATIONS = ("all_reduce", "broadcast", "broadcast, host value", "scatter", "gather")


def measure(found, rounds):
    """Median seconds of each way, in turn; each waited for, so that few programs are ever under way."""
    times = {name: [] for name in found}
    for turn in range(rounds + 2):
        for name, way in found.items():
            start = perf_counter()
            jax.block_until_ready(way())
            if turn > 1:
                times[name].append(perf_counter() - start)
    return {name: median(each) for name, each in times.items()}


def rounds_of(size):
    return max(3, min(options.rounds, int(options.rounds * 1e6 / size)))


def main():
    found, sizes = about("collectives"), [float(size) for size in options.sizes.split(",")]
    print(f"{heading(found)}; medians, ms (GB/s)")
    print(f"{'operation':22} {'replicas':>8} {'bytes':>6} {'synk':>16} {'by hand':>16} {'x + 1':>16}  synk / by hand")
    results = []
    for operation in OPERATIONS:
        for replicas in counts:
            for size in sizes:
                times = measure(ways(operation, replicas, size), rounds_of(size))
                rates = {name: size / seconds / 1e9 for name, seconds in times.items()}
                cells = " ".join(f"{1e3 * times[name]:8.2f} ({rates[name]:5.2f})" for name in times)
                ratio, over = times["synk"] / times["by hand"], 1e6 * (times["synk"] - times["by hand"])
                print(f"{operation:22} {replicas:8} {size:6.0e} {cells}  {ratio:.2f} ({over:+.0f} us)", flush=True)
                case = {"operation": operation, "replicas": replicas, "bytes": size, "ratio": ratio, "over_us": over}
                results.append({**case, "seconds": times, "GB/s": rates})
    save(options.json, found | {"results": results})


if __name__ == "__main__":
    main()
