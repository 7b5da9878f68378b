"""State: what a shared variable holds at one moment: a record that is replaced whole, and can be gone back to."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax

from .._runtime.layout import Layout


@dataclass(frozen=True)
class AbstractState:
    """What programs depend on, beside the value's tree, which stays."""

    shapes: tuple[jax.ShapeDtypeStruct, ...]  # of each stored leaf on one replica; of rows, on that with the most
    layout: Layout = "replicated"  # as long as nothing has made replicas differ, then "stacked"
    rows_per_replica: tuple[int, ...] | None = None  # where it holds rows

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
