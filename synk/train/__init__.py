"""Training steps by optax. `synk` does not import it."""

from typing import Any as _Any

from .._base.old_names import instead_of as _instead_of
from .synchronous import Step, step

__all__ = ["Step", "step"]

for _name in __all__:
    globals()[_name].__module__ = "synk.train"


def __getattr__(name: str) -> _Any:
    raise AttributeError(f"module 'synk.train' has no attribute {name!r}{_instead_of(name)}")
