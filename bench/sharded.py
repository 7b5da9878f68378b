"""Sharded: steps whose optimizer's state lies in pieces, beside the plain ones: time, bytes, memory, and difference.

    python bench/sharded.py [--replicas 4] [--rounds 21] [--models perceptron,wide,LeNet]
                           [--optimizers "SGD;momentum"] [--steps 100] [--json OUT]

Batches of 128 rows, uneven ones for the difference after 100 steps. Claims: at most 1.15 x the plain step, the bytes of
its all-reduce, one n-th of the state, parameters within 1e-6, or what one bit of one weight makes of the plain step in
as many. Ways in turn; medians.
"""

import argparse
from statistics import median
from time import perf_counter

import jax
from record import about, cpu_devices, heading, save

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--models", default="perceptron,wide,LeNet")
    parser.add_argument("--optimizers", default="SGD;momentum;AdamW;AdamW, clipped")
    parser.add_argument("--steps", type=int, default=100, help="after which parameters are compared")
    parser.add_argument("--json")
    options = parser.parse_args()
    cpu_devices(options.replicas)

import numpy as np
import optax
from small import lenet, perceptron

import synk
import synk.train

ROWS, WARM = 128, 3
RANDOM = np.random.default_rng(0)


def weights(*shape):
    return (RANDOM.normal(size=shape) * np.sqrt(1 / np.prod(shape[:-1]))).astype(np.float32), np.zeros(
        shape[-1], np.float32
    )


MODELS = {
    "perceptron": (perceptron, [weights(64, 256), weights(256, 128), weights(128, 10)], (64,)),
    "wide": (perceptron, [weights(64, 1024), weights(1024, 1024), weights(1024, 10)], (64,)),
    "LeNet": (lenet, [weights(5, 5, 1, 8), weights(5, 5, 8, 16), weights(784, 64), weights(64, 10)], (28, 28, 1)),
}
OPTIMIZERS = {
    "SGD": (optax.sgd(0.05), None),
    "momentum": (optax.sgd(0.02, momentum=0.9), None),
    "AdamW": (optax.adamw(1e-3), None),
    "AdamW, clipped": (optax.adamw(1e-3), 0.5),
}


def one_bit_off(params):
    """The same weights, but for the last bit of one: what training makes of it is no error of a step."""
    weight = params[0][0].copy()
    weight.flat[0] = np.nextafter(weight.flat[0], np.float32(np.inf))
    return [(weight, params[0][1]), *params[1:]]


def sent(explained):
    """Bytes that a replica sends in a step, by rings."""
    n = options.replicas
    share = {"all-reduce": 2 * (n - 1) / n, "reduce-scatter": (n - 1) / n, "all-gather": n - 1}
    return sum(share[c.kind] * c.operand_bytes for program in explained.programs for c in program.collectives)


def state_bytes(step):
    """Of the optimizer's state on one replica, all of whose leaves are stacked or whole."""
    leaves, stacked = step.opt_state._state.leaves, step.opt_state._state.layout == "stacked"
    return sum(leaf.nbytes for leaf in leaves) / (options.replicas if stacked else 1)


def compare(net, params, shape, optimizer, clip):
    """Milliseconds of both; ratios of bytes sent and of state; the largest difference of a parameter."""

    def loss(params, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(net(params, x), y).mean()

    x = RANDOM.normal(size=(ROWS, *shape)).astype(np.float32)
    y = RANDOM.integers(0, 10, ROWS)

    def made(shard, params=params):
        return synk.train.step(loss, params, optimizer, clip=clip, shard_optimizer=shard)

    steps, times = {shard: made(shard) for shard in (False, True)}, {False: [], True: []}
    for turn in range(options.rounds + WARM):
        for shard, step in steps.items():
            start = perf_counter()
            for _ in range(5):
                value = step(x, y)
            jax.block_until_ready((value, step.params.get_value(0, borrow=True)))
            if turn >= WARM:
                times[shard].append((perf_counter() - start) * 200)
    bytes_sent = {shard: sent(step.explain(x, y)) for shard, step in steps.items()}
    kept = {shard: state_bytes(step) for shard, step in steps.items()}
    uneven = {"plain": made(False), "sharded": made(True), "other": made(False, one_bit_off(params))}
    for i in range(options.steps):
        for step in uneven.values():
            step(x, y, batch=slice(i % 3, 125), num_slices=1 + i % 2)

    def difference(way):
        pairs = zip(*(jax.tree.leaves(uneven[each].params.value) for each in ("plain", way)), strict=True)
        return max(float(np.abs(a - b).max()) for a, b in pairs)

    return {
        "plain_ms": median(times[False]),
        "sharded_ms": median(times[True]),
        "bytes": bytes_sent[True] / bytes_sent[False],
        "state": kept[True] / kept[False] if kept[False] else None,
        "difference": difference("sharded"),
        "difference of one bit": difference("other"),
    }


def main():
    found = about("sharded") | {"replicas": options.replicas, "rounds": options.rounds, "results": {}}
    print(f"{heading(found)}; {options.replicas} replicas, medians of {options.rounds} turns")
    with synk.init(options.replicas):
        for name in options.models.split(","):
            for optimizer in options.optimizers.split(";"):
                tx, clip = OPTIMIZERS[optimizer]
                result = found["results"][f"{name}, {optimizer}"] = compare(*MODELS[name], tx, clip)
                plain, sharded, state = (
                    float(result["plain_ms"] or 0),
                    float(result["sharded_ms"] or 0),
                    result["state"],
                )
                kept = "no state" if state is None else f"state {state:.4f}"
                print(
                    f"{name}, {optimizer}: {plain:.2f}, {sharded:.2f} ms ({sharded / plain:.2f}), bytes "
                    f"{result['bytes']:.3f}, {kept}, difference {result['difference']:.1e} (of one bit "
                    f"{result['difference of one bit']:.1e})",
                    flush=True,
                )
    save(options.json, found)


if __name__ == "__main__":
    main()
