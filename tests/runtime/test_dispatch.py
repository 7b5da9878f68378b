"""Dispatch: programs in flight are forgotten once they have ended, and never before their variables know how."""

import signal
import sys

import pytest

from synk._runtime import dispatch
from synk._runtime.dispatch import IN_FLIGHT, InFlight, drain, look_for_dead, retire_finished, uninterrupted
from synk._runtime.group import Peers


class Token:
    """Stands for an output of a program that has ended; well, unless it died of an error."""

    def __init__(self, error=None, is_ready=True):
        self.error, self.ready = error, is_ready

    def is_ready(self):
        return self.ready

    def block_until_ready(self):
        self.ready = True
        if self.error is not None:
            raise self.error
        return self

    def __eq__(self, other):
        raise AssertionError("tokens are arrays, whose comparison is a program")


class Died(Exception):
    pass


class Limit(Exception):
    pass


@pytest.fixture
def flight():
    """Launch a program by its token; the errors of those that died."""
    drain()
    failures = []

    def launch(token):
        program = InFlight(token, failures.append, Peers(), "f")
        IN_FLIGHT[program] = None
        return program

    yield launch, failures
    IN_FLIGHT.clear()


def test_what_has_ended_is_forgotten(flight):
    """In the order of launches, up to the first that still runs; `drain` waits for that one too."""
    launch, failures = flight
    launch(Token()), launch(Token(Died()))
    running, last = launch(Token(is_ready=False)), launch(Token())
    retire_finished()
    assert [*IN_FLIGHT] == [running, last] and [type(error) for error in failures] == [Died]
    drain()
    assert not IN_FLIGHT and len(failures) == 1


def test_looking_for_dead_programs_forgets_none(flight):
    """The heartbeat's thread tells peers of one that died; its variables hear of it where it is forgotten."""
    launch, failures = flight
    program, told = launch(Token(Died())), []
    program.peers.after_failure = lambda name, error: told.append((name, type(error)))
    launch(Token(Died(), is_ready=False))
    look_for_dead()
    assert told == [("f", Died)] and len(IN_FLIGHT) == 2 and not failures


def test_a_handler_raises_while_a_program_runs(flight):
    """What it raises is no failure of the program, and the wait ends there: a time limit is one."""
    launch, failures = flight

    class Slow(Token):
        def block_until_ready(self):
            raise Limit

    program = launch(Slow(is_ready=False))
    with pytest.raises(Limit):
        drain()
    assert [*IN_FLIGHT] == [program] and not failures


def test_a_handler_raises_as_a_program_dies(flight):
    """Both are told: the error of the handler here, and the program's to its variables."""
    launch, failures = flight

    class Dying(Token):
        errors = (Limit(), Died())

        def block_until_ready(self):
            error, *self.errors = self.errors
            raise error

    launch(Dying())
    with pytest.raises(Limit):
        retire_finished()
    assert not IN_FLIGHT and [type(error) for error in failures] == [Died]


def signal_at(number, act):
    """Act, with a signal where Python would run its handler in `dispatch`: as a function begins or a call of C returns, the
    n-th time. Return whether there are as many."""
    left = number

    def press(frame, event, _):
        nonlocal left
        if event in ("call", "c_return") and frame.f_code.co_filename == dispatch.__file__:
            left -= 1
            if left == 0:
                signal.raise_signal(signal.SIGALRM)

    sys.setprofile(press)
    try:
        act()
    finally:
        sys.setprofile(None)
    return left <= 0


@pytest.mark.parametrize("error", [None, Died()], ids=["ends well", "dies"])
def test_a_handler_raises_anywhere(flight, error):
    """Neither what the handler raises is lost nor a failure, wherever the signal comes."""
    launch, failures = flight

    def over(*_):
        raise Limit

    before = signal.signal(signal.SIGALRM, over)
    try:
        for number in range(1, 1000):
            launch(Token(error))
            try:
                came = signal_at(number, retire_finished)
            except Limit:
                pass
            else:
                assert not came
                break
            finally:
                assert signal.getsignal(signal.SIGALRM) is over
            assert IN_FLIGHT or len(failures) == (error is not None)
            retire_finished()
            assert not IN_FLIGHT and {type(failure) for failure in failures} == ({Died} if error else set())
            failures.clear()
        assert (20 if error else 3) < number < 999
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("error", [None, Died()], ids=["ends well", "dies"])
def test_a_handler_that_retires(flight, error):
    """A handler that uses synk forgets the program first."""
    launch, failures = flight
    before = signal.signal(signal.SIGALRM, lambda *_: retire_finished())
    try:
        for number in range(1, 1000):
            launch(Token(error))
            if not signal_at(number, retire_finished):
                break
            assert not IN_FLIGHT and bool(failures) == (error is not None)
        assert 3 < number < 999
    finally:
        signal.signal(signal.SIGALRM, before)


def test_blocks_nest():
    """What a block inside holds back comes at the end of the one around it, once. A handler that was set inside stays."""
    came = []

    def first(*_):
        came.append("first")

    def second(*_):
        came.append("second")

    before, pressed = signal.signal(signal.SIGALRM, first), signal.getsignal(signal.SIGINT)
    try:
        with uninterrupted():
            with uninterrupted():
                signal.raise_signal(signal.SIGALRM)
            assert not came
            signal.signal(signal.SIGALRM, second)
            with uninterrupted():
                signal.raise_signal(signal.SIGALRM)
                assert not came
            assert came == ["second"]
        assert came == ["second", "second"]
        assert signal.getsignal(signal.SIGALRM) is second and signal.getsignal(signal.SIGINT) is pressed
    finally:
        signal.signal(signal.SIGALRM, before)
