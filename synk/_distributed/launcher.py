"""`python -m synk launch`: one program in several processes of this machine, or of each of several."""

import argparse
import os
import re
import signal
import socket
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .console import Console
from .gang import Ended, Gang, Guard
from .liveness import EXIT_PEER_FAILED

EXIT_TIMEOUT = 124  # the code of a process that had to be ended, as of the command `timeout`


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code of the gang. SIGTERM is passed on to all; a second one ends them."""
    options = _options(arguments)
    guard, console = Guard(), Console()
    with _noting_signals() as signals:
        launcher = _Launcher(options, guard, console, signals)
        console.say(f"{options.processes} processes" + (f", logs in {options.logs}" if options.logs else ""))
        code = launcher.run(0)
        for attempt in range(1, options.restarts + 1):
            if code == 0 or signals:
                break
            console.say(f"starting all again ({attempt} of {options.restarts})")
            code = launcher.run(attempt)
        guard.close()
        console.finish()
    return code if code >= 0 else 128 - code


@contextmanager
def _noting_signals() -> Generator[list[int]]:
    """Those that ask for an end, in the order in which they come; none that was ignored, as behind `nohup`."""
    signals: list[int] = []
    asking = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda number, _: signals.append(number)) for number in asking}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m synk", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="print versions, devices and settings, and what is wrong with them")
    commands.add_parser("bench", help="measure how a step scales over the devices that are here, as one page")
    launch = commands.add_parser("launch", help="start a program in n processes on this machine")
    launch.add_argument("-n", "--processes", type=int, default=2, help="how many processes (2)")
    launch.add_argument("--devices-per-process", type=int, metavar="K", help="devices of each (one GPU; all with -n 1)")
    launch.add_argument("--restarts", type=int, default=0, metavar="R", help="start all again up to R times (0)")
    launch.add_argument("--logs", type=Path, metavar="FOLDER", help="keep each rank's output there")
    launch.add_argument("--nodes", type=int, default=1, metavar="M", help="machines, on each of which this runs (1)")
    launch.add_argument("--node-rank", type=int, default=0, metavar="I", help="which of these this is, from 0 (0)")
    launch.add_argument("--coordinator", metavar="HOST:PORT", help="of the first machine, where there are several")
    launch.add_argument("-m", dest="is_module", action="store_true", help="the program is a module, as of python -m")
    launch.add_argument("program", help="a script")
    launch.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    if options.processes < 1 or options.restarts < 0:
        parser.error("-n is at least 1, --restarts at least 0")
    if options.devices_per_process is not None and options.devices_per_process < 1:
        parser.error(f"--devices-per-process is {options.devices_per_process}; give at least 1")
    if options.nodes < 1:
        parser.error(f"--nodes is {options.nodes}; give 1 or more")
    if not 0 <= options.node_rank < options.nodes:
        parser.error(f"--node-rank is {options.node_rank} of --nodes {options.nodes}; give 0 to {options.nodes - 1}")
    if options.nodes > 1 and options.coordinator is None:
        parser.error("--nodes needs --coordinator HOST:PORT, of the first machine, on all of them")
    if options.coordinator is not None and not re.fullmatch(r"\S+:\d+", options.coordinator):
        parser.error(f"--coordinator is {options.coordinator!r}; give HOST:PORT")
    try:
        if options.logs is not None:
            options.logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--logs is {options.logs}, which cannot be made: {error.strerror}")
    return options


class _Launcher:
    """Runs attempts of a gang."""

    def __init__(self, options: argparse.Namespace, guard: Guard, console: Console, signals: Sequence[int]) -> None:
        self.options, self.guard, self.console, self.signals = options, guard, console, signals

    def run(self, attempt: int) -> int:
        """One attempt: 0, or the code of the first process that failed."""
        options, gang, reserved = self.options, Gang(self.guard, self.console), reserve_port()
        try:
            coordinator = options.coordinator or "{}:{}".format(*reserved.getsockname())
            for i in range(options.processes):
                rank = options.node_rank * options.processes + i
                log = None if options.logs is None else options.logs / f"rank-{rank}.{attempt}.log"
                gang.start(rank, self._command(), self._environment(rank, attempt, coordinator), log)
            failed, stuck = gang.watch(self.signals)
        finally:
            gang.end()
            reserved.close()
        if signal.SIGINT in self.signals or len(self.signals) > 1:
            return -signal.SIGINT
        return self._blame(failed, stuck, gang.ended_by_runtime) if failed else 0

    def _command(self) -> list[str]:
        program = ["-m", self.options.program] if self.options.is_module else [self.options.program]
        return [sys.executable, *program, *self.options.arguments]

    def _environment(self, rank: int, attempt: int, coordinator: str) -> dict[str, str]:
        processes, devices = self.options.processes, self.options.devices_per_process
        environment = os.environ | {
            "SYNK_COORDINATOR": coordinator,
            "SYNK_NUM_PROCESSES": str(self.options.nodes * processes),
            "SYNK_PROCESS_ID": str(rank),
            "SYNK_ATTEMPT": str(attempt),
            "PYTHONUNBUFFERED": "1",
        }
        if devices:
            environment["JAX_NUM_CPU_DEVICES"] = str(devices)
        if devices or processes > 1:  # of the GPUs, each of which one process can have; CPUs ignore it
            count, first = devices or 1, rank % processes * (devices or 1)
            environment["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, range(first, first + count)))
        return environment

    def _blame(self, failed: Sequence[Ended], stuck: Sequence[int], ended_by_runtime: set[int]) -> int:
        """Name whom to blame; its code. An end is seen a little late, and process 0 lets others go first: none that
        follows another."""
        causes = [ended for ended in failed if ended.code != EXIT_PEER_FAILED and ended.rank not in ended_by_runtime]
        rank, code, seconds = min(causes or failed, key=lambda ended: ended.seconds)
        if stuck and not causes:  # for want of its heartbeat the others were ended
            rank, code, seconds = stuck[0], EXIT_TIMEOUT, failed[0].seconds
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        how = "was stuck" if code == EXIT_TIMEOUT else how
        self.console.say(f"process {rank} failed first: it {how} after {seconds:.1f} s")
        return code


def reserve_port() -> socket.socket:
    """A port of this machine that nobody else is given until the socket is closed; process 0 may listen there too.

    One that is merely free might be given to another launcher before process 0 listens. JAX's runtime would let both
    listen there, and their processes would meet the wrong ones.
    """
    reserved = socket.socket()
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        reserved.setsockopt(socket.SOL_SOCKET, option, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved
