"""Run: one call from bound arguments to committed updates, in one launch or several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import _engine, _flight
from ._engine import Lies, Piece
from ._inputs import Inputs, Window, gathered, local_pick, send
from ._ops import Leaf
from ._outputs import Outputs
from ._program import Signature
from ._rows import LocalRows, select_local
from ._shared import Shared
from ._split import Part, cut, runs, waves
from ._task import Built, count, reindexed, split_kinds
from ._trace import Traced

# How many uneven splits of one function get programs for just the devices concerned. Beyond that all devices run every
# part size, those not concerned on copies of real rows: twice the work, but the programs serve every split.
SMALL_SPLITS = 3


class Call(NamedTuple):
    """A call's arguments, checked and flattened."""

    inputs: Inputs
    broadcast: list[jax.Array]
    batch_s: Any  # what picks rows on each replica


class Update(NamedTuple):
    """A variable's new leaves, and whether all replicas have the same."""

    leaves: list[jax.Array]
    lies: Lies
    lengths: tuple[int, ...] | None
    is_equal: bool


class Outcome(NamedTuple):
    """What a call gives: its result's leaves, and new leaves of the variables it updates."""

    leaves: list[jax.Array]
    built: Built
    updates: dict[Shared, Update]

    @property
    def outputs(self) -> Outputs:
        """The structure of what `fn` returned."""
        return self.built.outputs


class Plan(NamedTuple):
    """How a call of so many rows runs."""

    lengths: tuple[int, ...] | None  # rows of each replica; None where the call has no rows
    waves: list[list[Part]]
    local: LocalRows | None = None  # where batch_s picks these rows from more

    @property
    def is_even(self) -> bool:
        """Have all replicas as many rows?"""
        return self.lengths is None or len(set(self.lengths)) == 1

    @property
    def is_plain(self) -> bool:
        """Is one program enough?"""
        return self.is_even and len(self.waves) <= 1


def plan(signature: Signature, call: Call, slices: int) -> Plan:
    """Decide which rows each replica runs."""
    rows, local = call.inputs.rows, call.inputs.local
    if call.batch_s is not None and local is None:
        local = _local_of_variables(signature, call)
    lengths = None if local is None else local.lengths
    if lengths is None:
        if rows is not None:
            key = ("plan", rows, slices)
            return signature.cached(key, lambda: _cut([part.rows for part in cut(rows, signature.group.size)], slices))
        lengths = next((held for _, held in _held(signature, rows)), None)
    if lengths is None and slices > 1:
        raise ValueError(
            f"{signature.task.name}: num_slices={slices} cuts rows, but this call has no scattered input, so no rows."
        )
    return _cut(lengths, slices, local) if lengths else Plan(None, [])


def _cut(lengths: Sequence[int], slices: int, local: LocalRows | None = None) -> Plan:
    return Plan(tuple(lengths), waves(lengths, min(slices, max(lengths))), local)


def _held(signature: Signature, rows: int | None) -> Iterator[tuple[Shared, tuple[int, ...]]]:
    """The variables read that hold rows."""
    for variable in signature.traced(rows, True).reads:
        held = signature.lengths(variable)
        if held is not None:
            yield variable, held


def _local_of_variables(signature: Signature, call: Call) -> LocalRows:
    """What `batch_s` picks from the rows that variables hold; other inputs bring as many."""
    name, rows = signature.task.name, call.inputs.rows
    found = next(_held(signature, rows), None)
    if found is None:
        raise ValueError(
            f"{name}: batch_s picks rows that live on the replicas, but none of its inputs do. Use batch for rows in "
            f"host memory."
        )
    variable, held = found
    local = select_local(call.batch_s, held, name, variable.name)
    if rows is not None and rows != sum(local.lengths):
        raise ValueError(
            f"{name}: batch_s picks {sum(local.lengths)} rows of {variable.name}, but the scattered inputs have {rows} "
            f"to go with them. Give as many."
        )
    return local


class Prepared(NamedTuple):
    """What is left to do of a call: the program that ends it, and its arguments after the variables' leaves."""

    built: Built
    values: list[jax.Array]
    firsts: list[jax.Array] | None  # the first replica's own outputs, where an earlier program gave them


def prepare(signature: Signature, call: Call, the_plan: Plan) -> Prepared:
    """Send the rows, and run what comes before the last program."""
    if call.inputs.is_exchanged:
        call = call._replace(inputs=gathered(signature.group, call.inputs))
    return (_plain if the_plan.is_plain else _in_waves)(signature, call, the_plan)


def finish(signature: Signature, ready: Prepared, commit: bool) -> Outcome:
    """Start the program that ends a call and, where asked, commit its updates: all or none, Ctrl-C included."""
    built = ready.built
    arguments = _state(signature, built.variables, ready.values)
    if not commit or not built.updates:
        return _outcome(signature, ready, built.program(arguments, _ignore))
    for variable in built.updates:
        variable.place(signature.group)  # the program has not read those that it only writes
    updates: dict[Shared, Update] = {}
    before: dict[Shared, tuple[list[jax.Array], bool]] = {}
    with _flight.uninterrupted():
        try:
            results = built.program(arguments, lambda error: _undo(signature, updates, before, error))
        except Exception as error:
            for variable in built.updates:
                if any(leaf.is_deleted() for leaf in signature.leaves(variable)):
                    variable.lose(signature.task.name, error)
            raise
        outcome = _outcome(signature, ready, results)
        updates.update(outcome.updates)
        for variable, update in updates.items():
            if not signature.donate:
                before[variable] = (signature.leaves(variable), variable.is_equal)
            variable.advance(update.leaves, update.is_equal, signature.task.name)
    return outcome


def _undo(signature: Signature, updates: dict[Shared, Update], before: dict[Shared, Any], error: Exception) -> None:
    """The program died. Old values that were donated are lost with it; others are back."""
    for variable, update in updates.items():
        if signature.donate:
            variable.lose(signature.task.name, error, update.leaves)
        else:
            variable.restore(update.leaves, *before[variable])


def _ignore(error: Exception) -> None:
    """A program that updates nothing dies: whoever reads its results is told."""


def _state(signature: Signature, variables: Sequence[Shared], values: Sequence[jax.Array]) -> list[jax.Array]:
    """The leaves of variables, and the values that follow them."""
    state: list[jax.Array] = []
    for variable in variables:
        state += signature.leaves(variable)
    state += values
    return state


def _plain(signature: Signature, call: Call, the_plan: Plan) -> Prepared:
    """All in one program: send the rows."""
    group, lengths = signature.group, the_plan.lengths
    rows = lengths[0] if lengths else None
    time = perf_counter()
    ranks = range(group.size)
    begins = [r * (rows or 0) for r in ranks]
    window = Window(0, group.size, rows or 0, begins, [0 for _ in ranks], the_plan.local)
    values = send(group, call.inputs.each, window)
    if signature.local is not None:
        values.append(local_pick(group, signature.local, window))
    signature.task.stats.sending += perf_counter() - time
    values += call.broadcast

    def build() -> Built:
        check_lengths(signature, signature.traced(rows, True), the_plan)
        return signature.plain(rows, lambda variables: _state(signature, variables, values))

    built = signature.compiled(("plain", rows), build)
    return Prepared(built, values, None)


def _outcome(signature: Signature, ready: Prepared, values: list[jax.Array]) -> Outcome:
    """Sort what the last program returned; the first replica's own come from it, or from an earlier one."""
    built = ready.built
    for j, place_ in enumerate(built.firsts):
        if ready.firsts is None:
            values[place_] = _engine.of_first(signature.group, values[place_])
        else:
            values.insert(place_, ready.firsts[j])
    at = len(built.result.picked)
    leaves = values[:at]
    updates: dict[Shared, Update] = {}
    for variable in built.updates:
        new, at = values[at : at + count(variable)], at + count(variable)
        needs = built.needs[variable]
        is_equal = needs is not None and all([signature.is_equal(other) for other in needs])
        updates[variable] = Update(new, signature.lies(variable), signature.lengths(variable), is_equal)
    return Outcome(leaves, built, updates)


def check_lengths(signature: Signature, traced: Traced, the_plan: Plan) -> None:
    """Variables that hold rows go with inputs of as many rows on each replica."""
    wanted = the_plan.lengths if the_plan.local is None else the_plan.local.held
    for variable in (*traced.reads, *(v for v, _ in traced.writes)):
        held = signature.lengths(variable)
        if held is not None and held != wanted:
            raise ValueError(
                f"{signature.task.name}: {variable.name} holds {list(held)} rows on the replicas, but this call gives "
                f"them {list(wanted or ())}. Scatter as many rows, or broadcast {variable.name}."
            )


def _in_waves(signature: Signature, call: Call, the_plan: Plan) -> Prepared:
    """Start the map programs, which leave a combine program to be run."""
    group = signature.group
    maps = _Maps(signature, call, the_plan)
    for wave in the_plan.waves:
        maps.run(wave)
    assert the_plan.lengths is not None
    total = sum(the_plan.lengths)
    weights = tuple(length / total for length in the_plan.lengths)
    totals = _engine.constant(group, "everywhere", weights, jnp.result_type(float).name)
    arrays = [array for entries in maps.entries for array, _ in entries]
    keeps = [maps.keep(entries) for entries in maps.entries]
    values = [*maps.merged, *arrays, *keeps, totals]
    counts = [len(entries) for entries in maps.entries]

    def build() -> Built:
        stacked = [jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for a in [*maps.merged[: len(maps.merge)], *arrays]]
        whole = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in [*keeps, totals]]
        shapes = [*stacked, *whole]
        return signature.combined(maps.traced, shapes, counts, lambda vs: _state(signature, vs, values))

    key = ("combine", maps.traced.outputs, tuple((v.shape, v.dtype) for v in values), tuple(counts))
    values += call.broadcast
    built = signature.compiled(key, build)
    return Prepared(built, values, maps.firsts_of(built))


class Launch(NamedTuple):
    """One run of a map program: over the devices of `span`, for ranks `start` to `stop`."""

    start: int
    stop: int
    rows: int
    span: tuple[int, int] | None  # None where other processes run it


class _Maps:
    """The map programs of one call: started wave by wave, what they give merged as it comes."""

    def __init__(self, signature: Signature, call: Call, the_plan: Plan) -> None:
        assert the_plan.lengths is not None
        self.signature, self.call, self.plan, self.lengths = signature, call, the_plan, the_plan.lengths
        self.everyone = (0, signature.group.size)
        self.is_local = call.inputs.is_local  # whether only the process that holds rows can run on them
        self.total = sum(self.lengths)
        self.bases = [sum(self.lengths[:rank]) for rank in range(len(self.lengths))]
        sizes = sorted({part.rows for wave in the_plan.waves for part in wave if part.rows}, reverse=True)
        self.traces = {rows: signature.traced(rows, the_plan.is_even) for rows in sizes}
        self.traced = self.traces[sizes[0]]
        for traced in self.traces.values():
            check_lengths(signature, traced, the_plan)
            self._check_shapes(traced)
        outputs = self.traced.outputs
        self.own = signature.own(outputs)
        self.leaves = reindexed(outputs.leaves, [i for i in range(len(outputs.leaves)) if i not in self.own])
        self.merge, self.gather = split_kinds(self.leaves)
        self.changes = signature.changes(self.traced)
        signature.settle(dict.fromkeys(v for v, _ in self.traced.writes))
        self.merged: list[jax.Array] = []
        self.firsts: list[jax.Array] = []
        # Of each gathered leaf: arrays, and how many of their entries each rank gives.
        self.entries: list[list[tuple[jax.Array, list[int]]]] = [[] for _ in self.gather]

    def _check_shapes(self, traced: Traced) -> None:
        """Parts that merge need equal shapes, whatever their rows."""
        for leaf, one, other in zip(self.traced.outputs.leaves, self.traced.shapes, traced.shapes, strict=False):
            if leaf.kind != "rows" and one.shape != other.shape:
                op = leaf.op if isinstance(leaf.op, str) else "a callable"
                raise ValueError(
                    f"{self.signature.task.name}: output{leaf.path} has shape {one.shape} on one part, {other.shape} "
                    f'on another, but parts under {op!r} need equal shapes. For one row an input row, use "concat".'
                )

    def run(self, wave: Sequence[Part]) -> None:
        """Start the programs of one wave."""
        launches = self._launches(wave)
        results = [None if launch.span is None else self._launch(launch, launch.span, wave) for launch in launches]
        if self.own and not self.firsts and launches[0].span and results[0]:
            first = self.signature.group.span(*launches[0].span)
            self.firsts = [_engine.of_first(first, array) for array in results[0][: len(self.own)]]
        shared = [None if result is None else result[len(self.own) :] for result in results]

        def each(i: int) -> list[jax.Array | None]:
            return [None if values is None else values[i] for values in shared]

        n = len(self.leaves)
        for j, i in enumerate(self.gather):
            self._gather(self.entries[j], self.leaves[i], launches, each(i))
        places = [*self.merge, *range(n, n + len(self.changes))]
        new = [self._assembled(launches, each(i)) for i in places]
        self.merged = self._merged(new, wave) if self.merged else new

    def _merged(self, new: list[jax.Array], wave: Sequence[Part]) -> list[jax.Array]:
        full = [i for i, array in enumerate(new) if array.size]  # XLA has no program for arrays of no size
        if not full:
            return new
        weights = self._weights(self.everyone, wave, range(*self.everyone))
        arguments = [*(self.merged[i] for i in full), *(new[i] for i in full), weights]
        leaves = [*(self.leaves[i] for i in self.merge), *self.changes]
        kept = [leaves[i] for i in full]
        program = self.signature.cached(("merge",), lambda: self.signature.merged(kept, arguments))
        done = dict(zip(full, program(arguments, _ignore), strict=True))
        return [done.get(i, array) for i, array in enumerate(new)]

    def _launches(self, wave: Sequence[Part]) -> list[Launch]:
        """Cover a wave: by the devices concerned alone, or by all."""
        found = runs([part.rows for part in wave])
        splits = self.signature.splits
        # What prints or calls back must not see rows that are not there.
        if (self.traced.has_effects and not self.plan.is_even) or len(splits) < SMALL_SPLITS:
            splits.add(tuple(found))
        alone = tuple(found) in splits or self.is_local
        if alone and self.signature.group.spans and found[0][:2] != self.everyone:
            return self._launches_here(found)
        return [Launch(start, stop, rows, (start, stop) if alone else self.everyone) for start, stop, rows in found]

    def _launches_here(self, found: Sequence[tuple[int, int, int]]) -> list[Launch]:
        """Of a wave over several processes, what this one runs: something, so that it knows what comes out."""
        mine = self.signature.group.mine
        launches: list[Launch] = []
        for start, stop, rows in found:
            first, last = max(start, mine.start), min(stop, mine.stop)
            launches.append(Launch(start, stop, rows, (first, last) if first < last else None))
        if all(launch.span is None for launch in launches):
            launches.append(Launch(mine.start, mine.start, found[-1][2], (mine.start, mine.stop)))
        return launches

    def _launch(self, launch: Launch, span: tuple[int, int], wave: Sequence[Part]) -> list[jax.Array]:
        sig, traced = self.signature, self.traces[launch.rows]
        group = sig.group.span(*span)
        meant = range(launch.start, launch.stop)
        offsets = [wave[rank].start if rank in meant else 0 for rank in range(*span)]
        bases = [base + offset for base, offset in zip(self.bases[slice(*span)], offsets, strict=True)]
        time = perf_counter()
        last = self.total - launch.rows
        begins = bases if self.is_local else [min(base, last) for base in bases]  # a filler is a copy of real rows
        window = Window(*span, launch.rows, begins, offsets, self.plan.local, meant, self.is_local)
        placed = send(sig.group, self.call.inputs.each, window)
        if sig.local is not None:
            placed.append(local_pick(group, sig.local, window))
        sig.task.stats.sending += perf_counter() - time
        arguments = [
            *(
                _engine.restrict(sig.group, *span, leaf, sig.lies(v))
                for v in traced.variables
                for leaf in sig.leaves(v)
            ),
            *placed,
            *(_engine.restrict(sig.group, *span, leaf, "everywhere") for leaf in self.call.broadcast),
            _engine.constant(group, "stacked", tuple(range(*span)), "int32"),
            self._weights(span, wave, meant),
            _engine.constant(group, "stacked", tuple(offsets), "int32"),
        ]
        key = ("map", span, launch.rows, self.plan.is_even)
        program = sig.compiled(key, lambda: sig.mapped(span, traced, launch.rows, arguments))
        return list(program(arguments, _ignore))

    def _weights(self, span: tuple[int, int], wave: Sequence[Part], meant: range) -> jax.Array:
        """Each rank's share of all rows in this wave; 0 where its rows are fillers."""
        values = tuple(wave[rank].rows / self.total if rank in meant else 0.0 for rank in range(*span))
        return _engine.constant(self.signature.group.span(*span), "stacked", values, jnp.result_type(float).name)

    def _assembled(
        self, launches: Sequence[Launch], arrays: Sequence[jax.Array | None], rows: int | None = None
    ) -> jax.Array:
        """One array of all ranks; those without rows have zeros, or what a filler gave.

        `rows`: of an entry, where the launches alone do not tell.
        """
        like = next(array for array in arrays if array is not None)
        if len(launches) == 1 and launches[0].span == self.everyone:
            return like
        pieces: list[Piece] = []
        for launch, array in zip(launches, arrays, strict=True):
            if launch.span is not None and launch.start < launch.stop:
                start, stop = max(launch.start, launch.span[0]), min(launch.stop, launch.span[1])
                pieces += [self._gap(pieces, start), Piece(start, stop, launch.span, array)]
        pieces = [piece for piece in [*pieces, self._gap(pieces, self.everyone[1])] if piece.start < piece.stop]
        shape = like.shape[1:] if rows is None else (rows, *like.shape[2:])
        return _engine.assemble(self.signature.group, pieces, shape, like.dtype)

    def _gap(self, pieces: Sequence[Piece], stop: int) -> Piece:
        start = pieces[-1].stop if pieces else 0
        return Piece(start, stop, (start, stop), None)

    def _gather(
        self, entries: list[Any], leaf: Leaf, launches: Sequence[Launch], arrays: Sequence[jax.Array | None]
    ) -> None:
        ranks = range(*self.everyone)
        if leaf.kind == "parts":  # of equal shapes, so the launches of a wave are one array
            given = {rank for launch in launches for rank in range(launch.start, launch.stop)}
            entries.append((self._assembled(launches, arrays), [int(rank in given) for rank in ranks]))
            return
        like = next(array for array in arrays if array is not None)
        for launch, array in zip(launches, arrays, strict=True):
            meant = range(launch.start, launch.stop)
            if meant:
                rows = [launch.rows if rank in meant else 0 for rank in ranks]
                there = [launch._replace(span=None)] if array is None else [launch]
                entries.append((self._assembled(there, [like if array is None else array], launch.rows), rows))

    def keep(self, entries: Sequence[tuple[jax.Array, list[int]]]) -> jax.Array:
        """Which entries to keep of those gathered, rank by rank and slice by slice."""
        offsets = np.cumsum([0, *(array.shape[1] for array, _ in entries)])
        index = [
            np.arange(rows[rank]) + rank * offsets[-1] + offset
            for rank in range(*self.everyone)
            for (_, rows), offset in zip(entries, offsets, strict=False)
        ]
        return _engine.sent(self.signature.group, np.concatenate(index).astype(np.int32), "everywhere")

    def firsts_of(self, built: Built) -> list[jax.Array]:
        """The first replica's own outputs that the result has, in its order."""
        keep = self.traced.outputs.keep
        at = dict(zip(self.own, self.firsts, strict=True))
        return [at[keep[built.result.picked[j]]] for j in built.firsts]
