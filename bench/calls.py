"""Calls: what a call of a small program costs by synk, beside the best that can be written by hand.

    python bench/calls.py [--replicas 1,2] [--parts steps,leaves,arguments,rows] [--json OUT]

- steps: a step of a perceptron of 6 leaves (three of 64 x 64) with 256 rows, the gradients' mean and plain SGD. By
  hand: `jit(shard_map)` of a tree of parameters, donated, with all gradients in one buffer; on one replica the better
  of that and of each gradient by itself. Then synk's own part of the call: the program is replaced by its results.
- leaves: the same of 60, 160 and 480 leaves of 1 KB.
- arguments: how much more a call costs with a key, a number or NumPy rows than with rows in place.
- rows: a batch of rows of 12 KB, picked by index on the host; by hand in several ways.

Each call is awaited, or the last of eight in a row is; or its start alone is timed, by the CPU time of the thread,
which other processes do not lengthen. Ways take turns in random order, in one process; first quartiles, and the least
of synk's own part. The last column is the ratio of the least twentieths, for busy machines.
"""

import argparse
import gc
import os
import random
import sys
from functools import partial
from time import perf_counter, thread_time

import jax
from record import Table, about, cpu_devices, heading, save

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", default="1,2", help="those for which there are devices")
    parser.add_argument("--parts", default="steps,leaves,arguments,rows")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--small", action="store_true", help="a trial of all parts")
    parser.add_argument("--json")
    options = parser.parse_args()
    counts = [int(n) for n in options.replicas.split(",")]
    cpu_devices(max(counts))

import jax.numpy as jnp
import numpy as np
from batches import KINDS, host_ways, measure, picks
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import synk

ROWS, WIDTH, TURN = 256, 64, 56
SYNK = os.path.dirname(synk.__file__) + os.sep


def loss(params, x, y):
    for i in range(3):
        x = jnp.tanh(x @ params[f"w{i}"] + params[f"b{i}"])
    return jnp.mean((x - y) ** 2)


def loss_of_leaves(params, x, y):
    """Touch every leaf; the gradient is as many leaves."""
    mean = x.mean(0)
    return sum(jnp.sum(mean * p) ** 2 for p in params.values()) + jnp.mean(y)


def sgd(params, grads):
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)


def in_place(*arrays):
    return jax.device_put(arrays, NamedSharding(synk.group().mesh, P("replica")))


def mapped(body, ins, outs, **of_jit):
    mesh = synk.group().mesh
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False), **of_jit)


def by_hand(loss, params, x, y, packs=True):
    """Make a step of `jit(shard_map)`; all gradients and the loss in one buffer, or each by itself."""

    def body(params, x, y):
        both, apart = jax.value_and_grad(loss)(params, x, y), lambda both: both
        if packs:
            both, apart = ravel_pytree(both)
        value, grads = apart(jax.lax.pmean(both, "replica"))
        return sgd(params, grads), value

    step = mapped(body, (P(), P("replica"), P("replica")), (P(), P()), donate_argnums=0)
    state = [jax.device_put(params, NamedSharding(synk.group().mesh, P()))]

    def run():
        state[0], value = step(state[0], x, y)
        return value

    return run


def by_synk(loss, params):
    variable = synk.shared(params, name="params")

    @synk.function(reduce="mean")
    def step(x, y):
        return jax.value_and_grad(loss)(variable.value, x, y)

    @step.then
    def step(value, grads):
        variable.value = sgd(variable.value, grads)
        return value

    return step


def hands(loss, params, x, y):
    """Make the ways by hand; on one replica gradients need no buffer."""
    ways = {"by hand, one buffer": by_hand(loss, params, x, y)}
    return ways | ({"by hand": by_hand(loss, params, x, y, packs=False)} if synk.size() == 1 else {})


# Times.


def awaited(run, turn):
    """Return the seconds of each of so many calls that are waited for."""
    times = []
    for _ in range(turn):
        start = perf_counter()
        jax.block_until_ready(run())
        times.append(perf_counter() - start)
    return times


def started(run, turn):
    """Return the seconds of CPU that the thread takes to start each of so many calls: other processes take none."""
    times = []
    for _ in range(turn):
        start = thread_time()
        result = run()
        times.append(thread_time() - start)
        jax.block_until_ready(result)
    return times


def in_a_row(run, turn):
    """Return the seconds of a call where the last of eight is waited for, for each eight."""
    times = []
    for _ in range(max(1, turn // 8)):
        start = perf_counter()
        results = [run() for _ in range(8)]
        jax.block_until_ready(results[-1])
        times.append((perf_counter() - start) / 8)
    return times


MEASURES = {"awaited": awaited, "eight in a row": in_a_row, "to its start (CPU)": started}


def quartiles(ways, measures=(awaited,), turn=TURN):
    """Return the microseconds of each way by each measure: first quartiles of all turns, and their least twentieth."""
    times = {name: [[] for _ in measures] for name in ways}
    for run in (*ways.values(), *ways.values()):
        jax.block_until_ready(run())
    order, shuffle = list(ways), random.Random(0).shuffle
    for _ in range(options.rounds):
        shuffle(order)
        for name in order:
            jax.block_until_ready(ways[name]())  # caches are full of another way's
            for seconds, measure_turn in zip(times[name], measures, strict=True):
                seconds += measure_turn(ways[name], turn)
    return {
        name: [1e6 * np.quantile(each, [0.25, 0.05], method="lower") for each in all_of]
        for name, all_of in times.items()
    }


def add_steps(table, n, figure, us, by_hands, by_synks):
    """Add rows of each measure: the best by hand, and each way by synk."""
    for column, measured in enumerate(MEASURES):
        best = min((us[name][column] for name in by_hands), key=lambda both: both[0])
        for name in by_synks:
            (taken, least), (by_hand, least_by_hand) = us[name][column].tolist(), best.tolist()
            ratio = least / least_by_hand
            table.add(n, f"{figure}{name}, {measured}", taken, by_hand, of_least=ratio, end=f"{ratio:6.2f}")


def check(ways):
    """Check that all ways give the same losses."""
    losses = [[float(run()) for _ in range(3)] for run in ways.values()]
    np.testing.assert_allclose(losses, [losses[0]] * len(losses), rtol=1e-4)
    return ways


def stub_programs():
    """Replace every program of synk by its results of the next run. It reaches into synk's own names, here alone."""
    from synk._runtime.executable import Program

    for program in [thing for thing in gc.get_objects() if isinstance(thing, Program)]:

        def remember(*args, program=program, run=program._run):
            results = run(*args)
            program._run = lambda *args: [*results]
            return [*results]

        program._run = remember


def own_python(step):
    """Return the microseconds of the thread in a step whose program takes nothing: the least of 15 times 200."""
    stub_programs()
    jax.block_until_ready(step())
    times = []
    for _ in range(min(15, options.rounds)):
        start = thread_time()
        for _ in range(200):
            step()
        times.append((thread_time() - start) / 200)
    return 1e6 * min(times)


def entered(step):
    """Return how many functions of synk a step enters, in how many files: the least of five steps."""

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(SYNK):
            files.append(frame.f_code.co_filename)

    jax.block_until_ready([step() for _ in range(4)])
    counts = []
    for _ in range(5):
        files = []
        sys.setprofile(note)
        try:
            result = step()
        finally:
            sys.setprofile(None)
        jax.block_until_ready(result)
        counts.append((len(files), len(set(files))))
    return min(counts)


# Parts.


def steps(table, n):
    """Time a step of 6 leaves."""
    rng = np.random.default_rng(0)
    params = {f"w{i}": rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 10 for i in range(3)}
    params |= {f"b{i}": np.zeros(WIDTH, np.float32) for i in range(3)}
    x = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
    xs, ys = in_place(x, x / 2)
    dx, dy = synk.data(x, place="scatter"), synk.data(x / 2, place="scatter")
    in_order, whole, some, own = [by_synk(loss, params) for _ in range(4)]
    by_hands = hands(loss, params, xs, ys)
    by_synks = {
        "": lambda: in_order(xs, ys),
        ", data taken whole": lambda: whole(dx, dy),
        ", an int batch": lambda: some(xs, ys, batch=ROWS),
    }
    us = quartiles(check(by_hands | by_synks), MEASURES.values())
    add_steps(table, n, "step of 6 leaves", us, by_hands, by_synks)
    functions, files = entered(lambda: own(xs, ys))
    table.add(n, "functions of synk entered in it", functions, unit="", wanted="<= 60")
    table.add(n, "files of synk entered in it", files, unit="", wanted="<= 12")
    table.add(n, "synk's own part of it (CPU, program stubbed)", own_python(lambda: own(xs, ys)))


def leaves(table, n):
    """Time steps of many leaves."""
    x = np.full((4 * n, 256), 0.01, np.float32)
    xs, ys = in_place(x, x)
    for count in (60,) if options.small else (60, 160, 480):
        params = {f"p{i}": np.full(256, 0.01, np.float32) for i in range(count)}
        by_hands = hands(loss_of_leaves, params, xs, ys)
        by_synks = {"": partial(by_synk(loss_of_leaves, params), xs, ys)}
        us = quartiles(check(by_hands | by_synks), MEASURES.values(), TURN // 3)
        add_steps(table, n, f"step of {count} leaves", us, by_hands, by_synks)


def arguments(table, n):
    """Time what a key, a number and NumPy rows add to a call."""
    x = np.ones((ROWS, 8), np.float32)
    (xs,) = in_place(x)
    keys = [jax.random.fold_in(jax.random.key(0), i) for i in range(64)]  # as each step makes one
    turn = iter(range(10**9))
    rows, whole = P("replica"), P()

    def mean(x):
        return jax.lax.pmean(jnp.mean(x), "replica")

    def function(fn, *inputs):
        return synk.function(fn, inputs=inputs, reduce="mean")

    plain = function(lambda x: jnp.mean(x), "x")
    scaled = function(lambda x, rate: jnp.mean(x) * rate, "x")
    keyed = function(lambda x, key: jnp.mean(x) + jax.random.uniform(key), "x")
    two = function(lambda x, y: jnp.mean(x) + jnp.mean(y), "x", "y")
    hand = mapped(mean, (rows,), whole)
    hand_scaled = mapped(lambda x, rate: mean(x) * rate, (rows, whole), whole)
    hand_keyed = mapped(lambda x, key: mean(x) + jax.random.uniform(key), (rows, whole), whole)
    hand_two = mapped(lambda x, y: mean(x) + mean(y), (rows, rows), whole)
    ways = {
        "plain": (lambda: plain(xs), lambda: hand(xs)),
        "key": (lambda: keyed(xs, keys[next(turn) % 64]), lambda: hand_keyed(xs, keys[next(turn) % 64])),
        "np.float32": (lambda: scaled(xs, np.float32(0.1)), lambda: hand_scaled(xs, np.float32(0.1))),
        "float": (lambda: scaled(xs, 0.1), lambda: hand_scaled(xs, 0.1)),
        "in place": (lambda: two(xs, xs), lambda: hand_two(xs, xs)),
        "NumPy": (lambda: two(x, x), lambda: hand_two(x, x)),
    }
    us = quartiles({(name, who): run for name, both in ways.items() for who, run in enumerate(both)})

    def more(name, base, arguments=1):
        return [(us[name, who][0][0] - us[base, who][0][0]) / arguments for who in (0, 1)]

    table.add(n, "a call of rows in place, awaited", us["plain", 0][0][0], us["plain", 1][0][0])
    table.add(n, "more for a typed key", *more("key", "plain"))
    table.add(n, "more for an np.float32", *more("np.float32", "plain"))
    table.add(n, "more for a float", *more("float", "plain"))
    table.add(n, "more for rows of NumPy, an argument", *more("NumPy", "in place", arguments=2))


def rows(table, n):
    """Time batches that are picked on the host."""
    shape, dtype = KINDS["uint8"]
    x = np.random.default_rng(0).integers(0, 255, (400 if options.small else 20_000, *shape), dtype)
    for batch in (64,) if options.small else (512, 4096):
        times = measure(host_ways(x, n, batch), picks(len(x), batch), options.rounds)
        best = min(times, key=lambda name: times[name] if name != "synk" else np.inf)
        table.add(n, f"{batch} rows of {x[0].nbytes} bytes by index", 1e6 * times["synk"], 1e6 * times[best], best=best)


def main():
    if options.small:
        options.rounds = 1
    found = about("calls") | {"rounds": options.rounds}
    print(heading(found))
    table, parts = Table(), options.parts.split(",")
    for n in counts:
        if n <= jax.device_count():
            synk.init(n)
            for part in (steps, leaves, arguments, rows):
                if part.__name__ in parts:
                    part(table, n)
                    save(options.json, found | {"results": table.rows})


if __name__ == "__main__":
    main()
