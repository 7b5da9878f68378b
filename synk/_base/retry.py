"""Retry: let an elastic group make a public call again after it has lost a process."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class MembersChanged(BaseException):
    """Raised inside a call where the processes of an elastic group have changed; the outermost call is made again.

    It is no `Exception`, so that nothing on the way out takes it for an error of the program's.
    """


class _Retry:
    """How public calls are run.

    Attributes:
      run: calls a function with positional and keyword arguments, again after a loss; None without an elastic group.
    """

    run: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any] | None = None


RETRY = _Retry()


def in_parts(fn: Callable[P, R]) -> Callable[P, R]:
    """Mark a function for `public_api`: what it does cannot be made again as a whole, and it calls `made_again`."""
    fn.is_in_parts = True  # type: ignore[attr-defined]  # functions take any attribute
    return fn


def made_again(fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function, and again after a loss."""
    return fn(*args, **kwargs) if RETRY.run is None else RETRY.run(fn, args, kwargs)
