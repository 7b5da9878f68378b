"""`python -m synk launch`: one program in several processes of this machine, for development and tests."""

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp
from time import monotonic, sleep
from typing import Any, NamedTuple

from .liveness import EXIT_PEER_FAILED

EXIT_TIMEOUT = 124  # the code of a process that had to be ended, as of the command `timeout`
GRACE_SECONDS = 3.0  # for the others to say why they end, once one has failed
RUNTIME_ENDS_IT = "JAX distributed service detected fatal errors"  # what the runtime prints in a process it ends


class Ended(NamedTuple):
    rank: int
    code: int
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code of the gang. SIGTERM is passed on to all; a second one ends them."""
    parser = argparse.ArgumentParser("python -m synk", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    launch = commands.add_parser("launch", help="start a program in n processes on this machine")
    launch.add_argument("-n", "--processes", type=int, default=2, help="how many processes (2)")
    launch.add_argument("--devices-per-process", type=int, metavar="K", help="CPU devices of each")
    launch.add_argument("--restarts", type=int, default=0, metavar="R", help="start all again up to R times (0)")
    launch.add_argument("--logs", type=Path, metavar="FOLDER", help="where each rank's output is kept")
    launch.add_argument("script")
    launch.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    if options.processes < 1 or options.restarts < 0:
        parser.error("-n is at least 1, --restarts at least 0")
    logs = options.logs or Path(mkdtemp(prefix="synk-"))
    logs.mkdir(parents=True, exist_ok=True)
    print(f"synk: {options.processes} processes, logs in {logs}", flush=True)
    signals: list[int] = []
    code = run(options, 0, logs, signals)
    for attempt in range(1, options.restarts + 1):
        if code in (0, -signal.SIGINT) or signals:
            break
        print(f"synk: starting all again ({attempt} of {options.restarts})", flush=True)
        code = run(options, attempt, logs, signals)
    return code if code >= 0 else 128 - code


def run(options: argparse.Namespace, attempt: int, logs: Path, signals: list[int]) -> int:
    """One attempt of the gang: 0, or the code of the first process that failed; notes the signals passed on."""
    gang: list[subprocess.Popen[str]] = []
    readers: list[threading.Thread] = []
    ended_by_runtime: set[int] = set()  # since another process is gone

    def pass_on(number: int, frame: Any) -> None:
        signals.append(number)
        if len(signals) > 1:
            raise KeyboardInterrupt
        for process in gang:
            process.send_signal(number)  # which synk.preempted notes: they may save, and leave

    before = signal.signal(signal.SIGTERM, pass_on)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    try:
        for rank in range(options.processes):
            gang.append(_start(options, attempt, rank, port))
            log = logs / f"rank-{rank}.{attempt}.log"
            readers.append(threading.Thread(target=_copy_output, args=(gang[-1], rank, log, ended_by_runtime)))
            readers[-1].start()
        failed, stuck = _watch(gang)
    except KeyboardInterrupt:
        return -signal.SIGINT
    finally:
        for process in gang:
            process.kill()
        for process in gang:
            process.wait()
        for reader in readers:
            reader.join(5)
        signal.signal(signal.SIGTERM, before)
    return _blame(failed, stuck, ended_by_runtime) if failed else 0


def _start(options: argparse.Namespace, attempt: int, rank: int, port: int) -> subprocess.Popen[str]:
    environment = os.environ | {
        "SYNK_COORDINATOR": f"127.0.0.1:{port}",
        "SYNK_NUM_PROCESSES": str(options.processes),
        "SYNK_PROCESS_ID": str(rank),
        "SYNK_ATTEMPT": str(attempt),
        "PYTHONUNBUFFERED": "1",
    }
    if options.devices_per_process:
        environment["JAX_NUM_CPU_DEVICES"] = str(options.devices_per_process)
    return subprocess.Popen(
        [sys.executable, options.script, *options.arguments],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    )  # fmt: skip


def _watch(gang: Sequence[subprocess.Popen[str]]) -> tuple[list[Ended], list[int]]:
    """Wait for all to end, or for the first failure and those that follow from it: which failed, and which hang."""
    start, until = monotonic(), float("inf")
    failed: list[Ended] = []
    while True:
        codes = [process.poll() for process in gang]
        known = {ended.rank for ended in failed}
        failed += [Ended(r, code, monotonic() - start) for r, code in enumerate(codes) if code and r not in known]
        if None not in codes or monotonic() > until:
            return failed, [rank for rank, code in enumerate(codes) if code is None]
        if failed:
            until = min(until, monotonic() + GRACE_SECONDS)
        sleep(0.02)


def _blame(failed: Sequence[Ended], stuck: Sequence[int], ended_by_runtime: set[int]) -> int:
    """Name whom to blame; its code. An end is seen a little late, and process 0 lets others go first: none that follows
    another."""
    causes = [ended for ended in failed if ended.code != EXIT_PEER_FAILED and ended.rank not in ended_by_runtime]
    rank, code, seconds = min(causes or failed, key=lambda ended: ended.seconds)
    if stuck and not causes:  # for want of its heartbeat the others were ended
        rank, code, seconds = stuck[0], EXIT_TIMEOUT, failed[0].seconds
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
    how = "was stuck" if code == EXIT_TIMEOUT else how
    print(f"synk: process {rank} failed first: it {how} after {seconds:.1f} s", flush=True)
    return code


def _copy_output(process: subprocess.Popen[str], rank: int, log: Path, ended_by_runtime: set[int]) -> None:
    """Every line to the log, and to the console with its rank."""
    assert process.stdout is not None
    with open(log, "w") as file:
        for line in process.stdout:
            if RUNTIME_ENDS_IT in line:
                ended_by_runtime.add(rank)
            file.write(line)
            file.flush()
            print(f"[{rank}] {line}", end="", flush=True)
