"""Synkhronos's own spellings of what has another name here."""

from __future__ import annotations

from ._errors import entry
from ._group import Group, init


@entry
def fork(n: int | None = None) -> Group:
    """Make the group, as `synk.init(n)` does; nothing is forked.

    Example:
      >>> import synk
      >>> with synk.fork(1) as group:
      ...     group.size
      1
    """
    return init(n)


@entry
def distribute() -> None:
    """Do nothing: functions and shared variables reach the devices by themselves.

    Example:
      >>> import synk
      >>> synk.distribute()
    """
