"""Parts: what one replica runs on in one launch, and the loop over its slices under a transformation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from .._base.partition import split_rows
from .._reductions.collectives import merge_leading_axes
from .._reductions.reduction import Reduced
from .spec import CallSpec


class Part(NamedTuple):
    """Which part a replica runs: Python numbers where all replicas run as many rows, else traced ones."""

    rank: jax.Array
    count: Any
    first_row: Any
    offset: Any  # of its first row among the replica's own
    weight: Any  # its share of all rows
    share: Any  # and of the replica's own
    row_slot: Any  # where its entries go in what is gathered of all slices
    part_slot: Any


class PartArrays(NamedTuple):
    """What brings a replica its rows: arrays and indexes of scattered arguments, the index into variables that hold
    rows, and broadcast arguments."""

    arrays: list[tuple[jax.Array, jax.Array | None]]
    held_index: jax.Array | None
    broadcast: list[jax.Array]


class ProgramRunner(Protocol):
    """The builder of a program, as the loop needs it."""

    call: CallSpec
    reduced: list[Reduced]

    def run_part(
        self, size: int | None, *, state: dict[Any, list[jax.Array]], arrays: PartArrays, part: Part, tall: int | None
    ) -> list[jax.Array]:
        """The states of one part."""
        ...

    def slots(self, is_rows: bool) -> int:
        """How many entries of what is gathered a replica has."""
        ...

    def selects_branches(self) -> bool:
        """Shall nothing run in branches or loops?"""
        ...


def run_slices(builder: ProgramRunner, size: int | None, *, arrays: PartArrays, part: Part) -> list[jax.Array]:
    """Run `fn` over the slices of a part, one after the other; there are no variables."""
    total = sum(builder.call.lengths or ())
    slices = split_rows(size or 1, min(builder.call.num_slices, size or 1))
    found: list[jax.Array] | None = None
    entries: list[list[jax.Array]] = [[] for _ in builder.reduced]
    for rows, group in itertools.groupby(slices, key=lambda each: each.rows):
        run = [*group]
        chunks = [
            array[run[0].start : run[-1].start + rows].reshape(len(run), rows, *array.shape[1:])
            for array, _ in arrays.arrays
        ]
        starts = jnp.asarray(part.first_row, jnp.int32) + jnp.array([each.start for each in run], jnp.int32)

        def one(chunk: tuple[Any, jax.Array], rows: int = rows) -> list[jax.Array]:
            its = part._replace(count=rows, first_row=chunk[1], weight=rows / total)
            its_rows = PartArrays([(array, None) for array in chunk[0]], None, arrays.broadcast)
            return builder.run_part(rows, state={}, arrays=its_rows, part=its, tall=rows)

        found, gathered = _loop(builder, one, (chunks, starts), found)
        for mine, new in zip(entries, gathered, strict=True):
            mine.extend(new)
    assert found is not None
    return [
        pad_rows(jnp.concatenate(mine), builder.slots(leaf.reduction.has_row_entries)) if mine else state
        for state, mine, leaf in zip(found, entries, builder.reduced, strict=True)
    ]


def _loop(
    builder: ProgramRunner, one: Callable[..., list[jax.Array]], chunks: Any, before: list[jax.Array] | None
) -> tuple[list[jax.Array], list[list[jax.Array]]]:
    """Run slices of one size; the states so far with theirs, and what they gather."""
    is_gathered = [leaf.reduction.collective == "gather" for leaf in builder.reduced]

    def add(old: Sequence[jax.Array], new: Sequence[jax.Array]) -> list[jax.Array]:
        leaves = zip(old, new, builder.reduced, is_gathered, strict=True)
        return [a[:0] if skip else leaf.reduction.accumulate(a, b) for a, b, leaf, skip in leaves]

    first = one(jax.tree.map(lambda array: array[0], chunks))
    gathered = [[new] if skip else [] for new, skip in zip(first, is_gathered, strict=True)]
    state = [a[:0] if skip else a for a, skip in zip(first, is_gathered, strict=True)]
    state = state if before is None else add(before, state)
    if len(chunks[1]) == 1:
        return state, gathered

    def step(carry: list[jax.Array], chunk: Any) -> tuple[list[jax.Array], list[jax.Array]]:
        new = one(chunk)
        return add(carry, new), [each for each, skip in zip(new, is_gathered, strict=True) if skip]

    rest = jax.tree.map(lambda array: array[1:], chunks)
    state, more = lax.scan(step, state, rest, unroll=len(chunks[1]) if builder.selects_branches() else 1)
    for mine, new in zip((mine for mine in gathered if mine), more, strict=True):
        mine.append(merge_leading_axes(new))
    return state, gathered


def pad_rows(array: jax.Array, rows: int | None) -> jax.Array:
    """The same with zeros after its rows, up to so many."""
    if rows is None or array.shape[0] == rows:
        return array
    return jnp.pad(array, [(0, rows - array.shape[0])] + [(0, 0)] * (array.ndim - 1))
