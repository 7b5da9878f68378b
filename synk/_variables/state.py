"""State: what a shared variable holds at one moment. A state never changes; a new one replaces it whole."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Final
from weakref import WeakKeyDictionary, ref

import jax
import numpy as np

from .._base.errors import SynkError
from .._base.jax_context import config
from .._base.partition import lengths_of
from .._runtime.group import Group
from .._runtime.layout import stack_parts
from .._runtime.way import Layout

_WIDE = tuple(map(np.dtype, ("int64", "uint64", "float64", "complex128")))


@dataclass(frozen=True, init=False)
class AbstractState:
    """The part of a state that programs are compiled for. Equal ones that live at once are one object.

    Attributes:
      shapes: of each stored leaf on one replica; of a variable that holds rows, on the replica with the most.
      layout: "replicated" until something makes replicas differ, then "stacked".
      rows_per_replica: how many rows each replica holds; None if the variable holds no rows.
    """

    shapes: tuple[jax.ShapeDtypeStruct, ...]
    layout: Layout = "replicated"
    rows_per_replica: tuple[int, ...] | None = None

    _living: ClassVar[WeakKeyDictionary["AbstractState", ref["AbstractState"]]] = WeakKeyDictionary()

    def __new__(
        cls,
        shapes: tuple[jax.ShapeDtypeStruct, ...],
        layout: Layout = "replicated",
        rows_per_replica: tuple[int, ...] | None = None,
    ) -> "AbstractState":
        new = super().__new__(cls)
        vars(new).update(shapes=shapes, layout=layout, rows_per_replica=rows_per_replica)
        # A warm call compares the state of each variable, which takes as long as its leaves are many. Not so of one
        # object with itself.
        return cls._living.setdefault(new, ref(new))() or new

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, AbstractState):
            return NotImplemented
        return (self.layout, self.rows_per_replica, self.shapes) == (other.layout, other.rows_per_replica, other.shapes)

    @cached_property
    def wide_dtypes(self) -> tuple[str, ...]:
        """Name the dtypes that JAX has only while `jax_enable_x64` is on."""
        return tuple(sorted({shape.dtype.name for shape in self.shapes if shape.dtype in _WIDE}))

    def part_shapes(self, rows: int | None) -> Sequence[jax.ShapeDtypeStruct]:
        """Return the shapes inside a function. A variable that holds rows is seen with `rows` rows."""
        # Stored rows are padded to those of the replica with the most; a function must not see the padding.
        if self.rows_per_replica is None or rows is None:
            return self.shapes
        return [jax.ShapeDtypeStruct((rows, *s.shape[1:]), s.dtype) for s in self.shapes]

    def rows_of(self, rank: int | None) -> int | None:
        """Return how many rows a replica holds; None if the variable holds no rows, or for no rank."""
        return None if self.rows_per_replica is None or rank is None else self.rows_per_replica[rank]

    def dealt_out(self, replicas: int) -> "AbstractState":
        """Return the state with its rows dealt out to so many replicas, or itself if it holds none."""
        if self.rows_per_replica is None:
            return self
        # Stored shapes have the rows of the longest part, which changes with the number of replicas.
        lengths = lengths_of(sum(self.rows_per_replica), replicas)
        return replace(self, shapes=tuple(self.part_shapes(max(lengths))), rows_per_replica=lengths)

    def global_shapes(self, size: int) -> list[jax.ShapeDtypeStruct]:
        front = (size,) if self.layout == "stacked" else ()
        return [jax.ShapeDtypeStruct((*front, *s.shape), s.dtype) for s in self.shapes]


@dataclass(eq=False, slots=True, weakref_slot=True)
class VariableState:
    """The leaves of a shared variable and what is known of them. Nothing assigns to a state that is made.

    Attributes:
      leaves: the stored leaves, global arrays of the variable's group.
      abstract: their shapes and layout.
      is_equal: whether all replicas hold one value, as far as synk knows.
      diverged_by: the function or call that made replicas differ.
      failure: the function whose program died before it wrote these leaves, and the cause.
    """

    # Final and not frozen: each call makes states, and a frozen dataclass takes three times as long to make.
    leaves: Final[list[jax.Array]]
    abstract: Final[AbstractState]
    is_equal: Final[bool] = True
    diverged_by: Final[str] = ""
    failure: Final[tuple[str, Exception] | None] = None

    @property
    def layout(self) -> Layout:
        return self.abstract.layout

    @property
    def rows_per_replica(self) -> tuple[int, ...] | None:
        return self.abstract.rows_per_replica


def state_of_leaves(
    leaves: list[Any], layout: Layout, rows: Sequence[int] | None = None, diverged_by: str = ""
) -> VariableState:
    """Make a state of new leaves. Replicas are equal unless they hold rows, or `diverged_by` says why not."""
    shapes = tuple(jax.ShapeDtypeStruct(leaf.shape[layout == "stacked" :], leaf.dtype) for leaf in leaves)
    abstract = AbstractState(shapes, layout, None if rows is None else tuple(rows))
    return VariableState(leaves, abstract, not diverged_by and rows is None, diverged_by)


def state_of_rows(group: Group, parts: Sequence[Sequence[Any]]) -> VariableState:
    """Make the state in which replicas hold rows: `parts[rank]` are the leaves of one replica."""
    rows = tuple(int(leaves[0].shape[0]) for leaves in parts)
    stacked = [stack_parts(group, leaves, max(rows)) for leaves in zip(*parts, strict=True)]
    return state_of_leaves(stacked, "stacked", rows)


def deal_out(group: Group, leaves: Sequence[np.ndarray], lengths: Sequence[int]) -> VariableState:
    """Make the state in which replicas hold so many of the rows of leaves."""
    cuts = np.cumsum(lengths)[:-1]
    return state_of_rows(group, [*zip(*[np.split(leaf, cuts) for leaf in leaves], strict=True)])


def with_layout(state: AbstractState, layout: Layout | None) -> AbstractState:
    return state if layout is None or layout == state.layout else replace(state, layout=layout)


def refuse_narrow(state: AbstractState, name: str) -> None:
    """Raise SynkError where programs would silently take 64 bits as 32."""
    if state.wide_dtypes and not config.jax_enable_x64:
        raise SynkError(
            f"{name}: it holds {', '.join(state.wide_dtypes)}, made while jax_enable_x64 was on, which is off here. "
            f"Turn it on, or make a variable of 32 bits."
        )
