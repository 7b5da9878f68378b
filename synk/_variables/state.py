"""State: what a shared variable holds at one moment: a record that is replaced whole, and can be gone back to."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import jax
import numpy as np

from .._base.errors import SynkError
from .._base.jax_context import config, is_traced
from .._runtime.layout import Layout
from .._tracing.context import current_trace

_WIDE = tuple(map(np.dtype, ("int64", "uint64", "float64", "complex128")))


@dataclass(frozen=True)
class AbstractState:
    """What programs depend on, beside the value's tree, which stays."""

    shapes: tuple[jax.ShapeDtypeStruct, ...]  # of each stored leaf on one replica; of rows, on that with the most
    layout: Layout = "replicated"  # as long as nothing has made replicas differ, then "stacked"
    rows_per_replica: tuple[int, ...] | None = None  # where it holds rows

    @cached_property
    def is_wide(self) -> bool:
        """Does it hold numbers that JAX has only while `jax_enable_x64` is on?"""
        return any(shape.dtype in _WIDE for shape in self.shapes)

    def part_shapes(self, rows: int | None) -> Sequence[jax.ShapeDtypeStruct]:
        """Of the value that a function sees; of one that holds rows, of so many."""
        if self.rows_per_replica is None or rows is None:
            return self.shapes
        return [jax.ShapeDtypeStruct((rows, *s.shape[1:]), s.dtype) for s in self.shapes]

    def global_shapes(self, size: int) -> list[jax.ShapeDtypeStruct]:
        """Of the arrays of a group of this size."""
        front = (size,) if self.layout == "stacked" else ()
        return [jax.ShapeDtypeStruct((*front, *s.shape), s.dtype) for s in self.shapes]


@dataclass(frozen=True, eq=False)
class VariableState:
    """The leaves of a shared variable and what is known of them."""

    leaves: list[jax.Array]  # stored leaves, global arrays of the variable's group
    abstract: AbstractState
    is_equal: bool = True  # whether all replicas hold one value, as far as synk knows
    diverged_by: str = ""  # what made them differ
    failure: tuple[str, Exception] | None = None  # (function, cause) where it was donated to a program that died

    @property
    def layout(self) -> Layout:
        return self.abstract.layout

    @property
    def rows_per_replica(self) -> tuple[int, ...] | None:
        return self.abstract.rows_per_replica


def with_layout(state: AbstractState, layout: Layout | None) -> AbstractState:
    """The same with another layout, if one is given."""
    return state if layout is None or layout == state.layout else replace(state, layout=layout)


def refuse_narrow(state: AbstractState, name: str) -> None:
    """SynkError where programs would have its 64 bits as 32, silently."""
    if state.is_wide and not config.jax_enable_x64:
        dtypes = ", ".join(sorted({shape.dtype.name for shape in state.shapes if shape.dtype in _WIDE}))
        raise SynkError(
            f"{name}: it holds {dtypes}, made while jax_enable_x64 was on, which is off here. Turn it on, or make a "
            f"variable of 32 bits."
        )


def refuse_inside(name: str, call: str) -> None:
    """Refuse to run inside a function, where a replica sees its own value only."""
    context = current_trace()
    if context is not None:
        raise SynkError(
            f"{context.name}: {call} of {name} is for the serial program, not inside a function. "
            f"There, read and assign {name}.value."
        )


def refuse_traced(name: str, call: str) -> None:
    """Refuse what a transformation would do once, when it is traced, and never again."""
    if is_traced():
        raise SynkError(
            f"{call}: it runs when called, but {name} is used inside jit, grad, vmap or the like, "
            f"which would run it once and never again. Call it outside."
        )
