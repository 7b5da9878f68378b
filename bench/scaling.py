"""Scaling: rows a second of a training step, by numbers of replicas.

    python bench/scaling.py [FILE:NAME] [--replicas 1,2] [--strong] [--steps 20] [--rounds 5] [--json OUT]

NAME is a function of yours without parameters. It makes a step, and returns it with the arguments of one call for the
most replicas: `return step, x, y`. It is called in a group of each number of replicas. Without FILE:NAME the step is
that of a perceptron. Each replica has the same number of rows (weak scaling), or all rows are divided (--strong).
A round is some steps in a row, of which the last is waited for; medians of rounds, with quartiles. Replicas on virtual
CPU devices share the cores, so there this shows what synk costs, and not what more devices bring.
"""

import argparse
import importlib
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
from record import about, cpu_devices, heading, progress, save

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target", nargs="?", metavar="FILE:NAME")
    parser.add_argument("--replicas", default="1,2")
    parser.add_argument("--strong", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    options = parser.parse_args()
    counts = sorted({int(n) for n in options.replicas.split(",")})
    cpu_devices(counts[-1])

import jax.numpy as jnp
import numpy as np
import optax

import synk


def perceptron():
    """A step of three dense layers, and its rows."""
    rng = np.random.default_rng(0)
    params = [rng.standard_normal((256, 256), np.float32) / 16 for _ in range(3)]
    x = rng.standard_normal((2048, 256), np.float32)

    def loss(params, x, y):
        for layer in params:
            x = jnp.tanh(x @ layer)
        return jnp.mean((x - y) ** 2)

    return synk.train.step(loss, params, optax.adam(1e-3)), x, x


def made_by(target):
    """Return the function FILE:NAME."""
    path, _, name = target.rpartition(":")
    sys.path.insert(0, str(Path(path).resolve().parent))
    return getattr(importlib.import_module(Path(path).stem), name)


def measure(make, replicas):
    """Time rounds of steps on so many replicas."""
    with synk.init(replicas):
        step, *args = make()
        rows = sum(step.explain(*args).lengths)
        if not options.strong:
            rows = rows * replicas // counts[-1]

        def seconds(steps):
            begin = perf_counter()
            for _ in range(steps):
                result = step(*args, batch=rows)
            jax.block_until_ready(result)
            return (perf_counter() - begin) / steps

        seconds(3)
        rounds = [seconds(options.steps) for _ in progress(range(options.rounds), f"{replicas} replica(s)")]
    low, middle, high = np.quantile(rounds, (0.25, 0.5, 0.75)).tolist()
    return {"replicas": replicas, "rows": rows, "seconds": middle, "quartiles": [low, high], "rate": rows / middle}


def main():
    make = made_by(options.target) if options.target else perceptron
    found = about("scaling") | {"step": options.target or "perceptron", "strong": options.strong}
    print(f"{heading(found)}; medians of {options.rounds} rounds of {options.steps} steps")
    print("replicas    rows   ms a step (quartiles)      rows/s   speed-up   efficiency")
    results = []
    for replicas in counts:
        case: dict[str, Any] = measure(make, replicas)
        results.append(case)
        case["speed-up"] = case["rate"] / results[0]["rate"]
        case["efficiency"] = case["speed-up"] * counts[0] / replicas
        low, high = (1e3 * seconds for seconds in case["quartiles"])
        print(
            f"{replicas:8} {case['rows']:7}   {1e3 * case['seconds']:.2f} ({low:.2f} to {high:.2f})   "
            f"{case['rate']:12.0f} {case['speed-up']:10.2f} {100 * case['efficiency']:10.0f} %"
        )
    save(options.json, found | {"results": results})


if __name__ == "__main__":
    main()
