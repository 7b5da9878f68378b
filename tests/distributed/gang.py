"""Gangs: processes of this machine that run one program together. Every process ends in time and is waited for.

They are forked from a nursery, a process that has imported JAX and started nothing of it: most of their time would be
that import.
"""

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple

from synk._command.launcher import reserve_port

PROGRAMS = Path(__file__).with_name("gang_programs.py")
ROOT = PROGRAMS.parent.parent.parent


class Ended(NamedTuple):
    """The end of one process."""

    code: int
    seconds: float  # from the start of the gang
    output: str


class Forked:
    """A process of the nursery, with the part of `subprocess.Popen` that tests use."""

    def __init__(self):
        self.pid, self.returncode, self.has_started, self.has_ended = 0, None, threading.Event(), threading.Event()

    def poll(self):
        return self.returncode

    def wait(self):
        self.has_ended.wait()

    def send_signal(self, number):
        if self.returncode is None:
            os.kill(self.pid, number)


class Nursery:
    """A process that forks others on request and reports which have started and ended."""

    def __init__(self):
        command = [sys.executable, str(PROGRAMS), "nursery"]
        pipe, plain = subprocess.PIPE, plain_environment()
        self.process = subprocess.Popen(command, env=plain, stdin=pipe, stdout=pipe, text=True, bufsize=1)
        self.children, self.lock = [], threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        assert self.process.stdout is not None
        for line in self.process.stdout:
            what, child, number = json.loads(line)
            if what == "started":
                self.children[child].pid = number
                self.children[child].has_started.set()
            else:
                self.children[child].returncode = number
                self.children[child].has_ended.set()

    def start(self, command, log, of_child):
        with self.lock:
            child = Forked()
            self.children.append(child)
            print(json.dumps([len(self.children) - 1, command, str(log), of_child]), file=self.process.stdin)
        assert child.has_started.wait(60)
        return child


nursery = functools.cache(Nursery)


def plain_environment(**more):
    """Return the environment of a process that knows nothing of the tests' own settings."""
    left_out = ("JAX_", "SYNK_", "COVERAGE_")
    plain = {key: value for key, value in os.environ.items() if not key.startswith(left_out)}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return plain | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"} | more


class Running:
    """Processes that have been started; use it in `with`."""

    def __init__(self, what):
        self.what, self.logs, self.processes, self.started = what, [], [], monotonic()

    def start(self, command, log, environment):
        """Have the nursery fork a process."""
        log.touch()
        self.logs.append(log)
        self.processes.append(nursery().start([str(part) for part in command], log, environment))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self.processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()

    def output(self, rank=0):
        """Return the output of a process so far."""
        return self.logs[rank].read_text(errors="replace")

    def await_line(self, text, rank=0, deadline=60, times=1):
        """Wait until a process has printed a text `times` times."""
        until = monotonic() + deadline
        while self.output(rank).count(text) < times:
            if monotonic() > until or self.processes[rank].poll() is not None:
                self._fail(f"did not say {text!r}")
            sleep(0.01)

    def signal(self, rank, number):
        """Send a signal to one process."""
        self.processes[rank].send_signal(number)

    def wait(self, deadline=60, besides=()):
        """Return how all processes but `besides` ended. Raise AssertionError with the stacks of all threads if one does not."""
        ends = {}
        waited = [rank for rank in range(len(self.processes)) if rank not in besides]
        until = monotonic() + deadline
        while len(ends) < len(waited):
            for rank in waited:
                if rank not in ends and self.processes[rank].poll() is not None:
                    ends[rank] = monotonic() - self.started
            if monotonic() > until:
                self._fail(f"did not end in {deadline} s")
            sleep(0.01)
        return [Ended(self.processes[rank].returncode, ends[rank], self.output(rank)) for rank in waited]

    def _fail(self, why):
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGUSR1)  # which dumps the stacks of all its threads
        sleep(1.0)
        codes = [process.poll() for process in self.processes]
        told = "".join(f"\n--- {log.stem}\n{self.output(i)[-6000:]}" for i, log in enumerate(self.logs))
        raise AssertionError(f"{self.what} {why}; exit codes so far: {codes}{told}")


class Gang(Running):
    """Processes x devices that run one of the programs."""

    def __init__(self, program, *arguments, processes=2, devices=1, **environment):
        super().__init__(f"{program} {' '.join(map(str, arguments))} in {processes}x{devices}")
        self.reserved = reserve_port()
        self.folder = tempfile.TemporaryDirectory(prefix="gang-")
        address = "{}:{}".format(*self.reserved.getsockname())
        for rank in range(processes):
            of_rank = {"JAX_NUM_CPU_DEVICES": str(devices)}
            if processes > 1:
                of_rank["SYNK_COORDINATOR"] = address
                of_rank["SYNK_NUM_PROCESSES"], of_rank["SYNK_PROCESS_ID"] = str(processes), str(rank)
            self.start([program, *arguments], Path(self.folder.name) / f"{rank}.log", of_rank | environment)

    def __exit__(self, *error):
        super().__exit__(*error)
        self.reserved.close()
        self.folder.cleanup()


class Launcher(Running):
    """A process that runs `python -m synk launch`."""

    def __init__(self, folder, *options, program="launcher", **environment):
        super().__init__(f"launch {' '.join(map(str, options))}")
        self.start([program, *options], Path(folder) / "launcher.log", environment)


def run(program, *arguments, deadline=120, **options):
    """Start a gang and wait for its end."""
    with Gang(program, *arguments, **options) as gang:
        return gang.wait(deadline)
