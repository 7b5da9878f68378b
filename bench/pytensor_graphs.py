# ruff: noqa: E402  # the flags are PyTensor's as it is imported
"""PyTensor graphs: the deep-learning tutorials by synk.pytensor, beside PyTensor's own functions.

    python bench/pytensor_graphs.py [--steps 108] [--rounds 41] [--rows 512] [--json OUT]

1. Parameters after so many steps by uneven batches on 1, 2 and 4 replicas, sliced or not, beside those of PyTensor's
   function on one device. Claim: no number differs by more than 1e-5.
2. The time of a step on one device beside that of PyTensor's own JAX mode, the same rows as NumPy arrays, each waited
   for. Claim: at most 1.2 x. That mode has no gradient of a scan, so there is nothing beside the LSTM.

The graphs are those of examples/pytensor_tutorials.py. Needs the extras `examples` and `pytensor`.
"""

import argparse
import os
import sys
import warnings
from pathlib import Path
from statistics import median
from time import perf_counter

import jax
from record import about, cpu_devices, heading, save

if __name__ == "__main__":
    cpu_devices(4)
os.environ.setdefault("PYTENSOR_FLAGS", "floatX=float32")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
warnings.filterwarnings("ignore", "Numba will use object mode|Skipping Assert|Explicitly requested dtype")

import numpy as np
import pytensor
import pytensor_tutorials as tutorials

import synk
import synk.pytensor


def make(model, own=None):
    """A step of the model: by PyTensor in a mode of its own, or by synk; and its parameters."""
    tutorials.rng = np.random.default_rng(0)
    inputs, cost, _, params, grads, updates = tutorials.graph(model)
    if own is not None:
        return pytensor.function(inputs, cost, updates=updates, mode=own), params
    combine = [(g, "mean") for g in grads]
    return synk.pytensor.function(inputs, cost, broadcast=inputs[-1:], updates=updates, combine=combine), params


def differences(model, steps):
    """The largest difference of a parameter, by number of replicas."""
    rows, _ = tutorials.digits(model)
    rate = np.float32(0.1)
    batches = list(synk.minibatches(len(rows[0]), 128, seed=1, epochs=-(-steps // 12)))
    alone, params = make(model, "NUMBA")
    for batch in batches:
        alone(*[each[batch] for each in rows], rate)
    found = {}
    for n in (1, 2, 4):
        with synk.init(n):
            step, others = make(model)
            for i, batch in enumerate(batches):
                step(*rows, rate, batch=batch, num_slices=2 if i % 10 == 9 else 1)
            gaps = [np.abs(a.get_value() - b.get_value()).max() for a, b in zip(params, others, strict=True)]
            found[n] = float(max(gaps))
    return len(batches), found


def times(model, rows, rounds):
    """Milliseconds of a step on one device: of synk, and of PyTensor's JAX mode, None where that fails."""
    each = [np.resize(values, (rows, *values.shape[1:])) for values in tutorials.digits(model)[0]]
    rate = np.float32(0.1)
    with synk.init(1):
        ways = {"synk": make(model)[0], "JAX": make(model, "JAX")[0]}
        taken = {way: [] for way in ways}
        for turn in range(rounds + 3):
            for way, step in list(ways.items()):
                start = perf_counter()
                try:
                    jax.block_until_ready(step(*each, rate))
                except Exception as error:
                    print(f"  {way}: {type(error).__name__}: {str(error).splitlines()[0][:90]}")
                    del ways[way]
                if turn > 2:
                    taken[way].append((perf_counter() - start) * 1e3)
        return median(taken["synk"]), median(taken["JAX"]) if "JAX" in ways else None


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=108)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--models", default=",".join(tutorials.MODELS))
    parser.add_argument("--json")
    options = parser.parse_args()
    found = about("pytensor_graphs") | {"pytensor": pytensor.__version__, "results": []}
    print(f"{heading(found)}; PyTensor {pytensor.__version__}")
    for model in options.models.split(","):
        steps, gaps = differences(model, options.steps)
        ours, own = times(model, options.rows, options.rounds)
        found["results"].append({"model": model, "steps": steps, "differences": gaps, "synk_ms": ours, "jax_ms": own})
        shown = ", ".join(f"{gap:.0e} on {n}" for n, gap in gaps.items())
        beside = "" if own is None else f", PyTensor's JAX mode {own:.2f}, ratio {ours / own:.2f}"
        print(f"{model}: after {steps} steps {shown}; {options.rows} rows: synk {ours:.2f} ms{beside}")
    save(options.json, found)


if __name__ == "__main__":
    main()
