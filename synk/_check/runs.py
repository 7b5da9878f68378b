"""Runs: a user's program on a number of virtual CPU devices, each run in a process of its own."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from time import sleep
from typing import Any, NamedTuple

import numpy as np

from . import worker
from .laws import Leaf, apart

# Importing these takes most of a run's time: the server does it once, if the program has their names.
LIBRARIES = {
    "optax": "optax", "nnx": "flax.nnx", "linen": "flax.linen", "keras": "keras", "equinox": "equinox", "synk": "synk",
}  # fmt: skip
WORKERS = min(os.cpu_count() or 1, 4)
HAS_FORK = hasattr(os, "fork")


class Run(NamedTuple):
    """A run of a program.

    Attributes:
      error: why there are no leaves; None if there are.
      is_over: whether the process was ended, or ended itself, before the program returned or raised.
      leaves: the leaves by their paths.
      draws: how many random draws are made inside `jax.shard_map` and `jax.pmap`.
      devices: how many devices JAX has.
      spans: on how many devices the largest compiled program runs.
      narrow: bits of the narrowest floats that compiled programs compute.
    """

    error: str | None
    is_over: bool
    leaves: dict[str, Leaf]
    draws: int = 0
    devices: int = 0
    spans: int = 0
    narrow: int = 64


class Program:
    """A program, with its runs by number of devices, number of rows and mode, each made once.

    Modes: "" as it is; "x64" where the names of narrower floats mean float64; "quiet" where draws inside
    `jax.shard_map` and `jax.pmap` are alike for all rows and keys.
    """

    def __init__(self, path: Path, name: str, timeout: float, on_run: Callable[[int, int], None]) -> None:
        self._path, self._name, self._timeout, self._on_run = str(path), name, timeout, on_run
        self.source = path.read_text(encoding="utf-8", errors="replace")
        self._runs: dict[tuple[int, int | None, str], Future[Run]] = {}

    def __enter__(self) -> "Program":
        self._temporary = tempfile.TemporaryDirectory(prefix="synk-check-", ignore_cleanup_errors=True)
        modules = [module for word, module in LIBRARIES.items() if word in self.source]
        self._server = _python(["serve", self._temporary.name, *modules], stdin=subprocess.PIPE) if HAS_FORK else None
        self._pool = ThreadPoolExecutor(WORKERS)
        return self

    def __exit__(self, *error: object) -> None:
        if self._server is not None and self._server.stdin is not None:
            # Without its standard input the server ends all runs that go on, and itself.
            self._server.stdin.close()
            self._server.wait()
        self._pool.shutdown(cancel_futures=True)
        self._temporary.cleanup()

    def start(self, n: int, rows: int | None, mode: str = "") -> Future[Run]:
        """Start a run, unless it was started before."""
        key = n, rows, mode
        if key not in self._runs:
            self._runs[key] = self._pool.submit(self._run, *key)
            self._runs[key].add_done_callback(lambda _: self._on_run(self.done, len(self._runs)))
        return self._runs[key]

    def __call__(self, n: int, rows: int | None, mode: str = "") -> Run:
        """Return a run, which is made if there is none."""
        return self.start(n, rows, mode).result()

    @property
    def done(self) -> int:
        """Return how many runs have ended."""
        return sum(run.done() for run in list(self._runs.values()))

    def _run(self, n: int, rows: int | None, mode: str) -> Run:
        out = f"{self._temporary.name}/{n}-{rows}-{mode}"
        job: worker.Job = {
            "path": self._path, "name": self._name, "rows": rows, "devices": n, "mode": mode, "out": out,
            "timeout": self._timeout, "share": WORKERS + 1,
        }  # fmt: skip
        text = json.dumps(job)
        if self._server is None:
            with open(f"{out}.log", "wb") as log:
                process = _python(["run", text], stdout=log, stderr=log)
            try:
                process.wait(self._timeout)
            except subprocess.TimeoutExpired:
                Path(f"{out}.late").touch()
            worker.end_group(process.pid)
            process.wait()
        elif self._server.stdin is not None:
            with suppress(BrokenPipeError):
                # One write, so that lines of threads do not mix.
                os.write(self._server.stdin.fileno(), text.encode() + b"\n")
            while not os.path.exists(f"{out}.ended") and self._server.poll() is None:
                sleep(0.02)
        return _read(out, self._timeout)


def _python(arguments: Sequence[str], **pipes: Any) -> "subprocess.Popen[bytes]":
    """Start a worker, in a session of its own. It finds what this process finds."""
    # Little optimization compiles in two thirds of the time.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=1"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "0", "KERAS_BACKEND": "jax",
        "XLA_FLAGS": flags, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
    }  # fmt: skip
    # Its folder has modules whose names may be those of a program's.
    command = [sys.executable, "-P", worker.__file__, *arguments]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL) | pipes
    return subprocess.Popen[bytes](command, env=environment, start_new_session=True, **pipes)


def _read(out: str, timeout: float) -> Run:
    """Read what a run has written down."""
    if not os.path.exists(f"{out}.npz"):
        log = Path(f"{out}.log")
        with open(log if log.exists() else os.devnull, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 1000))
            said = file.read().decode(errors="replace").strip()
        why = f"it ran for more than {timeout:g} s" if os.path.exists(f"{out}.late") else "its process died"
        return Run(f"{why}{f'; its last output: {said}' if said else ''}", True, {})
    leaves: dict[str, Leaf] = {}
    with np.load(f"{out}.npz") as file:
        record = json.loads(str(file["record"]))
        for i, (name, dtype, bits) in enumerate(record["leaves"]):
            leaves[name] = Leaf(name, dtype, bits, apart(*file[f"copies{i}"]), file[f"leaf{i}"])
    spans, narrow = 0, 64
    for path in Path(out).glob("*"):
        text = path.read_text(errors="replace")
        counts = re.findall(r"num_partitions = (\d+).*?num_replicas = (\d+)", text[:2000])
        spans = max([spans, *(int(parts) * int(replicas) for parts, replicas in counts)])
        narrow = min([narrow, *map(int, re.findall(r"[x<]b?f(8|16|32)\b", text))])
    return Run(record["error"], False, leaves, record["draws"], record["devices"], spans, narrow)
