"""Preemption: who handles SIGTERM, in a program and in the helpers that it forks."""

import os
import signal
import threading
import warnings

import numpy as np
import pytest

import synk

from .. import harness
from . import programs


@pytest.fixture
def handler():
    """Set a handler of SIGTERM that notes it; the handler of before comes back at the end."""
    noted = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: noted.append(number))
    yield noted
    signal.signal(signal.SIGTERM, before)


def loop(folder):
    """Return a loop of synk.resume, which handles SIGTERM from its first item on."""
    return synk.resume(range(2), {"w": synk.shared(np.zeros(2), name="w")}, folder=folder)


def in_helper(act):
    """Return what a function says in a helper that is forked now."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX has threads, and the helper uses nothing of it
        child = os.fork()
    if child == 0:
        code = 99
        signal.alarm(30)
        try:
            code = int(act())
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def is_told(noted):
    """Check that SIGTERM comes to the program's own handler."""
    before = len(noted)
    signal.raise_signal(signal.SIGTERM)
    return len(noted) == before + 1


def test_a_handler_set_inside_a_loop_stays(tmp_path, handler):
    """The program sets its own handler of SIGTERM inside a loop of synk.resume: the loop's end leaves it there."""
    with synk.init(1):
        for _ in loop(tmp_path):
            mine = lambda number, frame: None  # noqa: E731
            signal.signal(signal.SIGTERM, mine)
        assert signal.getsignal(signal.SIGTERM) is mine


def test_a_helper_has_the_handler_of_before(tmp_path, handler):
    """A helper that is forked inside a loop of synk.resume has the handler that the program had before the loop."""
    with synk.init(1):
        for _ in loop(tmp_path):
            assert in_helper(lambda: is_told(handler)) == 1
        assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, None) and is_told(handler)


def test_a_signal_for_the_program_is_not_for_its_helper(tmp_path, handler):
    """A SIGTERM that came before the fork stops the loop, and not the helper."""
    with synk.init(1):
        items = loop(tmp_path)
        next(items)
        signal.raise_signal(signal.SIGTERM)
        assert in_helper(lambda: not handler) == 1
        with pytest.raises(SystemExit, match="143"):
            next(items)


def test_a_helper_that_another_thread_forks(handler):
    """A thread forks helpers while the main thread calls: they have the program's handlers, not those of calls."""
    with synk.init(1):
        step = synk.function(lambda x: x.sum())
        step(np.ones(3))
        told, is_over = [], threading.Event()

        def fork():
            for _ in range(8):
                told.append(in_helper(lambda: is_told(handler)))
            is_over.set()

        thread = threading.Thread(target=fork)
        thread.start()
        while not is_over.is_set():
            step(np.ones(3))
        thread.join()
        assert told == [1] * 8


@pytest.mark.gang
@pytest.mark.parametrize("processes", [1, 2])
def test_a_daemon_ends_with_its_program(processes, tmp_path):
    """A helper that is forked inside a loop of synk.resume is ended by SIGTERM, though JAX's runtime only notes it."""
    options = "-n", processes, "--devices-per-process", 1, *harness.of_forks(programs.forks_in_a_loop), tmp_path / "run"
    with harness.Launcher(tmp_path, *options, program=harness.launch_forks) as launcher:
        end = launcher.wait(60)[0]
    assert end.code == 0 and end.output.count('"done"') == processes, end.output


@pytest.mark.gang
def test_a_helper_forked_while_a_save_is_written(tmp_path):
    """It ends by sys.exit, with its own code, though the thread that writes is not in it."""
    (end,) = harness.run(programs.forks_while_it_saves, tmp_path, processes=1, deadline=60)
    assert end.code == 0 and harness.said(end.output, "helper")[0]["code"] == 3, end.output
