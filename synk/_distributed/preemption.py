"""Preemption: ask whether this machine, or that of another process, has been told to stop."""

import signal
import threading
from typing import Any

from jax.experimental import multihost_utils

from .._base.errors import SynkError, public_api
from .._runtime.dispatch import call_in_helpers
from . import coordinator

_terminated: bool | None = None  # None until synk handles SIGTERM, in a program of one process
_before: Any = signal.SIG_DFL  # the handler before synk's
_questions = 0  # how many different steps the program has asked about
_answer: tuple[int | None, bool] = None, False  # the last step, and the answer
_is_told = False  # whether an answer was yes


@public_api
def preempted(step: int) -> bool:
    """Return whether any process of the group has been told to stop (SIGTERM): then save and leave.

    Every process asks about the same steps from its main thread, about all steps or, say, every tenth. A second
    question about a step has the same answer. After the first True, the answer for all later steps is True.

    Args:
      step: the number of this step; it grows, and is the same in all processes.

    Returns:
      True on every process at the same step, up to some seconds after the signal.

    Raises:
      SynkError: the preemption service of JAX is off.

    Example:
      >>> import synk
      >>> synk.preempted(1)
      False
    """
    global _answer
    # JAX answers each question once, so a second question about a step must not reach it.
    if step != _answer[0]:
        _answer = step, is_told_to_stop()
    return _answer[1]


def is_told_to_stop() -> bool:
    """Ask once more, as all processes do together; yes once it was yes."""
    global _questions, _is_told
    _questions += 1
    _is_told = _is_told or _is_over()
    return _is_told


def questions_asked() -> int:
    return _questions


def ask_from(number: int) -> None:
    """Count questions from a number of process 0: a process that has asked alone, in a group of its own, is ahead."""
    global _questions
    _questions = number


def _is_over() -> bool:
    """Ask JAX's preemption service or, in a program of one process, the handler of SIGTERM."""
    global _terminated, _before
    if coordinator.is_running():
        try:
            # After a signal JAX takes the largest number that a process has asked about, and says yes to the next
            # number alone. A program may leave out steps, but no question, so questions are counted in their place:
            # https://github.com/jax-ml/jax/blob/main/jax/experimental/multihost_utils.py
            return multihost_utils.reached_preemption_sync_point(_questions)
        except RuntimeError as error:
            raise SynkError(f"synk.preempted: {error} Leave jax_enable_preemption_service on.") from error
    if _terminated is None and threading.current_thread() is threading.main_thread():
        _terminated = False
        # Python lets only the main thread set a handler.
        _before = signal.signal(signal.SIGTERM, _note)
    return bool(_terminated)


def listen_no_more() -> None:
    """Give SIGTERM back to its handler before synk's, in a program of one process. Pass a signal on that came late."""
    global _terminated, _is_told
    if _terminated is not None and threading.current_thread() is threading.main_thread():
        is_late, _terminated, _is_told = _terminated and not _is_told, None, False
        # A handler that the program has set meanwhile stays.
        if signal.getsignal(signal.SIGTERM) is _note:
            signal.signal(signal.SIGTERM, _before or signal.SIG_DFL)
        if is_late:
            signal.raise_signal(signal.SIGTERM)


def _note(number: int, frame: Any) -> None:
    global _terminated
    _terminated = True


def _listen_no_more_in_helper() -> None:
    """Give SIGTERM back in a forked helper, which would note its own end and live on."""
    global _terminated
    # A signal that came before the fork is for the program.
    _terminated = None if _terminated is None else False
    listen_no_more()


call_in_helpers(_listen_no_more_in_helper)
