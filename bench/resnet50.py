"""ResNet-50: how many images a second one to many replicas train on, by synk and by hand.

    python bench/resnet50.py [--replicas 1,2,4,8] [--batch-per-replica 64] [--image 224] [--steps 30] [--against 2]
                             [--data resident|host|FOLDER] [--num-slices 1] [--json OUT]

Claim: a serial-looking loop trains as fast as the best hand-written JAX, reduces nothing but the gradients, the running
averages and the loss, once, and neither recompiles nor copies its state. Ways take turns in one run; medians. On CPUs
images are 64 pixels and 8 a replica by default. Virtual CPU devices share the cores: their speedup says nothing about
real ones. A folder has `x.npy` (uint8 images) and `y.npy` (labels). Over several processes:
`python -m synk launch -n 2 bench/resnet50.py --distributed`.
"""

import argparse
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import jax
from imagenet import BLOCKS, flops, from_folder, images
from record import about, cpu_devices, heading, progress, save, say

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", default=None, help="1,2,4,8 as far as there are devices")
    parser.add_argument("--batch-per-replica", type=int)
    parser.add_argument("--image", type=int, help="pixels a side")
    parser.add_argument("--steps", type=int, help="in all, in three rounds")
    parser.add_argument("--against", type=int, default=0, help="compare with hand-written ways on so many replicas")
    parser.add_argument("--ways", help="of those in resnet.py, with commas between")
    parser.add_argument("--data", default="resident", help="resident, host, or a folder of .npy files")
    parser.add_argument("--num-slices", type=int, default=1)
    parser.add_argument("--blocks", default=",".join(map(str, BLOCKS)), help="in each stage; fewer for a trial")
    parser.add_argument("--distributed", action="store_true", help="this is one of several processes")
    parser.add_argument("--json")
    options = parser.parse_args()
    if not options.distributed:
        cpu_devices(8)

import jax.numpy as jnp
import numpy as np
from resnet import WAYS, Training, collectives, donated, gradient_bytes, peak_memory, talk_of

import synk

ROUNDS = 3


def by_default():
    """Fill in what was not asked for: small on CPUs, the usual size elsewhere. Returns the numbers of replicas."""
    is_cpu = jax.devices()[0].platform == "cpu"
    options.image = options.image or (64 if is_cpu else 224)
    options.batch_per_replica = options.batch_per_replica or (8 if is_cpu else 64)
    options.steps = options.steps or (6 if is_cpu else 30)
    options.blocks = tuple(int(n) for n in options.blocks.split(","))
    counts = [1, 2] if is_cpu else [1, 2, 4, 8]
    if options.replicas:
        counts = [int(n) for n in options.replicas.split(",")]
    if options.distributed:
        counts = [jax.device_count()]
        options.against = options.against and counts[0]
    return [n for n in counts if n <= jax.device_count()], jnp.float32 if is_cpu else jnp.bfloat16


def ways_against():
    """Names of the ways to compare; in several processes those that span them."""
    names = options.ways.split(",") if options.ways else list(WAYS)
    return [name for name in names if not options.distributed or name not in ("pmap", "serial jit")]


def rows_for(replicas):
    """As many rows as two steps take, or the folder's."""
    if options.data in ("resident", "host"):
        return images(2 * replicas * options.batch_per_replica, options.image)
    x, y = from_folder(options.data)
    options.image = x.shape[1]
    return x, y


def steps_of(way, x, y, rows):
    """A way, as a function that runs n steps, each or only the last to its end, and gives milliseconds."""
    rng = np.random.default_rng(0)
    placed = way.put(x[:rows], y[:rows])

    def losses(n):
        batches = [rng.permutation(len(x))[:rows] for _ in range(n)]
        if options.data == "resident":
            return (way.step(*placed) for _ in batches)
        if way.function is not None:
            return way.function.iterate(x, y, batches=batches, num_slices=options.num_slices)
        return (way.step(*way.put(x[batch], y[batch])) for batch in batches)

    def steps(n, in_a_row=False):
        times, start = [], perf_counter()
        for loss in [jax.block_until_ready([*losses(n)])[-1]] if in_a_row else losses(n):
            jax.block_until_ready(loss)
            times.append(1e3 * (perf_counter() - start))
            start = perf_counter()
        if not np.isfinite(np.asarray(loss)).all():
            raise SystemExit("The loss is not finite.")
        return [times[0] / n] if in_a_row else times

    return steps


def measure(training, names, replicas):
    """Each way's steps, round by round in turn; what its program holds."""
    rows = replicas * options.batch_per_replica
    x, y = rows_for(replicas)
    ways, run = {}, {}
    for name in names:
        start = perf_counter()
        arguments = {"num_slices": options.num_slices} if name == "synk" else {}
        ways[name] = WAYS[name](training, replicas, x[:rows], y[:rows], **arguments)
        run[name] = steps_of(ways[name], x, y, rows)
        say(f"  {replicas} x {options.batch_per_replica}: {name} compiled in {perf_counter() - start:.0f} s")
    times, in_a_row, watched = {name: [] for name in run}, {name: [] for name in run}, {}
    for turn in progress(range(ROUNDS + 1), f"{replicas} replica(s)"):
        for name, steps in run.items():
            found = steps(max(1, options.steps // ROUNDS) if turn else 1)
            times[name] += found if turn else []
            in_a_row[name] += steps(max(1, options.steps // ROUNDS), in_a_row=True) if turn else []
        if not turn:
            watched = state_of_affairs(ways)
    results = {name: rates(times[name], rows, replicas) | {"ms in a row": median(in_a_row[name])} for name in run}
    after = state_of_affairs(ways)
    for name, way in ways.items():
        results[name] |= holds(training, way.compiled)
    if "synk" in ways:
        results["synk"] |= {
            "recompiled": after["compilations"] - watched["compilations"],
            "live bytes grown": after["live bytes"] - watched["live bytes"],
        }
    return results


def rates(times, rows, replicas):
    return {
        "replicas": replicas,
        "images/s": 1e3 * rows / median(times),
        "ms": [median(times), min(times), max(times)],
    }


def holds(training, compiled):
    """What a program communicates, needs and leaves where it lies."""
    talk, cost = collectives(compiled), compiled.cost_analysis() or {}
    return {
        "collectives": len(talk),
        "reduced MB": sum(size for _, size in talk) / 1e6,
        "peak MB": peak_memory(compiled) / 1e6,
        "state donated": donated(compiled, training),
        "GB accessed": cost.get("bytes accessed", 0) / 1e9,
    }


def state_of_affairs(ways):
    """Programs compiled by synk and bytes that live on the devices."""
    compilations = ways["synk"].function.stats.compilations if "synk" in ways else 0
    return {"compilations": compilations, "live bytes": sum(array.nbytes for array in jax.live_arrays())}


def figures(scaling, against, gradients, talk):
    """What the benchmark is about, in a few numbers."""
    mine: dict[str, Any] = against.get("synk") or list(scaling.values())[-1]
    found = {
        "recompiled after the first step": mine["recompiled"],
        "live bytes grown after the first step": mine["live bytes grown"],
        "state donated": mine["state donated"],
    }
    if talk:
        found["collectives of 8 replicas"] = len(talk)
        found["reduced by 8 replicas / gradients"] = sum(size for _, size in talk) / gradients
    # Where there are several replicas, the others let batch norm see the whole batch: another computation.
    same = set(WAYS) - {"synk"} if mine["replicas"] == 1 else {"jit(shard_map)", "pmap"}
    hand = [result for name, result in against.items() if name in same]
    if hand:
        found["images/s / best by hand"] = min(r["ms"][0] for r in hand) / mine["ms"][0]
        found["images/s / best by hand, quickest steps"] = min(r["ms"][1] for r in hand) / mine["ms"][1]
        found["images/s in a row / best by hand"] = min(r["ms in a row"] for r in hand) / mine["ms in a row"]
        found["peak memory / least by hand"] = mine["peak MB"] / min(r["peak MB"] for r in hand)
    return found


def show(name, result, one):
    middle, low, high = result["ms"]
    speedup = result["images/s"] / one
    held = "          -           -        -"
    if "collectives" in result:
        held = f"{result['collectives']:11} {result['reduced MB']:11.2f} {result['peak MB']:8.0f}"
    say(
        f"{result['replicas']:8} {name:34} {result['images/s']:10.1f} {middle:9.1f} {f'{low:.1f} to {high:.1f}':>18}"
        f" {speedup:8.2f} {speedup / result['replicas']:10.2f} {held}"
    )


def main():
    if options.distributed:
        synk.init(distributed=True)
    counts, dtype = by_default()
    if options.data not in ("resident", "host"):
        rows_for(1)  # the folder says how large images are
    training = Training(options.image, dtype, options.blocks)
    gradients = gradient_bytes(training)
    scaling, against = {}, {}
    for n in sorted({*counts, *([options.against] if options.against else [])}):
        found = measure(training, ways_against() if n == options.against else ["synk"], n)
        against = found if n == options.against else against
        scaling |= {n: found["synk"]} if n in counts and "synk" in found else {}
    is_alone = max(*counts, options.against, 1) == 1
    talk = [] if is_alone or jax.local_device_count() < 8 else talk_of(8, options.blocks)
    result = about("resnet50") | {
        "gradients MB": gradients / 1e6,
        "GFLOP an image": flops(options.image, options.blocks) / 1e9,
    }
    result |= {k: v for k, v in vars(options).items() if k != "json"}
    result |= {"dtype": np.dtype(dtype).name, "scaling": list(scaling.values()), "against": against}
    result["figures"] = figures(scaling, against, gradients, talk)
    result["talk of 8 replicas"] = [{"name": name, "bytes": size} for name, size in talk]
    say(f"\n{heading(result)}")
    say(
        f"{options.image} px, {options.batch_per_replica} images a replica, {result['dtype']}, rows {options.data}, "
        f"{options.num_slices} slice(s); gradients {gradients / 1e6:.2f} MB"
    )
    head = "replicas", "way", "images/s", "ms a step", "min to max", "speedup", "efficiency", "collectives"
    say("{:8} {:34} {:>10} {:>9} {:>18} {:>8} {:>10} {:>11} {:>11} {:>8}".format(*head, "reduced MB", "peak MB"))
    first: dict[str, Any] = next(iter(scaling.values()), None) or next(iter(against.values()))
    one = partial(show, one=first["images/s"] / first["replicas"])
    for n, found in scaling.items():
        if n != options.against:
            one("synk", found)
    for name, found in against.items():
        one(name, found)
    for name, value in result["figures"].items():
        say(f"{name}: {value:.4g}")
    if jax.process_index() == 0:
        save(options.json, result)


if __name__ == "__main__":
    main()
