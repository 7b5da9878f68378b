"""Processes: what it costs to split a group over processes, beside the same step written by hand.

    python bench/processes.py [--rows 128] [--steps 10] [--turns 12] [--json OUT]

Claim: a training step of LeNet on two processes of one replica costs synk at most 1.05 times what jit(shard_map) by
hand costs there; agreement and saving take milliseconds, once a program and once a save; and a run that is killed
trains again within seconds. The ways live in processes of their own and take turns in random order; steps are awaited,
rows are resident; medians. Two processes on one machine share its cores with one another and the bench.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from subprocess import PIPE, STDOUT, Popen

import jax
from record import about, cpu_devices, heading, save
from turns import Elsewhere, free_port, serve, timed

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=128, help="of a step, on both replicas")
    parser.add_argument("--steps", type=int, default=10, help="of a turn")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--json")
    parser.add_argument("--serve", choices=["synk", "by hand"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if "SYNK_NUM_PROCESSES" not in os.environ:
        cpu_devices(2)

import numpy as np
import optax
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import synk
from synk._distributed.agreement import PEERS

FAILS, SAVES = 30, 10  # the step at which a process is killed; steps between checkpoints
TX = optax.adam(1e-3)


class LeNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        for features in (16, 32):
            x = nn.avg_pool(nn.gelu(nn.Conv(features, (5, 5))(x)), (2, 2), (2, 2))
        x = x.reshape(len(x), -1)
        for features in (120, 84):
            x = nn.gelu(nn.Dense(features)(x))
        return nn.Dense(10)(x)


def loss(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(LeNet().apply(params, x), y).mean()


def start_values():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(options.rows, 28, 28, 1)).astype(np.float32)
    y = rng.integers(0, 10, options.rows).astype(np.int32)
    params = jax.device_get(LeNet().init(jax.random.key(0), x[:1]))
    return params, jax.device_get(TX.init(params)), x, y


def placed(sharding, value):
    """A value as an array over all processes; each reads its own part."""
    return jax.make_array_from_callback(value.shape, sharding, value.__getitem__)


def by_synk():
    """A step, and the variables that it trains."""
    group = synk.group()
    start, start_opt, x, y = start_values()
    params, opt_state = synk.shared(start, name="params"), synk.shared(start_opt, name="opt_state")

    @synk.function(reduce="mean")
    def step(x, y):
        return jax.value_and_grad(loss)(params.value, x, y)

    @step.then
    def step(value, grads):
        updates, opt_state.value = TX.update(grads, opt_state.value)
        params.value = optax.apply_updates(params.value, updates)
        return value

    rows = NamedSharding(group.mesh, P("replica"))
    x, y = placed(rows, x), placed(rows, y)
    return lambda: jax.block_until_ready(step(x, y)), {"params": params, "opt_state": opt_state}


def by_hand():
    """The same by jit(shard_map); its parameters and optimizer state are donated."""
    mesh = jax.make_mesh((jax.device_count(),), ("replica",), (AxisType.Auto,))
    params, opt_state, x, y = start_values()

    def step(params, opt_state, x, y):
        value, grads = jax.lax.pmean(jax.value_and_grad(loss)(params, x, y), "replica")
        updates, opt_state = TX.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, value

    specs = (P(), P(), P("replica"), P("replica"))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    compiled = jax.jit(mapped, donate_argnums=(0, 1))
    everywhere, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("replica"))
    state = [jax.tree.map(lambda leaf: placed(everywhere, np.asarray(leaf)), tree) for tree in (params, opt_state)]
    x, y = placed(rows, x), placed(rows, y)

    def run():
        *state[:], value = compiled(*state, x, y)
        jax.block_until_ready(value)

    return run


# What runs in the processes.


def serve_steps():
    """Answer with milliseconds of steps; before that, measure what synk does beside steps."""
    if "SYNK_NUM_PROCESSES" in os.environ:
        synk.init(distributed=True)
    else:
        synk.init(2)
    if options.serve == "by hand":
        return serve(timed(by_hand()))
    step, variables = by_synk()
    step()
    with tempfile.TemporaryDirectory() as folder:
        milliseconds = {"save": median(timed(lambda: synk.save(folder, variables, step=0))(15))}
    if synk.group()._is_multi_process:
        milliseconds["agreement"] = median(timed(lambda: PEERS.agree("bench", "text" * 20000))(30))
    return serve(timed(step), **milliseconds)


def train_and_fail():
    """Save now and then; on the first attempt process 1 is killed."""
    synk.init(distributed=True, heartbeat=10)
    step, variables = by_synk()
    try:
        done, _ = synk.load(options.folder, variables)
    except FileNotFoundError:
        done = 0
    for i in range(done, 2 * FAILS):
        if i == FAILS and os.environ["SYNK_ATTEMPT"] == "0" and jax.process_index() == 1:
            print(f"killed {time.time()}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        step()
        if i == done and done:
            print(f"resumed {time.time()}", flush=True)
        if (i + 1) % SAVES == 0:
            synk.save(options.folder, variables, step=i + 1)


# What drives them.


class Gang:
    """As many processes as replicas, or one with both."""

    def __init__(self, way, processes):
        command = [sys.executable, __file__, "--serve", way, "--rows", options.rows]
        environments = [{}]
        if processes > 1:
            where = {"SYNK_COORDINATOR": f"127.0.0.1:{free_port()}", "SYNK_NUM_PROCESSES": str(processes)}
            environments = [where | {"SYNK_PROCESS_ID": str(i), "JAX_NUM_CPU_DEVICES": "1"} for i in range(processes)]
        with ThreadPoolExecutor(processes) as pool:  # each waits for the others to come up
            self.each = list(pool.map(lambda environment: Elsewhere(command, **environment), environments))
        if not all(one.is_ready() for one in self.each):
            sys.exit(f"{way} on {processes} process(es): {[one.about for one in self.each]}")

    def steps(self, n):
        """Milliseconds of n steps, of the slowest process at each."""
        with ThreadPoolExecutor(len(self.each)) as pool:
            return [max(one) for one in zip(*pool.map(lambda one: one.steps(n), self.each), strict=True)]

    def close(self):
        with ThreadPoolExecutor(len(self.each)) as pool:
            list(pool.map(lambda one: one.close(), self.each))


def kill_and_resume():
    """Seconds from a kill -9 of one process to the first step of the next attempt, and to the end of the first."""
    with tempfile.TemporaryDirectory() as folder:
        own = ["-n", "2", "--devices-per-process", "1", "--restarts", "1", "--logs", folder]
        command = [sys.executable, "-m", "synk", "launch", *own, __file__, "--folder", f"{folder}/saved"]
        process = Popen([*command, "--rows", str(options.rows)], stdout=PIPE, stderr=STDOUT, text=True)
        times = {}
        for line in process.stdout or ():
            if "starting all again" in line:
                times["ended"] = time.time()
            for what in ("killed", "resumed"):
                if f"{what} " in line and line.startswith("["):
                    times.setdefault(what, float(line.split()[-1]))
        if process.wait() or len(times) < 3:
            sys.exit(f"kill and resume: exit code {process.returncode}, saw {times}")
    return times["ended"] - times["killed"], times["resumed"] - times["killed"]


def main():
    found = about("processes") | {"rows": options.rows, "steps": options.steps, "turns": options.turns}
    print(f"{heading(found)}; LeNet, {options.rows} rows a step on 2 replicas; medians")
    ways = {(way, processes): Gang(way, processes) for processes in (1, 2) for way in ("synk", "by hand")}
    times = {key: [] for key in ways}
    ratios = {1: [], 2: []}
    for _ in range(options.turns):
        turn = {}
        for key in random.sample(list(ways), len(ways)):
            turn[key] = ways[key].steps(options.steps)
            times[key] += turn[key]
        for processes, ratio in ratios.items():
            ratio.append(median(turn["synk", processes]) / median(turn["by hand", processes]))
    beside = {processes: ways["synk", processes].each[0].about for processes in (1, 2)}
    for gang in ways.values():
        gang.close()
    ms = {f"{way}, {processes} process(es)": median(times[way, processes]) for way, processes in ways}
    for name, value in ms.items():
        print(f"{name:>24} {value:8.2f} ms a step")
    for processes, ratio in ratios.items():
        print(f"synk / by hand, {processes} process(es): {median(ratio):.3f}")
    print(f"a save: {beside[1]['save']:.1f} ms in 1 process, {beside[2]['save']:.1f} ms in 2")
    print(f"agreement on a program, 2 processes: {beside[2]['agreement']:.2f} ms")
    ended, resumed = kill_and_resume()
    print(
        f"kill -9 of one process: all ended after {ended:.1f} s, first step of the next attempt after {resumed:.1f} s"
    )
    seconds = {"all ended": ended, "resumed": resumed}
    results = {"ms": ms, "ratio": {str(n): median(r) for n, r in ratios.items()}, "seconds": seconds}
    results |= {"save_ms": {str(n): a["save"] for n, a in beside.items()}, "agreement_ms": beside[2]["agreement"]}
    save(options.json, found | {"results": results})


if __name__ == "__main__":
    if options.folder:
        train_and_fail()
    elif options.serve:
        serve_steps()
    else:
        main()
