"""Waves: the map programs of a call whose rows do not divide or are sliced, and what they give, merged as it comes."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import _engine
from ._engine import Piece
from ._inputs import Window, local_pick, send
from ._ops import Leaf
from ._plan import Call, Plan, check_lengths
from ._program import Signature
from ._split import Part, runs
from ._task import Built, reindexed, split_kinds
from ._trace import Traced

# How many uneven splits of one function get programs for just the devices concerned. Beyond that all devices run every
# part size, those not concerned on copies of real rows: twice the work, but the programs serve every split.
SMALL_SPLITS = 3


def ignore(error: Exception) -> None:
    """A program that updates nothing dies: whoever reads its results is told."""


class Launch(NamedTuple):
    """One run of a map program: over the devices of `span`, for ranks `start` to `stop`."""

    start: int
    stop: int
    rows: int
    span: tuple[int, int] | None  # None where other processes run it


class Maps:
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
        arguments = [[self.merged[i] for i in full], [*(new[i] for i in full), weights]]
        leaves = [*(self.leaves[i] for i in self.merge), *self.changes]
        kept = [leaves[i] for i in full]
        program = self.signature.cached(("merge",), lambda: self.signature.merged(kept, arguments))
        done = dict(zip(full, program(arguments, ignore), strict=True))
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
        program = sig.compiled(key, lambda: sig.mapped(span, traced, launch.rows, [arguments]))
        return list(program([arguments], ignore))

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
