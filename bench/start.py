"""Start: what a program pays before its second step: `import synk`, and the first call.

    python bench/start.py [--replicas 4] [--times 3] [--json OUT]

Seconds of CPU of `import synk` beside those of `import jax, numpy`. Then a training step of 12 layers of 6 leaves with
AdamW, from its parameters on the host to its first result: `synk.train.step`, and by hand `jit(shard_map)` with all
gradients in one buffer; seconds, CPU seconds of all threads, and how many programs JAX compiles. Then the second start
of the same program with `synk.init(cache=folder)`, beside the first without. Each time is of a fresh process; the ways
take turns; medians.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
from statistics import median
from time import perf_counter, process_time

# Processes share a GPU: none takes all of its memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
from record import Table, about, cpu_devices, heading, save

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", type=int, default=4, help="fewer where there are fewer devices")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--one", choices=["synk", "hand"], help="take one first step; a run calls itself with this")
    parser.add_argument("--cache", help="with --one: a folder of compiled programs")
    parser.add_argument("--json")
    options = parser.parse_args()
    cpu_devices(options.replicas)

import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import synk
import synk.train

ROWS, WIDTH = 256, 64


def child(*command):
    """Return what a process prints last, as JSON."""
    done = subprocess.run([sys.executable, *command], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def imports(table):
    """Time imports in fresh processes."""
    line = (
        "from time import process_time as t; a = t(); import jax, numpy; b = t(); import synk; print([t() - b, b - a])"
    )
    both = np.median([child("-c", line) for _ in range(options.times + 2)], axis=0)
    table.add(1, "import synk, beside that of jax and NumPy: CPU seconds", *both.tolist(), unit="s")


def again(command):
    """Time first steps of which each program was compiled by a run before."""
    with tempfile.TemporaryDirectory() as folder:
        return [child(*command, "--cache", folder) for _ in range(options.times + 1)][1:]


def first(table):
    """Time first steps in fresh processes, in turns."""
    runs = {"synk": [], "hand": []}
    settings = ["--replicas", str(options.replicas), "--layers", str(options.layers)]
    for _ in range(options.times):
        for who, each in runs.items():
            each.append(child(__file__, "--one", who, *settings))
    runs["again"] = again([__file__, "--one", "synk", *settings])
    np.testing.assert_allclose([each[0]["loss"] for each in runs.values()], runs["hand"][0]["loss"], rtol=1e-5)
    what = f"first step of {6 * options.layers} leaves, AdamW"
    for figure, unit in (("seconds", "s"), ("CPU seconds", "s"), ("programs compiled", "")):
        synk_, hand, warm = [median(one[figure] for one in each) for each in runs.values()]
        replicas = runs["synk"][0]["replicas"]
        table.add(replicas, f"{what}: {figure}", synk_, hand, unit=unit)
        table.add(replicas, f"second start, beside the first: {figure}", warm, synk_, unit=unit)


class Compiled(logging.Handler):
    """Count the programs that JAX compiles, and those of them that come from a folder."""

    def __init__(self):
        super().__init__()
        self.names, self.hits = [], []
        jax.monitoring.register_event_listener(self.listen)
        jax.config.update("jax_log_compiles", True)
        logger = logging.getLogger("jax")
        logger.handlers, logger.propagate = [self], False

    def listen(self, event, **_):
        if event == "/jax/compilation_cache/cache_hits":
            self.hits.append(event)

    def emit(self, record):
        text = record.getMessage()
        if text.startswith("Finished XLA compilation of "):
            self.names.append(text.split()[4])


def first_step(who):
    """Take one first step, and print what it took."""
    synk.init(min(options.replicas, jax.device_count()), cache=options.cache)
    rng = np.random.default_rng(0)
    square = rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 16
    layer = {"w": square, "v": square.T, "b": square[0], "c": square[1], "scale": square[2] + 1, "shift": square[3]}
    params = [{name: leaf.copy() for name, leaf in layer.items()} for _ in range(options.layers)]
    mesh = synk.group().mesh
    x, y = jax.device_put([*rng.normal(size=(2, ROWS, WIDTH)).astype(np.float32)], NamedSharding(mesh, P("replica")))
    adamw = optax.adamw(1e-3)

    def loss(params, x, y):
        for p in params:
            h = (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-6) * p["scale"] + p["shift"]
            x = x + jnp.tanh(h @ p["w"] + p["b"]) @ p["v"] + p["c"]
        return jnp.mean((x - y) ** 2)

    def body(state, x, y):
        together, apart = ravel_pytree(jax.value_and_grad(loss)(state[0], x, y))
        value, grads = apart(jax.lax.pmean(together, "replica"))
        updates, moments = adamw.update(grads, state[1], state[0])
        return (optax.apply_updates(state[0], updates), moments), value

    compiled = Compiled()
    start = perf_counter(), process_time()
    if who == "synk":
        value = synk.train.step(loss, params, adamw)(x, y)
    else:
        state = jax.device_put((params, adamw.init(params)), NamedSharding(mesh, P()))
        ins = (P(), P("replica"), P("replica"))
        mapped = jax.shard_map(body, mesh=mesh, in_specs=ins, out_specs=(P(), P()), check_vma=False)
        _, value = jax.jit(mapped, donate_argnums=0)(state, x, y)
    jax.block_until_ready(value)
    took = {"seconds": perf_counter() - start[0], "CPU seconds": process_time() - start[1]}
    took |= {"programs compiled": len(compiled.names) - len(compiled.hits), "replicas": synk.size()}
    print(json.dumps(took | {"loss": float(value)}))


def main():
    if options.one:
        return first_step(options.one)
    found = about("start") | {"times": options.times}
    print(heading(found))
    table = Table()
    imports(table)
    first(table)
    save(options.json, found | {"results": table.rows})


if __name__ == "__main__":
    main()
