"""A gang: processes of this machine that run one program together. Each ends in time, and is reaped by its handle."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple

PROGRAMS = Path(__file__).with_name("gang_programs.py")
ROOT = PROGRAMS.parent.parent.parent


class Ended(NamedTuple):
    """How one process ended."""

    code: int
    seconds: float  # from the start of the gang
    output: str


class Gang:
    """Processes x devices that run one of the programs; use it in `with`."""

    def __init__(self, program, *arguments, processes=2, devices=1, folder=None, launch=None, **environment):
        """Start it; `launch`: by `python -m synk launch` with these options, as one process that has the others."""
        self.folder = Path(folder or tempfile.mkdtemp(prefix="gang-"))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.what = f"{program} {' '.join(map(str, arguments))} in {processes}x{devices}"
        command = [str(part) for part in (PROGRAMS, program, *arguments)]
        self.logs, self.processes, port = [], [], free_port()
        if launch is not None:
            own = ["-n", processes, "--devices-per-process", devices, "--logs", self.folder, *launch]
            self._start([sys.executable, "-m", "synk", "launch", *map(str, own), *command], "launcher", environment)
            return
        for rank in range(processes):
            of_rank = {"JAX_NUM_CPU_DEVICES": str(devices)}
            if processes > 1:
                of_rank["SYNK_COORDINATOR"] = f"127.0.0.1:{port}"
                of_rank["SYNK_NUM_PROCESSES"], of_rank["SYNK_PROCESS_ID"] = str(processes), str(rank)
            self._start([sys.executable, *command], f"{rank}", of_rank | environment)

    def _start(self, command, name, environment):
        left_out = ("JAX_", "SYNK_", "COVERAGE_")
        plain = {key: value for key, value in os.environ.items() if not key.startswith(left_out)}
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.started = monotonic()
        self.logs.append(self.folder / f"{name}.log")
        with open(self.logs[-1], "w") as log:
            process = subprocess.Popen(
                command,
                env=plain | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"} | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that what a launcher has started ends with it
            )
        self.processes.append(process)

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
        """What a process has printed so far."""
        return self.logs[rank].read_text(errors="replace")

    def await_line(self, text, rank=0, deadline=60):
        """Wait until a process has printed such a text."""
        until = monotonic() + deadline
        while text not in self.output(rank):
            if monotonic() > until or self.processes[rank].poll() is not None:
                self._fail(f"did not say {text!r}")
            sleep(0.01)

    def signal(self, rank, number):
        """Send a signal to one process."""
        self.processes[rank].send_signal(number)

    def wait(self, deadline=60, besides=()):
        """How all ended, or all `besides` some; AssertionError with the stacks of all threads where one does not."""
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


def run(program, *arguments, deadline=120, **options):
    """Start a gang and wait for its end."""
    with Gang(program, *arguments, **options) as gang:
        return gang.wait(deadline)


def free_port():
    """A port of this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
