"""Calls: what a call of a small program costs by synk, beside the best that can be written by hand.

    python bench/calls.py [--replicas 1,2] [--rounds 15] [--json OUT]

A step of a multilayer perceptron of 6 leaves (three of 64 x 64) with 256 rows, the gradients' mean and plain SGD. By
hand: `jit(shard_map)` with all gradients in one buffer. A runtime's threads sleep between two programs, so whoever does
anything in between pays for waking them: the step by hand is also timed with 20 us of other work before it. "In a row"
starts eight steps before it waits for the first. Then what kinds of arguments cost more than rows in place, and what
synk's own Python takes if the program takes nothing. The ways take turns in random order; first quartiles.
"""

import argparse
import os
import random
import sys
from collections import deque
from time import perf_counter, thread_time

import jax
from record import about, cpu_devices, heading, save

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", default="1,2")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json")
    options = parser.parse_args()
    counts = [int(n) for n in options.replicas.split(",")]
    cpu_devices(max(counts))

import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import synk

ROWS, WIDTH, TURN = 256, 64, 60
SYNK = os.path.dirname(synk.__file__) + os.sep


def loss(params, x, y):
    for i in range(3):
        x = jnp.tanh(x @ params[f"w{i}"] + params[f"b{i}"])
    return jnp.mean((x - y) ** 2)


def sgd(params, grads):
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)


def mapped(body, ins, outs, **options):
    return jax.jit(
        jax.shard_map(body, mesh=synk.group().mesh, in_specs=ins, out_specs=outs, check_vma=False), **options
    )


def by_hand(params, x, y):
    """A step of `jit(shard_map)` with one all-reduce of all gradients and the loss."""

    def body(params, x, y):
        together, apart = ravel_pytree(jax.value_and_grad(loss)(params, x, y))
        value, grads = apart(jax.lax.pmean(together, "replica"))
        return sgd(params, grads), value

    step = mapped(body, (P(), P("replica"), P("replica")), (P(), P()), donate_argnums=0)
    state = [jax.device_put(params, NamedSharding(synk.group().mesh, P()))]

    def run():
        state[0], value = step(state[0], x, y)
        return value

    return run


def after(microseconds, run):
    """The same with other work before it."""

    def busy():
        end = perf_counter() + 1e-6 * microseconds
        while perf_counter() < end:
            pass
        return run()

    return busy


def by_synk(params):
    shared = synk.shared(params, name="params")

    @synk.function(reduce="mean")
    def step(x, y):
        return jax.value_and_grad(loss)(shared.value, x, y)

    @step.then
    def step(value, grads):
        shared.value = sgd(shared.value, grads)
        return value

    return step


def steps():
    """Each way to run a step, by name."""
    rng = np.random.default_rng(0)
    params = {f"w{i}": rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 10 for i in range(3)}
    params |= {f"b{i}": np.zeros(WIDTH, np.float32) for i in range(3)}
    x = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
    xs, ys = jax.device_put((x, x / 2), NamedSharding(synk.group().mesh, P("replica")))
    dx, dy = synk.data(x, place="scatter"), synk.data(x / 2, place="scatter")
    ways = [by_synk(params) for _ in range(4)]
    return {
        "by hand": by_hand(params, xs, ys),
        "by hand, 20 us later": after(20, by_hand(params, xs, ys)),
        "synk, arrays in place": lambda: ways[0](xs, ys),
        "synk, data taken whole": lambda: ways[1](dx, dy),
        "synk, an int batch": lambda: ways[2](xs, ys, batch=ROWS),
    }, (lambda step: lambda: step(xs, ys))(ways[3])


def arguments():
    """Calls that differ in one argument, by name: by synk and by hand."""
    x = np.ones((ROWS, 8), np.float32)
    xs = jax.device_put(x, NamedSharding(synk.group().mesh, P("replica")))
    keys = [jax.random.fold_in(jax.random.key(0), i) for i in range(64)]
    turn = iter(range(10**9))
    plain = synk.function(lambda x: jnp.mean(x), reduce="mean")
    scaled = synk.function(lambda x, rate: jnp.mean(x) * rate, inputs=["x"], reduce="mean")
    keyed = synk.function(lambda x, key: jnp.mean(x) + jax.random.uniform(key), inputs=["x"], reduce="mean")
    two = synk.function(lambda x, y: jnp.mean(x) + jnp.mean(y), reduce="mean")
    rows, whole = P("replica"), P()
    hand = mapped(lambda x: jax.lax.pmean(jnp.mean(x), "replica"), (rows,), whole)
    hand_keyed = mapped(
        lambda x, key: jax.lax.pmean(jnp.mean(x), "replica") + jax.random.uniform(key), (rows, whole), whole
    )
    return {
        "plain": lambda: plain(xs),
        "float": lambda: scaled(xs, 0.1),
        "np.float32": lambda: scaled(xs, np.float32(0.1)),
        "typed key": lambda: keyed(xs, keys[next(turn) % 64]),
        "two in place": lambda: two(xs, xs),
        "two of NumPy": lambda: two(x, x),
        "by hand": lambda: hand(xs),
        "by hand, typed key": lambda: hand_keyed(xs, keys[next(turn) % 64]),
    }


def awaited(run):
    """Seconds of a step that is waited for."""
    times = []
    for _ in range(TURN):
        start = perf_counter()
        jax.block_until_ready(run())
        times.append(perf_counter() - start)
    return times


def in_a_row(run):
    """Seconds of a step, where eight are under way."""
    pending, start = deque(), perf_counter()
    for _ in range(TURN):
        pending.append(run())
        if len(pending) > 8:
            jax.block_until_ready(pending.popleft())
    jax.block_until_ready(list(pending))
    return [(perf_counter() - start) / TURN]


def quartiles(ways, rounds, *measures):
    """Microseconds of each way by each measure: first quartiles of all turns."""
    times = {name: [[] for _ in measures] for name in ways}
    for run in (*ways.values(), *ways.values()):
        jax.block_until_ready(run())
    order, shuffle = list(ways), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            jax.block_until_ready(ways[name]())  # caches are full of another way's
            for seconds, measure in zip(times[name], measures, strict=True):
                seconds += measure(ways[name])
    return {name: [1e6 * sorted(each)[len(each) // 4] for each in all_of] for name, all_of in times.items()}


def own_python(step):
    """Microseconds of the thread in a step whose program is replaced by its results, and what of synk it enters."""
    from synk._call import execute
    from synk._runtime.executable import Program

    jax.block_until_ready([step() for _ in range(4)])
    launch, known = Program.launch, {}

    def stub(self, args, on_failure=None):
        if self not in known:
            known[self] = launch(self, args, on_failure or execute.ignore_failure)
        return [*known[self]]

    Program.launch = stub
    try:
        step()
        least = 1.0
        for _ in range(15):
            start = thread_time()
            for _ in range(200):
                step()
            least = min(least, (thread_time() - start) / 200)
    finally:
        Program.launch = launch
    return 1e6 * least


def entered(step):
    """How many functions of synk, in how many files, a step enters."""
    jax.block_until_ready([step() for _ in range(4)])
    files = []

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(SYNK):
            files.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        result = step()
    finally:
        sys.setprofile(None)
    jax.block_until_ready(result)
    return len(files), len(set(files))


def main():
    found = about("calls") | {"rounds": options.rounds, "results": {}}
    print(f"{heading(found)}; first quartiles of {options.rounds} turns of {TURN}, us")
    for n in counts:
        synk.init(n)
        ways, own = steps()
        us = quartiles(ways, options.rounds, awaited, in_a_row)
        print(f"\n{n} replicas{'':24} {'awaited':>14} {'in a row':>16}")
        ratios = {
            name: [one / hand for one, hand in zip(both, us["by hand"], strict=True)] for name, both in us.items()
        }
        for name, (one, many) in us.items():
            print(f"  {name:32} {one:8.0f} {ratios[name][0]:5.2f} {many:10.0f} {ratios[name][1]:5.2f}", flush=True)
        more = {name: each[0] for name, each in quartiles(arguments(), options.rounds, awaited).items()}
        beside = {
            "a float": more["float"] - more["plain"],
            "an np.float32": more["np.float32"] - more["plain"],
            "a typed key": more["typed key"] - more["plain"],
            "a typed key, by hand": more["by hand, typed key"] - more["by hand"],
            "an argument of NumPy": (more["two of NumPy"] - more["two in place"]) / 2,
        }
        print("  more for " + ", ".join(f"{name} {us_more:+.0f}" for name, us_more in beside.items()))
        functions, files = entered(own)
        python = own_python(own)
        print(f"  synk's own Python {python:.1f} us, {functions} functions in {files} files", flush=True)
        found["results"][f"{n} replicas"] = {
            "us": us, "ratios": ratios, "beside": beside, "python": python, "functions": functions, "files": files,
        }  # fmt: skip
    save(options.json, found)


if __name__ == "__main__":
    main()
