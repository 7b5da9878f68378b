"""Axis: what the axis of the replicas is called in a function, and in the programs that run it."""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

# Its name in every group's mesh.
AXIS = "replica"

_name = ContextVar("name of the replicas' axis", default=AXIS)


def replica_axis() -> str:
    """Return the name of the replicas' axis in the function or program that is traced around this line."""
    return _name.get()


@contextmanager
def axis_named(name: str) -> Generator[None]:
    """Trace functions and programs, inside a `with` block, in which the replicas' axis has this name."""
    token = _name.set(name)
    try:
        yield
    finally:
        _name.reset(token)
