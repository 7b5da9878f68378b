"""Slices: time and memory of a training step whose rows run in parts, by synk and by hand.

    python bench/slices.py [--replicas 1,2] [--slices 1,2,4,8] [--models CNN,MLP] [--rounds 9] [--json OUT]

Claim: `num_slices=4` of a CNN takes at most 1.1 of the whole batch's time and at most 0.35 of its temporary memory. A
LeNet-like CNN (512 images of 28 x 28) and a multilayer perceptron (2,048 rows of 784), SGD, rows resident; beside the
same loop of launches over the slices written by hand. Interleaved in one run; medians.

Memory is told in two ways. Temporary: what XLA plans for a device, by `memory_analysis`, the most of the programs that
one step runs. `f.compile(..., num_slices=k)` gives the last of them, which combines; for the one that runs a part, a
plain call on a part's rows is compiled, which holds its map and the update. Peak: by how much the resident memory of a
process of its own grows during a step (Linux, CPU devices; all replicas together), which counts rows copied and
gradients kept between launches too.
"""

import argparse
import json
import os
import subprocess
import sys
from functools import partial
from statistics import median
from time import perf_counter, sleep
from typing import Any

import jax
from record import about, cpu_devices, heading, save

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", default="1,2")
    parser.add_argument("--slices", default="1,2,4,8", help="the first is 1: all ratios are to it")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--models", default="CNN,MLP")
    parser.add_argument("--divide", type=int, default=1, help="rows by so much, for a trial")
    parser.add_argument("--peaks", action="store_true", help="print peak memory alone; a run calls itself with this")
    parser.add_argument("--json")
    options = parser.parse_args()
    counts, kinds = [int(n) for n in options.replicas.split(",")], options.models.split(",")
    cpu_devices(max(counts))

import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import synk

LR = 0.01


class LeNet(nn.Module):
    """Two convolutions with pooling, two dense layers."""

    @nn.compact
    def __call__(self, x):
        for features in (16, 32):
            x = nn.avg_pool(nn.relu(nn.Conv(features, (5, 5))(x)), (2, 2), (2, 2))
        return nn.Dense(10)(nn.relu(nn.Dense(128)(x.reshape(len(x), -1))))


class Perceptron(nn.Module):
    """Four dense layers."""

    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = nn.relu(nn.Dense(512)(x))
        return nn.Dense(10)(x)


MODELS = {"CNN": (LeNet(), (512, 28, 28, 1)), "MLP": (Perceptron(), (2048, 784))}


def gradients(model, params, x, y):
    def loss(params):
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, x), y).mean()

    return jax.value_and_grad(loss)(params)


def updated(params, grads):
    return jax.tree.map(lambda p, g: p - LR * g, params, grads)


def by_synk(model, start, x, y, replicas):
    """For so many slices: a step, and the temporary memory of its programs."""
    group = synk.init(replicas)
    params = synk.shared(start, name="params")

    @synk.function(inputs=["x", "y"], reduce="mean")
    def step(x, y):
        return gradients(model, params.value, x, y)

    @step.then
    def step(loss, grads):
        params.value = updated(params.value, grads)
        return loss

    rows = jax.device_put((x, y), group.stacked)

    def way(slices):
        part = jax.tree.map(lambda a: a[: len(a) // slices], (x, y))
        programs = [step.compile(*part), step.compile(*rows, num_slices=slices)]
        return lambda: step(*rows, num_slices=slices), max(map(temporary, programs))

    return way


def by_hand(model, start, x, y, replicas):
    """The same by hand: one program for the whole batch, or one launch a slice and one that combines."""
    mesh = Mesh(np.array(jax.devices()[:replicas]), ("replica",), axis_types=(AxisType.Auto,))
    cut, everywhere = NamedSharding(mesh, P("replica")), NamedSharding(mesh, P())
    mapped = partial(jax.shard_map, mesh=mesh, check_vma=False)
    rows = jax.device_put((x, y), cut)

    def whole(params, x, y):
        loss, grads = lax.pmean(gradients(model, params, x, y), "replica")
        return updated(params, grads), loss

    def part(total, params, x, y, i, slices):
        n = len(x) // slices
        grads = gradients(model, params, *(lax.dynamic_slice_in_dim(a, i * n, n) for a in (x, y)))
        return jax.tree.map(lambda g, *t: sum(t, g[None]), grads, *total)

    def last(params, total, slices):
        loss, grads = lax.pmean(jax.tree.map(lambda t: t[0] / slices, total), "replica")
        return updated(params, grads), loss

    split, same = P("replica"), P()

    def way(slices):
        params = jax.tree.map(jnp.copy, jax.device_put(start, everywhere))
        if slices == 1:
            run = jax.jit(mapped(whole, in_specs=(same, split, split), out_specs=same), donate_argnums=0)
            run = run.lower(params, *rows).compile()

            def step():
                nonlocal params
                params, loss = run(params, *rows)
                return loss

            return step, temporary(run)
        f = mapped(partial(part, slices=slices), in_specs=(split, same, split, split, same), out_specs=split)
        g = mapped(partial(last, slices=slices), in_specs=(same, split), out_specs=same)
        at = [jax.device_put(jnp.int32(i), everywhere) for i in range(slices)]
        first = jax.jit(f).lower((), params, *rows, at[0]).compile()
        total = first((), params, *rows, at[0])
        further = jax.jit(f, donate_argnums=0).lower((total,), params, *rows, at[0]).compile()
        end = jax.jit(g, donate_argnums=0).lower(params, total).compile()
        del total

        def loop():
            nonlocal params
            total = first((), params, *rows, at[0])
            for i in at[1:]:
                total = further((total,), params, *rows, i)
            params, loss = end(params, total)
            return loss

        return loop, max(map(temporary, (first, further, end)))

    return way


def temporary(compiled):
    return compiled.memory_analysis().temp_size_in_bytes


def made(replicas, kind):
    """Every way, for every number of slices: its step and temporary memory."""
    model, shape = MODELS[kind]
    shape = (shape[0] // options.divide, *shape[1:])
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal(shape, np.float32), rng.integers(0, 10, shape[0]).astype(np.int32)
    start = jax.device_get(model.init(jax.random.key(0), x[:1]))
    makers = {"synk": by_synk(model, start, x, y, replicas), "by hand": by_hand(model, start, x, y, replicas)}
    return {(name, int(k)): make(int(k)) for k in options.slices.split(",") for name, make in makers.items()}


def measure(replicas, kind) -> list[dict[str, Any]]:
    """Every way, in turn: seconds a step."""
    found = made(replicas, kind)
    times = {key: [] for key in found}
    for turn in range(options.rounds + 2):
        for key, (step, _) in found.items():
            begin = perf_counter()
            jax.block_until_ready(step())
            if turn > 1:
                times[key].append(perf_counter() - begin)
    about = {"model": kind, "replicas": replicas}
    return [
        {**about, "way": name, "slices": k, "seconds": median(times[name, k]), "temporary": size}
        for (name, k), (_, size) in found.items()
    ]


def peaks():
    """Bytes by which each step makes this process grow, in the order of the results."""
    found = []
    for kind in kinds:
        for replicas in counts:
            for step, _ in made(replicas, kind).values():
                found.append(median([growth(step) for _ in range(4)][1:]))
    return found


def growth(step):
    sleep(0.05)  # the step before may still be giving memory back
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # VmHWM starts anew
    before = high_water()
    jax.block_until_ready(step())
    return high_water() - before


def high_water():
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("VmHWM"))


def peaks_apart():
    """Peaks told by a process whose malloc keeps nothing back, which would be slower; none where they cannot be."""
    if sys.platform != "linux" or jax.default_backend() != "cpu":
        return None
    malloc = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    same = {name: str(getattr(options, name)) for name in ("replicas", "slices", "models", "divide")}
    command = [sys.executable, __file__, "--peaks", *(f"--{name}={value}" for name, value in same.items())]
    return json.loads(subprocess.run(command, env={**os.environ, **malloc}, check=True, stdout=subprocess.PIPE).stdout)


def main():
    if options.peaks:
        print(json.dumps(peaks()))
        return
    found = about("slices") | {"rounds": options.rounds}
    print(f"{heading(found)}; medians of {options.rounds}")
    results = [case for model in kinds for replicas in counts for case in measure(replicas, model)]
    grown = peaks_apart() or [None] * len(results)
    print("model replicas way     slices       ms  MB temp  MB peak   of the whole batch by hand: time, temp")
    for case, peak in zip(results, grown, strict=True):
        if case["way"] == "synk" and case["slices"] == 1:
            whole = results[results.index(case) + 1]
        case |= {"peak": peak, "time ratio": case["seconds"] / whole["seconds"]}
        case["temporary ratio"] = case["temporary"] / whole["temporary"]
        print(
            f"{case['model']:5} {case['replicas']:8} {case['way']:7} {case['slices']:6} {1e3 * case['seconds']:8.1f} "
            f"{case['temporary'] / 1e6:8.1f} {'-' if peak is None else f'{peak / 1e6:.1f}':>8}   "
            f"{case['time ratio']:.2f}, {case['temporary ratio']:.2f}"
        )
    save(options.json, found | {"results": results})


if __name__ == "__main__":
    main()
