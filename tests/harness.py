"""Processes: programs of this machine in processes of their own, each of which ends in time and is waited for.

`python` starts a new Python. All others are forks of a nursery, a process that has imported JAX and started nothing of
it: most of their time would be that import. Their programs are functions of modules of tests.
"""

import ctypes
import faulthandler
import functools
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from time import monotonic, sleep, time
from typing import NamedTuple
from unittest import mock

import jax

from synk._command import launcher

ROOT = Path(__file__).parents[1]
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Ended(NamedTuple):
    """The end of one process."""

    code: int
    seconds: float  # from the start of the gang
    output: str


def plain_environment(**more):
    """Return the environment of a process that knows nothing of the tests' own settings."""
    left_out = ("JAX_", "SYNK_", "COVERAGE_")
    plain = {key: value for key, value in os.environ.items() if not key.startswith(left_out)}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return plain | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"} | more


def python(program, *arguments, deadline=600, cwd=None, **environment):
    """Run a new Python to its end. Its one argument is the text of a program, in which a warning is an error, or a path."""
    is_text = not arguments and isinstance(program, str)
    command = [sys.executable, *["-W", "error", "-c"] * is_text, program, *map(str, arguments)]
    plain = plain_environment(**environment)
    return subprocess.run(command, env=plain, cwd=cwd, timeout=deadline, capture_output=True, text=True)


def say(what, **more):
    """Print a line for the test to read, in one piece."""
    sys.stdout.flush()
    os.write(1, f"=> {json.dumps({'what': what, 'time': time(), **more})}\n".encode())


def said(output, what=None):
    """Return the lines that `say` has printed, or those of a kind. The launcher puts the rank before each."""
    lines = [json.loads(line.split("=> ", 1)[1]) for line in output.splitlines() if "=> {" in line]
    return [line for line in lines if what in (None, line["what"])]


# Forks.


def fork(main, stdin, stdout, environment):
    """Fork a process that runs a function as Python runs a program, in a session of its own."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    if pid := os.fork():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return pid
    # The frames below are those of the process that was forked; an error must not come to them.
    try:
        os.setsid()
        for old, new in ((stdin, 0), (stdout, 1), (stdout, 2)):
            os.dup2(old, new)
        os.closerange(3, 1024)
        os.environ.clear()
        os.environ.update(environment)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGCHLD):  # some of which a shell ignores
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        for name, value in environment.items():
            if name.startswith("JAX_") and hasattr(jax.config, name.lower()):
                jax.config.update(name.lower(), int(value) if value.isdigit() else value)
        code = main() or 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    # Python's own end: threads, handlers of the end, and the interpreter.
    ctypes.pythonapi.Py_Exit(code)


def name_of(program):
    """Return the name of a function, by which another process finds it."""
    return f"{program.__module__}:{program.__name__}"


def run_program(name, *arguments):
    """Run a program, named by its module and function."""
    module, function = name.split(":")
    return getattr(importlib.import_module(module), function)(*arguments)


def serve():
    """Fork a process for each line of standard input, and print how each starts and ends."""
    wake, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children, requests = {}, b""
    with open(os.devnull) as null:
        while True:
            ready, _, _ = select.select([0, wake], [], [])
            if wake in ready:
                os.read(wake, 1 << 16)
                while children and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    code = os.waitstatus_to_exitcode(ended[1])
                    print(json.dumps(["ended", children.pop(ended[0]), code]), flush=True)
            if 0 not in ready:
                continue
            read = os.read(0, 1 << 16)
            if not read:
                for child in children:
                    os.killpg(child, signal.SIGKILL)
                os._exit(0)
            *lines, requests = (requests + read).split(b"\n")
            for line in lines:
                number, command, log, environment = json.loads(line)
                importlib.import_module(command[0].split(":")[0])  # once, for all children
                with open(log, "wb") as file:
                    environment = dict(os.environ) | environment
                    child = fork(lambda: run_program(*command), null.fileno(), file.fileno(), environment)  # noqa: B023
                children[child] = number
                print(json.dumps(["started", number, child]), flush=True)


class Child:
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
        command, pipe = [sys.executable, "-m", "tests.harness"], subprocess.PIPE
        plain = plain_environment()
        self.process = subprocess.Popen(command, env=plain, cwd=ROOT, stdin=pipe, stdout=pipe, text=True, bufsize=1)
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
            child = Child()
            self.children.append(child)
            print(json.dumps([len(self.children) - 1, command, str(log), of_child]), file=self.process.stdin)
        assert child.has_started.wait(60)
        return child


nursery = functools.cache(Nursery)


# Who starts them.


class Running:
    """Processes that have been started; use it in `with`."""

    def __init__(self, what):
        self.what, self.logs, self.processes, self.started = what, [], [], monotonic()

    def start(self, program, *arguments, log, **environment):
        """Have the nursery fork a process that runs a function."""
        log.touch()
        self.logs.append(log)
        self.processes.append(nursery().start([name_of(program), *map(str, arguments)], log, environment))

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

    def await_line(self, text, rank=0, deadline=120, times=1):
        """Wait until a process has printed a text `times` times."""
        until = monotonic() + deadline
        while self.output(rank).count(text) < times:
            if monotonic() > until or self.processes[rank].poll() is not None:
                self._fail(f"did not say {text!r}")
            sleep(0.01)

    def signal(self, rank, number):
        """Send a signal to one process."""
        self.processes[rank].send_signal(number)

    def wait(self, deadline=120, besides=()):
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
    """Processes x devices that run one program."""

    def __init__(self, program, *arguments, processes=2, devices=1, **environment):
        super().__init__(f"{program.__name__} {' '.join(map(str, arguments))} in {processes}x{devices}")
        self.reserved = launcher.reserve_port()
        self.folder = tempfile.TemporaryDirectory(prefix="gang-")
        address = "{}:{}".format(*self.reserved.getsockname())
        for rank in range(processes):
            of_rank = {"JAX_NUM_CPU_DEVICES": str(devices)}
            if processes > 1:
                of_rank["SYNK_COORDINATOR"] = address
                of_rank["SYNK_NUM_PROCESSES"], of_rank["SYNK_PROCESS_ID"] = str(processes), str(rank)
            self.start(program, *arguments, log=Path(self.folder.name) / f"{rank}.log", **of_rank | environment)

    def __exit__(self, *error):
        super().__exit__(*error)
        self.reserved.close()
        self.folder.cleanup()


def run(program, *arguments, deadline=300, **options):
    """Start a gang and wait for its end."""
    with Gang(program, *arguments, **options) as gang:
        return gang.wait(deadline)


class Launcher(Running):
    """A process that runs `python -m synk launch`."""

    def __init__(self, folder, *options, program=None, log="launcher.log", **environment):
        super().__init__(f"launch {' '.join(map(str, options))}")
        self.start(program or launch, *options, log=Path(folder) / log, **environment)


class Forked(subprocess.Popen):
    """A process that is a fork of the launcher in place of a new Python. The rest is `subprocess.Popen`."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more):
        if "tests.harness" not in args:  # the launcher's guard
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more)
            return
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = more[3:9]
        self.pid = fork(lambda: run_program(*args[3:]), p2cread, c2pwrite, env)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def launch(*arguments):
    """Run `python -m synk launch`."""
    return launcher.main(["launch", *arguments])


def launch_forks(*arguments):
    """Run the launcher, whose processes are forks that run a program, as `of_forks` names it."""
    with mock.patch.object(launcher, "Popen", Forked):
        return launch(*arguments)


def of_forks(program):
    """Return the words by which the launcher is told of a function."""
    return "-m", "tests.harness", name_of(program)


def interrupted_launch(*arguments):
    """Run a launcher that gets Ctrl-C while it asks how a process has ended."""
    waitid, questions = os.waitid, []

    def interrupted(*how):
        questions.append(how)
        if len(questions) == 20:
            os.kill(os.getpid(), signal.SIGINT)
        return waitid(*how)

    with mock.patch.object(os, "waitid", interrupted):
        return launch(*arguments)


if __name__ == "__main__":
    gc.set_threshold(100_000, 20, 50)  # these two as in conftest.py
    jax.config.update("jax_traceback_in_locations_limit", 0)
    run_program(*sys.argv[1:]) if sys.argv[1:] else serve()
