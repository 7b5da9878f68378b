"""Calls: one training step, called in the ways there are, beside the best that can be written by hand.

    python bench/calls.py [--replicas 2] [--rounds 15] [--json OUT]

A multilayer perceptron of 6 leaves (three of 64 x 64), 256 rows, the gradients' mean and plain SGD. By hand:
`jit(shard_map)` with all gradients in one buffer. Claim: no way to call synk takes longer than another. A runtime's
threads sleep between two programs, so whoever does anything in between pays for waking them: the step by hand is also
timed with 20 us of other work before it. "In a row" starts eight steps before it waits for the first. The ways take
turns in random order, 60 steps a turn; medians.
"""

import argparse
import random
from collections import deque
from statistics import median
from time import perf_counter

import jax
from record import about, cpu_devices, heading, save

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json")
    options = parser.parse_args()
    cpu_devices(options.replicas)

import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import synk

ROWS, WIDTH, TURN = 256, 64, 60


def loss(params, x, y):
    for i in range(3):
        x = jnp.tanh(x @ params[f"w{i}"] + params[f"b{i}"])
    return jnp.mean((x - y) ** 2)


def sgd(params, grads):
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)


def by_hand(params, x, y):
    """A step of `jit(shard_map)` with one all-reduce of all gradients and the loss."""
    mesh = synk.group().mesh

    def body(params, x, y):
        together, apart = ravel_pytree(jax.value_and_grad(loss)(params, x, y))
        value, grads = apart(jax.lax.pmean(together, "replica"))
        return sgd(params, grads), value

    ins = (P(), P("replica"), P("replica"))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=ins, out_specs=(P(), P()), check_vma=False)
    step = jax.jit(mapped, donate_argnums=0)
    state = [jax.device_put(params, NamedSharding(mesh, P()))]

    def run():
        state[0], value = step(state[0], x, y)
        return value

    return run


def after(microseconds, run):
    """The same with other work before it."""

    def busy():
        end = perf_counter() + 1e-6 * microseconds
        while perf_counter() < end:
            pass
        return run()

    return busy


def by_synk(params):
    shared = synk.shared(params, name="params")

    @synk.function(reduce="mean")
    def step(x, y):
        return jax.value_and_grad(loss)(shared.value, x, y)

    @step.then
    def step(value, grads):
        shared.value = sgd(shared.value, grads)
        return value

    return step


def ways():
    """Each way to run a step, by name."""
    rng = np.random.default_rng(0)
    params = {f"w{i}": rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 10 for i in range(3)}
    params |= {f"b{i}": np.zeros(WIDTH, np.float32) for i in range(3)}
    x = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
    place = NamedSharding(synk.group().mesh, P("replica"))
    xs, ys = jax.device_put((x, x / 2), place)
    dx, dy = synk.data(x, place="scatter"), synk.data(x / 2, place="scatter")
    steps = [by_synk(params) for _ in range(4)]
    return {
        "by hand": by_hand(params, xs, ys),
        "by hand, 20 us later": after(20, by_hand(params, xs, ys)),
        "synk, arrays in place": lambda: steps[0](xs, ys),
        "synk, keywords": lambda: steps[1](x=xs, y=ys),
        "synk, data taken whole": lambda: steps[2](dx, dy),
        "synk, an int batch": lambda: steps[3](xs, ys, batch=ROWS),
    }


def awaited(run):
    """Seconds of a step that is waited for."""
    start = perf_counter()
    for _ in range(TURN):
        jax.block_until_ready(run())
    return (perf_counter() - start) / TURN


def in_a_row(run):
    """Seconds of a step, where eight are under way."""
    pending, start = deque(), perf_counter()
    for _ in range(TURN):
        pending.append(run())
        if len(pending) > 8:
            jax.block_until_ready(pending.popleft())
    jax.block_until_ready(list(pending))
    return (perf_counter() - start) / TURN


def main():
    found = about("calls") | {"replicas": options.replicas, "rounds": options.rounds}
    synk.init(options.replicas)
    steps = ways()
    times = {name: ([], []) for name in steps}
    for run in steps.values():
        for _ in range(3):
            jax.block_until_ready(run())
    order, shuffle = list(steps), random.Random(0).shuffle
    for _ in range(options.rounds):
        shuffle(order)
        for name in order:
            jax.block_until_ready(steps[name]())  # caches are full of another way's
            times[name][0].append(awaited(steps[name]))
            times[name][1].append(in_a_row(steps[name]))
    us = {name: [1e6 * median(each) for each in both] for name, both in times.items()}
    print(f"{heading(found)}; medians of {options.rounds} turns of {TURN} steps, us a step, and / by hand")
    print(f"{'':24} {'awaited':>14} {'in a row':>16}")
    ratios = {name: [one / hand for one, hand in zip(both, us["by hand"], strict=True)] for name, both in us.items()}
    for name, (one, many) in us.items():
        print(f"{name:24} {one:8.0f} {ratios[name][0]:5.2f} {many:10.0f} {ratios[name][1]:5.2f}")
    save(options.json, found | {"us": us, "ratios": ratios})


if __name__ == "__main__":
    main()
