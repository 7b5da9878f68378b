"""Loops: what a step of a loop over batches costs, beside the loop that one writes by hand.

    python bench/loops.py [--replicas 1,2] [--rows resident,host,shuffled] [--per-launch 16] [--json OUT]

A step of a perceptron of 6 leaves (three of 64 x 64) with 256 rows, the gradients' mean and plain SGD, over 48 batches:

- resident: all rows lie on the devices, `synk.data(place="broadcast")`, and a batch is a slice of them;
- host: a batch is a slice of NumPy arrays, which each step sends;
- shuffled: a batch is 256 indexes of rows on the devices.

By hand is `jit(shard_map)`, donated, with all gradients in one buffer: a program a step, which takes rows where they
are, or which `device_put` brings. Beside it the same as a scan over so many batches a program, and by synk plain calls,
`iterate`, with `per_launch=` too, and of rows on the host `stream`. Each loss is read, or all of them at the end; then
by hand every fourth step is awaited where there are several CPU devices, since more programs in flight may wedge them.

Ways take turns in random order, in one process; microseconds a step, first quartiles, and their ratio to a program a
step by hand. The last column is the ratio of the CPU time of the loop's thread, which other processes do not lengthen.
"""

import argparse
import random
from time import perf_counter, thread_time

import jax
from record import Table, about, cpu_devices, heading, save

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", default="1,2", help="those for which there are devices")
    parser.add_argument("--rows", default="resident,host,shuffled")
    parser.add_argument("--per-launch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--small", action="store_true", help="a trial of all of it")
    parser.add_argument("--json")
    options = parser.parse_args()
    counts = [int(n) for n in options.replicas.split(",")]
    cpu_devices(max(counts))

import numpy as np
from calls import ROWS, WIDTH, by_synk, loss, mapped, sgd
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import synk

BATCHES, AT_ONCE = 48, 4


class Hand:
    """The loop by hand over batches of one kind of rows, `k` of them a program."""

    def __init__(self, params, data, batches, kind, k):
        self.kind, self.batches, self.k = kind, batches, k
        mesh, n = synk.group().mesh, synk.size()
        self.waits = n > 1 and jax.default_backend() == "cpu"
        self.cut = NamedSharding(mesh, P("replica") if k == 1 else P(None, "replica"))
        whole = NamedSharding(mesh, P())
        self.data = data if kind == "host" else jax.device_put(data, whole)
        self.params = jax.device_put(params, whole)
        in_rows = P("replica") if k == 1 else P(None, "replica")
        ins = {"resident": (P(), P(), P()), "shuffled": (P(), P(), in_rows), "host": (P(), in_rows, P())}[kind]

        def step(params, data, index):
            if kind != "host":
                start = index + jax.lax.axis_index("replica") * (ROWS // n) if kind == "resident" else None
                data = [
                    array[index] if start is None else jax.lax.dynamic_slice_in_dim(array, start, ROWS // n)
                    for array in data
                ]
            both, apart = ravel_pytree(jax.value_and_grad(loss)(params, *data))
            value, grads = apart(jax.lax.pmean(both, "replica"))
            return sgd(params, grads), value

        def steps(params, data, indexes):
            per_step = (data, indexes) if kind == "host" else indexes
            one = (lambda params, each: step(params, *each)) if kind == "host" else lambda p, i: step(p, data, i)
            return jax.lax.scan(one, params, per_step)

        self.step = mapped(step if k == 1 else steps, ins, (P(), P()), donate_argnums=0)

    def __call__(self):
        """Yield the losses of each program."""
        for at in range(0, len(self.batches), self.k):
            data, index = self.data, self.batches[at : at + self.k]
            if self.kind == "host":
                data = [np.stack([array[batch] for batch in index]) for array in self.data]
                data = jax.device_put(data if self.k > 1 else [array[0] for array in data], self.cut)
                index = np.zeros(self.k, np.int32)
            elif self.kind == "resident":
                index = np.array([batch.start for batch in index], np.int32)
            else:
                index = np.array(index, np.int32)
            self.params, losses = self.step(self.params, data, index if self.k > 1 else index[0])
            if self.waits and at // self.k % AT_ONCE == AT_ONCE - 1:
                jax.block_until_ready(losses)
            yield losses


def ways_of(kind, params, data, batches, k):
    """Make loops, each of which gives losses, one or several at once; by hand, a program a step, first."""
    given = data if kind == "host" else [synk.data(array, place="broadcast") for array in data]
    calls, loop, in_lists, stream = [by_synk(loss, params) for _ in range(4)]
    ways = {
        "by hand": Hand(params, data, batches, kind, 1),
        f"by hand, a scan of {k}": Hand(params, data, batches, kind, k),
        "calls": lambda: (calls(*given, batch=batch) for batch in batches),
        "iterate": lambda: loop.iterate(*given, batches=batches),
        f"iterate, per_launch={k}": lambda: in_lists.iterate(*given, batches=batches, per_launch=k),
    }
    if kind == "host":
        items = [[array[batch] for array in data] for batch in batches]
        ways["stream"] = lambda: stream.stream(items)
    return ways


def read(losses):
    """Read each loss before the next step."""
    return [float(value) for some in losses for value in (some if isinstance(some, list) else np.ravel(some))]


def in_a_row(losses):
    """Keep all losses, and read them at the end."""
    return read(jax.block_until_ready(list(losses)))


def quartiles(ways):
    """Return the microseconds a step of each way, read and in a row: first quartiles of wall and of the thread."""
    times, order = {name: ([], []) for name in ways}, list(ways)
    for _ in range(options.rounds):
        random.shuffle(order)
        for name in order:
            for seconds, use in zip(times[name], (read, in_a_row), strict=True):
                start = perf_counter(), thread_time()
                use(ways[name]())
                seconds.append((perf_counter() - start[0], thread_time() - start[1]))
    return {
        name: [1e6 / BATCHES * np.quantile(all_of, 0.25, axis=0) for all_of in both] for name, both in times.items()
    }


def measure(table, n, kind):
    """Time the loops over one kind of rows."""
    rng = np.random.default_rng(0)
    params = {f"w{i}": rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 10 for i in range(3)}
    params |= {f"b{i}": np.zeros(WIDTH, np.float32) for i in range(3)}
    x = rng.normal(size=(ROWS * BATCHES, WIDTH)).astype(np.float32)
    data, order = [x, x / 2], rng.permutation(len(x))
    batches = [slice(ROWS * i, ROWS * (i + 1)) for i in range(BATCHES)]
    if kind == "shuffled":
        batches = [order[batch] for batch in batches]
    ways = ways_of(kind, params, data, batches, options.per_launch)
    losses = [read(way()) for way in ways.values()]
    np.testing.assert_allclose(losses, [losses[0]] * len(losses), rtol=1e-4)
    us = quartiles(ways)
    by_hand = us.pop("by hand")
    for name, both in us.items():
        for how, (wall, cpu), (hand_wall, hand_cpu) in zip(("each loss read", "in a row"), both, by_hand, strict=True):
            ratio = cpu / hand_cpu
            table.add(n, f"{kind} rows, {name}, {how}", wall, hand_wall, of_thread=ratio, end=f"{ratio:6.2f}")


def main():
    if options.small:
        options.rounds = 1
    found = about("loops") | {"rounds": options.rounds, "per_launch": options.per_launch}
    print(heading(found))
    table = Table()
    for n in counts:
        if n <= jax.device_count():
            synk.init(n)
            for kind in options.rows.split(","):
                measure(table, n, kind)
                save(options.json, found | {"results": table.rows})


if __name__ == "__main__":
    main()
