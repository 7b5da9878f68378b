"""Overhead: a training step by synk beside the same step written by hand.

    python bench/overhead.py [--replicas 1,2,4] [--leaves 10,160,480] [--rounds 7] [--json OUT]

Claim: many small leaves cost less than by hand, since they travel in one buffer. The ways take turns in random order,
in one run; a turn is a few steps in a row, as in a loop, each awaited, after one that does not count. Medians.
"""

import argparse
import random
from statistics import median
from time import perf_counter

import jax
from record import about, cpu_devices, heading, save

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", default="1,2,4")
    parser.add_argument("--leaves", default="10,160,480")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--size", type=int, default=256, help="numbers in a leaf; 256 are 1 KB")
    parser.add_argument("--json")
    options = parser.parse_args()
    counts = [int(n) for n in options.replicas.split(",")]
    cpu_devices(max(counts))

import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import synk

LR = 0.01
TURN = 60  # steps


def loss(params, x):
    """A tiny loss that touches every leaf: its gradient is as many leaves."""
    return sum(jnp.mean(jnp.dot(x, p)) ** 2 for p in params)


def by_synk(replicas, params, x):
    shared = synk.shared(params, name="params")

    @synk.function(inputs=["x"], reduce="mean")
    def step(x):
        return jax.value_and_grad(loss)(shared.value, x)

    @step.then
    def step(value, grads):
        shared.value = jax.tree.map(lambda p, g: p - LR * g, shared.value, grads)
        return value

    rows = jax.device_put(x, NamedSharding(synk.group().mesh, P("replica")))
    return lambda: step(rows)


def by_shard_map(replicas, params, x):
    mesh = jax.make_mesh((replicas,), ("replica",), (AxisType.Auto,), devices=jax.devices()[:replicas])

    def step(params, x):
        value, grads = jax.lax.pmean(jax.value_and_grad(loss)(params, x), "replica")
        return jax.tree.map(lambda p, g: p - LR * g, params, grads), value

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("replica")), out_specs=P(), check_vma=False)
    compiled = jax.jit(mapped, donate_argnums=0)
    return _loop(
        compiled, jax.device_put(params, NamedSharding(mesh, P())), jax.device_put(x, NamedSharding(mesh, P("replica")))
    )


def by_pmap(replicas, params, x):
    def step(params, x):
        value, grads = jax.lax.pmean(jax.value_and_grad(loss)(params, x), "replica")
        return jax.tree.map(lambda p, g: p - LR * g, params, grads), value

    compiled = jax.pmap(step, axis_name="replica", donate_argnums=0, devices=jax.devices()[:replicas])
    mesh = jax.make_mesh((replicas,), ("replica",), (AxisType.Auto,), devices=jax.devices()[:replicas])
    stacked = jax.tree.map(lambda p: np.stack([p] * replicas), params)
    lies = NamedSharding(mesh, P("replica"))
    return _loop(compiled, jax.device_put(stacked, lies), jax.device_put(x.reshape(replicas, -1, x.shape[1]), lies))


def by_jit(replicas, params, x):
    def step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - LR * g, params, grads), value

    return _loop(jax.jit(step, donate_argnums=0), jax.device_put(params), jax.device_put(x))


def _loop(compiled, params, x):
    state = [params]

    def run():
        state[0], value = compiled(state[0], x)
        return value

    return run


WAYS = {"synk": by_synk, "shard_map": by_shard_map, "pmap": by_pmap, "serial jit": by_jit}


def measure(replicas, leaves, size, rounds):
    """Median seconds of each way: to run a step to its end, and to start one."""
    params = [np.full(size, 0.01, np.float32) for _ in range(leaves)]
    x = np.full((4 * replicas, size), 0.01, np.float32)
    synk.init(replicas)
    steps = {name: make(replicas, params, x) for name, make in WAYS.items()}
    whole = {name: [] for name in steps}
    start = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(3):
            jax.block_until_ready(step())
    order, shuffle = list(steps.items()), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)  # who runs after whom matters as much as what it runs
        for name, step in order:
            jax.block_until_ready(step())  # caches are full of another way's
            for _ in range(TURN):
                begin = perf_counter()
                value = step()
                start[name].append(perf_counter() - begin)
                jax.block_until_ready(value)
                whole[name].append(perf_counter() - begin)
    return {name: (median(whole[name]), median(start[name])) for name in steps}


def main():
    found = about("overhead") | {"leaf_bytes": 4 * options.size, "rounds": options.rounds}
    print(f"{heading(found)}; medians of {TURN * options.rounds}, us")
    ways = " ".join(f"{name:>18}" for name in WAYS)
    print(f"{'replicas':>8} {'leaves':>6} {ways}   synk / best by hand")
    results = []
    for replicas in counts:
        for leaves in map(int, options.leaves.split(",")):
            times = measure(replicas, leaves, options.size, options.rounds)
            best = min(times["shard_map"][0], times["pmap"][0])
            cells = " ".join(f"{whole * 1e6:9.0f} ({start * 1e6:6.0f})" for whole, start in times.values())
            ratio, over = times["synk"][0] / best, (times["synk"][0] - best) * 1e6
            print(f"{replicas:8} {leaves:6} {cells}   {ratio:.2f} ({over:+.0f} us)", flush=True)
            us = {name: {"step": whole * 1e6, "start": start * 1e6} for name, (whole, start) in times.items()}
            results.append({"replicas": replicas, "leaves": leaves, "ratio": ratio, "over_us": over, "us": us})
    save(options.json, found | {"results": results})


if __name__ == "__main__":
    main()
