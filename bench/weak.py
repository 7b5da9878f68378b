"""Weak scaling: one replica on one core against two replicas, with twice the rows, on two cores.

    python bench/weak.py [--rounds 8] [--steps 2] [--patience 120] [--image 64] [--batch-per-replica 8] [--json OUT]

Claim: two cores train on at least 1.94 times as many images a second as one (an efficiency of 0.97), by synk as by
hand, or as many as the cores can: what they can is measured as two processes of one replica, one on each core, that run
at the same time and share nothing. Each run is a process of its own, pinned by `taskset` (Linux), with as many threads
as it has cores. They take turns, alone; the efficiency is the median over the rounds of one replica's step over two
replicas' (of the slower process where two run). A round in which other processes took over 3 % of the cores is
disturbed: it does not count where there are others, and until there are enough, more are run, for at most `--patience`
seconds.
"""

import argparse
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from time import monotonic

from imagenet import BLOCKS, images
from record import about, cpu_devices, heading, save
from turns import Elsewhere, serve, timed

WAYS = ("synk", "jit(shard_map)")
APART = "two that share nothing"
DISTURBED = 0.03


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


def start(options, way, replicas, first=0):
    """A process with as many cores as replicas, from the first on."""
    cores = sorted(os.sched_getaffinity(0))[first : first + replicas]
    pinned = ["taskset", "-c", ",".join(map(str, cores))]
    settings = ["--image", options.image, "--batch-per-replica", options.batch_per_replica, "--blocks", options.blocks]
    command = [*pinned, sys.executable, __file__, "--serve", way, "--replicas", replicas, *settings]
    found = Elsewhere(command, JAX_PLATFORMS="cpu")
    if not found.is_ready():
        raise SystemExit(f"{way} on {replicas} core(s): {found.about}")
    return found


class Others:
    """What part of the cores other processes than these take between two looks."""

    def __init__(self, pids):
        self.pids, self.before = pids, None

    def look(self):
        """The part since the last look."""
        with open("/proc/stat") as file:
            user, nice, system, idle, wait, *more = map(int, file.readline().split()[1:9])
        busy, mine = user + nice + system + sum(more), sum(map(ticks, self.pids))
        now = busy - mine, busy + idle + wait
        before, self.before = self.before or now, now
        return (now[0] - before[0]) / max(now[1] - before[1], 1)


def ticks(pid):
    """Processor time of a process."""
    with open(f"/proc/{pid}/stat") as file:
        return sum(map(int, file.read().rpartition(")")[2].split()[11:13]))


def measure(options):
    """Rounds of each way: milliseconds on one core and on two, and what others took meanwhile."""
    running = {(way, n): [start(options, way, n)] for way in options.ways for n in (1, 2)}
    lone = running[options.ways[0], 1]
    running |= {(APART, 1): lone, (APART, 2): [*lone, start(options, options.ways[0], 1, first=1)]}
    each = {process for together in running.values() for process in together}
    others = Others([os.getpid(), *(process.process.pid for process in each)])
    rounds, end = {way: [] for way in (*options.ways, APART)}, monotonic() + options.patience
    while not all(enough(found, options.rounds, end) for found in rounds.values()):
        for way, found in rounds.items():
            others.look()
            one, two = (steps(running[way, n], options.steps) for n in (1, 2))
            found.append({"ms": [one, two], "efficiency": median(one) / median(two), "others": others.look()})
    for process in each:
        process.close()
    return rounds


def steps(together, n):
    """Milliseconds of n steps of processes that run at the same time: of the slower one."""
    with ThreadPoolExecutor(len(together)) as pool:
        return [max(times) for times in zip(*pool.map(lambda process: process.steps(n), together), strict=True)]


def enough(found, wanted, end):
    return len(found) >= wanted and (len(quiet(found)) >= wanted or monotonic() > end)


def quiet(found):
    """The rounds that were not disturbed."""
    return [each for each in found if each["others"] <= DISTURBED]


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2, help="a round")
    parser.add_argument("--patience", type=float, default=120, help="seconds to wait for quiet rounds")
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
    rounds = measure(options)
    result = about("weak") | {k: v for k, v in vars(options).items() if k not in ("json", "serve", "replicas")}
    result |= {"rounds": rounds, "efficiency": {way: summary(found) for way, found in rounds.items()}}
    print(heading(result))
    for way, found in result["efficiency"].items():
        one, two = found["ms"]
        print(f"{way:22} 1 core {one:.0f} ms, 2 cores {two:.0f} ms: {described(found)}")
    save(options.json, result)


def summary(rounds):
    """The median of the rounds that count."""
    counted = quiet(rounds) or rounds
    each = [round["efficiency"] for round in counted]
    ms = [median([t for round in counted for t in round["ms"][i]]) for i in (0, 1)]
    about_rounds = {"rounds": len(rounds), "quiet": len(quiet(rounds)), "others": median(r["others"] for r in counted)}
    return {"median": median(each), "min": min(each), "max": max(each), "ms": ms, **about_rounds}


def described(found):
    """A summary in words."""
    spread = f"{found['median']:.3f} ({found['min']:.2f} to {found['max']:.2f})"
    if found["quiet"]:
        return f"{spread}, {found['quiet']} quiet rounds of {found['rounds']}"
    return f"{spread}, no round was quiet: others took {100 * found['others']:.0f} % of the cores"


if __name__ == "__main__":
    main()
