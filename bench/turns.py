"""Turns: ways to run a step that live in processes of their own and run a few whenever they are told."""

import json
import os
import socket
import subprocess
import sys
from time import perf_counter

MARK = "=> "  # what a process says to the one that started it; all else that it prints is let through


class Elsewhere:
    """A process that answers each number of steps with their milliseconds."""

    def __init__(self, command, **environment):
        """Start it, as `command` says, and let it compile."""
        self.process = subprocess.Popen(
            list(map(str, command)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        self.about = self._answer()

    def _answer(self):
        for line in self.process.stdout or ():
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        return {"failed": f"ended with status {self.process.wait()}"}

    def is_ready(self):
        """Did it come up?"""
        return not {"failed", "missing"} & set(self.about)

    def steps(self, n):
        """Milliseconds of n steps."""
        print(n, file=self.process.stdin, flush=True)
        return self._answer()

    def close(self):
        """Tell it to leave."""
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()


def serve(steps, **about):
    """The other end: `steps(n)` gives milliseconds."""
    steps(2)  # the second one may compile again
    _say(about)
    for line in sys.stdin:
        _say(steps(int(line)))


def serve_missing(library):
    """Say that a library is not installed."""
    _say({"missing": library})


def _say(value):
    print(MARK + json.dumps(value), flush=True)


def timed(step):
    """A step, as a function that runs n of them to their end and gives milliseconds."""

    def steps(n):
        times = []
        for _ in range(n):
            start = perf_counter()
            step()
            times.append(1e3 * (perf_counter() - start))
        return times

    return steps


def free_port():
    """A port of this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
