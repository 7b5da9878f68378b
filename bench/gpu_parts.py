"""GPU parts: what gpu.py asks of a GPU that no other benchmark does. Each runs in small on a CPU too.

    python bench/gpu_parts.py law|resume|rows|blocks|mock|torch [--small] [--limit SECONDS] [--json OUT]

- law: gangs of two and of three processes, over NCCL on one GPU, over gloo on a CPU. NCCL takes each process for a
  machine, so it tells right from wrong, and no speeds. Random cases against NumPy; training with slices, Adam and
  ZeRO-1 against one device; bits between processes; the bits of `blocks=` between processes, gangs and one device.
- resume: a gang of two, one of which is ended by kill -9, goes on from its save in `/dev/shm`.
- rows: GB/s of rows picked on the host, beside raw copies of rows that lie in order; a step fed by `iterate`.
- blocks: what `blocks=` costs: its kernels do not depend on timing.
- mock: ResNet-50 as the program of eight GPUs on one. JAX makes seven up (`jax_mock_gpu_topology`), and collectives do
  nothing: what is left is what the schedule of eight costs in computing. On a CPU two processes stand for the eight.
- torch: ResNet-50 by `torch.compile`, channels last, bfloat16 by autocast, where torch is installed.
"""

import argparse
import faulthandler
import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter, sleep

# Several processes share the GPU: none takes all of its memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from batches import KINDS, corner, fed_ways, measure, picks
from imagenet import BLOCKS, images
from record import about, heading, save

import synk
import synk.train

# Else NCCL, and JAX, would say that two processes of one machine share a GPU, which they refuse.
NCCL = {
    **{"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
    **{"NCCL_NVLS_ENABLE": "0", "NCCL_CUMEM_ENABLE": "0", "NCCL_DEBUG": "WARN"},
}


def start(part, size, folder, options):
    """Start the processes of a gang. Each writes its result to `<rank>.json` in the folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    is_cpu = jax.devices()[0].platform == "cpu"
    here = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    here = here if is_cpu else NCCL | {"JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": gpu}
    processes = []
    for rank in range(size):
        who = {"SYNK_COORDINATOR": address, "SYNK_NUM_PROCESSES": str(size), "SYNK_PROCESS_ID": str(rank)}
        who |= {} if is_cpu else {"NCCL_HOSTID": f"host{rank}"}
        command = [sys.executable, __file__, part, "--member", "--json", f"{folder}/{rank}.json"]
        command += ["--small"] * options.small + ["--limit", str(options.limit - 5)]
        with open(f"{folder}/{rank}.log", "w") as log:
            processes.append(subprocess.Popen(command, env=os.environ | here | who, stdout=log, stderr=log))
    return processes


def gangs(part, sizes, options):
    """Run gangs of these sizes at the same time; return the results of each by rank, and how many processes failed."""
    end, results, failures = monotonic() + options.limit - 3, {}, 0
    with tempfile.TemporaryDirectory() as root:
        running = {}
        for size in sizes:
            folder = Path(root) / str(size)
            folder.mkdir()
            running[size] = folder, start(part, size, folder, options)
        for size, (folder, processes) in running.items():
            while monotonic() < end and any(process.poll() is None for process in processes):
                sleep(0.05)
            for rank, process in enumerate(processes):
                if process.poll() is None:
                    process.kill()
                if process.wait():
                    failures += 1
                    text = (folder / f"{rank}.log").read_text(errors="replace")
                    print(f"process {rank} of {size} ended with {process.returncode}:\n{text[-3000:]}", flush=True)
            files = [folder / f"{rank}.json" for rank in range(size)]
            results[size] = [json.loads(file.read_text()) for file in files if file.exists()]
    return results, failures


# The law.

OPS = {
    **{"sum": "sum", "mean": "mean", "max": "max", "min": "min", "prod": "prod", "any": "any", "all": "all"},
    **{"concat": "concat", "weighted": "mean", "std": "merge"},
}


def statistics(x):
    positive = (x[:, 1] > 0).astype(jnp.float32)
    return {
        **{
            "sum": x.sum(0),
            "mean": jnp.tanh(x).mean(0),
            "max": x.max(0),
            "min": x.min(0),
            "prod": (1 + x / 64).prod(0),
        },
        **{"any": (x > 1).any(0), "all": (x > -1).all(0), "concat": x * 2, "std": synk.stats.std(x)},
        "weighted": synk.Weighted((x[:, 0] * positive).sum() / positive.sum(), positive.sum()),
    }


def by_numpy(x):
    positive = x[x[:, 1] > 0, 0]
    return {
        **{"sum": x.sum(0), "mean": np.tanh(x).mean(0), "max": x.max(0), "min": x.min(0), "prod": (1 + x / 64).prod(0)},
        **{"any": (x > 1).any(0), "all": (x > -1).all(0), "concat": x * 2, "std": x.std(0)},
        "weighted": positive.mean() if len(positive) else np.nan,
    }


def selection_of(rng, rows):
    """Draw a batch: all rows, the first ones, a slice, a mask, or indexes."""
    kind, first = rng.integers(5), int(rng.integers(1, rows + 1))
    mask = rng.permutation(np.arange(rows) < first)
    return [None, first, slice(rows - first, None), mask, rng.integers(-rows, rows, first)][kind]


def bits(tree, digest=None):
    """Hash all bits of a tree of arrays."""
    digest = digest or hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()[:12]


def cases(count):
    """Compare so many random calls with NumPy. All processes draw the same."""
    f, rng, digest, wrong = synk.function(statistics, outputs=OPS), np.random.default_rng(0), hashlib.sha256(), []
    for _ in range(count):
        rows, slices = int(rng.integers(1, 40)), int(rng.integers(1, 4))
        x = rng.normal(size=(rows, 3)).astype(np.float32)
        batch = selection_of(rng, rows)
        got = jax.tree.map(np.asarray, f(x, batch=batch, num_slices=slices))
        chosen = x if batch is None else x[:batch] if isinstance(batch, int) else x[batch]
        for name, want in by_numpy(chosen.astype(np.float64)).items():
            if not np.allclose(got[name], want, rtol=1e-4, atol=1e-5, equal_nan=True):
                wrong.append(f"{name} of {rows} rows, batch {batch!r}, {slices} slices: {got[name]!r}, not {want!r}")
        bits(got, digest)
    return wrong, digest.hexdigest()[:12]


def trained(optimizer, steps, slices=1, **options):
    """Return the parameters of a perceptron after a few steps over batches that do not divide."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(301, 16)).astype(np.float32)
    y = np.tanh(x @ rng.normal(size=(16, 3)).astype(np.float32))
    params = {"in": rng.normal(size=(16, 64)), "bias": np.zeros(64), "out": rng.normal(size=(64, 3)) / 8}
    params = jax.tree.map(lambda leaf: np.asarray(leaf / 4, np.float32), params)

    def loss(p, x, y):
        return jnp.mean((jnp.tanh(x @ p["in"] + p["bias"]) @ p["out"] - y) ** 2)

    step = synk.train.step(loss, params, optimizer, **options)
    for i in range(steps):
        step(x, y, batch=np.random.default_rng(i).permutation(301)[: 97 + i % 2], num_slices=slices)
    return jax.tree.map(np.asarray, step.params.value)


def law_of_member(options):
    """Run all that the law asks, as one process of a gang."""
    jax.config.update("jax_default_matmul_precision", "float32")
    group = synk.init(distributed=True, heartbeat=60)
    count, steps = (2, 1) if options.small else (12, 6)
    wrong, of_cases = cases(count)
    hashes, differences = {"cases": of_cases}, {}
    found = {"platform": group.platform, "cases": count, "wrong": wrong, "bits": hashes, "differences": differences}
    save(options.json, found | {"bits of blocks": {}})
    sgd, adam = optax.sgd(0.1, momentum=0.9), optax.adam(1e-2)
    with synk.init([jax.local_devices()[0]]):
        alone = {"sgd": trained(sgd, steps), "adam": trained(adam, steps)}
        blocks_alone = bits(trained(sgd, steps, blocks=16))
    ways = {"sgd, slices": (sgd, {"slices": 3}), "adam": (adam, {})}
    ways |= {"adam, ZeRO-1": (adam, {"shard_optimizer": True})}
    for name, (optimizer, more) in ways.items():
        params = trained(optimizer, steps, **more)
        pairs = zip(jax.tree.leaves(params), jax.tree.leaves(alone[name.split(",")[0]]), strict=True)
        differences[name] = max(float(abs(a - b).max()) for a, b in pairs)
        hashes[name] = bits(params)
    found["bits of blocks"] = {"gang": bits(trained(sgd, steps, blocks=16)), "one device": blocks_alone}
    save(options.json, found)


def law(options):
    """Run gangs of two and of three, in small of two, and compare what their processes found."""
    found, (results, failures) = [], gangs("law", (2,) if options.small else (2, 3), options)
    of_blocks = {each for members in results.values() for one in members for each in one["bits of blocks"].values()}
    for size, members in results.items():
        if not members:
            continue
        first = members[0]
        gang = {
            "processes": size,
            "with a result": len(members),
            "platform": first["platform"],
            "cases": first["cases"],
        }
        gang["wrong"] = [wrong for member in members for wrong in member["wrong"]]
        gang["bits are equal"] = all(member["bits"] == first["bits"] for member in members)
        gang["differences"] = first["differences"]
        print(f"{gang}", flush=True)
        found.append(gang)
    print(f"bits of blocks=: {len(of_blocks)} hash(es), {sorted(of_blocks)}")
    return {"gangs": found, "hashes of blocks": sorted(of_blocks), "processes that failed": failures}


# Rows from the host.

AHEAD = ("synk", "raw copy, pinned")  # Ways that are timed eight in a row too.


def seconds(f, *args, repeats=9):
    """Median seconds of a call, run to its end."""
    jax.block_until_ready(f(*args))
    times = []
    for _ in range(repeats):
        begin = perf_counter()
        jax.block_until_ready(f(*args))
        times.append(perf_counter() - begin)
    return median(times)


def picked_rates(x, picked):
    """GB/s of rows picked on the host, and of the raw copy of rows that lie in order already; how many arrive wrong."""
    device = jax.devices()[0]
    there = jax.sharding.SingleDeviceSharding(device)
    run = jax.jit(corner)
    synk.init([device])
    f, whole, held = synk.function(corner), synk.function(lambda x: x, reduce="concat"), synk.data(x)
    found = []
    for n in picked:
        block = x[:n].copy()
        ways = {
            "synk": lambda i: f(held, batch=i),
            "x[i], device_put": lambda i: run(jax.device_put(x[i], there)),
            "raw copy": lambda i, block=block: run(jax.device_put(block, there)),
        }
        if "pinned_host" in {memory.kind for memory in device.addressable_memories()}:
            pinned = jax.device_put(block, there.with_memory_kind("pinned_host"))
            ways["raw copy, pinned"] = lambda i, pinned=pinned: run(jax.device_put(pinned, there))
        times = measure(ways, picks(len(x), n), 15)
        in_a_row = measure({name: way for name, way in ways.items() if name in AHEAD}, picks(len(x), n), 3, ahead=8)
        times |= {f"{name}, in a row": each for name, each in in_a_row.items()}
        rates = {name: block.nbytes / each / 1e9 for name, each in times.items()}
        # Batches follow each other before the first is there, as memory that is written again too early would show.
        batches = [*islice(picks(len(x), n, seed=1), 6)]
        arrived = [whole(held, batch=index) for index in batches]
        wrong = sum(int((np.asarray(got) != x[i]).any(1).sum()) for got, i in zip(arrived, batches, strict=True))
        print(f"{n} rows of {block[0].nbytes} bytes, GB/s:", ", ".join(f"{k} {v:.1f}" for k, v in rates.items()))
        print(f"{wrong} of {6 * n} rows arrive wrong", flush=True)
        found.append({"rows": n, "bytes": block.nbytes, "GB/s": rates, "wrong": wrong})
    return found


def rows(options):
    """Measure the device's own speeds, rows picked on the host, and a step that such rows feed."""
    megabytes, side, count = (16, 256, 600) if options.small else (4096, 8192, 50_000)
    x, y = jnp.zeros(megabytes * 250_000, jnp.float32), jnp.ones((side, side), jnp.bfloat16)
    found = {"GB/s of memory": 2 * x.nbytes / seconds(jax.jit(lambda x: x + 1), x) / 1e9}
    found["TFLOP/s, bfloat16"] = 2 * side**3 / seconds(jax.jit(lambda y: y @ y), y) / 1e12
    del x, y
    print(f"memory {found['GB/s of memory']:.0f} GB/s, matrix products {found['TFLOP/s, bfloat16']:.0f} TFLOP/s")
    shape, dtype = KINDS["uint8"]
    pixels = np.random.default_rng(0).integers(0, 255, (count, *shape), dtype)
    found["picked"] = picked_rates(pixels, (64,) if options.small else (512, 4096))
    save(options.json, found)
    shape, dtype = KINDS["float32"]
    x = np.random.default_rng(0).integers(0, 255, (count // 2, *shape), np.uint8).astype(dtype)
    found["fed"] = fed_ways(x, 1, 64 if options.small else 512, 3)
    print("a step, ms:", ", ".join(f"{name} {1e3 * each:.2f}" for name, each in found["fed"].items()))
    return found


# The same bits.


def blocks(options):
    """Time steps with `blocks=` beside steps without, in turns."""
    from slices import MODELS

    found = {}
    for kind in ("MLP",) if options.small else MODELS:
        model, shape = MODELS[kind]
        shape = (shape[0] // (16 if options.small else 1), *shape[1:])
        rng = np.random.default_rng(0)
        x, y = rng.standard_normal(shape, np.float32), rng.integers(0, 10, shape[0]).astype(np.int32)
        params = jax.device_get(model.init(jax.random.key(0), x[:1]))
        group = synk.init(1)

        def loss(params, x, y, model=model):
            return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, x), y).mean()

        placed, steps = jax.device_put((x, y), group.stacked), {}
        for name, k in {"no blocks": None, "one block": shape[0], "eight blocks": shape[0] // 8}.items():
            steps[name] = synk.train.step(loss, params, optax.sgd(0.01), blocks=k)
        ways = {name: partial(step, *placed) for name, step in steps.items()}
        times = in_turns(ways, 1 if options.small else 60)
        found[kind] = {name: 1e3 * median(each) for name, each in times.items()}
        print(f"{kind}, ms:", ", ".join(f"{name} {each:.2f}" for name, each in found[kind].items()), flush=True)
    return found


def in_turns(ways, rounds):
    """Seconds of each way's calls, each awaited, in random order."""
    times = {name: [] for name in ways}
    for turn in range(rounds + 2):
        for name in random.Random(turn).sample(list(ways), len(ways)):
            begin = perf_counter()
            jax.block_until_ready(ways[name]())
            if turn > 1:
                times[name].append(perf_counter() - begin)
    return times


# Eight GPUs on one.


def steps_of_groups(options):
    """Time a step of ResNet-50 by synk and by hand as the program of all devices, and of one."""
    # By synk.init a group of several processes waits for them before it runs anything; mocked ones never come.
    from resnet import Training, on_group, on_mesh

    from synk._runtime.group import make_group

    batch, image, counts, dtype = (4, 32, (1,), jnp.float32) if options.small else (128, 224, BLOCKS, jnp.bfloat16)
    training, steps, found = Training(image, dtype, counts), {}, {"synk": [], "by hand": []}
    for devices in (tuple(jax.devices()), (jax.local_devices()[0],)):
        group = make_group(devices, False)
        x, y = images(group.size * batch, image)
        ways = {"synk": on_group(training, group, x, y), "by hand": on_mesh(training, group.mesh, x, y)}
        for name, way in ways.items():
            steps[name, len(found[name])] = partial(step_in, group, way, way.put(x, y))
            memory = way.compiled.memory_analysis().temp_size_in_bytes
            found[name].append({"replicas": group.size, "temporary MB": memory / 1e6})
            print(f"{name}, {group.size} replicas: compiled", flush=True)
    for (name, which), times in in_turns(steps, 2 if options.small else 20).items():
        found[name][which]["ms"] = 1e3 * median(times)
        print(f"{name}: {found[name][which]}", flush=True)
    return {"ways": found, "images": batch, "image": image, "replicas": jax.device_count()}


def step_in(group, way, rows):
    with group:
        return way.step(*rows)


def mock(options):
    """Run the program of eight GPUs on one of them."""
    if options.small:
        results, failures = gangs("mock", (2,), options)
        print(results)
        return results[2][0] | {"processes that failed": failures}
    # XLA would wait for the mocked processes' share of its autotuning: https://github.com/openxla/xla/issues/28959
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_shard_autotuning=false"
    jax.config.update("jax_mock_gpu_topology", "1x8x1")
    return steps_of_groups(options)


def mock_of_member(options):
    """Stand for some of the eight GPUs: one of two processes whose group has no peers to agree with."""
    who = [os.environ[f"SYNK_{name}"] for name in ("COORDINATOR", "NUM_PROCESSES", "PROCESS_ID")]
    jax.distributed.initialize(who[0], int(who[1]), int(who[2]))
    save(options.json, steps_of_groups(options))


# Resume.


def counted_and_trained(epochs=4, **options):
    """Train and count rows in a loop of `synk.resume`; return it, the parameters and the counts."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(301, 16)).astype(np.float32)
    y = np.tanh(x @ rng.normal(size=16).astype(np.float32))
    step = synk.train.step(
        lambda w, x, y: jnp.mean((jnp.tanh(x @ w) - y) ** 2), np.zeros(16, np.float32), optax.adam(0.01)
    )
    counts = synk.shared(np.zeros(301, np.int32), "counts")
    count = synk.function(lambda rows: counts.value.at[rows].add(1) - counts.value)
    count.then(lambda more: setattr(counts, "value", counts.value + more))
    variables = {**step.variables, "counts": counts}
    loop = synk.resume(enumerate(synk.minibatches(301, 32, epochs=epochs)), variables, **options)
    first = loop.done
    for i, batch in loop:
        float(step(x, y, batch=batch))
        count(np.arange(301, dtype=np.int32), batch=batch)
        sleep(0.02)
        if first == 0 and i == 23 and os.environ.get("SYNK_PROCESS_ID") == "1":
            os.kill(os.getpid(), signal.SIGKILL)
    return first, np.asarray(step.params.value), np.asarray(counts.value)


def resume_of_member(options):
    """Run the loop as one process of a gang."""
    synk.init(distributed=True, heartbeat=10)
    first, w, counts = counted_and_trained(folder=os.environ["RUN_FOLDER"], save_every=0.1)
    save(options.json, {"first": first, "w": w.tolist(), "counts": sorted(set(counts.tolist()))})


def resume(options):
    """Kill one of two processes, start both again, and compare with a loop that nobody has disturbed."""
    with synk.init([jax.local_devices()[0]]), tempfile.TemporaryDirectory() as folder:
        _, alone, _ = counted_and_trained(folder=folder)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as memory:
        os.environ["RUN_FOLDER"], began = memory, monotonic()
        _, killed = gangs("resume", [2], options)
        ended = monotonic() - began
        results, failed = gangs("resume", [2], options)
    members = results[2]
    worst = max([float(np.abs(alone - np.float32(member["w"])).max()) for member in members], default=np.nan)
    print(f"{killed} ended in {ended:.1f} s; went on from {[m['first'] for m in members]}; differs by {worst:.1e}")
    ended_well = {"members": members, "furthest from one device": worst, "processes that failed": failed}
    return {"processes ended by the kill": killed, "seconds with the kill": ended, **ended_well}


# Torch.


def torch(options):
    """Time ResNet-50 by torch.compile, as its manual says: channels last, autocast, convolutions tried out."""
    try:
        from torch_resnet import timed_steps
    except ModuleNotFoundError as error:
        print(f"{error.name} is not installed")
        return {"missing": error.name}
    batch, image, counts, steps = (4, 32, (1,), 3) if options.small else (128, 224, BLOCKS, 30)
    times = timed_steps(*images(batch, image), counts, steps)
    print(f"torch.compile: {1e3 * batch / median(times):.0f} images/s")
    return {"images": batch, "ms": [median(times), min(times), max(times)], "images/s": 1e3 * batch / median(times)}


PARTS = {"law": law, "resume": resume, "rows": rows, "blocks": blocks, "mock": mock, "torch": torch}
MEMBERS = {"law": law_of_member, "resume": resume_of_member, "mock": mock_of_member}


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--small", action="store_true", help="tiny sizes, on a CPU too")
    parser.add_argument("--limit", type=float, default=300, help="seconds after which it prints all stacks and ends")
    parser.add_argument("--member", action="store_true", help="be one process of a gang; a run starts itself with this")
    parser.add_argument("--json")
    options = parser.parse_args()
    # Where a part hangs, in XLA too, its stacks tell where.
    faulthandler.dump_traceback_later(options.limit, exit=True)
    if options.member:
        return MEMBERS[options.part](options)
    found = PARTS[options.part](options)
    where = about(f"gpu_parts {options.part}")
    print(heading(where))
    save(options.json, where | found)
    if found.get("processes that failed"):
        raise SystemExit(f"{found['processes that failed']} processes failed.")


if __name__ == "__main__":
    main()
