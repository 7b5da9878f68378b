"""Over: one answer over the rows of many batches. States add up on the replicas, and combine once, at the end."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._base.errors import SynkError
from .._base.pytree import PyTree
from .._call.binding import BoundArguments, CallOptions
from .._call.compiler import Compiler
from .._call.execute import ReadyCall, check_variables, leaves_taken, rows_taken, run, values_of
from .._call.kinds import MOST_ROWS, check_row_count, start
from .._call.parts import split_into_launches, table_of_batch
from .._call.plan import CallPlan, Site
from .._call.rows import Rows
from .._data.transfer import PartRows
from .._runtime.dispatch import LOCK
from .._runtime.executable import run_collective
from .._runtime.layout import constant, layouts, put
from .._tracing.nan_origin import is_finite
from .._variables.state import VariableState
from .._variables.variable import Shared, bind

# Each number of arrays that are joined at once is a program to compile.
_JOINED_AT_ONCE = 32


class _Kept(NamedTuple):
    """Arrays that one launch leaves on the replicas until the end: rows, or an entry for each part.

    Attributes:
      batch: the number of the batch.
      counts: the number of rows of each replica.
      max_rows: the number of rows that the arrays have room for on each replica.
      leaves: the arrays.
    """

    batch: int
    counts: tuple[int, ...]
    max_rows: int
    leaves: list[jax.Array]


class Accumulation:
    """The sums and rows of the batches of `f.over` so far."""

    def __init__(self, site: Site) -> None:
        function = site.function
        if function.then is not None:
            raise ValueError(
                f"{function.name}.over: the function has a then, which follows each call. Put over a function without "
                f"one, and do the rest with its answer."
            )
        self._function = replace(function, is_over=True)
        self._site = site._replace(function=self._function)
        # The first call gives the outputs of all, and the states of variables that all batches must find.
        self._first: ReadyCall | None = None
        self._states: dict[Shared, VariableState] = {}
        self._sums: list[jax.Array] = []
        self._kept: list[_Kept] = []
        self._batches = self._rows = 0
        self._has_rows = np.zeros(site.group.size, bool)

    def add(self, bound: BoundArguments, options: CallOptions) -> None:
        """Run one more batch."""
        if any(bound.spec.overlaps):
            raise ValueError(
                f"{self._function.name}.over: rows at the ends of batches have neighbours in others (synk.Overlap), "
                f"which over runs apart. Call the function on all rows."
            )
        with LOCK:
            start(self._site, bound, options, self._run)

    def _run(self, ready: ReadyCall) -> None:
        """Launch the programs of a batch, which add to the sums."""
        plan, lengths = ready.plan, ready.rows.lengths
        assert lengths is not None and plan.start is not None
        states = {variable: bind(variable, ready.group) for variable in plan.accepts}
        check_variables(ready, states)
        self._check(ready, states, sum(lengths))
        if self._first is None:
            self._sums = run(self._function.name, plan.start, [])
            # The rows of the first batch need not stay in memory.
            self._first, self._states = ready._replace(rows=Rows((), (), (), None), broadcast=[]), states
        read_leaves, rows = leaves_taken(ready, states, plan.reads[0]), rows_taken(ready)
        compiler = _compiler(plan)
        num_sums = len(compiler.carry)
        for parts in split_into_launches(lengths, ready.num_slices):
            values = [*values_of(ready, rows, parts), self._place_table(ready, parts)]
            results = run(self._function.name, plan.program_of(parts), [*read_leaves, self._sums, values])
            self._sums = results[:num_sums]
            self._has_rows |= np.array(parts.counts) > 0
            if compiler.kept_kinds:
                self._kept.append(_Kept(self._batches, parts.counts, parts.max_rows, results[num_sums : len(results)]))
        self._rows += sum(lengths)
        self._batches += 1

    def _place_table(self, ready: ReadyCall, parts: PartRows) -> jax.Array:
        """Bring every replica the table of one launch."""
        group, lengths = ready.group, ready.rows.lengths
        assert lengths is not None
        first_row = self._rows if _compiler(ready.plan).uses_rank else 0
        table = table_of_batch(parts, lengths, first_row, tuple(self._has_rows.tolist()))
        # Numbers of rows are others in each batch.
        if first_row:
            return put(group, np.array(table, np.int32), "replicated")
        return constant(group, "replicated", table, "int32")

    def _check(self, ready: ReadyCall, states: dict[Shared, VariableState], rows: int) -> None:
        """Check that a batch finds the values, and gives the shapes, that the first batch had."""
        name, new = ready.function.name, _compiler(ready.plan)
        if self._rows + rows > MOST_ROWS and (new.uses_rank or True in new.kept_kinds):
            raise ValueError(
                f"{name}.over: rows beyond {MOST_ROWS} have no number in int32. Do without row numbers, and without "
                f"what keeps all rows."
            )
        if self._first is None:
            return
        for variable, state in states.items():
            if self._states.get(variable) is not state:
                change = "was set" if variable in self._states else "came in place of another variable"
                raise SynkError(
                    f"{name}.over: {variable.name} {change} between two batches, but all of them make one answer. Do "
                    f"that before or after."
                )
        old = _compiler(self._first.plan)
        combined = [old.builder.outputs.leaves[i] for i in old.builder.combined]
        for leaf, a, b in zip(combined, old.states, new.states, strict=False):
            if (a.dtype, _entry_shape(leaf, a)) != (b.dtype, _entry_shape(leaf, b)):
                raise ValueError(
                    f"{name}.over: output{leaf.path} is {b.dtype}{list(b.shape)} on a replica in batch "
                    f"{self._batches}, but {a.dtype}{list(a.shape)} in the first: they do not combine. For a row an "
                    f'input row, use "concat".'
                )
        if old.builder.outputs.treedef != new.builder.outputs.treedef:
            raise ValueError(
                f"{name}.over: what it returns has another tree in batch {self._batches} than in the first one. Return "
                f"the same for any number of rows."
            )

    def result(self) -> PyTree:
        """Combine the replicas and return the answer."""
        ready, rows = self._first, self._rows
        if ready is None:
            raise ValueError(f"{self._function.name}.over: there was no batch. An answer needs at least one row.")
        plan, compiler, name = ready.plan, _compiler(ready.plan), self._function.name
        check_row_count(name, plan.least_rows, (rows,))
        order = {is_row: _order_of_rows(self._kept, is_row) for is_row in compiler.kept_kinds}
        places = {True: sum(kept.max_rows for kept in self._kept), False: len(self._kept)}
        totals = {is_row: len(positions) for is_row, positions in order.items()}
        key = ("over", plan, *places.values(), *totals.values())
        with LOCK:
            program = self._site.plans.kept(ready.group, key, lambda: compiler.compile_over(places, totals))
            kept = _join(ready, [kept.leaves for kept in self._kept])
            placed = [put(ready.group, positions, "replicated") for positions in order.values()]
            placed.append(constant(ready.group, "replicated", rows, jnp.result_type(float).name))
            placed.append(constant(ready.group, "replicated", tuple(self._has_rows.tolist()), "bool"))
            values = run(name, program, [[*self._sums, *kept], placed])
            self._function.stats.calls += 1
        if self._function.refuses_nan and not all(map(is_finite, values)):
            raise FloatingPointError(f"{name}.over: its outputs are not finite.")
        return plan.result.tree(values)


def _compiler(plan: CallPlan) -> Compiler:
    assert plan.compiler is not None
    return plan.compiler


def _entry_shape(leaf: Any, state: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    """Return the shape of a state, without the axis of rows if it has one."""
    return state.shape[1:] if leaf.reduction.has_row_entries else state.shape


def _order_of_rows(kept: Sequence[_Kept], is_row: bool) -> np.ndarray:
    """Return the positions of rows (or of entries of parts) in the joined arrays of all replicas, in row order.

    Rows of a batch lie in the order of the replicas, and on each replica in the order of the launches.
    """
    starts = np.cumsum([0, *(launch.max_rows if is_row else 1 for launch in kept)])
    order = sorted((launch.batch, rank, i) for i, launch in enumerate(kept) for rank in range(len(launch.counts)))
    positions: list[np.ndarray] = []
    for _, rank, i in order:
        count = kept[i].counts[rank] if is_row else min(kept[i].counts[rank], 1)
        positions.append(np.arange(count) + (rank * starts[-1] + starts[i]))
    return np.concatenate(positions).astype(np.int32)


def _join(ready: ReadyCall, kept: list[list[jax.Array]]) -> list[jax.Array]:
    """Concatenate each leaf of all launches on its replica; a few at a time, so that there are few programs."""
    while len(kept) > 1:
        groups = [kept[i : i + _JOINED_AT_ONCE] for i in range(0, len(kept), _JOINED_AT_ONCE)]
        kept = [_join_at_once(ready, group) if len(group) > 1 and group[0] else group[0] for group in groups]
    return kept[0] if kept else []


def _join_at_once(ready: ReadyCall, kept: list[list[jax.Array]]) -> list[jax.Array]:
    arrays = [array for arrays_of_leaf in zip(*kept, strict=True) for array in arrays_of_leaf]
    ins, outs = layouts("stacked", len(arrays)), layouts("stacked", len(kept[0]))
    return run_collective(ready.group, _concatenate(len(kept)), ins, outs, arrays)


@lru_cache(maxsize=_JOINED_AT_ONCE)
def _concatenate(count: int) -> Callable[..., list[jax.Array]]:
    """Return what concatenates each `count` arrays in a row; one function a count, since a program is kept by it."""
    return lambda *arrays: [jnp.concatenate(arrays[i : i + count]) for i in range(0, len(arrays), count)]
