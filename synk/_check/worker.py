"""Worker: the processes of runs. A server that has imported JAX forks one for each run of a user's program.

It runs as a script and imports nothing of synk, which a checked program need not use.
"""

import contextlib
import importlib
import importlib.util
import inspect
import json
import os
import select
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MOST_OUTPUT = 1 << 28  # bytes of each file that a program writes


# A run that is asked for: the `path` of the user's file, the `name` of its function and `rows`, its argument (None if
# it has none); the number of `devices` and the `mode` (see `Program`); `out`, with which the names of files to write
# begin; `timeout` in seconds, and `share`: a run has one of so many parts of the machine's memory.
Job = dict[str, Any]


def main(what: str, *arguments: str) -> None:
    """Serve runs until the process that asks for them is gone, or make one run where no process can be forked."""
    draws = _Draws()
    if what == "run":
        job: Job = json.loads(arguments[0])
        if job["mode"] == "x64":
            _widen()
        return _make(job, draws)
    folder, *modules = arguments
    jobs, wide_jobs = os.pipe()
    # Runs in float64 share no import with others: what a library once took from JAX stays as it was.
    if not (wide_server := os.fork()):
        os.close(wide_jobs)
        _widen()
        _serve(jobs, None, modules, draws)
        os._exit(0)
    os.close(jobs)
    _serve(0, wide_jobs, modules, draws)
    os.close(wide_jobs)
    os.waitpid(wide_server, 0)
    # The process that asked may have been killed.
    shutil.rmtree(folder, ignore_errors=True)


def _widen() -> None:
    """Let the names of narrower floats mean float64. JAX's flag alone leaves what programs and libraries pin."""
    jax.config.update("jax_enable_x64", True)
    # JAX itself asks whether numbers are np.float16, and takes their mean in float32.
    for module, name in ((np, "float32"), (jnp, "float32"), (jnp, "float16"), (jnp, "bfloat16")):
        setattr(module, name, np.float64)


def _serve(jobs: int, wide_jobs: int | None, modules: Sequence[str], draws: "_Draws") -> None:
    """Fork a process for each job while jobs come: JAX has no devices yet. Those in float64 go to their own server."""
    running: dict[int, tuple[str, float]] = {}
    rest = b""
    while True:
        if select.select([jobs], [], [], 0.02 if running else None)[0]:
            if not (new := os.read(jobs, 1 << 16)):
                break
            *lines, rest = (rest + new).split(b"\n")
            for line in lines:
                job: Job = json.loads(line)
                if job["mode"] == "x64" and wide_jobs is not None:
                    os.write(wide_jobs, line + b"\n")
                    continue
                for module in modules:
                    with contextlib.suppress(Exception):
                        importlib.import_module(module)
                if not (pid := os.fork()):
                    if wide_jobs is not None:
                        os.close(wide_jobs)
                    _begin(job, draws)
                running[pid] = job["out"], monotonic() + job["timeout"]
        for pid, (out, deadline) in list(running.items()):
            is_late = monotonic() > deadline
            if is_late:
                Path(f"{out}.late").touch()
                end_group(pid)
            if os.waitpid(pid, 0 if is_late else os.WNOHANG)[0]:
                # Processes of the program's own may go on.
                end_group(pid)
                del running[pid]
                Path(f"{out}.ended").touch()
    for pid in running:
        end_group(pid)
        os.waitpid(pid, 0)


def end_group(group: int) -> None:
    """End a run, with all processes that it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _begin(job: Job, draws: "_Draws") -> None:
    """Make a run in this process, a fork of the server, and end it."""
    code = 1
    try:
        os.setsid()
        log = os.open(f"{job['out']}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        _make(job, draws)
        code = 0
    finally:
        os._exit(code)


def _make(job: Job, draws: "_Draws") -> None:
    """Run the program, and write down its leaves or its error."""
    jax.config.update("jax_num_cpu_devices", job["devices"])
    jax.config.update("jax_dump_ir_to", job["out"])
    jax.config.update("jax_dump_ir_modes", "stablehlo")
    draws.is_quiet, draws.count = job["mode"] == "quiet", 0
    record: dict[str, Any] = {"error": None, "leaves": []}
    arrays: dict[str, np.ndarray] = {}
    _bound(job["share"])
    try:
        for path, leaf in jax.tree_util.tree_flatten_with_path(_call(job))[0]:
            said, number, copies = _described(leaf)
            arrays |= {f"leaf{len(record['leaves'])}": number, f"copies{len(record['leaves'])}": copies}
            record["leaves"].append([jax.tree_util.keystr(path) or "value", *said])
    except (Exception, SystemExit) as error:
        lines = str(error).strip().splitlines() or [""]
        record |= {"error": f"{type(error).__name__}: {lines[0]}"[:300], "leaves": []}
    _bound(None)
    record |= {"draws": draws.count, "devices": len(jax.devices())}
    np.savez(f"{job['out']}.part.npz", allow_pickle=False, record=np.array(json.dumps(record)), **arrays)
    os.replace(f"{job['out']}.part.npz", f"{job['out']}.npz")


def _call(job: Job) -> Any:
    """Import the user's file anew, and call its function."""
    sys.argv, sys.dont_write_bytecode = [job["path"]], True
    sys.path.insert(0, os.path.dirname(job["path"]))
    spec = importlib.util.spec_from_file_location(Path(job["path"]).stem, job["path"])
    assert spec is not None and spec.loader is not None
    # Libraries look up the module of a class there.
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, job["name"])
    return function() if job["rows"] is None else function(job["rows"])


def _described(leaf: Any) -> tuple[list[Any], np.ndarray, np.ndarray]:
    """Return a leaf's dtype and its bits, its numbers, and two rows of numbers of devices that should be equal."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    number, seen = np.asarray(leaf), dict[str, np.ndarray]()
    copies = [np.empty((2, 0), number.dtype)]
    if number.dtype.kind not in "biufcV":
        raise TypeError(f"it returned {type(leaf).__name__}, which is no array of numbers; return a tree of arrays")
    wide = np.complex128 if number.dtype.kind == "c" else np.float64
    for shard in leaf.addressable_shards if isinstance(leaf, jax.Array) else ():
        part = np.asarray(shard.data)
        first = seen.setdefault(str(shard.index), part)
        if first.tobytes() != part.tobytes():
            copies.append(np.stack([first.ravel(), part.ravel()]))
    bits = jnp.finfo(number.dtype).bits if jnp.issubdtype(number.dtype, jnp.inexact) else 0
    return [number.dtype.name, int(bits)], number.astype(wide), np.concatenate(copies, 1).astype(wide)


def _bound(share: int | None) -> None:
    """Bound the memory of this process, and each file that it writes, where the system can; None lifts the bounds."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        bounds = {resource.RLIMIT_DATA: memory // (share or 1), resource.RLIMIT_FSIZE: MOST_OUTPUT}
        for kind, most in bounds.items():
            hard = resource.getrlimit(kind)[1]
            is_lower = share and (hard == resource.RLIM_INFINITY or most < hard)
            resource.setrlimit(kind, (most if is_lower else hard, hard))


class _Draws:
    """Draws by `jax.random` inside `jax.shard_map` and `jax.pmap`: counted, and made alike where that is asked for."""

    def __init__(self) -> None:
        self.is_quiet, self.count = False, 0
        for name, function in list(vars(jax.random).items()):
            if inspect.isfunction(function) and not name.startswith("_"):
                parameters = [*inspect.signature(function).parameters]
                if parameters[:1] == ["key"] and len(parameters) > 1 and name not in ("fold_in", "split", "clone"):
                    setattr(jax.random, name, self._watched(function))

    def _watched(self, draw: Callable[..., Any]) -> Callable[..., Any]:
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


if __name__ == "__main__":
    main(*sys.argv[1:])
