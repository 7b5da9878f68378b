"""Launcher: `python -m synk launch` runs one program in several processes of this machine, or of each of several."""

import os
import re
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
from argparse import REMAINDER, ArgumentParser, Namespace
from collections import deque
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, Popen
from time import monotonic, sleep
from typing import IO

from .._base.old_names import instead_of
from .._base.units import counted
from .._distributed.coordinator import EXIT_NOT_MET
from .._distributed.liveness import EXIT_PEER_FAILED

EXIT_TIMEOUT = 124  # the exit code for a stuck process, as of the command `timeout`
EXIT_TOLD = 128 + signal.SIGTERM  # the exit code of a program that was told to stop
NOTICE_SECONDS = 0.5  # for other processes to print why they end, once one has failed
GRACE_SECONDS = 3.0  # for the process that failed, if others end before it, and for all after Ctrl-C
DRAIN_SECONDS = 1.0  # for the last output of processes that have ended
STALL_SECONDS = 60.0  # at the end, without progress, after which nobody seems to read standard output
TOLD_STALL_SECONDS = 2.0  # the same, once the launcher was told to stop
MAX_LINE_BYTES = 1 << 16  # longer lines are cut
MAX_UNREAD_BYTES = 64 << 20  # of lines that wait until somebody reads standard output
RUNTIME_ENDS_IT = b"JAX distributed service detected fatal errors"  # JAX prints it in a process that it ends
FOREVER = float("inf")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit code. SIGTERM is passed on to all processes; a second one ends them."""
    options = _options(arguments)
    console, signals, code = Console(), _note_signals(), 0
    console.say(f"{options.processes} processes" + (f", logs in {options.logs}" if options.logs else ""))
    with closing(Guard()) as guard:
        for attempt in range(options.restarts + 1):
            members = _run(options, attempt, guard, console, signals)
            code, rank, how = _blame(members, signals)
            if not how:
                break
            # Processes of another machine that do not come to a later start are those of a launcher that has given up.
            if attempt == options.restarts or signals or (code == EXIT_NOT_MET and attempt > 0 and options.nodes > 1):
                console.say(f"process {rank} failed first: it {how}")
                break
            left = counted(options.restarts - attempt - 1, "restart")
            console.say(f"process {rank} {how}; all start again; {left} left")
    console.close(signals)
    return code if code >= 0 else 128 - code


def _note_signals() -> list[int]:
    """Return a list that collects signals which ask for an end. Ignored signals, as behind `nohup`, stay ignored."""
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            # A handler that raised might leave a lock held, such as that of `Popen.wait`.
            signal.signal(number, lambda number, _: signals.append(number))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it were ignored, no exit code would be kept
    return signals


def _options(arguments: Sequence[str] | None) -> Namespace:
    """Parse and check the command line."""
    parser = ArgumentParser("python -m synk", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="print versions, devices and settings, and what is wrong with them")
    commands.add_parser("check", help="check any parallel JAX program against one device")
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
    add("arguments", nargs=REMAINDER)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{instead_of(unknown[0].split('=')[0])}")
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


def _run(options: Namespace, attempt: int, guard: "Guard", console: "Console", signals: list[int]) -> "list[Member]":
    """Run one attempt. Return its processes, which have ended."""
    command = [sys.executable, *["-m"] * options.is_module, options.program, *options.arguments]
    members: list[Member] = []
    try:
        with reserve_port() as reserved:
            coordinator = options.coordinator or "{}:{}".format(*reserved.getsockname())
            for i in range(options.processes):
                rank = options.node_rank * options.processes + i
                log = None if options.logs is None else options.logs / f"rank-{rank}.{attempt}.log"
                environment = _environment(options, rank, attempt, coordinator)
                environment["SYNK_EXITS_FOLDER"] = guard.folder
                members.append(Member(rank, command, environment, log, console))
                guard.toggle(members[-1].process.pid)
            _watch(members, signals)
    finally:
        _end(members, guard)
    return members


def _environment(options: Namespace, rank: int, attempt: int, coordinator: str) -> dict[str, str]:
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


class Guard:
    """A process that ends all others when the launcher is gone, even by `kill -9`, and removes their folder.

    Attributes:
      folder: a temporary folder, where a process says how long its exit may take; empty if there is no place.
    """

    folder = ""

    # The guard's standard input ends with the launcher. A group that is named a second time has ended.
    PROGRAM = """if True:
        import contextlib, os, shutil, signal, sys
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        groups = set()
        for line in sys.stdin:
            groups ^= {int(line)}
        for group in groups:
            with contextlib.suppress(OSError):
                os.killpg(group, signal.SIGKILL)
        shutil.rmtree(sys.argv[1], ignore_errors=True)"""

    def __init__(self) -> None:
        with suppress(OSError):  # no temporary folder can be written to
            self.folder = tempfile.mkdtemp(prefix="synk-launcher-")
        command = [sys.executable, "-S", "-c", self.PROGRAM, self.folder]
        self._process = Popen(command, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL, bufsize=0, start_new_session=True)

    def toggle(self, group: int) -> None:
        """Tell the guard that a process group has begun, or that its number may soon belong to another group."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # somebody has killed the guard
            self._process.stdin.write(b"%d\n" % group)

    def close(self) -> None:
        """Remove the folder, and end the guard."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._process.kill()
        self._process.communicate()


class Member:
    """A process of the gang, and the thread that reads its output.

    The process leads a session of its own: its helpers end with it, and Ctrl-C comes by the launcher alone.

    Attributes:
      rank: its number among the processes of all machines.
      process: the handle of the process.
      code: how the process has ended, negative if by a signal; None while it runs.
      start, end: when it was started, and when `note_end` saw its end.
      ended_by_runtime: whether JAX has ended it, since another process was gone.
      exit_until: when it will count as stuck in its exit; infinite before its program and those of the others end.
      is_over: whether nobody waits for its output any more.
    """

    def __init__(
        self, rank: int, command: list[str], env: dict[str, str], log: Path | None, console: "Console"
    ) -> None:
        self.rank, self._log, self._console = rank, log, console
        self.code: int | None = None
        self.start, self.end, self.exit_until = monotonic(), FOREVER, FOREVER
        self.ended_by_runtime = self.is_over = False
        self.process = Popen(command, env=env, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, start_new_session=True)
        self._exits = Path(env["SYNK_EXITS_FOLDER"] or os.devnull, str(self.process.pid))
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    @property
    def follows(self) -> bool:
        """Check whether the process has ended because of another one."""
        return self.code in (EXIT_PEER_FAILED, EXIT_NOT_MET) or self.ended_by_runtime

    def note_end(self) -> None:
        """Note the end of the process. Kill it if it is stuck in its exit: its program has ended well."""
        if self.code is None and (code := _exit_code(self.process)) is not None:
            self.code, self.end = code, monotonic()
        elif self.code is None and monotonic() > self.exit_until:
            self._console.say(f"process {self.rank} was stuck in its exit, after the end of its program, and is killed")
            os.killpg(self.process.pid, signal.SIGKILL)
            self.code, self.end = 0, monotonic()
        elif self.exit_until == FOREVER:
            with suppress(OSError, ValueError):  # it is not written yet
                self.exit_until = monotonic() + float(self._exits.read_text())

    def _read(self) -> None:
        """Print each line with the rank before it."""
        assert self.process.stdout is not None
        rest = b""
        self._append_to_log(b"")
        with self.process.stdout as pipe:
            while chunk := self._next_output(pipe):
                self._append_to_log(chunk)
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) > MAX_LINE_BYTES:
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    self._print(line)
        if rest:
            self._print(rest)

    def _next_output(self, pipe: IO[bytes]) -> bytes:
        """Return more output; nothing at its end, which a helper that made a session of its own may put off."""
        while not self.is_over:
            if select.select([pipe], [], [], 0.2)[0]:
                return os.read(pipe.fileno(), 1 << 16)
        return b""

    def _print(self, line: bytes) -> None:
        self.ended_by_runtime |= RUNTIME_ENDS_IT in line
        self._console.write(b"[%d] %s\n" % (self.rank, line.rstrip(b"\r")))

    def _append_to_log(self, chunk: bytes) -> None:
        if self._log is None:
            return
        try:
            with open(self._log, "ab") as log:
                log.write(chunk)
        except OSError as error:
            self._console.say(f"{self._log} is not written any further: {error.strerror}")
            self._log = None


def _exit_code(process: Popen[bytes]) -> int | None:
    """Return how a process has ended, as `poll` does, but do not wait for it: nobody else gets its number."""
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        return process.poll()
    end = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return None if end is None else end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


def _end(members: Sequence[Member], guard: Guard) -> None:
    """End all processes with their helpers, and read the rest of their output."""
    for member in members:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(member.process.pid, signal.SIGKILL)
        guard.toggle(member.process.pid)
    for member in members:
        member.process.wait()
    until = monotonic() + DRAIN_SECONDS
    for member in members:
        member.reader.join(max(0.0, until - monotonic()))
        member.is_over = True


def _watch(members: Sequence[Member], signals: Sequence[int]) -> None:
    """Wait for all processes. Return early soon after one has failed or Ctrl-C has come, or at a second signal.

    The first of `signals` is passed on to all. SIGTERM sets no limit, so that programs may save: `synk.preempted`
    reports it. The caller ends the processes that are left.
    """
    until, is_passed_on = FOREVER, False
    while True:
        for member in members:
            member.note_end()
        failed, causes = _failed(members, signals)
        limits = [until, *(m.end + GRACE_SECONDS for m in failed), *(m.end + NOTICE_SECONDS for m in causes)]
        if all(m.code is not None for m in members) or monotonic() > min(limits) or len(signals) > 1:
            return
        if signals and not is_passed_on:
            is_passed_on = True
            if signals[0] == signal.SIGINT:
                until = monotonic() + GRACE_SECONDS
            for member in members:
                if member.code is None:
                    os.kill(member.process.pid, signals[0])
        sleep(0.02)


def _failed(members: Sequence[Member], signals: Sequence[int]) -> tuple[list[Member], list[Member]]:
    """Return the processes that have failed so far, and those of them that did not end because of another one.

    A process that ends by SIGTERM has failed if nobody told the launcher, or all processes, to stop.
    """
    is_told = signal.SIGTERM in signals or all(m.code in (-signal.SIGTERM, EXIT_TOLD) for m in members)
    well = (None, 0, EXIT_TOLD, -signal.SIGTERM if is_told else 0)
    # JAX may end a process that waits in its exit for one that is stuck there.
    failed = [m for m in members if m.code not in well and not (m.follows and m.exit_until < FOREVER)]
    return failed, [member for member in failed if not member.follows]


def _blame(members: Sequence[Member], signals: Sequence[int]) -> tuple[int, int, str]:
    """Return the code and rank of the process that failed first, and how it ended, which is empty if none failed.

    A process that ended because of another one is not to blame, though its end may be seen first.
    """
    if signal.SIGINT in signals or len(signals) > 1:
        return -signal.SIGINT, 0, ""
    failed, causes = _failed(members, signals)
    if not failed or (signals and not causes):
        is_told = failed or any(member.code in (-signal.SIGTERM, EXIT_TOLD) for member in members)
        return -signal.SIGTERM if is_told else 0, 0, ""
    stuck = [member for member in members if member.code is None]
    first = min(causes or failed, key=lambda member: member.end)
    code, after = first.code or 0, f"after {first.end - first.start:.1f} s"
    if stuck and not causes:  # its heartbeat has stopped, so the runtime has ended the others
        return EXIT_TIMEOUT, stuck[0].rank, f"was stuck {after}"
    if code > 0:
        return code, first.rank, f"exited with {code} {after}"
    name = next((each.name for each in signal.Signals if each == -code), f"signal {-code}")
    return code, first.rank, f"was ended by {name} {'(out of memory?) ' * (code == -signal.SIGKILL)}{after}"


class Console:
    """Standard output, written by a thread of its own: no process waits because nobody reads it.

    So lines wait for a reader, up to MAX_UNREAD_BYTES. Then the oldest make room, since the newest say how it ended.
    """

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque()
        # All these change under the lock of `_changed`.
        self._changed = threading.Condition()
        self._bytes = self._lost = self._written = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._write_all, daemon=True)
        self._thread.start()

    def say(self, text: str) -> None:
        """Print a line of the launcher's own."""
        self.write(f"synk: {text}\n".encode())

    def write(self, line: bytes) -> None:
        """Print a line, soon."""
        with self._changed:
            self._lines.append(line)
            self._bytes += sys.getsizeof(line)
            while self._bytes > MAX_UNREAD_BYTES:
                self._bytes -= sys.getsizeof(self._lines.popleft())
                self._lost += 1
            self._changed.notify()

    def close(self, signals: Sequence[int]) -> None:
        """Wait until everything is written, as long as somebody reads."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        written, since = self._written, monotonic()
        while self._thread.is_alive() and monotonic() < since + (TOLD_STALL_SECONDS if signals else STALL_SECONDS):
            if written != self._written:
                written, since = self._written, monotonic()
            self._thread.join(0.2)

    def _write_all(self) -> None:
        """Write lines until all are written. A line that a closed output or a full disk does not take is lost."""
        while line := self._next():
            with suppress(OSError):
                # sys.stdout would try again at the end of Python, and fail loudly.
                while line and sys.stdout is not None:
                    line = line[os.write(1, line) :]

    def _next(self) -> bytes:
        """Wait for the line to write next: one that says how many are missing there, if any. None is left: empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._is_closed)
            self._written += 1
            if self._lost:
                lost, self._lost = counted(self._lost, "line"), 0
                return f"synk: {lost} left out here, since nobody read them (--logs FOLDER keeps all)\n".encode()
            if not self._lines:
                return b""
            line = self._lines.popleft()
            self._bytes -= sys.getsizeof(line)
            return line


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
