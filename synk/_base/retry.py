"""Retry: let an elastic group make a public call again after it has lost a process."""

from collections.abc import Callable
from typing import Any


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
