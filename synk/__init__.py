"""Data parallelism for plain JAX functions: write the serial program, run it on every device."""

import importlib as _importlib
import typing as _typing

from ._base import old_names as _old_names
from ._base.errors import (
    CheckpointError,
    DisagreementError,
    DivergedError,
    LawError,
    PeerError,
    Preempted,
    SharedLostError,
    SynkError,
)
from ._data.dataset import Data, data
from ._data.minibatches import minibatches
from ._data.overlap import Overlap
from ._data.prefetch import prefetch
from ._data.process_rows import local
from ._data.row_keys import row_keys
from ._distributed.init import close, group, init, simulate
from ._function.decorator import function
from ._function.function import Function
from ._loops.iterate import each
from ._reductions.monoid import Monoid
from ._reductions.reduction import Weighted
from ._runtime.group import Group
from ._synkhronos import build_inputs, fork
from ._tracing.context import part_key, rank, row_numbers, size
from ._variables.collectives import (
    all_gather,
    all_reduce,
    broadcast,
    gather,
    get_lengths,
    get_shapes,
    get_value,
    reduce,
    scatter,
    set_value,
)
from ._variables.variable import Shared, shared

__version__ = "0.1.0"

__all__ = [
    "CheckpointError", "Data", "DisagreementError", "DivergedError", "Function", "Group", "LawError", "Monoid",
    "Overlap", "PeerError", "Preempted", "Shared", "SharedLostError", "SynkError", "Weighted", "all_gather",
    "all_reduce", "broadcast", "build_inputs", "check_program", "check_replicas", "close", "data", "each", "fork",
    "function", "gather", "get_lengths", "get_shapes", "get_value", "group", "info", "init", "load", "local", "map",
    "minibatches", "pairs", "part_key", "preempted", "prefetch", "rank", "reduce", "resume", "row_keys", "row_numbers",
    "save", "scan", "scatter", "set_value", "shared", "simulate", "size", "target", "unstack",
]  # fmt: skip

# Modules that most programs never use are loaded at first use, so that `import synk` is quick: public ones, and those
# of these names.
_MODULES = ("orbax", "stats", "train", "typing")
_AT_FIRST_USE = {
    "check_program": "_check.program",
    "check_replicas": "_variables.replica_check",
    "info": "_explain.info",
    "load": "_variables.checkpoint",
    "map": "_function.row_map",
    "pairs": "_skeletons.pairs",
    "preempted": "_distributed.preemption",
    "resume": "_loops.resume",
    "save": "_variables.checkpoint",
    "scan": "_skeletons.scan",
    "target": "_runtime.target",
    "unstack": "_base.unstack",
}
if _typing.TYPE_CHECKING:  # what a checker of the user's program reads beside `__getattr__`
    from . import orbax as orbax
    from . import stats as stats
    from . import train as train
    from . import typing as typing
    from ._base.unstack import unstack
    from ._check.program import check_program
    from ._distributed.preemption import preempted
    from ._explain.info import info
    from ._function.row_map import map
    from ._loops.resume import resume
    from ._runtime.target import target
    from ._skeletons.pairs import pairs
    from ._skeletons.scan import scan
    from ._variables.checkpoint import load, save
    from ._variables.replica_check import check_replicas


def _show(name: str, value: _typing.Any) -> None:
    """Show users `synk.function`, never `synk._function.decorator.function`, in tracebacks and help()."""
    globals()[name] = value
    value.__module__ = "synk"


for _name in __all__:
    if _name not in _AT_FIRST_USE:
        _show(_name, globals()[_name])


def __getattr__(name: str) -> _typing.Any:
    """Load what is loaded at first use, which needs no import."""
    if name in _MODULES:
        return _importlib.import_module(f"synk.{name}")
    if name in _AT_FIRST_USE:
        _show(name, getattr(_importlib.import_module(f"synk.{_AT_FIRST_USE[name]}"), name))
        return globals()[name]
    if name == "pytensor":  # whoever looks through all members must not switch JAX's 64-bit mode by that
        raise AttributeError("synk.pytensor is not loaded yet: import synk.pytensor, which sets JAX's 64-bit mode.")
    raise AttributeError(f"module 'synk' has no attribute {name!r}{_old_names.instead_of(name)}")


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted([*__all__, *_MODULES, "pytensor", *(name for name in globals() if name.startswith("__"))])
