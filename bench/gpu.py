"""GPU: all that is measured on one, in one command of less than nine minutes.

    python bench/gpu.py [--parts suite,calls,start,overhead,resnet50,selection] [--minutes 9] [--small] [--json OUT]

The fast tests, on ten workers; calls.py; start.py; overhead.py; ResNet-50 at 224 pixels in bfloat16, by synk and by
`jax.jit` by hand in turns, and what part of the GPU's arithmetic and of its measured memory bandwidth that is; rows
picked on the host, against the raw copy of rows already picked.
Each part is a process of its own with a time limit, prints as it goes, and its result is kept as it comes. Needs jax,
flax, optax and numpy; the tests need pytest, pytest-xdist and hypothesis. `--small` tries the script out anywhere.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter
from typing import Any

# Several processes share the GPU: none takes all of its memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
from batches import KINDS, corner, measure, picks
from record import about, heading, results_path, save

import synk

HERE = Path(__file__).parent
PEAK = 790e12  # bfloat16, as measured on an H200 with large matrix products
LIMITS = {"suite": 100, "calls": 130, "start": 50, "overhead": 80, "resnet50": 150, "selection": 40}  # seconds
TESTS = "-m pytest -q -p no:cacheprovider -p no:benchmark -rfE --tb=short"
FULL: dict[str, Any] = {
    "suite": f"{TESTS} -n 10 --dist worksteal tests",
    "calls": "bench/calls.py --replicas 1 --rounds 9",
    "start": "bench/start.py --times 1",
    "overhead": "bench/overhead.py --replicas 1 --leaves 10,160 --rounds 30",
    "resnet50": "bench/resnet50.py --image 224 --blocks 3,4,6,3 --steps 30",
    "selection": "bench/gpu.py --selection",
    "batches": (128, 256, 64),
    **{"rows": 50_000, "picked": (512, 4096)},
    **{"MB": 4096, "side": 8192},  # of what is copied and multiplied
}
SMALL: dict[str, Any] = {
    "suite": f"{TESTS} tests/base",
    "calls": "bench/calls.py --replicas 1 --small",
    "start": "bench/start.py --replicas 1 --times 1 --layers 1",
    "overhead": "bench/overhead.py --replicas 1 --leaves 10 --rounds 5",
    "resnet50": "bench/resnet50.py --image 32 --blocks 1 --steps 3",
    "selection": "bench/gpu.py --selection --small",
    "batches": (4,),
    **{"rows": 500, "picked": (64,)},
    **{"MB": 16, "side": 256},
}


def seconds(f, *args, repeats=9):
    """Median seconds of a call, run to its end."""
    jax.block_until_ready(f(*args))
    times = []
    for _ in range(repeats):
        start = perf_counter()
        jax.block_until_ready(f(*args))
        times.append(perf_counter() - start)
    return median(times)


def bandwidth(size):
    """Bytes a second of device memory: so many MB read and as many written."""
    x = jnp.zeros(size * 1_000_000 // 4, jnp.float32)
    return 2 * x.nbytes / seconds(jax.jit(lambda x: x + 1), x)


def arithmetic(side):
    """Floating point operations a second of a large product of bfloat16 matrices."""
    x = jnp.ones((side, side), jnp.bfloat16)
    return 2 * side**3 / seconds(jax.jit(lambda x: x @ x), x)


def selection(rows, picked):
    """GB/s of rows picked on the host, and of the raw copy of rows that lie in order already."""
    shape, dtype = KINDS["uint8"]
    x = np.random.default_rng(0).integers(0, 255, (rows, *shape), np.uint8).astype(dtype)
    device = jax.devices()[0]
    there = jax.sharding.SingleDeviceSharding(device)
    run = jax.jit(corner)
    synk.init([device])
    f, held = synk.function(corner), synk.data(x)
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
        times = measure(ways, picks(rows, n), 15)
        rates = {name: block.nbytes / each / 1e9 for name, each in times.items()}
        print(f"{n} rows of {block[0].nbytes} bytes, GB/s:", ", ".join(f"{k} {v:.1f}" for k, v in rates.items()))
        found.append({"rows": n, "bytes": block.nbytes, "GB/s": rates})
    return found


def of_device(size):
    """What the device itself does, and rows picked on the host."""
    found = {"GB/s of memory": bandwidth(size["MB"]) / 1e9, "TFLOP/s, bfloat16": arithmetic(size["side"]) / 1e12}
    print(f"memory {found['GB/s of memory']:.0f} GB/s, matrix products {found['TFLOP/s, bfloat16']:.0f} TFLOP/s")
    return found | {"selection": selection(size["rows"], size["picked"])}


def child(command, limit, **environment):
    """Run a part in a process of its own; return its exit status, its seconds, and what it found, as far as it came."""
    print(f"\n== {command}, at most {limit:.0f} s", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path, start = Path(folder) / "out.json", monotonic()
        arguments = [] if "pytest" in command else ["--json", str(path)]
        process = subprocess.Popen(
            [sys.executable, *shlex.split(command), *arguments],
            cwd=HERE.parent,
            env=os.environ | {"PYTHONPATH": str(HERE.parent), "PYTHONUNBUFFERED": "1"} | environment,
            process_group=0,  # so that its own processes end with it
        )
        try:
            status = process.wait(max(limit, 1))
        except subprocess.TimeoutExpired:
            status = "out of time"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        took = monotonic() - start
        print(f"== {status}, {took:.0f} s", flush=True)
        result = json.loads(path.read_text()) if path.exists() else {}
        return {"status": status, "seconds": took, "result": result}


def use(run, peak, memory):
    """Each way's part of the arithmetic and of the memory bandwidth that the device has."""
    for result in run["against"].values():
        result["MFU"] = result["images/s"] * run["GFLOP an image"] * 1e9 / peak
        if result.get("GB accessed"):
            result["of memory bandwidth"] = result["GB accessed"] * 1e9 / (result["ms"][0] / 1e3) / memory
    return run


def part(name, size, limit):
    """Run a part; ResNet-50 as many sizes of batch as there is time for."""
    if name == "suite":
        # Some tests want a CPU beside, and all compare with float32 results.
        platforms = "cpu" if jax.devices()[0].platform == "cpu" else "cuda,cpu"
        return child(size[name], limit, JAX_PLATFORMS=platforms, JAX_DEFAULT_MATMUL_PRECISION="float32")
    if name != "resnet50":
        return child(size[name], limit)
    end, runs = monotonic() + limit, []
    for batch in size["batches"]:
        if monotonic() < end:
            settings = f"--replicas 1 --against 1 --ways 'synk,serial jit' --batch-per-replica {batch}"
            runs.append(child(f"{size[name]} {settings}", end - monotonic()))
    return {"status": [run["status"] for run in runs], "result": [run["result"] for run in runs if run["result"]]}


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", help="by default bench/results/<date>-<device>.json")
    parser.add_argument("--parts", default=",".join(LIMITS))
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--selection", action="store_true", help="that part alone; a run calls itself with this")
    options = parser.parse_args()
    size = SMALL if options.small else FULL
    if options.selection:
        return save(options.json, of_device(size))
    end, found = monotonic() + 60 * options.minutes, about("gpu")
    print(heading(found), flush=True)
    for name in options.parts.split(","):
        limit = min(LIMITS[name], end - monotonic())
        found[name] = part(name, size, limit) if limit > 5 else {"status": "no time left", "result": {}}
        save(options.json or results_path(found), found)
    show(found)


def show(found):
    print(f"\n{heading(found)}")
    for name in LIMITS:
        print(f"{name}: {found[name]['status'] if name in found else 'not asked for'}")
    runs, device = (found.get(name, {}).get("result") for name in ("resnet50", "selection"))
    if not runs or not device:
        return
    print(f"{'images':>6} {'way':34} {'images/s':>9} {'ms':>8} {'MFU':>6} {'of memory':>9}")
    for run in runs:
        for name, result in use(run, PEAK, device["GB/s of memory"] * 1e9)["against"].items():
            memory = f"{result['of memory bandwidth']:9.2f}" if "of memory bandwidth" in result else f"{'-':>9}"
            print(
                f"{run['batch_per_replica']:6} {name:34} {result['images/s']:9.1f} {result['ms'][0]:8.1f} "
                f"{result['MFU']:6.3f} {memory}"
            )
        print("       " + ", ".join(f"{name} {value:.3f}" for name, value in run["figures"].items() if "/s /" in name))


if __name__ == "__main__":
    main()
