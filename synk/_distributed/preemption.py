"""Preemption: has this machine been told to stop?"""

import signal
import threading
from typing import Any

from jax.experimental import multihost_utils

from .._base.errors import SynkError, public_api
from . import kv_store

_terminated: bool | None = None  # None while SIGTERM has no handler of synk's


@public_api
def preempted(step: int) -> bool:
    """Has this machine, or that of any process of the group, been told to stop (SIGTERM)?

    Call it once a step, in every process, from the main thread.

    Args:
      step: the number of this step; larger with each call, and the same in all processes.

    Returns:
      Whether to save and leave now: True on every process at the same step, some steps after the signal.

    Raises:
      SynkError: the preemption service of JAX is off.

    Example:
      >>> import synk
      >>> synk.preempted(1)
      False
    """
    global _terminated
    if kv_store.is_running():
        try:
            return multihost_utils.reached_preemption_sync_point(step)
        except RuntimeError as error:
            raise SynkError(f"synk.preempted: {error} Leave jax_enable_preemption_service on.") from error
    if _terminated is None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _note)
        _terminated = False
    return bool(_terminated)


def _note(number: int, frame: Any) -> None:
    global _terminated
    _terminated = True
