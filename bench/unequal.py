"""Rows of unequal cost: `synk.map` with `cost=` beside without, and batches under a budget beside fixed rows.

    python bench/unequal.py [--replicas 2] [--rounds 15] [--rows 256] [--texts 2048] [--json OUT]

Loops of sines with lognormal lengths: by their lengths, by guesses with 30 % noise, and of equal lengths. A model of
two layers over texts of lognormal lengths, 8 to 512: real tokens a second under a budget of 16,384 tokens, and in
batches of 64 rows padded to their longest. Ways in turn in one process; ratios of medians.
"""

import argparse
import random
from statistics import median
from time import perf_counter

import jax
from record import about, cpu_devices, heading, save

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--texts", type=int, default=2048)
    parser.add_argument("--json")
    options = parser.parse_args()
    cpu_devices(options.replicas)

import jax.numpy as jnp
import numpy as np

import synk

SIZE = 64


def turns(ways, rounds):
    """Return the median seconds of each way."""
    times = {name: [] for name in ways}
    for way in ways.values():
        way()
    for _ in range(rounds):
        for name in random.sample(list(ways), len(ways)):
            start = perf_counter()
            ways[name]()
            times[name].append(perf_counter() - start)
    return {name: median(each) for name, each in times.items()}


@synk.map
def loop(steps):
    def step(state):
        i, x = state
        return i + 1, jnp.sin(x) + 1

    return jax.lax.while_loop(lambda state: state[0] < steps, step, (jnp.int32(0), jnp.float32(0.1) * steps))[1]


def maps():
    """Time loops with costs beside those without."""
    rng, rows = np.random.default_rng(0), options.rows
    steps = np.clip(rng.lognormal(7, 1, rows), 100, 40_000).astype(np.int32)
    guess, equal = steps * rng.uniform(0.7, 1.3, rows), np.full(rows, int(steps.mean()), np.int32)
    calls = {
        "without": lambda **cost: np.asarray(loop(steps, **cost)),
        "equal, without": lambda **cost: np.asarray(loop(equal, **cost)),
    }
    ways = {
        **calls,
        "by cost": lambda: calls["without"](cost=steps),
        "by a guess": lambda: calls["without"](cost=guess),
        "equal, by cost": lambda: calls["equal, without"](cost=equal),
    }
    times = turns(ways, options.rounds)
    assert np.array_equal(ways["by cost"](), ways["without"]())
    return {
        "map by cost: time / without": times["by cost"] / times["without"],
        "map by a guess with 30 % noise: time / without": times["by a guess"] / times["without"],
        "map of equal costs: time / without": times["equal, by cost"] / times["equal, without"],
    }


def texts():
    """Time an epoch under a budget beside one of fixed rows, and compare the losses of their tokens."""
    rng, count = np.random.default_rng(0), options.texts
    length = np.clip(rng.lognormal(4.2, 0.8, count), 8, 512).astype(np.int32)
    x = rng.normal(size=(count, 512, SIZE)).astype(np.float32) / 4
    real = jnp.result_type(float)
    weights = [rng.normal(0, 0.1, shape).astype(real) for shape in ((SIZE, 256), (256, SIZE))]

    @synk.function(inputs=["x", "length"], reduce="mean")
    def step(x, length, weights):
        is_token = jnp.arange(x.shape[1]) < length[:, None]

        def loss(weights):
            error = ((jnp.tanh(x @ weights[0]) @ weights[1] - x) ** 2).mean(-1)
            return (error * is_token).sum() / is_token.sum()

        return synk.Weighted(jax.value_and_grad(loss)(weights), is_token.sum().astype(real))

    budget = synk.minibatches(count, cost=length, budget=16_384)
    fixed = synk.minibatches(count, 64)
    buckets = {"budget": budget.longest, "fixed": lambda rows: 1 << int(length[rows].max() - 1).bit_length()}
    batches = {
        name: [(x[rows, : buckets[name](rows)], length[rows]) for rows in order]
        for name, order in (("budget", budget), ("fixed", fixed))
    }

    def epoch(name):
        found = [step(*batch, weights)[0] for batch in batches[name]]
        return np.average([float(value) for value in found], weights=[batch[1].sum() for batch in batches[name]])

    times = turns({name: (lambda name=name: epoch(name)) for name in batches}, max(1, options.rounds // 5))
    with jax.enable_x64(True):
        exact = [value.astype(np.float64) for value in weights]
        losses = {
            name: np.average(
                [float(step(x.astype(np.float64), n, exact)[0]) for x, n in batches[name]],
                weights=[n.sum() for _, n in batches[name]],
            )
            for name in batches
        }
    return {
        "texts under a budget: real tokens a second / fixed rows": times["fixed"] / times["budget"],
        "difference of an epoch's loss": abs(losses["budget"] / losses["fixed"] - 1),
        "shapes of an epoch": len({batch[0].shape for batch in batches["budget"]}),
    }


def main():
    found = about("unequal") | {"replicas": options.replicas, "rounds": options.rounds}
    synk.init(options.replicas)
    print(f"{heading(found)}; ratios of medians of {options.rounds} turns")
    found["results"] = maps() | texts()
    for name, value in found["results"].items():
        print(f"{name}: {value:.3g}")
    save(options.json, found)


if __name__ == "__main__":
    main()
