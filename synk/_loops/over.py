"""Over: one answer over the rows of many batches: states add up on the replicas, and combine once, at the end."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._base.errors import SynkError
from .._base.pytree import PyTree
from .._call.binding import BoundArguments, CallOptions
from .._call.compiler import Compiler
from .._call.execute import ReadyCall, check_held_rows, leaves_taken, place_table, rows_taken, run, values_of
from .._call.kinds import MOST_ROWS
from .._call.parts import split_into_launches
from .._call.plan import CallPlan, Site
from .._call.prepare import check_row_count, prepare, start
from .._call.rows import RowInputs
from .._runtime.dispatch import LOCK
from .._runtime.executable import run_collective
from .._runtime.layout import constant, layouts, put
from .._tracing.nan_origin import is_finite
from .._variables.state import VariableState
from .._variables.variable import Shared, bind

_TOGETHER = 32  # pieces that are joined at a time


class _Piece(NamedTuple):
    """What one launch has given to keep until the end."""

    batch: int
    counts: tuple[int, ...]  # rows of each replica
    max_rows: int  # places that each replica has for them
    leaves: list[jax.Array]


class Accumulation:
    """What the batches of `f.over` have given so far."""

    def __init__(self, site: Site) -> None:
        function = site.function
        if function.then is not None:
            raise ValueError(
                f"{function.name}.over: the function has a then, which follows each call. Put over a function without "
                f"one, and do the rest with its answer."
            )
        self._function = replace(function, is_over=True)
        self._site = replace(site, function=self._function)
        self._first: ReadyCall | None = None
        self._states: dict[Shared, VariableState] = {}  # as the first batch found them
        self._carry: list[jax.Array] = []
        self._pieces: list[_Piece] = []
        self._batches = self._rows = 0
        self._seen = np.zeros(site.group.size, bool)  # which replicas had rows

    def add(self, bound: BoundArguments, options: CallOptions) -> None:
        """Run one more batch."""
        if any(bound.spec.overlaps):
            raise ValueError(
                f"{self._function.name}.over: rows at the ends of batches have neighbours in others (synk.Overlap), "
                f"which over runs apart. Call the function on all rows."
            )
        ready = partial(prepare, self._site, bound, options)
        with LOCK:
            start(self._function, ready, self._run)

    def _run(self, ready: ReadyCall) -> None:
        plan, lengths = ready.plan, ready.rows.lengths
        assert lengths is not None and plan.start is not None
        states = {variable: bind(variable, ready.group) for variable in plan.accepts}
        check_held_rows(ready, states)
        self._check(ready, states, sum(lengths))
        if self._first is None:
            self._carry = run(self._function.name, plan.start, [])
            self._first = ready._replace(rows=RowInputs((), None), broadcast=[])  # which need not be kept
        leaves, rows = leaves_taken(ready, states), rows_taken(ready)
        of_variables = [leaves[variable] for variable in plan.reads[0]]
        compiler = _compiler(plan)
        count = len(compiler.carry)
        several = split_into_launches(lengths, ready.num_slices)
        ready.function.stats.slices = len(several)
        for j, parts in enumerate(several, 1):
            table = place_table(ready, parts, ended=sum(lengths) if j == len(several) else 0)
            values = [*values_of(ready, rows, parts), table]
            found = run(self._function.name, plan.program_of(parts), [*of_variables, self._carry, values])
            self._carry = found[:count]
            self._seen |= np.array(parts.counts) > 0
            if compiler.kept_kinds:
                self._pieces.append(_Piece(self._batches, parts.counts, parts.max_rows, found[count : len(found)]))
        self._rows += sum(lengths)
        self._batches += 1

    def _check(self, ready: ReadyCall, states: dict[Shared, VariableState], rows: int) -> None:
        """All batches find the same values and give outputs of the same shapes."""
        name, new = ready.function.name, _compiler(ready.plan)
        for variable, state in states.items():
            if self._first is not None and variable not in self._states:
                raise SynkError(
                    f"{name}.over: {variable.name} came in place of another variable between two batches, but all of "
                    f"them make one answer. Put it there before or after."
                )
            if self._states.setdefault(variable, state) is not state:
                raise SynkError(
                    f"{name}.over: {variable.name} was set between two batches, but all of them make one answer. Set "
                    f"it before or after."
                )
        if self._rows + rows > MOST_ROWS and (new.builder.first.uses_rank or True in new.kept_kinds):
            raise ValueError(
                f"{name}.over: rows beyond {MOST_ROWS} have no number in int32. Do without row numbers, and without "
                f"what keeps all rows."
            )
        if self._first is None:
            return
        old = _compiler(self._first.plan)
        combined = [old.builder.outputs.leaves[i] for i in old.builder.combined]
        leaves = zip(combined, old.states, new.states, strict=False)
        other = [(leaf.path, a, b) for leaf, a, b in leaves if a.dtype != b.dtype or _shape(leaf, a) != _shape(leaf, b)]
        for path, a, b in other[:1]:
            raise ValueError(
                f"{name}.over: output{path} is {b.dtype}{list(b.shape)} on a replica in batch {self._batches}, but "
                f'{a.dtype}{list(a.shape)} in the first: they do not combine. For a row an input row, use "concat".'
            )
        if old.builder.outputs.treedef != new.builder.outputs.treedef:
            raise ValueError(
                f"{name}.over: what it returns has another tree in batch {self._batches} than in the first one. Return "
                f"the same for any number of rows."
            )

    def finish(self) -> PyTree:
        """Combine the replicas."""
        ready, rows = self._first, self._rows
        if ready is None:
            raise ValueError(f"{self._function.name}.over: there was no batch. An answer needs at least one row.")
        plan, compiler, name = ready.plan, _compiler(ready.plan), self._function.name
        check_row_count(name, plan.least_rows, (rows,))
        index = {is_row: _row_order(self._pieces, is_row) for is_row in compiler.kept_kinds}
        places = {True: sum(piece.max_rows for piece in self._pieces), False: len(self._pieces)}
        totals = {is_row: len(numbers) for is_row, numbers in index.items()}
        key = ("over", plan, *places.values(), *totals.values())
        with LOCK:
            program = self._site.plans.kept(ready.group, key, lambda: compiler.compile_over(places, totals))
            kept = _joined(ready, [piece.leaves for piece in self._pieces])
            placed = [put(ready.group, each, "replicated") for each in index.values()]
            placed.append(constant(ready.group, "replicated", rows, jnp.result_type(float).name))
            placed.append(constant(ready.group, "replicated", tuple(self._seen.tolist()), "bool"))
            values = run(name, program, [[*self._carry[:-1], *kept], placed])  # not where they end
            self._function.stats.calls += 1
        if self._function.refuses_nan and not all(map(is_finite, values)):
            raise FloatingPointError(f"{name}.over: its outputs are not finite.")
        return plan.result.tree(values)


def _compiler(plan: CallPlan) -> Compiler:
    assert plan.compiler is not None
    return plan.compiler


def _shape(leaf: Any, state: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    """Without rows, where it has some."""
    return state.shape[1:] if leaf.reduced.reduction.has_row_entries else state.shape


def _row_order(pieces: Sequence[_Piece], is_row: bool) -> np.ndarray:
    """Where the rows, or the parts, of all batches lie among what the replicas have kept, in row order."""
    starts = np.cumsum([0, *(piece.max_rows if is_row else 1 for piece in pieces)]).tolist()
    found: list[np.ndarray] = []
    for _, batch in groupby(zip(pieces, starts, strict=False), key=lambda each: each[0].batch):
        launched = list(batch)
        for rank in range(len(pieces[0].counts)):
            for piece, first in launched:
                count = piece.counts[rank] if is_row else min(piece.counts[rank], 1)
                found.append(np.arange(count) + (rank * starts[-1] + first))
    return np.concatenate(found).astype(np.int32)


def _joined(ready: ReadyCall, kept: list[list[jax.Array]]) -> list[jax.Array]:
    """What all launches have kept as one array of each: a few at a time, so that few programs do it."""
    while len(kept) > 1:
        several = [kept[i : i + _TOGETHER] for i in range(0, len(kept), _TOGETHER)]
        kept = [_join(ready, each) if len(each) > 1 and each[0] else each[0] for each in several]
    return kept[0] if kept else []


def _join(ready: ReadyCall, kept: list[list[jax.Array]]) -> list[jax.Array]:
    arrays = [leaf for leaves in zip(*kept, strict=True) for leaf in leaves]  # those of one leaf together
    ins, outs = layouts("stacked", len(arrays)), layouts("stacked", len(kept[0]))
    return run_collective(ready.group, _concatenate(len(kept)), ins, outs, arrays)


@lru_cache(maxsize=_TOGETHER)
def _concatenate(count: int) -> Callable[..., list[jax.Array]]:
    """A program that concatenates so many at a time."""
    return lambda *arrays: [jnp.concatenate(arrays[i : i + count]) for i in range(0, len(arrays), count)]
