"""Graphs of PyTensor, Theano's living descendant, on every device. Needs the extra `pytensor`.

Importing this module imports PyTensor's JAX back end, which sets JAX's 64-bit mode for the whole process: on if
`pytensor.config.floatX` is "float64" (the default), off if it is "float32". So set `floatX` first.
"""

from .build import function
from .held import shared

__all__ = ["function", "shared"]

for _name in __all__:
    globals()[_name].__module__ = "synk.contrib.pytensor"
