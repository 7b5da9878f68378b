"""Plan: which rows each replica runs in a call, and in how many launches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from ._inputs import Inputs
from ._program import Signature
from ._rows import LocalRows, select_local
from ._shared import Shared
from ._split import Part, cut, waves
from ._trace import Traced


class Call(NamedTuple):
    """A call's arguments, checked and flattened."""

    inputs: Inputs
    broadcast: list[jax.Array]
    batch_s: Any  # what picks rows on each replica


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
