"""Nan: a training step with nan="raise" beside the same step without, each waited for.

    python bench/nan.py [--replicas 1,2] [--rounds 41] [--json OUT]

A perceptron with one hidden layer, AdamW, 256 numbers a row. Claim: at most 1.02 x. Ways in turn; medians.
"""

import argparse
from statistics import median
from time import perf_counter

import jax
from record import about, cpu_devices, heading, save

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", default="1,2")
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--json")
    options = parser.parse_args()
    replicas = [int(n) for n in options.replicas.split(",")]
    cpu_devices(max(replicas))

import jax.numpy as jnp
import numpy as np
import optax

import synk
import synk.train

WIDTH, CLASSES = 256, 10


def loss(params, x, y):
    scores = jnp.tanh(x @ params["in"]) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(scores, y).mean()


def measure(n, hidden, rows, rounds):
    """Milliseconds of both steps, medians."""
    rng = np.random.default_rng(0)
    params = {"in": rng.normal(size=(WIDTH, hidden)), "out": rng.normal(size=(hidden, CLASSES))}
    params = {name: (value * 0.05).astype(np.float32) for name, value in params.items()}
    x = rng.normal(size=(rows, WIDTH)).astype(np.float32)
    y = rng.integers(0, CLASSES, rows)
    with synk.init(n):
        steps = {nan: synk.train.step(loss, params, optax.adamw(1e-3), nan=nan) for nan in (None, "raise")}
        times = {nan: [] for nan in steps}
        for round_number in range(rounds + 2):
            for nan, step in steps.items():
                start = perf_counter()
                jax.block_until_ready((step(x, y), step.params.get_value(borrow=True)))
                if round_number > 1:
                    times[nan].append((perf_counter() - start) * 1e3)
    return median(times[None]), median(times["raise"])


def main():
    found = about("nan") | {"rounds": options.rounds, "results": []}
    print(f"{heading(found)}; medians of {options.rounds} turns, ms, and their ratio")
    for n in replicas:
        for hidden, rows in ((256, 512), (4096, 128), (4096, 1024)):
            plain, raising = measure(n, hidden, rows, options.rounds)
            each = {"replicas": n, "hidden": hidden, "rows": rows, "plain_ms": plain, "raise_ms": raising}
            found["results"].append(each | {"ratio": raising / plain})
            print(
                f"{n} replicas, {hidden} hidden units, {rows} rows: {plain:.2f}, {raising:.2f}, {raising / plain:.3f}"
            )
    save(options.json, found)


if __name__ == "__main__":
    main()
