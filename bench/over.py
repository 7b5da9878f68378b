"""Over: an evaluation over an epoch by `f.over`, beside a loop by hand that sums on the devices.

    python bench/over.py [--replicas 1,2] [--rounds 9] [--json OUT]

Loss, accuracy and confusion matrix of a perceptron with one hidden layer over 40 batches of 512 rows of 256 numbers and
a short one, on the host. By hand: `jit(shard_map)` whose sums stay on their devices, donated from batch to batch, rows
picked by NumPy and put in place, one psum at the end; without the short batch, which none may leave out. Claim:
at most 1.05 x its time with prefetch=0, since by hand no batch is taken early either. Beside it f.over as it is by
default, with prefetch=2. Ways in turn; medians.
"""

import argparse
import random
from functools import partial
from statistics import median
from time import perf_counter

import jax
from record import about, cpu_devices, heading, save

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", default="1,2")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json")
    options = parser.parse_args()
    replicas = [int(n) for n in options.replicas.split(",")]
    cpu_devices(max(replicas))

import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import synk

BATCH, BATCHES, WIDTH, CLASSES = 512, 40, 256, 10
SIZES = {"a small model": 32, "a larger one": 1024}


def counts(params, x, y):
    """Sums over the rows: losses, right guesses, the confusion matrix."""
    scores = jnp.tanh(x @ params[0]) @ params[1]
    guess = scores.argmax(1)
    losses = -jnp.take_along_axis(jax.nn.log_softmax(scores), y[:, None], 1)
    return losses.sum(), (guess == y).sum(), jnp.zeros((CLASSES, CLASSES), int).at[y, guess].add(1)


def by_synk(params, x, y, order):
    model = synk.shared(params)
    evaluate = synk.function(lambda x, y: counts(model.value, x, y))
    batches = [order[i : i + BATCH] for i in range(0, len(order), BATCH)]
    return {f"prefetch={n}": lambda n=n: evaluate.over(x, y, batches=batches, prefetch=n) for n in (0, 2)}


def by_hand(n, params, x, y, order):
    mesh = Mesh(np.array(jax.devices()[:n]), ("replica",), axis_types=(AxisType.Auto,))
    rows, whole = NamedSharding(mesh, P("replica")), NamedSharding(mesh, P())
    model = jax.device_put(params, whole)

    def add(sums, params, x, y):
        return jax.tree.map(lambda s, new: s + new, sums, jax.tree.map(lambda a: a[None], counts(params, x, y)))

    specs = (P("replica"), P(), P("replica"), P("replica"))
    mapped = jax.shard_map(add, mesh=mesh, in_specs=specs, out_specs=P("replica"), check_vma=False)
    step = jax.jit(mapped, donate_argnums=0)
    last = jax.jit(lambda sums: jax.tree.map(lambda s: s.sum(0), sums), out_shardings=whole)
    zeros = jax.eval_shape(partial(counts, params), x[:1], y[:1])
    start = jax.jit(lambda: jax.tree.map(lambda s: jnp.zeros((n, *s.shape), s.dtype), zeros), out_shardings=rows)

    def run():
        sums = start()
        for i in range(0, len(order) // BATCH * BATCH, BATCH):
            chosen = order[i : i + BATCH]
            sums = step(sums, model, jax.device_put(x[chosen], rows), jax.device_put(y[chosen], rows))
            if n > 1 and i % (16 * BATCH) == 0:
                jax.block_until_ready(sums)  # more than 32 programs in flight may wedge CPU devices
        return last(sums)

    return run


def main():
    found = about("over") | {"replicas": replicas, "rounds": options.rounds, "results": {}}
    rng = np.random.default_rng(0)
    total = BATCH * BATCHES + 37
    x, y = rng.normal(size=(total, WIDTH)).astype(np.float32), rng.integers(0, CLASSES, total).astype(np.int32)
    order = rng.permutation(total)
    print(f"{heading(found)}; medians of {options.rounds} turns, ms, and the ratio to by hand")
    for n in replicas:
        synk.init(n)
        for name, hidden in SIZES.items():
            params = [rng.normal(size=shape).astype(np.float32) for shape in ((WIDTH, hidden), (hidden, CLASSES))]
            runs = {**by_synk(params, x, y, order), "hand": by_hand(n, params, x, y, order)}
            times = {way: [] for way in runs}
            for run in (*runs.values(), *runs.values()):
                jax.block_until_ready(run())
            for _ in range(options.rounds):
                for way in random.sample(list(runs), len(runs)):
                    start = perf_counter()
                    jax.block_until_ready(runs[way]())
                    times[way].append(perf_counter() - start)
            ms = {way: 1e3 * median(each) for way, each in times.items()}
            ratios = {way: each / ms["hand"] for way, each in ms.items() if way != "hand"}
            shown = "; ".join(f"{way} {ms[way]:.1f}, {ratio:.2f}" for way, ratio in ratios.items())
            print(f"{n} replicas, {name}: by hand {ms['hand']:.1f}; {shown}")
            found["results"][f"{name}, {n} replicas"] = {"ms": ms, "ratios": ratios}
    save(options.json, found)


if __name__ == "__main__":
    main()
