"""Preemption: has this machine been told to stop?"""

import signal
import threading
from typing import Any

from jax.experimental import multihost_utils

from .._base.errors import SynkError, public_api
from . import coordinator

_terminated: bool | None = None  # None while SIGTERM has no handler of synk's
_questions = 0  # how many steps have been asked about
_answer: tuple[int | None, bool] = None, False  # of the last of them


@public_api
def preempted(step: int) -> bool:
    """Has this machine, or that of any process of the group, been told to stop (SIGTERM)?

    Every process asks about the same steps, from its main thread: about each, or about every tenth, say. Asked again
    about the same step it says the same, and once it has said True it does so of all steps that follow.

    Args:
      step: the number of this step; it grows, and is the same in all processes.

    Returns:
      Whether to save and leave now: True on every process at the same step, one that is asked about up to some seconds
      after the signal.

    Raises:
      SynkError: the preemption service of JAX is off.

    Example:
      >>> import synk
      >>> synk.preempted(1)
      False
    """
    global _questions, _answer
    last, is_over = _answer
    if step != last:
        _questions += 1
        _answer = step, is_over or _is_over()
    return _answer[1]


def _is_over() -> bool:
    global _terminated
    if coordinator.is_running():
        try:
            # After a signal JAX takes the largest number that a process has asked about so far, and says yes to the
            # next one alone: so it is asked about questions, of which none is left out, and not about steps.
            return multihost_utils.reached_preemption_sync_point(_questions)
        except RuntimeError as error:
            raise SynkError(f"synk.preempted: {error} Leave jax_enable_preemption_service on.") from error
    if _terminated is None and threading.current_thread() is threading.main_thread():
        _terminated = False
        signal.signal(signal.SIGTERM, _note)
    return bool(_terminated)


def _note(number: int, frame: Any) -> None:
    global _terminated
    _terminated = True
