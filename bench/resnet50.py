"""ResNet-50: how many images a second one to many replicas train on, by synk and by hand.

    python bench/resnet50.py [--replicas 1,2,4,8] [--batch-per-replica 64] [--image 224] [--steps 30] [--against 2]
                             [--data resident|host] [--num-slices 1] [--json OUT] [--plot OUT.png]

Claim: a serial-looking loop trains as fast as the best hand-written JAX, and reduces nothing but the gradients, the
running averages and the loss, once. Ways take turns in one run; medians. On CPUs images are 64 pixels and 8 a replica
by default. Virtual CPU devices share the cores: their speedup says nothing about real ones.
"""

import argparse
import json
import os
from statistics import median
from time import perf_counter

import jax

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", default=None, help="1,2,4,8 as far as there are devices")
    parser.add_argument("--batch-per-replica", type=int)
    parser.add_argument("--image", type=int, help="pixels a side")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--against", type=int, default=0, help="compare with hand-written ways on so many replicas")
    parser.add_argument("--data", choices=("resident", "host"), default="resident")
    parser.add_argument("--num-slices", type=int, default=1)
    parser.add_argument("--json")
    parser.add_argument("--plot")
    options = parser.parse_args()
    if os.environ.get("JAX_PLATFORMS", "cpu") == "cpu":
        jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp
import numpy as np
from resnet import WAYS, Training, collectives, images, peak_memory
from tqdm import tqdm


def by_default():
    """Fill in what was not asked for: small on CPUs, the usual size elsewhere."""
    is_cpu = jax.devices()[0].platform == "cpu"
    options.image = options.image or (64 if is_cpu else 224)
    options.batch_per_replica = options.batch_per_replica or (8 if is_cpu else 64)
    options.steps = options.steps or (5 if is_cpu else 30)
    counts = [1, 2] if is_cpu else [1, 2, 4, 8]
    if options.replicas:
        counts = [int(n) for n in options.replicas.split(",")]
    return [n for n in counts if n <= jax.device_count()], jnp.float32 if is_cpu else jnp.bfloat16


def timed(way, batches, x, y):
    """Milliseconds of each step: `way` on resident rows, or on rows picked on the host."""
    times = []
    placed = way.put(x[: batches[0].size], y[: batches[0].size])
    for batch in batches:
        start = perf_counter()
        if options.data == "resident":
            loss = way.step(*placed)
        elif way.function is not None:
            loss = way.function(x, y, batch=batch, num_slices=options.num_slices)
        else:
            loss = way.step(*way.put(x[batch], y[batch]))
        jax.block_until_ready(loss)
        times.append(1e3 * (perf_counter() - start))
    if not np.isfinite(np.asarray(loss)).all():
        raise SystemExit("The loss is not finite.")
    return times


def measure(training, names, replicas):
    """Each way's steps, round by round in turn; what its program holds."""
    rows = replicas * options.batch_per_replica
    x, y = images(2 * rows, options.image)
    ways = {}
    for name in names:
        start = perf_counter()
        arguments = {"num_slices": options.num_slices} if name == "synk" else {}
        ways[name] = WAYS[name](training, replicas, x[:rows], y[:rows], **arguments)
        print(
            f"  {replicas} x {options.batch_per_replica}: {name} compiled in {perf_counter() - start:.0f} s", flush=True
        )
    rng = np.random.default_rng(0)
    times = {name: [] for name in names}
    for turn in tqdm(range(4), f"{replicas} replica(s)", leave=False):
        for name, way in ways.items():
            batches = [rng.permutation(2 * rows)[:rows] for _ in range(max(1, options.steps // 3) if turn else 2)]
            found = timed(way, batches, x, y)
            times[name] += found if turn else []
    results = {}
    for name, way in ways.items():
        talk = collectives(way.compiled)
        results[name] = {
            "replicas": replicas,
            "images/s": 1e3 * rows / median(times[name]),
            "ms": [median(times[name]), min(times[name]), max(times[name])],
            "collectives": len(talk),
            "reduced MB": sum(size for _, size in talk) / 1e6,
            "peak MB": peak_memory(way.compiled) / 1e6,
        }
    synk_way = ways.get("synk")
    if synk_way is not None and synk_way.function.stats.compilations > 1 + 2 * (options.num_slices > 1):
        print(f"  synk compiled {synk_way.function.stats.compilations} programs")
    return results


def show(name, result, one):
    middle, low, high = result["ms"]
    speedup = result["images/s"] / one if one else float("nan")
    print(
        f"{result['replicas']:8} {name:20} {result['images/s']:10.1f} {middle:9.1f} ({low:.1f} to {high:.1f})"
        f" {speedup:8.2f} {speedup / result['replicas']:10.2f} {result['collectives']:11} {result['reduced MB']:11.2f}"
        f" {result['peak MB']:8.0f}"
    )


def main():
    counts, dtype = by_default()
    training = Training(options.image, dtype)
    gradients = sum(leaf.nbytes for leaf in jax.tree.leaves(training.params)) / 1e6
    scaling = {n: measure(training, ["synk"], n)["synk"] for n in counts}
    against = measure(training, list(WAYS), options.against) if options.against else {}
    device = jax.devices()[0].device_kind
    print(
        f"\njax {jax.__version__}, {device}, {os.cpu_count()} cores; {options.image} px, "
        f"{options.batch_per_replica} images a replica, {np.dtype(dtype).name}, rows {options.data}, "
        f"{options.num_slices} slice(s)"
    )
    print(f"gradients: {gradients:.2f} MB")
    head = ("replicas", "way", "images/s", "ms a step", "speedup", "efficiency", "collectives", "reduced MB", "peak MB")
    print("{:8} {:20} {:>10} {:>9} {:>24} {:>10} {:>11} {:>11} {:>8}".format(*head))
    one = scaling[counts[0]]["images/s"] / counts[0]
    for result in scaling.values():
        show("synk", result, one)
    for name, result in against.items():
        show(name, result, one)
    if options.json:
        os.makedirs(os.path.dirname(options.json) or ".", exist_ok=True)
        about = {"jax": jax.__version__, "device": device, "cores": os.cpu_count(), "gradients MB": gradients}
        about |= {k: v for k, v in vars(options).items() if k not in ("json", "plot")}
        with open(options.json, "w") as file:
            json.dump({**about, "scaling": list(scaling.values()), "against": against}, file, indent=1)
    if options.plot:
        plot(scaling, device)


def plot(scaling, device):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    counts = list(scaling)
    rates = [result["images/s"] for result in scaling.values()]
    plt.plot(counts, rates, marker="o", label="synk")
    plt.plot(counts, [rates[0] * n / counts[0] for n in counts], "--", color="gray", label="as many times one")
    plt.xlabel("replicas"), plt.ylabel("images/s"), plt.title(f"ResNet-50 on {device}"), plt.legend()
    plt.savefig(options.plot, dpi=110)


if __name__ == "__main__":
    main()
