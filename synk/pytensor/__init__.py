"""Graphs of PyTensor, Theano's living descendant, on every device. Needs the extra `pytensor`.

PyTensor switches JAX's 64-bit mode, of the whole process, when its JAX back end is imported, which this module does:
on where `pytensor.config.floatX` is "float64" (its default), off where it is "float32". So set `floatX` before.
"""

from .build import function
from .held import shared

__all__ = ["function", "shared"]

for _name in __all__:
    globals()[_name].__module__ = "synk.pytensor"
