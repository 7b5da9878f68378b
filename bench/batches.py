"""Batches: rows picked by index and brought to the replicas, by synk and by hand.

    python bench/batches.py [--replicas 1,2,4] [--rows 50000] [--batches 512,4096] [--rounds 6] [--json OUT]

Claim: rows come as fast as the best that can be written by hand, wherever they live, and a step fed from the host costs
what one with resident data costs. The ways take turns in random order, in one run; medians.
"""

import argparse
import os
import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median
from time import perf_counter

import jax
from record import about, cpu_devices, heading, save

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", default="1,2,4")
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--batches", default="512,4096")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json")
    options = parser.parse_args()
    counts = [int(n) for n in options.replicas.split(",")]
    cpu_devices(max(counts))

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import synk

TURN = 4
AHEAD = 8  # calls in a row; 33 would wedge CPU devices for good, by hand
KINDS = {"float32": ((3072,), np.float32), "uint8": ((12288,), np.uint8)}


def on_mesh(replicas):
    mesh = Mesh(np.array(jax.devices()[:replicas]), ("replica",), axis_types=(AxisType.Auto,))
    return mesh, NamedSharding(mesh, P("replica")), NamedSharding(mesh, P())


def mapped(mesh, body, *ins):
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=ins, out_specs=P(), check_vma=False))


def corner(x):
    """A program that needs the rows to be there and does next to nothing."""
    return x[0, 0].astype(jnp.float32)


def there_first(x):
    """A program that does next to nothing, but only once all rows lie in memory, as a matrix product wants them.

    (XLA takes no more rows than a function looks at; what enters a loop, it takes whole.)
    """
    return lax.fori_loop(0, 3, lambda row, total: total + corner(lax.dynamic_slice_in_dim(x, row, 1)), jnp.float32(0))


def picks(rows, batch, seed=0):
    """Fresh random indexes for every call."""
    rng = np.random.default_rng(seed)
    while True:
        yield rng.integers(0, rows, batch)


# Rows on the host.


def host_ways(x, replicas, batch):
    """Ways to bring `x[i]` to the replicas, each ending in the same tiny program."""
    mesh, cut, _ = on_mesh(replicas)
    run = mapped(mesh, lambda rows: lax.psum(corner(rows), "replica"), P("replica"))
    rows = batch // replicas
    buffers = [aligned((rows * replicas, *x.shape[1:]), x.dtype) for _ in range(2)]
    ring = [[aligned((rows, *x.shape[1:]), x.dtype) for _ in range(replicas)] for _ in range(2)]
    cores = os.cpu_count() or 1
    threads = ThreadPoolExecutor(cores)
    turn = 0

    def whole(part):
        shape = (batch, *x.shape[1:])
        return jax.make_array_from_callback(shape, cut, lambda index: part[(index[0].start or 0) // rows])  # type: ignore[index]

    def fancy(i):
        return run(jax.device_put(x[i], cut))

    def take_whole(i):
        nonlocal turn
        turn = 1 - turn
        for rank in range(replicas):
            mine = slice(rank * rows, (rank + 1) * rows)
            np.take(x, i[mine], axis=0, out=buffers[turn][mine], mode="clip")
        return run(buffers[turn])

    def take(i):
        nonlocal turn
        turn = 1 - turn
        for rank, part in enumerate(ring[turn]):
            np.take(x, i[rank * rows : (rank + 1) * rows], axis=0, out=part, mode="clip")
        return run(whole(ring[turn]))

    def threaded(i):
        nonlocal turn
        turn = 1 - turn
        some = max(1, rows // -(-cores // replicas))
        jobs = []
        for rank, part in enumerate(ring[turn]):
            mine = i[rank * rows : (rank + 1) * rows]
            for at in range(0, rows, some):
                jobs.append(threads.submit(np.take, x, mine[at : at + some], 0, part[at : at + some], "clip"))
        for job in jobs:
            job.result()
        return run(whole(ring[turn]))

    synk.init(replicas)
    f = synk.function(corner)
    held = synk.data(x)
    return {
        "synk": lambda i: f(held, batch=i),
        "x[i], device_put": fancy,
        "x[i] into jit": lambda i: run(x[i]),
        "np.take clip, aligned, into jit": take_whole,
        "np.take clip, aligned": take,
        "threads, np.take clip, aligned": threaded,
    }


def aligned(shape, dtype):
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)


def timed(call):
    start = perf_counter()
    call()
    return perf_counter() - start


# Rows on the devices.


def take_on(mesh, lies):
    """By hand: each replica takes its part of the index from what it holds."""

    def body(x, i):
        return lax.psum(there_first(x.at[i].get(mode="promise_in_bounds")), "replica")

    return mapped(mesh, body, lies, P("replica"))


def broadcast_ways(x, replicas, batch):
    mesh, cut, everywhere = on_mesh(replicas)
    there, take = shared_copy(x, everywhere), take_on(mesh, P())
    synk.init(replicas)
    f = synk.function(there_first)
    held = synk.data(x, place="broadcast")
    return {"synk": lambda i: f(held, batch=i), "shard_map take": lambda i: take(there, put(i.astype(np.int32), cut))}


def local_ways(x, replicas, batch):
    mesh, cut, _ = on_mesh(replicas)
    there, take = shared_copy(x, cut), take_on(mesh, P("replica"))
    synk.init(replicas)
    f = synk.function(there_first)
    held = synk.data(x, place="scatter")
    rows, part = len(x) // replicas, batch // replicas

    def local(i):
        return (i % rows).reshape(replicas, part)

    return {
        "synk": lambda i: f(held, batch_s=local(i)),
        "shard_map take": lambda i: take(there, put(local(i).astype(np.int32).ravel(), cut)),
    }


def exchange_ways(x, replicas, batch):
    _, cut, everywhere = on_mesh(replicas)
    there = shared_copy(x, cut)
    take = jax.jit(lambda x, i: there_first(x[i]))
    take_cut = jax.jit(lambda x, i: there_first(lax.with_sharding_constraint(x[i], cut)))
    synk.init(replicas)
    f = synk.function(there_first)
    held = synk.data(x, place="scatter")
    return {
        "synk": lambda i: f(held, batch=i),
        "jit x[i]": lambda i: take(there, put(i.astype(np.int32), everywhere)),
        "jit x[i], cut": lambda i: take_cut(there, put(i.astype(np.int32), everywhere)),
    }


def put(values, sharding):
    return jax.make_array_from_callback(values.shape, sharding, values.__getitem__)


def shared_copy(x, sharding):
    """On the devices, in memory of its own; on CPU where synk's lies, one copy for all."""
    mine = aligned(x.shape, x.dtype)
    mine[...] = x
    return jax.make_array_from_callback(x.shape, sharding, mine.__getitem__)


# Loops and calls.


def fed_ways(x, replicas, batch, rounds):
    """Seconds a step, of a loop over batches: rows from the host by `iterate`, and resident."""
    group = synk.init(replicas)
    weight = np.random.default_rng(0).standard_normal((x.shape[1], 64), dtype=np.float32)
    held = synk.data(x)
    there = synk.data(x, place="broadcast")
    send = synk.function(corner)
    index = picks(len(x), batch)
    send(held, batch=next(index))
    selecting = median([timed(lambda: send(held, batch=next(index)).block_until_ready()) for _ in range(9)])

    def step_of(times):
        def work(x, w):
            def again(i, y):
                return jnp.tanh(x @ w) + 1e-3 * y

            start = jnp.zeros((x.shape[0], w.shape[1]), jnp.float32)
            return jnp.sum(lax.fori_loop(0, times, again, start))

        return synk.function(work, ["x"])

    rows = jax.device_put(x[:batch], group.stacked)
    probe = {}
    for times in (4, 8):
        f = step_of(times)
        f(rows, weight).block_until_ready()
        probe[times] = median([timed(lambda f=f: f(rows, weight).block_until_ready()) for _ in range(7)])
    each = max((probe[8] - probe[4]) / 4, probe[8] / 16)  # on a busy machine more may take no longer
    times = max(1, round(4 * selecting / each))
    f = step_of(times)
    computing = median([timed(lambda: f(rows, weight).block_until_ready()) for _ in range(7)])

    def loop(data):
        batches = [next(index) for _ in range(20)]
        return timed(lambda: [r.block_until_ready() for r in f.iterate(data, weight, batches=batches)]) / 20

    def plain(data):
        return timed(lambda: [f(data, weight, batch=next(index)).block_until_ready() for _ in range(20)]) / 20

    ways = {
        "iterate, host": partial(loop, held),
        "plain, host": partial(plain, held),
        "iterate, resident": partial(loop, there),
    }
    times = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            seconds = way()
            if turn:
                times[name].append(seconds)
    return {"selecting": selecting, "computing": computing, **{name: median(each) for name, each in times.items()}}


def call_ways(replicas):
    """Microseconds until a call returns, on data so small that nothing else counts; fresh indexes each."""
    mesh, cut, everywhere = on_mesh(replicas)
    x = np.zeros((1024, 4), np.float32)
    there = jax.device_put(x, everywhere)
    jitted = jax.jit(lambda x, i: jnp.sum(x.at[i].get(mode="promise_in_bounds")))
    one = jax.device_put(x, jax.devices()[0])
    synk.init(replicas)
    f = synk.function(jnp.sum)
    held, local = synk.data(x, place="broadcast"), synk.data(x, place="scatter")
    take = mapped(
        mesh, lambda x, i: lax.psum(jnp.sum(x.at[i].get(mode="promise_in_bounds")), "replica"), P(), P("replica")
    )
    return {
        "synk, batch": lambda i: f(held, batch=i),
        "synk, batch_s": lambda i: f(local, batch_s=i[: 64 // replicas] % (1024 // replicas)),
        "jit, one device": lambda i: jitted(one, i),
        "jit(shard_map)": lambda i: take(there, i),
        "jit(shard_map), put": lambda i: take(there, put(i.astype(np.int32), cut)),
    }


def argument_ways(replicas):
    """Microseconds until a call returns, on rows that are there, with an argument that each call has anew."""
    mesh, cut, _ = on_mesh(replicas)
    rows = jax.device_put(np.zeros((64, 16), np.float32), cut)
    keys = list(jax.random.split(jax.random.key(0), 1024))

    def total(x, y):
        return jnp.sum(x) + (jax.random.uniform(y) if jnp.issubdtype(y.dtype, jax.dtypes.prng_key) else jnp.sum(y))

    def by_hand(cuts):
        return mapped(mesh, lambda x, y: lax.psum(total(x, y), "replica"), P("replica"), cuts)

    hand, hand_rows = by_hand(P()), by_hand(P("replica"))
    synk.init(replicas)
    f, f_rows = synk.function(total, ["x"]), synk.function(total)
    host = np.random.default_rng(0).random((1024, 16), np.float32)
    return {
        "synk, a number": lambda i: f(rows, i[0] / 7),
        "by hand, a number": lambda i: hand(rows, i[0] / 7),
        "synk, a key": lambda i: f(rows, keys[i[0]]),
        "by hand, a key": lambda i: hand(rows, keys[i[0]]),
        "synk, 64 rows": lambda i: f_rows(rows, host[i]),
        "by hand, 64 rows": lambda i: hand_rows(rows, host[i]),
    }


def measure(ways, index, rounds, is_call=False, ahead=1):
    """Median seconds of each way. In turn, each a few times in a row, as in a loop, after once that does not count.

    With `ahead` so many calls are made before the first is waited for, and share the time.
    """
    times = {name: [] for name in ways}
    order = list(ways.items())
    for turn in range(rounds + 1):
        random.Random(turn).shuffle(order)
        for name, way in order:
            for again in range(TURN + 1):
                picked = [next(index) for _ in range(ahead)]
                start = perf_counter()
                results = [way(i) for i in picked]
                if is_call:
                    seconds = perf_counter() - start
                jax.block_until_ready(results)
                if turn and again:
                    times[name].append((seconds if is_call else perf_counter() - start) / ahead)
    return {name: median(each) for name, each in times.items()}


def main():
    results = about("batches") | {"rows": options.rows, "rounds": options.rounds, "cases": []}
    print(heading(results))

    def note(case, kind, batch, replicas, size, times):
        rates = {name: size / seconds / 1e9 for name, seconds in times.items()} if size else {}
        results["cases"].append(
            {"case": case, "kind": kind, "batch": batch, "replicas": replicas, "seconds": times, "GB/s": rates}
        )
        best = min(seconds for name, seconds in times.items() if name != "synk") if "synk" in times else None
        shown = rates or {name: seconds * 1e6 for name, seconds in times.items()}
        ratio = f"  synk {best / times['synk']:.2f} of the best by hand" if best else ""
        print(
            f"{case:19} {kind:8} {batch:5} {replicas}:",
            ", ".join(f"{n} {v:.1f}" for n, v in shown.items()),
            ratio,
            flush=True,
        )

    for kind, (shape, dtype) in KINDS.items():
        rng = np.random.default_rng(0)
        x = rng.integers(0, 255, (options.rows, *shape), np.uint8).astype(dtype)
        for batch in map(int, options.batches.split(",")):
            size = batch * x[0].nbytes
            buffer, other = aligned((batch, *shape), dtype), x[:batch].copy()
            copy = median([timed(lambda b=buffer, o=other: np.copyto(b, o)) for _ in range(9)])
            note("memcpy", kind, batch, 0, size, {"memcpy": copy})
            for replicas in counts:
                cases = {"host": host_ways, "broadcast": broadcast_ways, "local": local_ways, "exchange": exchange_ways}
                for case, ways in cases.items():
                    made, index = ways(x, replicas, batch), picks(len(x) // replicas * replicas, batch)
                    note(case, kind, batch, replicas, size, measure(made, index, options.rounds))
                    if case != "host":  # by hand its buffers would be written again too early
                        times = measure(made, index, options.rounds, ahead=AHEAD)
                        note(f"{case}, in a row", kind, batch, replicas, size, times)
        if kind == "float32":
            for replicas in counts:
                note("fed", kind, 512, replicas, 0, fed_ways(x, replicas, 512, max(3, options.rounds // 2)))
    for replicas in counts:
        times = measure(call_ways(replicas), picks(1024, 64), 20 * options.rounds, is_call=True)
        note("call", "float32", 64, replicas, 0, times)
        times = measure(argument_ways(replicas), picks(1024, 64), 20 * options.rounds, is_call=True)
        note("new argument", "float32", 64, replicas, 0, times)
    save(options.json, results)


if __name__ == "__main__":
    main()
