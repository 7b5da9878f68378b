"""GPU: all that synk promises on one, in one command of at most eight minutes, the most telling parts first.

    python bench/gpu.py [--parts law,resnet50,suite] [--tests] [--minutes 8] [--small] [--json OUT]

Each part is a process of its own with a time limit, prints as it goes, and its result is kept as it comes: three
minutes are enough for the first four. At the end stands a table, with what is wanted. gpu_parts.py says what law,
resume, rows, blocks, mock and torch do; suite is the tests marked smoke, on ten workers. `--tests` runs all fast tests,
in as many minutes as they take, and nothing else. Without a GPU all of it runs in small on the CPU, and its times mean
nothing.

Needs flax, optax and JAX with CUDA; the tests need pytest, pytest-xdist and hypothesis; torch is left out where it is
not installed.
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
from time import monotonic
from typing import NamedTuple
from xml.etree import ElementTree

# Several processes share the GPU: none takes all of its memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import numpy as np
import run
from record import about, heading, results_path, save

HERE = Path(__file__).parent
PEAK = 790e12  # bfloat16, as measured on an H200 with large matrix products
TESTS = "-m pytest -q -p no:cacheprovider -rfE --tb=short"
RESNET50 = "bench/resnet50.py --replicas 1 --against 1 --ways 'synk,serial jit'"
# In small, compiling is most of the time: XLA's own passes stay, LLVM's go.
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


class Part(NamedTuple):
    """Describe a part: its command, the command in small, and after how many seconds on a GPU it is stopped."""

    command: str
    small: str
    limit: float


def of_parts(name, limit):
    command = f"bench/gpu_parts.py {name}"
    return Part(command, f"{command} --small", limit)


def resnet50(batch, limit):
    small = f"{RESNET50} --image 32 --blocks 1 --steps 3 --batch-per-replica 4"
    return Part(f"{RESNET50} --image 224 --steps 30 --batch-per-replica {batch}", small, limit)


# In small, limits are there for parts that hang: a laptop at work may be several times slower than it is at rest.
SLACK = 4

# In the order of what they tell. Whoever has three minutes sees the first four.
PARTS = {
    "law": of_parts("law", 90),
    "resnet50": resnet50(256, 90),
    "calls": Part(
        "bench/calls.py --replicas 1 --parts steps,leaves,arguments --rounds 7",
        "bench/calls.py --replicas 1 --small",
        100,
    ),
    "rows": of_parts("rows", 60),
    "resume": of_parts("resume", 60),
    "mock": of_parts("mock", 130),
    # Those that depend most on JAX and the device; `--tests` runs all.
    "suite": Part(f"{TESTS} -n 10 --dist worksteal -m 'smoke and not slow' tests", f"{TESTS} tests/base", 130),
    "resnet50 of 128": resnet50(128, 70),
    "blocks": of_parts("blocks", 40),
    "slices": Part(
        "bench/slices.py --replicas 1 --slices 1,4 --models CNN --rounds 9",
        "bench/slices.py --replicas 1 --slices 1,4 --models CNN --divide 16 --rounds 1",
        40,
    ),
    "over": Part("bench/over.py --replicas 1 --rounds 5", "bench/over.py --replicas 1 --rounds 1", 30),
    "start": Part("bench/start.py --replicas 1 --times 1", "bench/start.py --replicas 1 --times 1 --layers 1", 70),
    "overhead": Part(
        "bench/overhead.py --replicas 1 --leaves 10,160 --rounds 9",
        "bench/overhead.py --replicas 1 --leaves 10 --rounds 1",
        40,
    ),
    "resnet50 of 64": resnet50(64, 60),
    "torch": of_parts("torch", 90),
}
ALL_TESTS = Part(f"{TESTS} -n 10 --dist worksteal tests synk", f"{TESTS} -n 2 --dist worksteal tests synk", 1800)


def environment_of(command, is_small):
    """Return the environment of a part, apart from what this process has."""
    more = {"PYTHONPATH": str(HERE.parent), "PYTHONUNBUFFERED": "1"}
    if is_small:
        quick = {} if "pytest" in command else {"XLA_FLAGS": QUICK}
        return quick | os.environ | more | {"JAX_PLATFORMS": "cpu"}
    if "pytest" in command:
        # Some tests want a CPU beside, and all compare with float32 results.
        more |= {"JAX_PLATFORMS": "cuda,cpu", "JAX_DEFAULT_MATMUL_PRECISION": "float32"}
    return os.environ | more


def child(command, limit, environment):
    """Run a part in a process of its own; return its exit status, its seconds, and what it found, as far as it came."""
    print(f"\n== {command}, at most {limit:.0f} s", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path, start, is_pytest = Path(folder) / "out", monotonic(), "pytest" in command
        arguments = [*shlex.split(command), "--junit-xml" if is_pytest else "--json", str(path)]
        if "gpu_parts" in command:
            arguments += ["--limit", f"{limit - 3:.0f}"]
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=HERE.parent,
            env=environment,
            process_group=0,  # so that its own processes end with it
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = "out of time"
            # Python then says where it is, and pytest what has failed so far.
            os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                pass
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        took = monotonic() - start
        print(f"== {status}, {took:.0f} s", flush=True)
        result = {} if not path.exists() else tests_of(path) if is_pytest else json.loads(path.read_text())
        return {"status": status, "seconds": took, "result": result}


def tests_of(path):
    """Read how many tests there were, and the names of those that failed."""
    suite = next(ElementTree.parse(path).getroot().iter("testsuite"))
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    wrong = [
        case for case in suite.iter("testcase") if case.find("failure") is not None or case.find("error") is not None
    ]
    return counts | {"wrong": [f"{case.get('classname')}.{case.get('name')}" for case in wrong]}


# The table: (figure, value, wanted) of each part.


def rows_of_law(result):
    for gang in result["gangs"]:
        what = f"{gang['processes']} processes over {'gloo' if gang['platform'] == 'cpu' else 'NCCL'}"
        equal = "equal" if gang["bits are equal"] else "unequal"
        yield f"{what}: wrong answers of {gang['cases']} cases; bits", f"{len(gang['wrong'])}; {equal}", "0; equal"
        yield (
            f"{what}: trained, furthest from one device",
            f"{max(gang['differences'].values(), default=np.nan):.1e}",
            "< 1e-5",
        )
    yield "hashes of `blocks=` over processes, gangs and one device", str(len(result["hashes of blocks"])), "1"


def rows_of_resnet50(result):
    batch, figures = result["batch_per_replica"], result["figures"]
    for name, way in result["against"].items():
        used = way["images/s"] * result["GFLOP an image"] * 1e9 / PEAK
        yield (
            f"ResNet-50, {batch} images, {name}: images/s; ms; of the peak",
            (f"{way['images/s']:.0f}; {way['ms'][0]:.2f}; {used:.3f}"),
            "",
        )
        yield f"ResNet-50, {batch} images, {name}, in a row: images/s", f"{1e3 * batch / way['ms in a row']:.0f}", ""
    yield f"ResNet-50, {batch} images: images/s / jit", f"{figures['images/s / best by hand']:.3f}", ">= 0.98"
    in_a_row = figures["images/s in a row / best by hand"]
    yield f"ResNet-50, {batch} images, in a row: images/s / jit", f"{in_a_row:.3f}", ">= 0.98"
    yield f"ResNet-50, {batch} images: memory / jit", f"{figures['peak memory / least by hand']:.3f}", "<= 1.02"


def rows_of_rows(result):
    yield "device memory: GB/s", f"{result['GB/s of memory']:.0f}", ""
    yield "matrix products in bfloat16: TFLOP/s", f"{result['TFLOP/s, bfloat16']:.0f}", ""
    for case in result["picked"]:
        rates = case["GB/s"]
        what = f"{case['rows']} rows picked on the host"
        yield f"{what}: rows that arrive wrong", str(case["wrong"]), "0"
        for raw in ("raw copy", "raw copy, pinned", "raw copy, pinned, in a row"):
            if raw in rates:
                way = "synk, in a row" if "in a row" in raw else "synk"
                yield f"{what}: GB/s; / {raw}", f"{rates[way]:.1f}; {rates[way] / rates[raw]:.2f}", ""
    if fed := result.get("fed"):
        ratio = fed["iterate, host"] / fed["iterate, resident"]
        yield "a step that `iterate` feeds from the host: time / resident rows", f"{ratio:.2f}", ""


def rows_of_suite(result):
    failed = result["failures"] + result["errors"]
    yield (
        "tests: passed, failed, skipped",
        (f"{result['tests'] - failed - result['skipped']}, {failed}, {result['skipped']}"),
        "0 failed",
    )


def rows_of_resume(result):
    firsts = [member["first"] for member in result["members"]]
    yield "two processes, one killed: both had ended after, s", f"{result['seconds with the kill']:.1f}", ""
    yield (
        "started again: items done before; counts of rows",
        f"{firsts}; {[m['counts'] for m in result['members']]}",
        "[4]",
    )
    yield "started again: furthest from one device", f"{result['furthest from one device']:.1e}", "< 1e-5"


def rows_of_mock(result):
    for way, (many, one) in result["ways"].items():
        ratios = f"{many['ms'] / one['ms']:.3f}, {many['temporary MB'] / one['temporary MB']:.3f}"
        what = f"ResNet-50, the program of {result['replicas']} replicas on one device, {way}"
        yield f"{what}: ms; time, memory / program of one", f"{many['ms']:.2f}; {ratios}", ""


def rows_of_blocks(result):
    for kind in [kind for kind in ("CNN", "MLP") if kind in result]:
        times = result[kind]
        ratios = ", ".join(f"{times[name] / times['no blocks']:.2f}" for name in ("one block", "eight blocks"))
        yield f"{kind} with `blocks=`: one block, eight; time / without", ratios, ""


def rows_of_torch(result):
    if "ms" in result:
        yield f"ResNet-50, {result['images']} images, torch.compile: images/s", f"{result['images/s']:.0f}", ""


ROWS = run.ROWS | {
    **{
        "law": rows_of_law,
        "rows": rows_of_rows,
        "resume": rows_of_resume,
        "suite": rows_of_suite,
        "mock": rows_of_mock,
        "blocks": rows_of_blocks,
    },
    **{"torch": rows_of_torch, "resnet50": rows_of_resnet50},
}


def show(found, names):
    """Print a table of what the parts found; a part that did not end says how far it came."""
    print(f"\n{heading(found)}\n\n| part | figure | value | wanted |\n| --- | --- | ---: | ---: |")
    for name in names:
        part = found[name]
        if part["status"] != 0:
            print(f"| {name} | ended with | {part['status']} after {part['seconds']:.0f} s | 0 |")
        try:
            for figure, value, wanted in ROWS[name.split()[0]](part["result"]):
                print(f"| {name} | {figure} | {value} | {wanted} |")
        except (KeyError, StopIteration, IndexError):
            print(f"| {name} | has no figures, or not all of them | | |")
    for name in found["suite"]["result"].get("wrong", []) if "suite" in names else []:
        print(f"failed: {name}")


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", help="by default bench/results/<date>-<device>.json; of a run in small, none")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--tests", action="store_true", help="all fast tests, and nothing else")
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--small", action="store_true", help="tiny sizes on the CPU, to try this out")
    options = parser.parse_args()
    parts = {"suite": ALL_TESTS} if options.tests else PARTS
    names = ["suite"] if options.tests else options.parts.split(",")
    if not options.small and jax.devices()[0].platform == "cpu":
        print("JAX finds no GPU here (see `python -m synk info`): all parts run in small on the CPU.")
        options.small = True
    slack = SLACK if options.small else 1
    end = monotonic() + slack * (parts["suite"].limit if options.tests else 60 * options.minutes)
    found = about("gpu")
    path = options.json or (None if options.small or options.tests else results_path(found))
    print(heading(found), flush=True)
    # In small one ResNet-50 is as good as three.
    names = [name for name in names if not (options.small and name.startswith("resnet50 of"))]
    for name in names:
        part = parts[name]
        limit = min(slack * part.limit, end - monotonic())
        command = part.small if options.small else part.command
        if limit > 5:
            found[name] = child(command, limit, environment_of(command, options.small))
        else:
            found[name] = {"status": "no time left", "seconds": 0, "result": {}}
        save(path, found)
    show(found, names)
    if any(found[name]["status"] not in (0, "no time left") for name in names):
        raise SystemExit("Not all parts ended well.")


if __name__ == "__main__":
    main()
