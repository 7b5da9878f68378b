"""Turns: what a thread that works ahead of a loop does to the loop's own state waits until the loop has come so far."""

import threading
from collections.abc import Callable

_thread = threading.local()


def take_turns(wait: Callable[[], None]) -> None:
    """This thread works ahead of a loop, and `wait` waits until that has come as far."""
    _thread.wait = wait


def turns_of_thread() -> Callable[[], None] | None:
    """What waits until it is the turn of this thread; None where it works ahead of nothing."""
    return getattr(_thread, "wait", None)


def in_turn() -> None:
    """Wait until it is the turn of this thread: whatever it calls, reads or writes is then as without working ahead."""
    wait = getattr(_thread, "wait", None)
    if wait is not None:
        wait()
