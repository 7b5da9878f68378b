"""Errors: synk's own exceptions, and the one frame that may stand between a user's line and them."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, TypeVar

import jax

from ._context import is_disturbed, undisturbed

P = ParamSpec("P")
R = TypeVar("R")

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_JAX = os.path.dirname(os.path.abspath(jax.__file__)) + os.sep


class SynkError(Exception):
    """Base of the errors that synk alone raises.

    Example:
      >>> issubclass(LawError, SynkError)
      True
    """


class LawError(SynkError):
    """Raised by `f.check` where the parallel answer is not the serial one.

    The message names every output and shared variable that differs, and the ops that would have matched.

    Example:
      >>> import jax.numpy as jnp, numpy as np, synk
      >>> with synk.simulate(4):
      ...     try:
      ...         synk.function(jnp.mean).check(np.arange(8.0))  # a sum of four means
      ...     except synk.LawError as error:
      ...         print('"mean"' in str(error))
      True
    """


class DivergedError(SynkError):
    """Raised where replicas hold different values and one value was asked for.

    Example:
      >>> import numpy as np, synk
      >>> with synk.simulate(2):
      ...     w = synk.shared(np.zeros(3, np.float32), name="w")
      ...     w.set_value(np.ones(3, np.float32), rank=1)
      ...     try:
      ...         w.value
      ...     except synk.DivergedError as error:
      ...         print(str(error).splitlines()[0][:29])
      w: its replicas hold differen
    """


class SharedLostError(SynkError):
    """Raised on reading a shared variable whose old value was donated to a program that then died.

    Setting the variable (`w.value = ...`, `w.set_value`, `synk.broadcast`, `synk.scatter`) heals it; a function
    built with `donate=False` cannot lose one.

    Example:
      >>> issubclass(SharedLostError, SynkError)
      True
    """


class PeerError(SynkError):
    """Raised where another process of the group has failed or is gone.

    The group cannot go on: end this process, and start all again from the last checkpoint (`python -m synk launch
    --restarts` does).

    Example:
      >>> issubclass(PeerError, SynkError)
      True
    """


class DisagreementError(SynkError):
    """Raised in every process of a group where they are about to run different programs.

    Example:
      >>> issubclass(DisagreementError, SynkError)
      True
    """


def entry(fn: Callable[P, R]) -> Callable[P, R]:
    """Wrap a public call, so that an error of synk's own shows the user's line and this one frame."""

    @functools.wraps(fn)
    def synk_call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            if is_disturbed():
                with undisturbed():
                    return fn(*args, **kwargs)
            return fn(*args, **kwargs)
        except Exception as error:
            shorten(error)
            raise

    return synk_call


def shorten(error: Exception) -> None:
    """Of an error of synk's own, forget the frames that led to it; raised again, it shows the public call alone."""
    if _is_ours(error.__traceback__):
        error.__traceback__ = None


def _is_ours(traceback: TracebackType | None) -> bool:
    """Was it raised by synk, with no line of the user's below this call?"""
    last = ""
    while traceback is not None:
        last = traceback.tb_frame.f_code.co_filename
        if not last.startswith((_OURS, _JAX, "<")):
            return False
        traceback = traceback.tb_next
    return last.startswith(_OURS)
