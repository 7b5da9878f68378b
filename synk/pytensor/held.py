"""Held: PyTensor's shared variables whose values lie on every device, in shared variables of synk's."""

from functools import partial
from typing import Any

import jax
import numpy as np
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.link.basic import Container
from pytensor.tensor.type import TensorType

import synk

from .._base.errors import public_api, shown


class HeldElsewhere:
    """What a function that PyTensor compiled before finds in the place of a value that synk holds; it raises."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(
            "synk holds a shared variable of this function since a function of synk.pytensor was made. Make PyTensor's "
            "own functions after that one."
        )


class _Storage(list):
    """The list of one element in which PyTensor looks for a value; it reads and assigns a shared variable of synk's."""

    def __init__(self, held: synk.Shared, dtype: str, before: list[Any]) -> None:
        super().__init__([HeldElsewhere()])
        self.held = held
        self._dtype = dtype
        self._before = before  # where PyTensor's earlier functions look for the value

    def __getitem__(self, index: Any) -> Any:
        self.check()
        return np.array(self.held.value, self._dtype)

    def check(self) -> None:
        """RuntimeError where a function has set the value past this, so that it is lost."""
        for cells in (self._before, self):
            if not isinstance(list.__getitem__(cells, 0), HeldElsewhere):
                cells_are = "was made before synk held it" if cells is self._before else "runs by PyTensor's C linker"
                raise RuntimeError(
                    f"{self.held.name}: a function that {cells_are} has set it, which synk does not see. Make it after "
                    f"those of synk.pytensor, in mode NUMBA, JAX or FAST_COMPILE, and set the value again."
                )

    def __setitem__(self, index: Any, value: Any) -> None:
        self.held.value = fitting(np.asarray(value, self._dtype), self.held.name)
        for cells in (self._before, self):
            list.__setitem__(cells, 0, HeldElsewhere())

    def __reduce__(self) -> Any:
        return list, ([self[0]],)


class _Container(Container):
    """A container whose value is set without a look at the old one, which may be lost."""

    def _assign(self, value: Any) -> None:
        self.storage[0] = self.type.filter(value, strict=self.strict, allow_downcast=self.allow_downcast)

    value = data = property(Container.__get__, _assign)

    def __reduce__(self) -> Any:
        make = partial(
            Container, readonly=self.readonly, strict=self.strict, allow_downcast=self.allow_downcast, name=self.name
        )
        return make, (self.type, [self.storage[0]])

    def __deepcopy__(self, memo: Any) -> Container:
        make, args = self.__reduce__()
        return make(*args)


@public_api
def shared(variable: SharedVariable) -> synk.Shared:
    """Give the shared variable of synk's that holds a PyTensor variable's value, for checkpoints and collectives.

    From the first time on, the value lies on every device, as it does once `synk.pytensor.function` has taken the
    variable. `get_value`, `set_value`, pickles, and functions that PyTensor compiles afterwards see it there, in modes
    NUMBA (its default), JAX and FAST_COMPILE; not by its C linkers. Functions that PyTensor compiled before raise; one
    that only sets the variable makes what reads it next raise.

    Args:
      variable: one that `pytensor.shared` made, of numbers in an array.

    Returns:
      A `synk.Shared`: an array of the variable's shape; of its dtype, or with 64 bits switched off, of 32 bits.

    Raises:
      TypeError: it is none of PyTensor's shared variables, or holds no array.
      ValueError: its numbers are of 64 bits, which are switched off in JAX.

    Example:
      >>> import numpy as np, pytensor, synk.pytensor
      >>> w = pytensor.shared(np.arange(3, dtype="float32"), "w")
      >>> synk.pytensor.shared(w)
      Shared(w: float32[3])
    """
    if not isinstance(variable, SharedVariable):
        raise TypeError(
            f"synk.pytensor.shared: {shown(variable)} is no shared variable of PyTensor's (pytensor.shared)."
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
    held = synk.shared(fitting(container.storage[0], name or "a shared variable"), name=name or None)
    before = container.storage
    before[0] = HeldElsewhere()
    container.storage = _Storage(held, variable.type.dtype, before)
    container.__class__ = _Container
    return held


def fitting(value: np.ndarray, name: str) -> np.ndarray:
    """The value as JAX has it; ValueError where 64 bits are switched off and it needs them."""
    fits = value.astype(jax.dtypes.canonicalize_dtype(value.dtype))
    if fits.dtype != value.dtype and (value.dtype.kind in "fc" or (fits != value).any()):
        raise ValueError(
            f"{name}: it is of {value.dtype}, but JAX has 64 bits switched off: set pytensor.config.floatX = "
            f'"float32" before graphs are made, or jax.config.update("jax_enable_x64", True).'
        )
    return fits
