"""Spec: what a function is asked to do, and all that the programs of one kind of call depend on."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from .._base.errors import shown
from .._base.pytree import PyTree
from .._base.units import counted
from .._data.feed import InputFeed
from .._data.selection import IndexKind
from .._reductions.outputs import PerPart
from .._reductions.reduction import REDUCTIONS, UNREDUCED_MEAN
from .._runtime.way import AXIS
from .binding import ArgumentBinder, ArgumentSpec, CallOptions


class Stats:
    """Counters of a function's calls so far.

    Attributes:
      calls: number of calls.
      compilations: number of programs compiled, or read from the folder of `synk.init(cache=...)`.
      rows: number of rows of all calls.
      slices: number of slices of the newest call.
      replica_imbalance: of the newest call of a map with `cost=`: the most work of a replica over the mean of all.
      slice_imbalance: likewise the largest cost of a slice, for which its rows wait, over the mean of its rows.
      selecting: seconds spent checking arguments and batches.
      sending: seconds spent picking rows and starting to bring them to the devices.
      dispatching: seconds spent starting programs, compilation included.
      loading: seconds for which loops of the function (`iterate`, `stream`, `over`) waited for their loader or batches.

    Example:
      >>> import jax.numpy as jnp, numpy as np, synk
      >>> f = synk.function(jnp.sum)
      >>> _ = f(np.ones(8)), f(np.ones(8))
      >>> f.stats.calls, f.stats.compilations, f.stats.rows
      (2, 1, 16)
    """

    __slots__ = (
        "calls", "compilations", "dispatching", "loading", "replica_imbalance", "rows", "selecting", "sending",
        "slice_imbalance", "slices",
    )  # fmt: skip

    def __init__(self) -> None:
        self.calls = self.compilations = self.rows = 0
        self.slices = 1
        self.replica_imbalance = self.slice_imbalance = 1.0
        self.selecting = self.sending = self.dispatching = self.loading = 0.0

    def __repr__(self) -> str:
        return f"Stats({', '.join(f'{name}={getattr(self, name):.6g}' for name in self.__slots__)})"


@dataclass(frozen=True, eq=False)
class FunctionSpec:
    """A function as its user asked for it.

    Attributes:
      ops: a tree of reductions, a prefix of what `fn` returns.
      then: the function of the combined outputs.
      then_parameters: returns the names of the parameters that `then` has after so many outputs.
      engine: how programs are mapped over replicas.
      donate: whether old values of updated variables may be overwritten.
      made_by: the call that made the function, in messages.
      axis_name: what the axis of the replicas is called in `fn` and `then`.
      of_one_row: whether `fn` takes one row, and is mapped over those of a part; "axis" if rows communicate, so that
        there is one on each replica.
      refuses_nan: whether a call whose numbers are not finite raises and commits nothing.
      compiler_options: options of XLA, beside those that synk sets.
      has_barrier: whether a barrier may stand between combining and `then`.
      wires: the formats in which sums travel, a prefix of what `fn` returns; None for their own.
      blocks: rows of a block, if rows are dealt out in blocks.
      plain: for a `then` that adds up unreduced sums: the same function with sums that synk has made.
      per_part: the outputs of which `f.check` keeps the parts.
      is_over: whether calls are batches of `f.over`.
      gathers_all: whether outputs that would stay on the replicas are gathered.
      inside: what messages advise where the function is called inside another one.
      advice: what messages advise where the function breaks the law.
      log: the function of the user's that `then` calls, for a function of synk's own.
      on_first_call: takes site, arguments, options and plan (None under a trace) of the first call of each kind before
        it runs.
      output_names: for synk's own functions, what users call the outputs whose paths begin so, and whether the user
        named their op.
    """

    name: str
    fn: Callable[..., PyTree]
    ops: PyTree
    engine: str
    donate: bool
    then: Callable[..., PyTree] | None = None
    then_parameters: Callable[[int], Sequence[str]] = lambda count: ()
    stats: Stats = field(default_factory=Stats)
    made_by: str = "synk.function"
    axis_name: str = AXIS
    of_one_row: Literal["", "alone", "axis"] = ""
    refuses_nan: bool = False
    compiler_options: tuple[tuple[str, Any], ...] = ()
    has_barrier: bool = True
    wires: PyTree = None
    blocks: int | None = None
    plain: "FunctionSpec | None" = None
    per_part: PerPart = ""
    is_over: bool = False
    gathers_all: bool = False
    inside: str | None = None
    advice: str = "Name ops with outputs= or reduce=, and update shared variables in then."
    log: Callable[..., PyTree] | None = None
    on_first_call: Callable[..., None] = lambda *call: None
    output_names: Mapping[str, tuple[str, bool]] = field(default_factory=dict)

    def name_of_output(self, path: str) -> tuple[str, bool]:
        """Return the name of an output in messages, and whether the user named its op."""
        for start, (name, is_named) in self.output_names.items():
            if path.startswith(start):
                return name + path[len(start) :], is_named
        return f"output{path}", True

    def gathering(self) -> "FunctionSpec":
        """Return the function whose outputs are whole: no rows stay on replicas, and sums are made before `then`."""
        if self.plain is not None:
            return replace(self.plain, gathers_all=True)
        if all(op.collective != "scatter" for op in jax.tree.leaves(self.ops)):
            return self
        ops = jax.tree.map(lambda op: REDUCTIONS["concat"] if op.collective == "scatter" else op, self.ops)
        return replace(self, ops=ops, gathers_all=True)

    def exact(self) -> "FunctionSpec":
        """Return the function whose sums travel as they are."""
        return replace(self, wires=None, blocks=None)

    @cached_property
    def by_user(self) -> tuple[Any, ...]:
        """Return the functions of the user's, whose names calls look up."""
        return (self.fn, self.then, self.log, *self.ops_by_user)

    @cached_property
    def ops_by_user(self) -> list[Any]:
        return [op.finalize for op in jax.tree.leaves(self.ops) if op.name == "callable"]

    @cached_property
    def flags(self) -> tuple[Any, ...]:
        """Return what kinds of calls depend on, beside arguments and options."""
        return (
            self.then is None, self.per_part, self.gathers_all, self.refuses_nan, self.wires is None, self.blocks,
            self.donate, self.is_over, self.gathers,
        )  # fmt: skip

    @cached_property
    def needs_parts(self) -> bool:
        """Tell whether it speaks of the parts of a call, and so cannot run all rows as one part."""
        ops = jax.tree.leaves(self.ops)
        has_parts = UNREDUCED_MEAN in ops or any(op.name in ("scatter", "stack", "callable") for op in ops)
        return has_parts or self.blocks is not None or bool(self.of_one_row or jax.tree.leaves(self.wires))

    @cached_property
    def gathers(self) -> bool:
        """Tell whether an output has an entry a row or a part, so that programs depend on their numbers."""
        return bool(self.per_part) or any(op.collective == "gather" for op in jax.tree.leaves(self.ops))


class Repeat(NamedTuple):
    """Several calls in a row by one program.

    Attributes:
      most: how many calls there may be.
      own: the broadcast arguments, by number, of which each call has a value of its own.
    """

    most: int
    own: tuple[int, ...]


class CallSpec(NamedTuple):
    """Key of the plan of one kind of call: all that its programs depend on, beside shared variables.

    Attributes:
      arguments: the tree and the modes of the arguments.
      options: JAX's trace options.
      rows: shape and dtype of a row of each scattered argument.
      feeds: how the rows of each scattered argument reach a replica.
      broadcast: shape, dtype and weakness of each broadcast argument.
      keys: the PRNG implementation of each leaf, or None, in the order of the tree.
      held_index: how `batch_s` picks from the rows that variables hold.
      asked: options of the call, without those that are told by rows and parts.
      part_sizes: for the first launch and for each further kind of launch, the numbers of rows that parts have, most
        first. Which replica has how many is data. ((None,),) for a call without rows.
      lengths: rows of each replica, if programs depend on them.
      is_even: whether all replicas have equally many rows.
      num_slices: 1 for one launch; else the number of slices if programs depend on it, or 2.
      is_composed: whether the call is part of an outer transformation.
      block: rows of a block, if each replica runs its blocks one by one in one launch.
      repeat: the calls that a program runs one after another; None for one call.
    """

    arguments: ArgumentSpec
    options: tuple[Any, ...]
    rows: tuple[tuple[tuple[int, ...], np.dtype], ...]
    feeds: tuple[InputFeed, ...]
    broadcast: tuple[tuple[tuple[int, ...], np.dtype, bool], ...]
    keys: tuple[Any, ...]
    held_index: IndexKind | None = None
    asked: CallOptions = CallOptions()
    donate: bool = False
    part_sizes: tuple[tuple[int | None, ...], ...] = ((None,),)
    lengths: tuple[int, ...] | None = None
    is_even: bool = True
    num_slices: int = 1
    is_composed: bool = False
    is_over: bool = False
    block: int | None = None
    repeat: Repeat | None = None

    @property
    def row_shapes(self) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in self.rows]

    @property
    def broadcast_shapes(self) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(shape, dtype, weak_type=weak) for shape, dtype, weak in self.broadcast]

    @property
    def is_sliced(self) -> bool:
        """Tell whether a replica has several parts."""
        return self.num_slices > 1 or self.is_over

    @property
    def is_plain(self) -> bool:
        """Tell whether every replica has one part of equally many rows, so that no program needs a table of parts."""
        return not self.is_sliced and len(self.part_sizes[0]) == 1 and self.block is None

    @property
    def has_rows(self) -> bool:
        """Tell whether the call has scattered arguments, or a variable that holds rows."""
        return self.part_sizes != ((None,),)


def with_then(spec: FunctionSpec, binder: ArgumentBinder, then: Callable[..., PyTree]) -> FunctionSpec:
    if not callable(then):
        raise TypeError(f"{spec.name}: then is {shown(then)}; give a function of the combined outputs.")
    parameters = list(inspect.signature(then).parameters.values())

    def following(outputs: int) -> list[str]:
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
