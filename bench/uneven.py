"""Uneven rows: what a call costs whose rows do not divide, beside one whose rows do.

    python bench/uneven.py [--replicas 4] [--rounds 15] [--json OUT]

`x.sum(0)` of 65 rows beside 64, and a training step of a small CNN on 70 images beside 68. Claim: one launch each, and
a branch costs little; where XLA's CPU backend compiles convolutions inside branches to naive loops
(https://github.com/jax-ml/jax/issues/12868) both sizes run, so at most about twice the time. Ways in turn; medians.
"""

import argparse
import random
from statistics import median
from time import perf_counter

import jax
from record import about, cpu_devices, heading, save

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json")
    options = parser.parse_args()
    cpu_devices(options.replicas)

import jax.numpy as jnp
import numpy as np
import optax
from slices import LeNet

import synk


def summing(rows):
    """A call that sums so many rows, 64 numbers each."""
    total, x = synk.function(lambda x: x.sum(0)), np.ones((rows, 64), np.float32)
    return lambda: total(x)


def training(rows):
    """A step of LeNet on so many images."""
    model = LeNet()
    x = np.random.default_rng(0).normal(size=(rows, 28, 28, 1)).astype(np.float32)
    y = np.arange(rows, dtype=np.int32) % 10
    shared = synk.shared(jax.device_get(model.init(jax.random.key(0), x[:1])))

    @synk.function(reduce="mean")
    def step(x, y):
        def loss(params):
            return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, x), y).mean()

        return jax.value_and_grad(loss)(shared.value)

    @step.then
    def step(value, grads):
        shared.value = jax.tree.map(lambda p, g: p - jnp.float32(0.01) * g, shared.value, grads)
        return value

    return lambda: step(x, y)


CASES = {
    "x.sum(0) of 65 rows, to 64": (summing, 65, 64, 40),
    "LeNet, 70 rows, to 68": (training, 70, 68, 4),
}


def main():
    found = about("uneven") | {"replicas": options.replicas, "rounds": options.rounds, "results": {}}
    synk.init(options.replicas)
    print(f"{heading(found)}; medians of {options.rounds} turns, us")
    for name, (make, uneven, even, turn) in CASES.items():
        runs = {rows: make(rows) for rows in (uneven, even)}
        times = {rows: [] for rows in runs}
        for run in runs.values():
            for _ in range(3):
                jax.block_until_ready(run())
        for _ in range(options.rounds):
            for rows in random.sample(list(runs), 2):
                start = perf_counter()
                for _ in range(turn):
                    jax.block_until_ready(runs[rows]())
                times[rows].append((perf_counter() - start) / turn)
        us = {rows: 1e6 * median(each) for rows, each in times.items()}
        print(f"{name}: {us[uneven]:.0f}, {us[even]:.0f}, {us[uneven] / us[even]:.2f}")
        found["results"][name] = {"us": us, "ratio": us[uneven] / us[even]}
    save(options.json, found)


if __name__ == "__main__":
    main()
