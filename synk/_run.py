"""Run: one call from bound arguments to committed updates, in one launch or several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from . import _engine, _flight
from ._engine import Lies, Lists
from ._group import PyTree
from ._inputs import Window, gathered, local_pick, send
from ._outputs import Outputs
from ._plan import Call, Plan, check_lengths
from ._program import Signature
from ._shared import Shared
from ._task import Built
from ._waves import Maps, ignore


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


class Prepared(NamedTuple):
    """What is left to do of a call: the program that ends it, and its arguments after the variables' leaves."""

    built: Built
    values: list[jax.Array]
    firsts: list[jax.Array] | None  # the first replica's own outputs, where an earlier program gave them
    loans: Sequence[_flight.Loan] = ()  # what it reads until it ends


def prepare(signature: Signature, call: Call, the_plan: Plan) -> Prepared:
    """Send the rows, and run what comes before the last program."""
    if call.inputs.is_exchanged:
        call = call._replace(inputs=gathered(signature.group, call.inputs))
    return (_plain if the_plan.is_plain else _in_waves)(signature, call, the_plan)


def outcome_of(signature: Signature, ready: Prepared) -> Outcome:
    """Start the program that ends a call, and leave its updates to the caller."""
    values = _results(signature, ready, ignore)
    updates: dict[Shared, Update] = {}
    for variable, start, stop, needs in ready.built.ends:
        is_equal = _is_equal(signature, needs)
        lies, lengths = signature.lies(variable), signature.lengths(variable)
        updates[variable] = Update(values[start:stop], lies, lengths, is_equal)
    return Outcome(values[: len(ready.built.result.picked)], ready.built, updates)


def finish(signature: Signature, ready: Prepared) -> PyTree:
    """Start the program that ends a call and commit its updates: all or none, Ctrl-C included. Return its result."""
    built = ready.built
    if not built.ends:
        return built.result.tree(_results(signature, ready, ignore))
    for variable in built.unread:
        variable.place(signature.group)
    if not signature.donate:
        _flight.settle()
    updates: list[tuple[Shared, int, Any]] = []
    with _flight.uninterrupted():
        try:
            values = _results(signature, ready, partial(_undo, signature, updates))
        except Exception as error:
            for variable in built.updates:
                if any(leaf.is_deleted() for leaf in signature.leaves(variable)):
                    variable.lose(signature.task.name, error)
            raise
        new = [(variable, values[a:b], _is_equal(signature, needs)) for variable, a, b, needs in built.ends]
        for variable, leaves, is_equal in new:
            before = None if signature.donate else (leaves, signature.leaves(variable), variable.is_equal)
            variable.advance(leaves, is_equal, signature.task.name)
            updates.append((variable, variable.version, before))
    return built.result.tree(values[: built.ends[0][1]])


def _undo(signature: Signature, updates: Sequence[tuple[Shared, int, Any]], error: Exception) -> None:
    """The program died. Old values that were donated are lost with it; others are back."""
    for variable, version, before in updates:
        if before is None:
            variable.lose(signature.task.name, error, version)
        else:
            variable.restore(*before)


def _is_equal(signature: Signature, needs: Sequence[Shared] | None) -> bool:
    """Is a new value the same on all replicas, given what it depends on?"""
    return needs is not None and all(map(signature.is_equal, needs))


def _results(signature: Signature, ready: Prepared, failed: Callable[[Exception], None]) -> list[jax.Array]:
    """What the last program returns; the first replica's own come from it, or from an earlier one."""
    built = ready.built
    values = built.program([*map(signature.leaves, built.variables), ready.values], failed, ready.loans)
    if built.firsts:
        for j, place_ in enumerate(built.firsts):
            if ready.firsts is None:
                values[place_] = _engine.of_first(signature.group, values[place_])
            else:
                values.insert(place_, ready.firsts[j])
    return values


def _state(signature: Signature, variables: Sequence[Shared], values: Sequence[jax.Array]) -> Lists:
    """The leaves of each variable, and the values that follow them."""
    return [*map(signature.leaves, variables), values]


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


def _in_waves(signature: Signature, call: Call, the_plan: Plan) -> Prepared:
    """Start the map programs, which leave a combine program to be run."""
    group = signature.group
    maps = Maps(signature, call, the_plan)
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
