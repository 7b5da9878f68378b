"""Data parallelism for plain JAX functions: write the serial program, run it on every device."""

from ._checkpoint import load, save
from ._collectives import (
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
from ._data import Data, data
from ._errors import DisagreementError, DivergedError, LawError, PeerError, SharedLostError, SynkError
from ._fingerprint import check_replicas
from ._flat import shared
from ._function import Function, function
from ._group import Group, close, group, init, simulate
from ._local import local
from ._minibatches import minibatches
from ._ops import Weighted
from ._prefetch import prefetch
from ._processes import preempted
from ._random import row_keys
from ._shared import Shared
from ._synkhronos import build_inputs, distribute, fork
from ._task import Stats
from ._trace import rank, size

__version__ = "0.1.0"

__all__ = [
    "Data",
    "DisagreementError",
    "DivergedError",
    "Function",
    "Group",
    "LawError",
    "PeerError",
    "Shared",
    "SharedLostError",
    "Stats",
    "SynkError",
    "Weighted",
    "all_gather",
    "all_reduce",
    "broadcast",
    "build_inputs",
    "check_replicas",
    "close",
    "data",
    "distribute",
    "fork",
    "function",
    "gather",
    "get_lengths",
    "get_shapes",
    "get_value",
    "group",
    "init",
    "load",
    "local",
    "minibatches",
    "preempted",
    "prefetch",
    "rank",
    "reduce",
    "row_keys",
    "save",
    "scatter",
    "set_value",
    "shared",
    "simulate",
    "size",
]

# Show users `synk.function`, never `synk._function.function`, in tracebacks and help().
for _name in __all__:
    globals()[_name].__module__ = "synk"
