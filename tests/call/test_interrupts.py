"""Ctrl-C at any moment loses no shared variable and tears no update."""

import os
import random
import signal
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import core  # noqa: TID251  # to break what Ctrl-C breaks

import synk
from synk._runtime import dispatch
from synk._runtime.dispatch import uninterrupted

from .. import harness
from ..helpers import interrupted, slow

pytestmark = pytest.mark.smoke

TRIALS = 60


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # where the collector swallows one
@pytest.mark.parametrize("rows", [8, 7], ids=["one launch", "several launches"])
def test_updates_are_all_or_nothing(rows):
    """After an interrupt both variables have had the same updates: all of the calls' that returned, and at most one more."""
    moments = random.Random(rows)
    with synk.init(4):
        one, two = synk.shared(np.int32(0)), synk.shared(np.zeros(1000, np.int32))

        @synk.function(reduce="max", then=lambda seen: update())
        def step(x):
            return jnp.max(x)

        def update():
            one.value = one.value + 1
            two.value = two.value + 1

        x = np.ones(rows, np.float32)
        step(x)
        done = 1
        for _ in range(TRIALS):
            done += interrupted(lambda: step(x), moments.uniform(0.001, 0.02))
            count = int(one.value)
            assert np.all(np.asarray(two.value) == count)
            assert count in (done, done + 1)
            done = count


def test_ctrl_c_in_a_callback_of_mlir():
    """JAX has MLIR walk a program that it looks up in its cache, and MLIR raises a RuntimeError for the callback's."""

    def press(operation):
        signal.raise_signal(signal.SIGINT)

    def walk(x):
        jax.jit(jnp.sin).lower(x).compiler_ir().operation.walk(press)  # type: ignore[union-attr]
        return x

    with pytest.raises(KeyboardInterrupt) as raised:
        synk.function(walk)(np.ones(4, np.float32))
    assert isinstance(raised.value.__cause__, RuntimeError)


@pytest.mark.parametrize("act", ["read", "save"])
@pytest.mark.slow
def test_a_time_limit_while_a_value_is_awaited(act, tmp_path):
    """What a handler raises is no failure of the program: the limit is told, and the value is there."""
    w = synk.shared(np.float32(0), name="w")

    @synk.function(then=lambda total: setattr(w, "value", w.value + loop()))
    def slow(x):
        return x.sum()

    def loop():
        return jax.lax.fori_loop(0, 10, lambda i, m: jnp.tanh(m @ m), jnp.ones((800, 800)))[0, 0] * 0 + 1

    def over(*came):
        raise TimeoutError("time is up")

    slow(np.ones(8, np.float32))
    assert w.value == 1
    before = signal.signal(signal.SIGALRM, over)
    try:
        for seconds in (0.02, 0.06):
            slow(np.ones(8, np.float32))
            signal.setitimer(signal.ITIMER_REAL, seconds)
            with pytest.raises(TimeoutError, match="time is up"):
                while True:  # the program may have ended by then
                    w.value if act == "read" else synk.save(tmp_path, {"w": w}, step=1)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert w.value == 3


def test_handlers_that_set_others(monkeypatch):
    """As those of which the first signal asks to end and the next one ends: what they set stays, and hears of the next."""
    came = []

    def graceful(*_):
        came.append("graceful")
        signal.signal(signal.SIGALRM, lambda *_: came.append("hard"))

    before, get = signal.signal(signal.SIGALRM, graceful), dispatch._get_handler
    try:
        with uninterrupted():
            for _ in range(3):
                signal.raise_signal(signal.SIGALRM)
        assert came == ["graceful", "hard", "hard"]
        signal.signal(signal.SIGALRM, graceful)

        def get_and_press(number):
            found = get(number)
            if found is graceful:
                signal.raise_signal(number)
            return found

        monkeypatch.setattr(dispatch, "_get_handler", get_and_press)
        with uninterrupted():
            pass
        signal.raise_signal(signal.SIGALRM)
        assert came[3:] == ["graceful", "hard"]
    finally:
        monkeypatch.undo()
        signal.signal(signal.SIGALRM, before)


def interrupt_exit(number, act):
    """Act, with a Ctrl-C where Python would run its handler: on the first line by which JAX leaves a trace, the n-th time.
    How often it left one."""
    left = 0

    def press(frame, event, _):
        nonlocal left
        if (
            event == "call"
            and frame.f_code.co_name == "__exit__"
            and "CurrentTrace" in type(frame.f_locals["self"]).__name__
        ):
            left += 1
            if left == number:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(press)
    try:
        act()
    finally:
        sys.setprofile(None)
    return left


@pytest.mark.parametrize(("act", "every"), [("call", 1), ("check", 4)])
def test_no_trace_is_left_open(act, every):
    """Where the Ctrl-C comes on JAX's way out of a trace, the thread is not left inside of it."""
    w = synk.shared(np.float32(1), name="w")
    x = np.ones(7, np.float32)

    def fresh():
        f = synk.function(lambda x: jnp.tanh(x).mean(), reduce="mean", then=lambda m: setattr(w, "value", w.value + 1))
        (f if act == "call" else f.check)(x)

    with synk.init(2):
        for number in range(1, 200, every):
            before = float(w.value)
            try:
                interrupt_exit(number, fresh)
            except KeyboardInterrupt:
                assert not isinstance(jnp.ones(2) + 1, jax.core.Tracer)
                core.trace_ctx.set_trace(None)  # as after a Ctrl-C inside an operation of JAX 0.12's
                assert float(w.value) in (before, before + 1)
                continue
            break
        assert 4 < number < 199


class Limit(Exception):
    pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # where the collector swallows one
@pytest.mark.parametrize("number", [signal.SIGALRM, slow(signal.SIGTERM)])
def test_other_handlers_that_raise(number):
    """A time limit, or the end of a job, loses no variable either; nor do these all at once."""

    def over(*signal):
        raise Limit

    moments, counter = random.Random(int(number)), synk.shared(np.zeros(1000, np.int32))
    step = synk.function(jnp.sum, then=lambda total: setattr(counter, "value", counter.value + 1))
    x = np.ones(7, np.float32)
    step(x)
    before = signal.signal(number, over)
    try:
        done = 1
        for _ in range(TRIALS):
            done += interrupted(lambda: step(x), moments.uniform(0.001, 0.02), number, Limit)
            count = int(counter.value[0])
            assert np.all(np.asarray(counter.value) == count)
            assert count in (done, done + 1)
            done = count
        with pytest.raises(Limit), uninterrupted():
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
    finally:
        signal.signal(number, before)


def test_the_users_handler_is_back():
    """After a call the SIGINT handler is the user's own."""
    before = signal.getsignal(signal.SIGINT)
    counter = synk.shared(np.int32(0))
    synk.function(lambda: None, then=lambda nothing: setattr(counter, "value", counter.value + 1))()
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("at", range(6))
@pytest.mark.parametrize("is_set", [True, False])
def test_every_handler_is_back(monkeypatch, at, is_set):
    """Wherever one raises while they are taken or given back, all are as before, and what came meanwhile is told."""
    numbers, seen, changes = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM), [], []
    before = [signal.signal(number, lambda number, frame: seen.append(number)) for number in numbers]
    handlers = [signal.getsignal(number) for number in numbers]

    def change(number, handler):
        changes.append(number)
        if len(changes) == at + 1 and not is_set:
            raise Limit
        replaced = signal.signal(number, handler)
        if len(changes) == at + 1:
            raise Limit
        return replaced

    monkeypatch.setattr(dispatch, "_set_handler", change)
    came = []
    try:
        with pytest.raises(Limit), uninterrupted():
            for number in numbers:
                os.kill(os.getpid(), number)
                came.append(number)
            assert seen == []
        assert [signal.getsignal(number) for number in numbers] == handlers
        assert seen == came
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def test_calls_in_other_threads():
    """Only the main thread can hold signals; calls in others run all the same."""
    counter = synk.shared(np.int32(0))
    step = synk.function(lambda: None, then=lambda nothing: setattr(counter, "value", counter.value + 1))
    threads = [threading.Thread(target=step) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert int(counter.value) == 4


def test_ctrl_c_while_trees_are_compared():
    """JAX makes a ValueError of what comes in a comparison of its own; here it is Ctrl-C again."""

    class Pressed:
        count = 0

        def __hash__(self):
            return 1

        def __eq__(self, other):
            self.count += 1
            raise KeyboardInterrupt

    f = synk.function(lambda x, how: x.sum(), inputs={"how": "static"})
    x = np.ones(4, np.float32)
    first, second = Pressed(), Pressed()
    assert float(f(x, first)) == 4
    with pytest.raises(KeyboardInterrupt):
        f(x, second)
    assert first.count + second.count and float(f(x, first)) == 4


@pytest.mark.slow
def test_no_thread_waits_for_ever():
    """Ctrl-C while two threads take turns with the lock leaves it to neither."""
    x, w = np.ones(4, np.float32), synk.shared(np.float32(1))
    total = synk.function(jnp.sum)
    total(x), w.value

    def call():
        for _ in range(20):
            total(x)
        os.kill(os.getpid(), signal.SIGINT)

    for _ in range(40):
        thread = threading.Thread(target=call)
        with pytest.raises(KeyboardInterrupt):
            thread.start()
            while True:
                w.value
        thread.join()
        waiting = threading.Thread(target=lambda: total(x), daemon=True)
        waiting.start()
        waiting.join(60)
        assert not waiting.is_alive()


def test_the_default_of_the_system():
    """A program that has asked for it ends at Ctrl-C, inside a call too."""
    program = """
import os, signal
from synk._runtime.dispatch import uninterrupted
signal.signal(signal.SIGINT, signal.SIG_DFL)
with uninterrupted():
    os.kill(os.getpid(), signal.SIGINT)
    print("held back", flush=True)
print("not seen")
"""
    done = harness.python(program)
    assert (done.stdout, done.returncode) == ("held back\n", -signal.SIGINT)
