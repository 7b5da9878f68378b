"""Blocks: a training step whose bits depend on no number of replicas, beside the plain step.

    python bench/blocks.py [--replicas 1,2,4] [--rounds 21] [--json OUT]

Batches of 128 rows in blocks of 32; a perceptron of 50,000 parameters and a small LeNet, Adam. Claims: at most 1.5 x
and 1.15 x. Ways in turn; medians.
"""

import argparse
from statistics import median
from time import perf_counter

import jax
from record import about, cpu_devices, heading, save

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", default="1,2,4")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json")
    options = parser.parse_args()
    replicas = [int(n) for n in options.replicas.split(",")]
    cpu_devices(max(replicas))

import numpy as np
import optax
from small import lenet, perceptron

import synk
import synk.train

ROWS, BLOCK, WARM = 128, 32, 3
RANDOM = np.random.default_rng(0)


def weights(*shape):
    return (RANDOM.normal(size=shape) * 0.1).astype(np.float32), np.zeros(shape[-1], np.float32)


MODELS = {
    "perceptron": (perceptron, [weights(64, 256), weights(256, 128), weights(128, 10)], (64,)),
    "LeNet": (lenet, [weights(5, 5, 1, 8), weights(5, 5, 8, 16), weights(784, 64), weights(64, 10)], (28, 28, 1)),
}


def steps_of(net, params):
    def loss(params, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(net(params, x), y).mean()

    return {blocks: synk.train.step(loss, params, optax.adam(1e-3), blocks=blocks) for blocks in (None, BLOCK)}


def main():
    found = about("blocks") | {"rounds": options.rounds, "results": {}}
    print(f"{heading(found)}; medians of {options.rounds} turns, ms, and the ratio to the plain step")
    for n in replicas:
        for name, (net, params, shape) in MODELS.items():
            x = RANDOM.normal(size=(ROWS, *shape)).astype(np.float32)
            y = RANDOM.integers(0, 10, ROWS)
            with synk.init(n):
                steps, times = steps_of(net, params), {None: [], BLOCK: []}
                for turn in range(options.rounds + WARM):
                    for blocks, step in steps.items():
                        start = perf_counter()
                        for _ in range(5):
                            loss = step(x, y)
                        jax.block_until_ready((loss, step.params.get_value(borrow=True)))
                        if turn >= WARM:
                            times[blocks].append((perf_counter() - start) * 200)
            plain, in_blocks = median(times[None]), median(times[BLOCK])
            found["results"][f"{name}, {n} replicas"] = {
                "plain_ms": plain,
                "blocks_ms": in_blocks,
                "ratio": in_blocks / plain,
            }
            print(f"{n} replicas, {name}: {plain:.2f}, {in_blocks:.2f}, {in_blocks / plain:.2f}", flush=True)
    save(options.json, found)


if __name__ == "__main__":
    main()
