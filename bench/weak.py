"""Weak scaling: one replica on one core against two replicas, with twice the rows, on two cores.

    python bench/weak.py [--rounds 5] [--steps 2] [--image 64] [--batch-per-replica 8] [--json OUT]

Claim: two cores train on at least 1.94 times as many images a second as one (an efficiency of 0.97), by synk as by
hand. Each of the four runs is a process of its own, pinned by `taskset` (Linux), with as many threads as it has cores.
They take turns, alone; the efficiency is the median over the rounds of one replica's step over two replicas', beside it
that of the quickest steps, which other work on the cores has disturbed least.
"""

import argparse
import os
import sys
from statistics import median

from imagenet import BLOCKS, images
from record import about, cpu_devices, heading, save
from turns import Elsewhere, serve, timed

WAYS = ("synk", "jit(shard_map)")


def serve_way(options):
    """In a pinned process: its steps."""
    cpu_devices(options.replicas)
    import jax
    from resnet import WAYS, Training

    rows = options.replicas * options.batch_per_replica
    x, y = images(rows, options.image)
    blocks = tuple(int(n) for n in options.blocks.split(","))
    way = WAYS[options.serve](Training(options.image, blocks=blocks), options.replicas, x, y)
    placed = way.put(x, y)
    serve(timed(lambda: jax.block_until_ready(way.step(*placed))), cores=len(os.sched_getaffinity(0)))


def start(options, way, replicas):
    """A process with as many cores as replicas."""
    pinned = ["taskset", "-c", ",".join(map(str, sorted(os.sched_getaffinity(0))[:replicas]))]
    settings = ["--image", options.image, "--batch-per-replica", options.batch_per_replica, "--blocks", options.blocks]
    command = [*pinned, sys.executable, __file__, "--serve", way, "--replicas", replicas, *settings]
    found = Elsewhere(command, JAX_PLATFORMS="cpu")
    if not found.is_ready():
        raise SystemExit(f"{way} on {replicas} core(s): {found.about}")
    return found


def measure(options):
    """Efficiency of each round and milliseconds of all steps, by way."""
    running = {(way, n): start(options, way, n) for way in options.ways for n in (1, 2)}
    times, rounds = {key: [] for key in running}, {way: [] for way in options.ways}
    for _ in range(options.rounds):
        found = {key: process.steps(options.steps) for key, process in running.items()}
        for key, ms in found.items():
            times[key] += ms
        for way in rounds:
            rounds[way].append(median(found[way, 1]) / median(found[way, 2]))
    for process in running.values():
        process.close()
    return times, rounds


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="a round")
    parser.add_argument("--image", type=int, default=64)
    parser.add_argument("--batch-per-replica", type=int, default=8)
    parser.add_argument("--blocks", default=",".join(map(str, BLOCKS)), help="in each stage; fewer for a trial")
    parser.add_argument("--ways", type=lambda text: text.split(","), default=list(WAYS))
    parser.add_argument("--json")
    parser.add_argument("--serve", choices=WAYS, help="be one of the processes; a run starts them with this")
    parser.add_argument("--replicas", type=int, help="goes with --serve")
    options = parser.parse_args()
    if options.serve:
        serve_way(options)
        return
    if not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("Weak scaling needs Linux and two cores.")
    times, rounds = measure(options)
    result = about("weak") | {k: v for k, v in vars(options).items() if k not in ("json", "serve", "replicas")}
    result |= {"ms": {way: {n: times[way, n] for n in (1, 2)} for way in rounds}, "rounds": rounds}
    result["efficiency"] = {way: median(found) for way, found in rounds.items()}
    result["of the quickest"] = {way: min(times[way, 1]) / min(times[way, 2]) for way in rounds}
    print(heading(result))
    for way in rounds:
        one, two = (median(times[way, n]) for n in (1, 2))
        spread = f"{min(rounds[way]):.2f} to {max(rounds[way]):.2f}"
        found = f"{result['efficiency'][way]:.3f} ({spread}), of the quickest {result['of the quickest'][way]:.3f}"
        print(f"{way:15} 1 core {one:.0f} ms, 2 cores {two:.0f} ms: {found}")
    save(options.json, result)


if __name__ == "__main__":
    main()
