"""GPU: all that is measured on one, in one command of less than eight minutes.

    python bench/gpu.py [--json OUT] [--minutes 8] [--small]

ResNet-50 at 224 pixels in bfloat16 with 64, 128 and 256 images, by synk and by `jax.jit` by hand, taking turns; what
part of the GPU's arithmetic and of its measured memory bandwidth that is; the overhead of a call; rows picked on the
host, against the raw copy of rows already picked.
Needs jax, flax, optax and numpy. `--small` tries the script out anywhere. Parts for which no time is left are skipped,
and it says so.
"""

import argparse
import json
import os
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
FULL: dict[str, Any] = {
    **{"batches": (128, 256, 64), "image": 224, "blocks": "3,4,6,3", "steps": 30},  # of ResNet-50
    **{"leaves": "10,160,480", "rounds": 60},  # of the overhead of a call
    **{"rows": 50_000, "picked": (512, 4096)},
    **{"MB": 4096, "side": 8192},  # of what is copied and multiplied
}
SMALL: dict[str, Any] = {
    **{"batches": (4,), "image": 32, "blocks": "1", "steps": 3},
    **{"leaves": "10", "rounds": 5},
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


def child(script, limit, *arguments):
    """What another benchmark found, in a process of its own; None where time ran out or it failed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out.json"
        command = [sys.executable, str(HERE / script), *map(str, arguments), "--json", str(path)]
        try:
            subprocess.run(command, check=True, timeout=max(limit, 1))
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
            print(f"{script}: left out: {error}", flush=True)
            return None
        return json.loads(path.read_text())


def use(run, peak, memory):
    """Each way's part of the arithmetic and of the memory bandwidth that the device has."""
    for result in run["against"].values():
        result["MFU"] = result["images/s"] * run["GFLOP an image"] * 1e9 / peak
        if result.get("GB accessed"):
            result["of memory bandwidth"] = result["GB accessed"] * 1e9 / (result["ms"][0] / 1e3) / memory
    return run


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", help="by default bench/results/<date>-<device>.json")
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    end = monotonic() + 60 * options.minutes
    size = SMALL if options.small else FULL
    found = about("gpu")
    print(heading(found), flush=True)
    found |= {"GB/s of memory": bandwidth(size["MB"]) / 1e9, "TFLOP/s, bfloat16": arithmetic(size["side"]) / 1e12}
    print(f"memory {found['GB/s of memory']:.0f} GB/s, matrix products {found['TFLOP/s, bfloat16']:.0f} TFLOP/s")
    found["selection"] = selection(size["rows"], size["picked"])
    synk.close()
    jax.clear_caches()
    left = end - monotonic()
    arguments = ["--replicas", 1, "--leaves", size["leaves"], "--rounds", size["rounds"]]
    found["overhead"] = child("overhead.py", min(left, 120), *arguments)
    found["resnet50"] = []
    for batch in size["batches"]:
        arguments = ["--replicas", 1, "--against", 1, "--ways", "synk,serial jit"]
        arguments += ["--image", size["image"], "--blocks", size["blocks"], "--steps", size["steps"]]
        run = child("resnet50.py", end - monotonic() - 5, *arguments, "--batch-per-replica", batch)
        if run:
            found["resnet50"].append(use(run, PEAK, found["GB/s of memory"] * 1e9))
        save(options.json or results_path(found), found)
    show(found)


def show(found):
    print(f"\n{heading(found)}")
    print(f"{'images':>6} {'way':34} {'images/s':>9} {'ms':>8} {'MFU':>6} {'of memory':>9}")
    for run in found["resnet50"]:
        for name, result in run["against"].items():
            memory = f"{result['of memory bandwidth']:9.2f}" if "of memory bandwidth" in result else f"{'-':>9}"
            print(
                f"{run['batch_per_replica']:6} {name:34} {result['images/s']:9.1f} {result['ms'][0]:8.1f} "
                f"{result['MFU']:6.3f} {memory}"
            )
        print("       " + ", ".join(f"{name} {value:.3f}" for name, value in run["figures"].items() if "/s /" in name))


if __name__ == "__main__":
    main()
