"""Runs: a user's program on a number of virtual CPU devices, each run in a process of its own."""

import importlib
import importlib.util
import inspect
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .compare import widened
from .laws import Leaf, apart

# Importing these takes most of a run's time: the server does it once, if the program has their names.
LIBRARIES = {"optax": "optax", "flax": "flax.nnx", "linen": "flax.linen", "keras": "keras", "equinox": "equinox"}
MOST_OUTPUT = 1 << 28  # bytes of each file that a program writes
WORKERS = min(os.cpu_count() or 1, 4)
HAS_FORK = hasattr(os, "fork")
_Server = tuple["subprocess.Popen[bytes]", dict[str, threading.Event]]


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

    Modes: "" as it is; "x64" where the names of narrower floats mean float64; "again" compiled otherwise; "quiet" where
    draws inside `jax.shard_map` and `jax.pmap` are alike for all rows and keys.
    """

    def __init__(self, path: Path, name: str, timeout: float, on_run: Callable[[int, int], None]) -> None:
        self._target, self._timeout, self._on_run = (str(path), name), timeout, on_run
        self.source = path.read_text(encoding="utf-8", errors="replace")
        self._runs: dict[tuple[int, int | None, str], Future[Run]] = {}
        self._servers: dict[bool, _Server] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> "Program":
        self._temporary = tempfile.TemporaryDirectory(prefix="synk-check-", ignore_cleanup_errors=True)
        self._pool = ThreadPoolExecutor(WORKERS)
        return self

    def __exit__(self, *error: object) -> None:
        for server, _ in self._servers.values():
            # Without its standard input a server ends all runs that go on, and itself.
            assert server.stdin is not None
            server.stdin.close()
            server.wait()
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

    def _serve(self, mode: str) -> _Server:
        """Return the server of a mode with the events of its runs. Runs in float64 share no imports with others."""
        with self._lock:
            if (is_wide := mode == "x64") not in self._servers:
                modules = [module for word, module in LIBRARIES.items() if word in self.source]
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
                server = _python(["serve", mode * is_wide, *modules], self._environment(1, mode), **pipes)
                self._servers[is_wide] = server, {"": threading.Event()}
                threading.Thread(target=_listen, args=[*self._servers[is_wide]], daemon=True).start()
            return self._servers[is_wide]

    @staticmethod
    def _environment(n: int, mode: str) -> dict[str, str]:
        flags = os.environ.get("XLA_FLAGS", "")
        if mode == "again":
            flags += " --xla_backend_optimization_level=0 --xla_cpu_enable_fast_math=true"
        return {
            "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(n), "JAX_ENABLE_COMPILATION_CACHE": "0",
            "JAX_ENABLE_X64": "1" if mode == "x64" else os.environ.get("JAX_ENABLE_X64", "0"),
            "KERAS_BACKEND": "jax", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONDONTWRITEBYTECODE": "1", "XLA_FLAGS": flags,
        }  # fmt: skip

    def _run(self, n: int, rows: int | None, mode: str) -> Run:
        out = f"{self._temporary.name}/{n}-{rows}-{mode}"
        environment = self._environment(n, mode) | {"JAX_DUMP_IR_TO": out, "JAX_DUMP_IR_MODES": "stablehlo"}
        job = [*self._target, rows, mode, out, self._timeout]
        start = monotonic()
        if not HAS_FORK:
            with open(f"{out}.log", "wb") as log:
                process = _python(["run", mode, json.dumps(job)], environment, stdout=log, stderr=log)
            with suppress(subprocess.TimeoutExpired):
                process.wait(self._timeout)
            _end_group(process.pid)
            process.wait()
        else:
            server, ended = self._serve(mode)
            ended[out] = event = threading.Event()
            assert server.stdin is not None
            # Its imports are no part of a run's time.
            ended[""].wait()
            start = monotonic()
            try:
                # One write, so that lines of threads do not mix.
                os.write(server.stdin.fileno(), json.dumps([job, environment]).encode() + b"\n")
            except BrokenPipeError:
                event.set()
            event.wait(self._timeout + 10)
        return _read(out, self._timeout if monotonic() - start >= self._timeout else None)


def _python(arguments: Sequence[str], environment: dict[str, str], **pipes: Any) -> "subprocess.Popen[bytes]":
    """Start this module as a program, in a session of its own."""
    pipes = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL} | pipes
    command = [sys.executable, "-c", f"from {__name__} import main; main()", *arguments]
    package = str(Path(__file__).parents[2])
    environment = environment | {
        "PYTHONPATH": os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    }
    return subprocess.Popen[bytes](command, env=os.environ | environment, start_new_session=True, **pipes)


def _listen(server: "subprocess.Popen[bytes]", ended: dict[str, threading.Event]) -> None:
    assert server.stdout is not None
    with server.stdout as lines:
        for line in lines:
            ended[line.decode().strip()].set()
    for event in list(ended.values()):
        event.set()


def _end_group(group: int) -> None:
    """End a run, with all processes that it has started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _read(out: str, timeout: float | None) -> Run:
    """Read what a run has written down."""
    if not os.path.exists(f"{out}.npz"):
        with open(f"{out}.log", "rb") if os.path.exists(f"{out}.log") else open(os.devnull, "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - 1000))
            said = log.read().decode(errors="replace").strip()
        why = f"it ran for more than {timeout:g} s" if timeout else "its process died"
        return Run(f"{why}{f'; its last output: {said}' if said else ''}", True, {})
    with np.load(f"{out}.npz") as file:
        record = json.loads(str(file["record"]))
        leaves = [Leaf(name, *said, value=file[f"leaf{i}"]) for i, (name, *said) in enumerate(record["leaves"])]
    spans, narrow = 0, 64
    for path in Path(out).glob("*"):
        text = path.read_text(errors="replace")
        counts = re.findall(r"num_partitions = (\d+).*?num_replicas = (\d+)", text[:2000])
        spans = max([spans, *(int(parts) * int(replicas) for parts, replicas in counts)])
        narrow = min([narrow, *map(int, re.findall(r"[x<]b?f(8|16|32)\b", text))])
    by_name = {leaf.name: leaf for leaf in leaves}
    return Run(record["error"], False, by_name, record["draws"], record["devices"], spans, narrow)


# What follows runs in the process of a run, and in the server that forks it.


def main() -> None:
    """Serve runs, or make one in a fresh process."""
    what, mode, *arguments = sys.argv[1:]
    if mode == "x64":
        # The flag alone leaves what programs and libraries pin to float32.
        for module in (np, jnp):
            for name in ("float32", "float16", "bfloat16"):
                setattr(module, name, np.float64)
    if what == "serve":
        _serve(arguments, _watched_draws())
    else:
        _write(json.loads(arguments[0]), _watched_draws())


def _serve(modules: Sequence[str], draws: "_Draws") -> None:
    """Import once what runs import, then fork a process for each run: JAX has no devices yet."""
    for module in modules:
        with suppress(Exception):
            importlib.import_module(module)
    os.write(1, b"\n")
    running: dict[int, tuple[str, float]] = {}
    rest = b""
    try:
        while True:
            if select.select([0], [], [], 0.02 if running else None)[0]:
                if not (new := os.read(0, 1 << 16)):
                    return
                *lines, rest = (rest + new).split(b"\n")
                for job, environment in map(json.loads, lines):
                    if not (pid := os.fork()):
                        _begin(job, environment, draws)
                    running[pid] = job[4], monotonic() + job[5]
            for pid, (out, deadline) in list(running.items()):
                is_late = monotonic() > deadline
                if is_late:
                    _end_group(pid)
                if os.waitpid(pid, 0 if is_late else os.WNOHANG)[0]:
                    # Processes of the program's own may go on.
                    _end_group(pid)
                    del running[pid]
                    os.write(1, out.encode() + b"\n")
    finally:
        for pid in running:
            _end_group(pid)


def _begin(job: Sequence[Any], environment: dict[str, str], draws: "_Draws") -> None:
    """Make a run in this process, a fork of the server, and end it."""
    os.setsid()
    log = os.open(f"{job[4]}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(environment)
    for name in ("JAX_NUM_CPU_DEVICES", "JAX_DUMP_IR_TO", "JAX_DUMP_IR_MODES"):
        value = environment[name]
        jax.config.update(name.lower(), int(value) if value.isdigit() else value)
    code = 1
    try:
        _write(job, draws)
        code = 0
    finally:
        os._exit(code)


def _write(job: Sequence[Any], draws: "_Draws") -> None:
    """Run the program, and write down its leaves or its error."""
    path, name, rows, mode, out, _ = job
    draws.is_quiet, draws.count = mode == "quiet", 0
    record: dict[str, Any] = {"error": None, "leaves": []}
    arrays: dict[str, np.ndarray] = {}
    try:
        with _limits():
            value = _call(path, name, rows)
            for place, leaf in jax.tree_util.tree_flatten_with_path(value)[0]:
                said, arrays[f"leaf{len(arrays)}"] = _described(leaf)
                record["leaves"].append([jax.tree_util.keystr(place) or "value", *said])
    except (Exception, SystemExit) as error:
        lines = str(error).strip().splitlines() or [""]
        record |= {"error": f"{type(error).__name__}: {lines[0]}"[:300], "leaves": []}
    record |= {"draws": draws.count, "devices": len(jax.devices())}
    np.savez(f"{out}.part.npz", allow_pickle=False, record=np.array(json.dumps(record)), **arrays)
    os.replace(f"{out}.part.npz", f"{out}.npz")


def _call(path: str, name: str, rows: int | None) -> Any:
    """Import the user's file anew, and call its function."""
    sys.argv = [path]
    sys.path.insert(0, os.path.dirname(path))
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    # Libraries look up the module of a class there.
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name)
    return function() if rows is None else function(rows)


def _described(leaf: Any) -> tuple[list[Any], np.ndarray]:
    """Return a leaf's dtype, its bits, how far devices differ that should hold the same numbers, and its numbers."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    number, parted, seen = np.asarray(leaf), 0.0, dict[str, np.ndarray]()
    if number.dtype.kind not in "biufcV":
        raise TypeError(f"it returned {type(leaf).__name__}, which is no array of numbers; return a tree of arrays")
    for shard in leaf.addressable_shards if isinstance(leaf, jax.Array) else ():
        (part,) = widened(np.asarray(shard.data))
        parted = max(parted, apart(seen.setdefault(str(shard.index), part), part))
    bits = jnp.finfo(number.dtype).bits if jnp.issubdtype(number.dtype, jnp.inexact) else 0
    return [number.dtype.name, int(bits), parted], widened(number)[0]


@contextmanager
def _limits() -> Generator[None]:
    """Bound the memory of this process, and each file that it writes, where the system can."""
    try:
        import resource

        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // (WORKERS + 1)
    except (ImportError, OSError, ValueError):
        yield
        return
    bounds = {resource.RLIMIT_DATA: memory, resource.RLIMIT_FSIZE: MOST_OUTPUT}
    before = {kind: resource.getrlimit(kind) for kind in bounds}
    try:
        for kind, most in bounds.items():
            hard = before[kind][1]
            resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
        yield
    finally:
        for kind, limits in before.items():
            resource.setrlimit(kind, limits)


class _Draws:
    """Draws by `jax.random` inside `jax.shard_map` and `jax.pmap`: counted, and made alike where that is asked for."""

    def __init__(self) -> None:
        self.is_quiet, self.count = False, 0

    def watched(self, draw: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function of `jax.random` that draws."""
        signature = inspect.signature(draw)

        def drawn(key: Any, *args: Any, **kwargs: Any) -> Any:
            manual = jax.sharding.AxisType.Manual
            if manual not in jax.sharding.get_abstract_mesh().axis_types:
                return draw(key, *args, **kwargs)
            self.count += 1
            if not self.is_quiet:
                return draw(key, *args, **kwargs)
            bound = signature.bind(jax.random.key(0), *args, **kwargs)
            shape = bound.arguments.get("shape")
            if not shape or isinstance(shape, int):
                return draw(*bound.args, **bound.kwargs)
            # The same numbers for each row, however many rows a device has.
            bound.arguments["shape"] = (*[1] * (len(shape) - 1), shape[-1] if len(shape) > 1 else 1)
            return jnp.broadcast_to(draw(*bound.args, **bound.kwargs), shape)

        return drawn


def _watched_draws() -> _Draws:
    """Watch all functions of `jax.random` that draw by a key."""
    draws = _Draws()
    for name, function in list(vars(jax.random).items()):
        if inspect.isfunction(function) and not name.startswith("_"):
            parameters = [*inspect.signature(function).parameters]
            if parameters[:1] == ["key"] and len(parameters) > 1 and name not in ("fold_in", "split", "clone"):
                setattr(jax.random, name, draws.watched(function))
    return draws
