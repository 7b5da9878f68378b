"""Training steps by optax. `synk` does not import it."""

import typing as _typing

from .._base.old_names import instead_of as _instead_of
from .synchronous import Step, step

__all__ = ["Step", "step"]

for _name in __all__:
    globals()[_name].__module__ = "synk.train"


if not _typing.TYPE_CHECKING:  # for a checker of the user's program the names above are all that there are

    def __getattr__(name: str) -> _typing.Any:
        raise AttributeError(f"module 'synk.train' has no attribute {name!r}{_instead_of(name)}")
