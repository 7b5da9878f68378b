"""Held: keep the values of PyTensor's shared variables in shared variables of synk, on every device."""

from typing import Any

import jax
import numpy as np
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.link.basic import Container
from pytensor.tensor.type import TensorType

import synk

from ..._base.errors import public_api, shown


class _HeldElsewhere:
    """A stand-in for a value that synk holds, in functions that PyTensor compiled before; any use of it raises."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(
            "synk holds a shared variable of this function since a function of synk.contrib.pytensor was made. Make "
            "PyTensor's own functions after that one."
        )


class _Storage(list):
    """The list of one element in which PyTensor keeps a value; reads and assigns a shared variable of synk instead."""

    def __init__(self, held: synk.typing.Shared, dtype: str, before: list[Any]) -> None:
        super().__init__([_HeldElsewhere()])
        self.held = held
        self._dtype = dtype
        self._before = before  # the list in which PyTensor's earlier functions look for the value

    def __getitem__(self, index: Any) -> Any:
        self.check()
        return np.array(self.held.value, self._dtype)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.held.value = _fitting(np.asarray(value, self._dtype), self.held.name)
        for cells in (self._before, self):
            list.__setitem__(cells, 0, _HeldElsewhere())

    def __reduce__(self) -> Any:
        # Pickled with its value, as PyTensor's own list: another process has no variable of synk's.
        return list, ([self[0]],)

    def check(self) -> None:
        """Raise RuntimeError if a function of PyTensor has set the value where synk does not see it."""
        # C linkers write to the list itself, without `__setitem__`.
        for cells, made in ((self._before, "was made before synk held it"), (self, "runs by PyTensor's C linker")):
            if not isinstance(list.__getitem__(cells, 0), _HeldElsewhere):
                raise RuntimeError(
                    f"{self.held.name}: a function that {made} has set it, which synk does not see. Make it after "
                    f"those of synk.contrib.pytensor, in mode NUMBA, JAX or FAST_COMPILE, and set the value again."
                )


class _Container(Container):
    """A container that sets a value without reading the old one, which may be lost."""

    def _assign(self, value: Any) -> None:
        self.storage[0] = self.type.filter(value, strict=self.strict, allow_downcast=self.allow_downcast)

    value = data = property(Container.__get__, _assign)


@public_api
def shared(variable: SharedVariable) -> synk.typing.Shared:
    """Return the synk variable that holds the value of a PyTensor variable, for checkpoints and collectives.

    From the first call on, the value lies on every device, as it does once `synk.contrib.pytensor.function` has taken
    the variable. `get_value`, `set_value`, pickles, and functions that PyTensor compiles afterwards see it there, in
    modes NUMBA (PyTensor's default), JAX and FAST_COMPILE, but not by its C linkers. Functions that PyTensor compiled
    before raise; where one only sets the variable, the next read of the variable raises.

    Args:
      variable: made by `pytensor.shared`; holds an array of numbers.

    Returns:
      A `synk.typing.Shared` of the variable's shape and dtype, with 32 bits where JAX has 64 switched off.

    Raises:
      TypeError: the argument is no shared variable of PyTensor, or holds no array.
      ValueError: its numbers need 64 bits, which JAX has switched off.

    Example:
      >>> import numpy as np, pytensor, synk.contrib.pytensor
      >>> w = pytensor.shared(np.arange(3, dtype="float32"), "w")
      >>> synk.contrib.pytensor.shared(w)
      Shared(w: float32[3])
    """
    if not isinstance(variable, SharedVariable):
        raise TypeError(
            f"synk.contrib.pytensor.shared: {shown(variable)} is no shared variable of PyTensor's (pytensor.shared)."
        )
    container = variable.container
    if isinstance(container.storage, _Storage):
        container.storage.check()
        return container.storage.held
    if not isinstance(variable.type, TensorType):
        raise TypeError(
            f"{variable}: it holds a {variable.type}; synk's variables hold arrays. Random numbers are rows of an "
            f"input, made of synk.row_keys."
        )
    name = variable.name or ""
    held = synk.shared(_fitting(container.storage[0], name or "a shared variable"), name=name or None)
    before = container.storage
    before[0] = _HeldElsewhere()
    container.storage = _Storage(held, variable.type.dtype, before)
    # PyTensor's own container stays the object that its functions refer to, so it is the class that changes.
    container.__class__ = _Container
    return held


def _fitting(value: np.ndarray, name: str) -> np.ndarray:
    """Cast a value to the dtype that JAX has for it; raise ValueError if that loses digits."""
    fits = value.astype(jax.dtypes.canonicalize_dtype(value.dtype))
    if fits.dtype != value.dtype and (value.dtype.kind in "fc" or (fits != value).any()):
        raise ValueError(
            f"{name}: it is of {value.dtype}, but JAX has 64 bits switched off: set pytensor.config.floatX = "
            f'"float32" before graphs are made, or jax.config.update("jax_enable_x64", True).'
        )
    return fits
