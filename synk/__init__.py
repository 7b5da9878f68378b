"""Data parallelism for plain JAX functions: write the serial program, run it on every device."""

import importlib as _importlib
import typing as _typing

from . import errors as errors
from ._base import old_names as _old_names
from ._data.dataset import Data as _Data
from ._data.dataset import data
from ._data.overlap import Overlap
from ._data.process_rows import local
from ._data.row_keys import row_keys
from ._distributed.init import close, group, init, simulate
from ._function.decorator import function
from ._function.function import Function as _Function
from ._loops.iterate import each
from ._loops.minibatches import minibatches
from ._loops.prefetch import prefetch
from ._reductions.monoid import Monoid
from ._reductions.reduction import Weighted
from ._runtime.group import Group as _Group
from ._tracing.context import part_key, rank, row_numbers, size
from ._variables.collectives import all_gather, all_reduce, broadcast, gather, reduce, scatter
from ._variables.variable import Shared as _Shared
from ._variables.variable import shared
from .errors import LawError, SynkError

__version__ = "0.1.0"

__all__ = [
    "LawError", "Monoid", "Overlap", "SynkError", "Weighted", "all_gather", "all_reduce", "broadcast", "check_program",
    "check_replicas", "close", "data", "each", "function", "gather", "group", "info", "init", "load", "local", "map",
    "minibatches", "part_key", "preempted", "prefetch", "rank", "reduce", "resume", "row_keys", "row_numbers", "save",
    "scatter", "shared", "simulate", "size", "target",
]  # fmt: skip

# Modules that most programs never use are loaded at first use, so that `import synk` is quick: public ones, and those
# of these names.
_MODULES = ("contrib", "orbax", "stats", "train", "typing")
_AT_FIRST_USE = {
    "check_program": "_check.program",
    "check_replicas": "_check.replica_check",
    "info": "_explain.info",
    "load": "_saving.checkpoint",
    "map": "_function.row_map",
    "preempted": "_distributed.preemption",
    "resume": "_saving.resume",
    "save": "_saving.checkpoint",
    "target": "_explain.target",
}
if _typing.TYPE_CHECKING:  # what a checker of the user's program reads beside `__getattr__`
    from . import contrib as contrib
    from . import orbax as orbax
    from . import stats as stats
    from . import train as train
    from . import typing as typing
    from ._check.program import check_program
    from ._check.replica_check import check_replicas
    from ._distributed.preemption import preempted
    from ._explain.info import info
    from ._explain.target import target
    from ._function.row_map import map
    from ._saving.checkpoint import load, save
    from ._saving.resume import resume


def _show(name: str, value: _typing.Any) -> None:
    """Show users `synk.function`, never `synk._function.decorator.function`, in tracebacks and help()."""
    globals()[name] = value
    value.__module__ = "synk"


for _name in __all__:
    if _name not in _AT_FIRST_USE:
        _show(_name, globals()[_name])
# `synk.typing` itself is loaded at first use.
for _type in (_Data, _Function, _Group, _Shared):
    _type.__module__ = "synk.typing"


if not _typing.TYPE_CHECKING:  # for a checker of the user's program the names above are all that there are

    def __getattr__(name: str) -> _typing.Any:
        """Load what is loaded at first use, which needs no import."""
        if name in _MODULES:
            return _importlib.import_module(f"synk.{name}")
        if name in _AT_FIRST_USE:
            _show(name, getattr(_importlib.import_module(f"synk.{_AT_FIRST_USE[name]}"), name))
            return globals()[name]
        raise AttributeError(f"module 'synk' has no attribute {name!r}{_old_names.instead_of(name)}")


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted([*__all__, "errors", *_MODULES, *(name for name in globals() if name.startswith("__"))])
