"""Launcher: `python -m synk launch` runs one program in several processes of this machine, or of each of several."""

import argparse
import os
import queue
import re
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, Popen
from time import monotonic, sleep

from .._base.old_names import instead_of
from .liveness import EXIT_PEER_FAILED

EXIT_TIMEOUT = 124  # the exit code for a stuck process, as of the command `timeout`
GRACE_SECONDS = 3.0  # for other processes to print why they end, once one has failed
DRAIN_SECONDS = 2.0  # for the last output of a process that has ended
STALL_SECONDS = 2.0  # without progress, after which nobody seems to read standard output
MAX_LINE_BYTES = 1 << 16  # longer lines are cut
PROGRESS_SECONDS = 1.0  # between two printed states of a progress bar
RUNTIME_ENDS_IT = b"JAX distributed service detected fatal errors"  # JAX prints it in a process that it ends

# A progress bar ends each state with \r, and draws the next one over it.
_LINE_ENDS = re.compile(rb"(?<=\n)|(?<=\r)(?=[^\n])")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit code. SIGTERM is passed on to all processes; a second one ends them."""
    options = _options(arguments)
    console, signals, code = Console(), _note_signals(), 0
    console.say(f"{options.processes} processes" + (f", logs in {options.logs}" if options.logs else ""))
    for attempt in range(options.restarts + 1):
        if attempt:
            console.say(f"starting all again ({attempt} of {options.restarts})")
        code = _run(options, attempt, console, signals)
        if code == 0 or signals:
            break
    console.close()
    return code if code >= 0 else 128 - code


def _note_signals() -> Sequence[int]:
    """Return a list that collects signals which ask for an end. Ignored signals, as behind `nohup`, stay ignored."""
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            # A handler that raised might leave a lock held, such as that of `Popen.poll`.
            signal.signal(number, lambda number, _: signals.append(number))
    return signals


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser("python -m synk", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="print versions, devices and settings, and what is wrong with them")
    commands.add_parser("bench", help="measure how a step scales over the devices that are here, as one page")
    launch = commands.add_parser("launch", help="start a program in n processes on this machine")
    add = launch.add_argument
    add("-n", "--processes", type=int, default=2, help="how many processes (2)")
    add("--devices-per-process", type=int, metavar="K", help="devices of each (one GPU; all with -n 1)")
    add("--restarts", type=int, default=0, metavar="R", help="start all again up to R times (0)")
    add("--logs", type=Path, metavar="FOLDER", help="keep each rank's output there")
    add("--nodes", type=int, default=1, metavar="M", help="on how many machines this command runs (1)")
    add("--node-rank", type=int, default=0, metavar="I", help="number of this machine, from 0 (0)")
    add("--coordinator", metavar="HOST:PORT", help="an address of the first machine, where there are several")
    add("-m", dest="is_module", action="store_true", help="the program is a module, as of python -m")
    add("program", help="a script")
    add("arguments", nargs=argparse.REMAINDER)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{instead_of(unknown[0])}")
    for name, least in {"processes": 1, "devices_per_process": 1, "restarts": 0, "nodes": 1}.items():
        if (value := getattr(options, name)) is not None and value < least:
            parser.error(f"--{name.replace('_', '-')} is {value}; give at least {least}")
    if not 0 <= options.node_rank < options.nodes:
        parser.error(f"--node-rank is {options.node_rank} of --nodes {options.nodes}; give 0 to {options.nodes - 1}")
    if options.nodes > 1 and options.coordinator is None:
        parser.error("--nodes needs --coordinator HOST:PORT, the same on all machines")
    if options.coordinator is not None and not re.fullmatch(r"\S+:\d+", options.coordinator):
        parser.error(f"--coordinator is {options.coordinator!r}; give HOST:PORT")
    try:
        if options.logs is not None:
            options.logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--logs is {options.logs}, which cannot be made: {error.strerror}")
    return options


def _run(options: argparse.Namespace, attempt: int, console: "Console", signals: Sequence[int]) -> int:
    """Run one attempt. Return 0, or the code of the process that failed first, negative if a signal ended it."""
    program = ["-m", options.program] if options.is_module else [options.program]
    command = [sys.executable, *program, *options.arguments]
    members: list[Member] = []
    guard = _start_guard()
    assert guard.stdin is not None
    try:
        with reserve_port() as reserved:
            coordinator = options.coordinator or "{}:{}".format(*reserved.getsockname())
            for i in range(options.processes):
                rank = options.node_rank * options.processes + i
                log = None if options.logs is None else options.logs / f"rank-{rank}.{attempt}.log"
                members.append(Member(rank, command, _environment(options, rank, attempt, coordinator), log, console))
                with suppress(BrokenPipeError):  # somebody has killed the guard
                    guard.stdin.write(b"%d\n" % members[-1].process.pid)
            _watch(members, signals)
    finally:
        _end(members, guard)
    is_interrupted = signal.SIGINT in signals or len(signals) > 1
    return -signal.SIGINT if is_interrupted else _blame(members, console)


def _environment(options: argparse.Namespace, rank: int, attempt: int, coordinator: str) -> dict[str, str]:
    """Return the environment of one process: who it is, and which devices of this machine it takes."""
    processes, devices = options.processes, options.devices_per_process
    environment = os.environ | {
        "SYNK_COORDINATOR": coordinator,
        "SYNK_NUM_PROCESSES": str(options.nodes * processes),
        "SYNK_PROCESS_ID": str(rank),
        "SYNK_ATTEMPT": str(attempt),
        "PYTHONUNBUFFERED": "1",
    }
    if devices:
        environment["JAX_NUM_CPU_DEVICES"] = str(devices)
    # A GPU belongs to one process. JAX ignores this setting on CPUs.
    if devices or processes > 1:
        first = rank % processes * (devices or 1)
        environment["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, range(first, first + (devices or 1))))
    return environment


def _start_guard() -> Popen[bytes]:
    """Start a process that reads process groups, and ends them when the launcher is gone, even by `kill -9`."""
    # The guard's standard input ends with the launcher.
    program = """if True:
        import os, signal, sys
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for group in sys.stdin.read().split():
            try:
                os.killpg(int(group), signal.SIGKILL)
            except OSError:
                pass"""
    command = [sys.executable, "-S", "-c", program]
    return Popen(command, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL, bufsize=0, start_new_session=True)


class Member:
    """A process of the gang, and the thread that reads its output.

    It leads a session of its own: its helpers end with it, and Ctrl-C comes by the launcher alone.

    Attributes:
      rank: its number among the processes of all machines.
      process: the handle of the process.
      seconds: when `_watch` saw its end; None while it runs.
      ended_by_runtime: whether JAX has ended it, since another process was gone.
    """

    def __init__(
        self, rank: int, command: Sequence[str], environment: Mapping[str, str], log: Path | None, console: "Console"
    ) -> None:
        self.rank, self._log, self._console = rank, log, console
        self.seconds: float | None = None
        self.ended_by_runtime = False
        self.process = Popen(
            command, env=environment, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, start_new_session=True
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        """Print each line with the rank before it. Of a progress bar, print one state a second."""
        assert self.process.stdout is not None
        rest, printed = b"", 0.0
        self._append_to_log(b"")
        with self.process.stdout as pipe:
            while chunk := os.read(pipe.fileno(), 1 << 16):
                self._append_to_log(chunk)
                *lines, rest = _LINE_ENDS.split(rest + chunk)
                if len(rest) > MAX_LINE_BYTES:
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    is_progress = line.endswith(b"\r")
                    if not is_progress or (line != b"\r" and monotonic() > printed + PROGRESS_SECONDS):
                        self._print(line)
                        printed = monotonic() if is_progress else printed
        if rest:
            self._print(rest)

    def _print(self, line: bytes) -> None:
        self.ended_by_runtime |= RUNTIME_ENDS_IT in line
        self._console.write(b"[%d] %s\n" % (self.rank, line.rstrip(b"\r\n")))

    def _append_to_log(self, chunk: bytes) -> None:
        if self._log is None:
            return
        try:
            with open(self._log, "ab") as log:
                log.write(chunk)
        except OSError as error:
            self._console.say(f"{self._log} is not written any further: {error.strerror}")
            self._log = None


def _end(members: Sequence[Member], guard: Popen[bytes]) -> None:
    """End all processes with their helpers, and read the rest of their output."""
    for member in members:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(member.process.pid, signal.SIGKILL)
    # The guard goes before `wait`, after which the system may give the number of a process to another one.
    guard.kill()
    guard.communicate()
    for member in members:
        member.process.wait()
    # A helper that made a session of its own outlives the others, and may hold the output open.
    until = monotonic() + DRAIN_SECONDS
    for member in members:
        member.reader.join(max(0.0, until - monotonic()))


def _watch(members: Sequence[Member], signals: Sequence[int]) -> None:
    """Wait for all processes. Return early some seconds after one has failed or Ctrl-C has come, or at a second signal.

    The first of `signals` is passed on to all. SIGTERM sets no limit, so that programs may save: `synk.preempted`
    reports it. The caller ends the processes that are left.
    """
    start, until, is_passed_on = monotonic(), float("inf"), False
    while True:
        for member in members:
            if member.seconds is None and member.process.poll() is not None:
                member.seconds = monotonic() - start
        if all(m.seconds is not None for m in members) or monotonic() > until or len(signals) > 1:
            return
        if signals and not is_passed_on:
            is_passed_on = True
            for member in members:
                member.process.send_signal(signals[0])
        if signal.SIGINT in signals or any(member.process.returncode for member in members):
            until = min(until, monotonic() + GRACE_SECONDS)
        sleep(0.02)


def _blame(members: Sequence[Member], console: "Console") -> int:
    """Print which process failed first, and return its code; 0 if none failed.

    A process that ended because of another one is not to blame, though its end may be seen first.
    """
    failed = [member for member in members if member.seconds is not None and member.process.returncode]
    if not failed:
        return 0
    causes = [m for m in failed if m.process.returncode != EXIT_PEER_FAILED and not m.ended_by_runtime]
    stuck = [member for member in members if member.seconds is None]
    first = min(causes or failed, key=lambda member: member.seconds or 0.0)
    code, seconds = first.process.returncode, first.seconds
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
    if stuck and not causes:  # its heartbeat has stopped, so the runtime has ended the others
        first, code, how = stuck[0], EXIT_TIMEOUT, "was stuck"
    console.say(f"process {first.rank} failed first: it {how} after {seconds:.1f} s")
    return code


class Console:
    """Standard output, written by a thread of its own: no process waits because nobody reads it."""

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, daemon=True)
        self._thread.start()

    def say(self, text: str) -> None:
        """Print a line of the launcher's own."""
        self.write(f"synk: {text}\n".encode())

    def write(self, line: bytes) -> None:
        """Print a line, soon."""
        self._lines.put(line)

    def close(self) -> None:
        """Wait until everything is written, as long as somebody reads."""
        self.write(b"")
        waiting = -1
        while self._thread.is_alive() and waiting != self._lines.qsize():
            waiting = self._lines.qsize()
            self._thread.join(STALL_SECONDS)

    def _write_all(self) -> None:
        """Write lines until an empty one comes. A line that a closed output or a full disk does not take is lost."""
        while line := self._lines.get():
            with suppress(OSError):
                # sys.stdout would try again at the end of Python, and fail loudly.
                while line and sys.stdout is not None:
                    line = line[os.write(1, line) :]


def reserve_port() -> socket.socket:
    """Bind a port of this machine that nobody else is given until the socket is closed. Process 0 may listen there.

    A port that is merely free might be given to another launcher before process 0 listens. JAX's runtime would let
    both listen there, and their processes would meet the wrong ones.
    """
    reserved = socket.socket()
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        reserved.setsockopt(socket.SOL_SOCKET, option, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved
