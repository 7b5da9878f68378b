"""Spec: what a function is asked to do, and all that the programs of one kind of call depend on."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np

from .._base.errors import shown
from .._base.pytree import PyTree
from .._base.units import counted
from .._data.feed import InputFeed
from .._data.selection import IndexKind
from .._reductions.outputs import PerPart
from .._reductions.reduction import REDUCTIONS
from .binding import ArgumentBinder, ArgumentSpec


class Stats:
    """What a function has done so far.

    Attributes:
      calls: how often it was called.
      compilations: how many programs were compiled for it.
      rows: how many rows it was given in all.
      slices: in how many slices its newest call ran.
      selecting: seconds spent checking arguments and batches.
      sending: seconds spent picking rows and starting to bring them to the devices.
      dispatching: seconds spent starting programs, compilation included.

    Example:
      >>> import jax.numpy as jnp, numpy as np, synk
      >>> f = synk.function(jnp.sum)
      >>> _ = f(np.ones(8)), f(np.ones(8))
      >>> f.stats.calls, f.stats.compilations, f.stats.rows
      (2, 1, 16)
    """

    __slots__ = ("calls", "compilations", "dispatching", "rows", "selecting", "sending", "slices")

    def __init__(self) -> None:
        self.calls = self.compilations = self.rows = 0
        self.slices = 1
        self.selecting = self.sending = self.dispatching = 0.0

    def __repr__(self) -> str:
        return f"Stats({', '.join(f'{name}={getattr(self, name):.6g}' for name in self.__slots__)})"


@dataclass(frozen=True, eq=False)
class FunctionSpec:
    """What the user asked for."""

    name: str  # what messages call the function
    fn: Callable[..., PyTree]  # the user's
    ops: PyTree  # a tree of reductions, a prefix of its outputs
    then: Callable[..., PyTree] | None  # what follows the combined outputs
    then_parameters: Callable[[int], Sequence[str]]  # (number of outputs) -> the parameters that `then` has after these
    engine: str  # how programs are mapped
    donate: bool  # whether old values of updated variables may be overwritten
    stats: Stats  # what it has done
    refuses_nan: bool = False  # whether a call whose numbers are not finite raises, and commits nothing
    compiler_options: tuple[tuple[str, Any], ...] = ()  # of XLA, beside synk's
    wires: PyTree = None  # as what sums travel, a prefix of its outputs; None: as they are
    blocks: int | None = None  # of how many rows are the blocks that it runs on; None: parts are the replicas' own
    plain: "FunctionSpec | None" = None  # where `then` adds up itself: the same function that leaves it to synk
    per_part: PerPart = ""  # of which outputs the parts are kept as they come, for `f.check`
    is_over: bool = False  # whether calls are parts of one answer, for `f.over`
    gathers_all: bool = False  # whether outputs that would stay where they are made are gathered, as one array
    inside: str | None = None  # what to do inside another function, where none can be called
    advice: str = "Name ops with outputs= or reduce=, and update shared variables in then."  # where it breaks the law

    # Of synk's own functions, what users call an output, and whether they have named its op, by the start of its path.
    output_names: Mapping[str, tuple[str, bool]] = field(default_factory=dict)

    def name_of_output(self, path: str) -> tuple[str, bool]:
        """Return what messages call an output, and whether its op is the user's."""
        for start, (name, is_named) in self.output_names.items():
            if path.startswith(start):
                return name + path[len(start) :], is_named
        return f"output{path}", True

    def gathering(self) -> "FunctionSpec":
        """Return the function that runs under a trace, in the serial run, and to compare.

        Its outputs are whole: no rows stay on replicas, and all sums are made before `then`.
        """
        if self.plain is not None:
            return replace(self.plain, gathers_all=True)
        if all(op.collective != "stay" for op in jax.tree.leaves(self.ops)):
            return self
        ops = jax.tree.map(lambda op: REDUCTIONS["concat"] if op.collective == "stay" else op, self.ops)
        return replace(self, ops=ops, gathers_all=True)

    def exact(self) -> "FunctionSpec":
        """Return the function whose sums travel as they are."""
        return replace(self, wires=None, blocks=None)

    @property
    def donates(self) -> bool:
        """May old values be overwritten? Not where the new ones may be refused."""
        return self.donate and not self.refuses_nan

    @cached_property
    def gathers(self) -> bool:
        """Do some outputs keep an entry a row or a part, so that programs depend on how many there are?"""
        return bool(self.per_part) or any(op.collective == "gather" for op in jax.tree.leaves(self.ops))


class CallSpec(NamedTuple):
    """All that the programs of one kind of call depend on, beside the shared variables: the key of its plan."""

    arguments: ArgumentSpec  # one object a tree of arguments
    options: tuple[Any, ...]  # JAX's trace options
    rows: tuple[tuple[tuple[int, ...], np.dtype], ...]  # shape and dtype of a row of each scattered argument
    feeds: tuple[InputFeed, ...]  # how the rows of each scattered argument reach a replica
    # Shape, dtype and whether that is weak of each broadcast argument.
    broadcast: tuple[tuple[tuple[int, ...], np.dtype, bool], ...]
    keys: tuple[Any, ...]  # the PRNG implementation of each argument leaf, in the order of the tree
    held_index: IndexKind | None = None  # how `batch_s` picks from the rows that variables hold
    subset: tuple[Any, ...] | None = None  # which outputs are asked for
    donate: bool = False  # whether old values may be overwritten
    # For the first launch, and for each further kind of launch, the numbers of rows that parts have, most first;
    # which replica has how many is data. ((None,),) where there are no rows.
    part_sizes: tuple[tuple[int | None, ...], ...] = ((None,),)
    lengths: tuple[int, ...] | None = None  # rows of each replica, where programs depend on them
    is_even: bool = True  # whether all replicas have as many rows
    num_slices: int = 1  # 1; or, of slices, how many where programs depend on that, else 2
    is_composed: bool = False  # whether it is part of an outer transformation
    is_over: bool = False  # whether it is a batch of many, which combine at the end
    block: int | None = None  # of how many rows are the blocks that each replica runs one by one, in one launch

    @property
    def row_shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Shape and dtype of a row of each scattered argument."""
        return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in self.rows]

    @property
    def broadcast_shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the broadcast arguments."""
        return [jax.ShapeDtypeStruct(shape, dtype, weak_type=weak) for shape, dtype, weak in self.broadcast]

    @property
    def is_sliced(self) -> bool:
        """Has a replica several parts?"""
        return self.num_slices > 1 or self.is_over

    @property
    def is_plain(self) -> bool:
        """Has every replica one part of as many rows, so that nothing about parts is data?"""
        return not self.is_sliced and len(self.part_sizes[0]) == 1 and self.block is None

    @property
    def has_rows(self) -> bool:
        """Are there rows?"""
        return self.part_sizes != ((None,),)


def with_then(spec: FunctionSpec, binder: ArgumentBinder, then: Callable[..., PyTree]) -> FunctionSpec:
    """The same function with what follows it."""
    if not callable(then):
        raise TypeError(f"{spec.name}: then is {shown(then)}; give a function of the combined outputs.")
    parameters = list(inspect.signature(then).parameters.values())

    def following(outputs: int) -> list[str]:
        """Names of the parameters that `then` has after the outputs."""
        if any(p.kind == p.VAR_POSITIONAL for p in parameters):
            return []
        there = counted(outputs, "output")
        if len(parameters) < outputs:
            raise TypeError(
                f"{spec.name}.then: it takes {counted(len(parameters), 'argument')}, but {spec.name} has {there}. "
                f"Give it one parameter for each."
            )
        names = []
        for parameter in parameters[outputs:]:
            mode = binder.mode(parameter.name)
            if parameter.name in binder.parameters and mode in ("broadcast", "static"):
                names.append(parameter.name)
            elif parameter.default is parameter.empty:
                raise TypeError(
                    f"{spec.name}.then: its parameter {parameter.name!r} follows {there}, so it must "
                    f'be a "broadcast" or "static" parameter of {spec.name}, which it is not.'
                )
        return names

    return replace(spec, then=then, then_parameters=following)
