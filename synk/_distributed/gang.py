"""Gang: the processes of one program on this machine, started together, and all ended however one of them ends."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple

from . import guard
from .console import Console, Reader

GRACE_SECONDS = 3.0  # for the others to say why they end, once one has failed
DRAIN_SECONDS = 2.0  # for output to come to its end, once its process has
RUNTIME_ENDS_IT = b"JAX distributed service detected fatal errors"  # what the runtime prints in a process it ends


class Ended(NamedTuple):
    """A process that has failed."""

    rank: int
    code: int
    seconds: float  # since the start


class Guard:
    """A process that ends the gang when the launcher is gone, even by kill -9: its standard input ends then."""

    def __init__(self) -> None:
        null = subprocess.DEVNULL
        command = [sys.executable, "-S", guard.__file__]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=null, stderr=null, bufsize=0, start_new_session=True
        )

    def add(self, group: int) -> None:
        """End this process group then."""
        self._tell(b"+%d\n" % group)

    def remove(self, group: int) -> None:
        """It is gone."""
        self._tell(b"-%d\n" % group)

    def _tell(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # somebody has killed it
            self._process.stdin.write(line)

    def close(self) -> None:
        """Let it go."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _kill(group: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


class Gang:
    """Processes by rank; each leads a process group, in which its own helpers are."""

    def __init__(self, watcher: Guard, console: Console) -> None:
        self._guard, self._console = watcher, console
        self.ended_by_runtime: set[int] = set()  # ranks, since another process is gone
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._readers: list[Reader] = []

    def start(self, rank: int, command: Sequence[str], environment: Mapping[str, str], log: Path | None) -> None:
        """Start a process; in a session of its own, so that Ctrl-C comes by the launcher alone."""
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._guard.add(process.pid)
        self._processes[rank] = process

        def note(line: bytes) -> None:
            if RUNTIME_ENDS_IT in line:
                self.ended_by_runtime.add(rank)

        assert process.stdout is not None
        self._readers.append(Reader(process.stdout.fileno(), rank, self._console, log, note))

    def watch(self, signals: Sequence[int]) -> tuple[list[Ended], list[int]]:
        """Wait for all to end, or for the first failure and those that follow from it: which failed, and which hang.
        The first of `signals`, to which a handler adds, is passed on; after Ctrl-C they have a while to clear up, and a
        second one ends the wait. A handler that raised might leave a lock held: that of `Popen.poll`, for one."""
        start, until, passed_on = monotonic(), float("inf"), False
        failed: dict[int, Ended] = {}
        while True:
            codes = {rank: process.poll() for rank, process in self._processes.items()}
            for rank, code in codes.items():
                if code and rank not in failed:
                    failed[rank] = Ended(rank, code, monotonic() - start)
            if None not in codes.values() or monotonic() > until or len(signals) > 1:
                return list(failed.values()), [rank for rank, code in codes.items() if code is None]
            if signals and not passed_on:  # of SIGTERM synk.preempted tells: they may save, and leave
                passed_on = True
                for process in self._processes.values():
                    process.send_signal(signals[0])
            if failed or signal.SIGINT in signals:
                until = min(until, monotonic() + GRACE_SECONDS)
            sleep(0.02)

    def end(self) -> None:
        """End what is left of it, helpers too, and read what is left of their output."""
        for process in self._processes.values():
            _kill(process.pid, signal.SIGKILL)
            process.wait()
            self._guard.remove(process.pid)
        until = monotonic() + DRAIN_SECONDS
        for process, reader in zip(self._processes.values(), self._readers, strict=True):
            assert process.stdout is not None
            if reader.join(max(0.0, until - monotonic())):
                process.stdout.close()
