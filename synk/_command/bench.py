"""Bench: `python -m synk bench FILE:NAME`, rows a second of a user's step by numbers of replicas, as one page."""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
import numpy as np

from .._base.units import counted, number_text
from .._distributed.init import group, init
from .._explain.info import machine, settings
from .._explain.page import Bar, chart, page


def bench(arguments: Sequence[str]) -> int:
    """Measure each number of replicas in a process of its own, one after the other; return the exit status."""
    options = _options(arguments)
    if options.only:
        options.json.write_text(json.dumps(_measured(options)))
        return 0
    counts = options.replicas or _numbers_here()
    # As many CPU devices as are measured, and as the file's own group may want.
    environment = {"JAX_NUM_CPU_DEVICES": str(max(8, *counts))} | os.environ
    results: list[dict[str, Any]] = []
    for count in counts:
        print(f"{counted(count, 'replica')}: ", end="", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "result.json"
            more = ["--only", str(count), "--of", str(max(counts)), "--json", str(path)]
            command = [sys.executable, "-m", "synk", "bench", *arguments, *more]
            # What the file prints goes to stderr.
            done = subprocess.run(command, env=environment, stdout=sys.stderr)
            if done.returncode:
                status = f"exit status {done.returncode}"
                print(f"python -m synk bench: it failed on {counted(count, 'replica')}, with {status}.")
                return 1
            results.append(json.loads(path.read_text()))
        point = _point(results[-1], results[0], options.unit)
        print(", ".join(f"{value} {name}" for name, value in point.items() if name != "replicas"))
    options.out.write_text(_page(options, results), encoding="utf-8")
    print(options.out)
    return 0


def _point(result: dict[str, Any], first: dict[str, Any], unit: str) -> dict[str, Any]:
    """Compare one number of replicas with the smallest one: a row of the page's table."""
    low, middle, high = (f"{seconds * 1e3:.2f}" for seconds in result["seconds"])
    return {
        "replicas": result["replicas"],
        "rows": result["rows"],
        "ms a step": f"{middle} ({low} to {high})",
        f"{unit}/s": number_text(result["rate"]),
        "speed-up": f"{result['rate'] / first['rate']:.2f}",
        "efficiency": f"{100 * _efficiency(result, first):.0f} %",
    }


def _efficiency(result: dict[str, Any], first: dict[str, Any]) -> float:
    """Return the rate of a replica as a part of its rate at the smallest number of replicas."""
    return result["rate"] / first["rate"] * first["replicas"] / result["replicas"]


def _page(options: argparse.Namespace, results: list[dict[str, Any]]) -> str:
    """Write the page of all measurements."""
    path, name = options.target
    first, last = results[0], results[-1]
    tree: dict[str, Any] = {
        "measured": f"median of {counted(options.rounds, 'round')} of {counted(options.steps, 'step')}, with quartiles",
        "rows": "the same for any number of replicas" if options.strong else "as many for each replica",
    }
    if first["platform"] == "cpu":
        tree["note"] = (
            "Replicas on CPU devices share the machine's cores, and one replica may use all of them. So this shows the "
            "cost that synk adds, not the speed that more devices would bring."
        )
    if any(_efficiency(result, first) > 1.1 for result in results):
        tree["above 110 %"] = (
            f"No gain of more replicas: something else slowed {counted(first['replicas'], 'replica')}, as happens on a "
            f"busy machine, or a cache holds what each of more replicas reads. Measure again, with more --rounds."
        )
    tree["scaling"] = [_point(result, first, options.unit) for result in results]
    tree[f"one step on {counted(last['replicas'], 'replica')}"] = last["explained"]
    # The settings of this process are the user's own, without those of the processes above.
    tree["the machine"] = last["machine"] | {"settings": settings()}
    bars: list[Bar] = []
    for result in results:
        ideal = first["rate"] / first["replicas"] * result["replicas"]
        segments = [("measured", result["rate"]), ("missing to the ideal", max(0, ideal - result["rate"]))]
        bars.append((counted(result["replicas"], "replica"), segments, number_text(result["rate"])))
    title = f"{path.name}:{name} on up to {counted(last['replicas'], 'replica')}"
    return page(title, tree, chart(title, [(f"{options.unit}/s", bars)]))


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line; say what is wrong before anything is measured."""
    parser = argparse.ArgumentParser(
        "python -m synk bench",
        description="Measure a step by numbers of replicas: rows a second and efficiency, as a page.",
        epilog="NAME is a function without parameters, which returns the step and the arguments of one call for the "
        "largest number of replicas: `return step, x, y`. Fewer get their part of these rows, as many each.",
    )
    parser.add_argument("target", metavar="FILE:NAME", type=_target)
    parser.add_argument(
        "--replicas", type=_counts, help="1,2,4; else powers of two as far as there are devices or cores"
    )
    parser.add_argument(
        "--strong", action="store_true", help="all rows for each number of replicas, not as many for each"
    )
    parser.add_argument("--steps", type=_count, default=20, help="in a row, before the last is waited for")
    parser.add_argument("--rounds", type=_count, default=5, help="of so many steps; the median counts")
    parser.add_argument("--unit", default="rows", help="images, tokens, ...")
    parser.add_argument("--per-row", type=float, default=1.0, help="how many of these a row is")
    parser.add_argument("--out", type=Path, default=Path("scaling.html"))
    # The process of one number of replicas is told which, of how many, and where to write.
    for name, kind in (("--only", int), ("--of", int), ("--json", Path)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not 0 < options.per_row < float("inf"):
        parser.error(f"--per-row is {options.per_row}; give a number > 0.")
    if not options.out.parent.is_dir():
        parser.error(f"--out is {options.out}, but there is no folder {options.out.parent}.")
    return options


def _target(text: str) -> tuple[Path, str]:
    path, _, name = text.rpartition(":")
    if not name.isidentifier() or not Path(path).is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is no FILE:NAME of a file that is there, such as train.py:bench")
    return Path(path), name


def _count(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1")
    return int(text)


def _counts(text: str) -> list[int]:
    return sorted({_count(number) for number in text.split(",")})


def _numbers_here() -> list[int]:
    """Return the numbers of replicas to measure: powers of two, and all that are here."""
    # JAX starts in another process, so that this one takes no device's memory.
    program = "import jax; print(jax.default_backend(), jax.device_count())"
    asked = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    platform, count = asked.stdout.split()[-2:]
    there = (os.cpu_count() or 1) if platform == "cpu" else int(count)
    return sorted({there, *[2**i for i in range(there.bit_length())]})


def _measured(options: argparse.Namespace) -> dict[str, Any]:
    """Measure one number of replicas, in the process of that number."""
    path, name = options.target
    sys.path.insert(0, str(path.resolve().parent))
    make = getattr(importlib.import_module(path.stem), name, None)
    # The file may have made a group of another size.
    init(options.only)
    made = make() if callable(make) and not hasattr(make, "explain") else None
    if not isinstance(made, tuple) or not made or not hasattr(made[0], "explain"):
        raise SystemExit(
            f"{path}:{name} is no function that returns a step and its arguments, such as\n"
            f"def {name}():\n    return step, x, y"
        )
    step, *args = made
    if group().size != options.only:
        raise SystemExit(
            f"{path}:{name} makes a group of its own, of {group().size} replicas instead of {options.only}. Leave "
            f"synk.init out there: it is called in the group that is measured."
        )
    explained = step.explain(*args)
    rows, batch = sum(explained.lengths), {}
    if rows < options.of:
        raise SystemExit(
            f"{path}:{name} returns a call of {rows} rows, for {options.of} replicas. Give scattered arguments of at "
            f"least as many rows, or measure fewer: --replicas."
        )
    if options.only != options.of and not options.strong:
        rows = rows * options.only // options.of
        batch = {"batch": rows}
        explained = step.explain(*args, **batch)
    for _ in range(3):
        jax.block_until_ready(step(*args, **batch))
    rounds = [_timed(lambda: step(*args, **batch), options.steps) for _ in range(options.rounds)]
    seconds: list[float] = np.quantile(rounds, (0.25, 0.5, 0.75)).tolist()
    return {
        "replicas": options.only,
        "rows": rows,
        "seconds": seconds,
        "rate": rows * options.per_row / seconds[1],
        "platform": group().platform,
        "explained": json.loads(explained.json()),
        "machine": machine(group().devices),
    }


def _timed(step: Callable[[], Any], steps: int) -> float:
    """Return the mean seconds of a step, over several launched one after another and awaited at the end."""
    start, result = perf_counter(), None
    for _ in range(steps):
        result = step()
    jax.block_until_ready(result)
    return (perf_counter() - start) / steps
