"""What every result says of itself: what ran, where, when, and how busy the machine was."""

import json
import os
import platform
import re
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax

try:
    from tqdm import tqdm
except ImportError:  # a bar less
    tqdm = None

BEFORE = os.getloadavg() if hasattr(os, "getloadavg") else ()


def cpu_devices(n):
    """Ask for so many virtual CPU devices; before anything else of JAX."""
    if os.environ.get("JAX_PLATFORMS", "cpu") == "cpu":
        jax.config.update("jax_num_cpu_devices", n)


def about(bench) -> dict[str, Any]:
    """What ran, where and when; the load averages (1, 5 and 15 minutes) are from before it began."""
    return {
        "bench": bench,
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load before": BEFORE,
    }


def heading(found):
    """One line of it, to print."""
    load = ", ".join(f"{one:.1f}" for one in found["load before"])
    return (
        f"jax {found['jax']}, {found['device']} x {found['devices']}, {found['cores']} cores, "
        f"Python {found['python']}; {found['date']}, load before {load}"
    )


def say(text):
    """Print, in one process of several."""
    if jax.process_index() == 0:
        (tqdm.write if tqdm else print)(text)


def progress(items, what):
    """The items, with a bar where tqdm is installed, in one process of several."""
    return tqdm(items, what, leave=False, disable=jax.process_index() > 0) if tqdm else items


def results_path(found):
    """Where a result goes: bench/results/<date>-<device>.json."""
    device = re.sub(r"[^a-z0-9]+", "-", found["device"].lower()).strip("-")
    return Path(__file__).parent / "results" / f"{found['date'].split()[0]}-{device}.json"


def save(path, found):
    """Write a result as JSON, if a path was given."""
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(found, indent=1) + "\n")


class Table:
    """Print and keep a row for each figure: what synk takes, what it takes by hand."""

    def __init__(self):
        self.rows = []

    def add(self, replicas, figure, synk, hand=None, *, unit="us", wanted="", end="", **more):
        row = {
            "replicas": replicas,
            "figure": figure,
            "unit": unit,
            "synk": synk,
            "hand": hand,
            "wanted": wanted,
            **more,
        }
        if not self.rows:
            print(f"{'':>3} {'figure':56} {'by hand':>9} {'synk':>9} {'':4} {'ratio':>6} {'more':>8}")
        shown = [f"{hand:.4g}", f"{synk / hand:.2f}", f"{synk - hand:+.4g}"] if hand is not None else [""] * 3
        print(
            f"{replicas:3} {figure:56} {shown[0]:>9} {synk:9.4g} {unit:4} {shown[1]:>6} {shown[2]:>8} {end}", flush=True
        )
        self.rows.append(row)
