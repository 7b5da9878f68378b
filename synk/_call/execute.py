"""Execute: feed and launch one call of a plan, and commit its updates."""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, NamedTuple
from weakref import ref

import jax
import numpy as np

from .._base.errors import DivergedError, SynkError
from .._base.jax_context import checks_floats
from .._base.pytree import PyTree
from .._data.dataset import data_of_replicas
from .._data.transfer import PartRows
from .._runtime.dispatch import ignore_failure, uninterrupted
from .._runtime.executable import Executable, relayout, translate_peer_errors
from .._runtime.group import Group
from .._runtime.layout import constant, shard_of_rank
from .._variables.state import VariableState
from .._variables.variable import Shared, bind, divergence, invalidate
from .parts import part_table, split_into_launches
from .plan import CallPlan, SliceChoice
from .rows import Rows, exchanged, feed_rows, index_on_replicas
from .spec import CallSpec, FunctionSpec


class ReadyCall(NamedTuple):
    """A call that only has to run.

    Attributes:
      function: the function.
      group: the replicas.
      call: the key of the plan.
      plan: the plan.
      rows: the rows that it takes.
      broadcast: the broadcast arguments on the replicas, or their shapes if the call does not run.
      num_slices: in how many slices replicas run their rows.
      choice: if synk has chosen the number of slices, the choice.
    """

    function: FunctionSpec
    group: Group
    call: CallSpec
    plan: CallPlan
    rows: Rows
    broadcast: list[Any]
    num_slices: int
    choice: SliceChoice | None = None


class Outcome(NamedTuple):
    """Outcome of a call whose updates are not committed.

    Attributes:
      leaves: the leaves of the result.
      updates: the new states of the variables that the call updates.
      plan: the plan that ran.
      is_refused: whether a number is not finite, which the function refuses.
    """

    leaves: list[jax.Array]
    updates: dict[Shared, VariableState]
    plan: CallPlan
    is_refused: bool


class NotFinite(FloatingPointError):
    """Error of a call whose numbers are not finite, which its function or the user's options refuse."""


def execute(ready: ReadyCall) -> Any:
    """Run a call and commit its updates: all or none, Ctrl-C included. Return its result."""
    plan = ready.plan
    states = {variable: bind(variable, ready.group) for variable in plan.accepts}
    check_variables(ready, states)
    last = _before_last(ready, states)
    if not plan.updates:
        values = _launch(ready, last, ignore_failure)
        if _is_refused(ready, values):
            raise NotFinite
        return _tree(ready, values)
    # `lose` lives as long as the program is in flight. It must keep no argument and no value alive, so it refers to
    # the new states weakly.
    name = ready.function.name
    written: list[tuple[Shared, ref[VariableState]]] = []

    def lose(error: Exception) -> None:
        for variable, reference in written:
            state = reference()
            if state is not None:
                invalidate(variable, state, name, error)

    with uninterrupted():
        try:
            values = _launch(ready, last, lose)
            if _is_refused(ready, values):
                raise NotFinite
        except Exception as error:
            for update in plan.updates:
                old = states[update.variable]
                if any(leaf.is_deleted() for leaf in old.leaves):
                    invalidate(update.variable, old, name, error)
            raise
        for variable, state in _updates(ready, values, states).items():
            written.append((variable, ref(state)))
            variable._state = state
    return _tree(ready, values)


def _is_refused(ready: ReadyCall, values: list[jax.Array]) -> bool:
    """Wait for the flag of a function with nan="raise", and tell whether a number is not finite."""
    if not ready.plan.has_flag:
        return False
    with translate_peer_errors(ready.group):
        return bool(np.asarray(values.pop()))


def _tree(ready: ReadyCall, values: list[jax.Array]) -> PyTree:
    """Return the result as the user sees it."""
    plan, rows = ready.plan, sum(ready.rows.lengths or ())
    leaves: list[Any] = values[: len(plan.result.picked)]
    for i in plan.staying:
        leaves[i] = data_of_replicas(
            ready.group, leaves[i], rows, plan.result.keys[i], f"a result of {ready.function.name}"
        )
    return plan.result.tree(leaves)


def evaluate(ready: ReadyCall, view: Callable[[Shared], VariableState] | None) -> Outcome:
    """Run a call without committing its updates."""
    states = {v: bind(v, ready.group) if view is None else view(v) for v in ready.plan.accepts}
    check_variables(ready, states)
    values = _launch(ready, _before_last(ready, states), ignore_failure)
    is_refused = _is_refused(ready, values)
    if ready.group._is_multi_process:
        with translate_peer_errors(ready.group):
            jax.block_until_ready(values)
    return Outcome(values[: len(ready.plan.result.picked)], _updates(ready, values, states), ready.plan, is_refused)


def check_variables(ready: ReadyCall, states: dict[Shared, VariableState]) -> None:
    """Check that variables have as many rows on each replica as the call, and that those which must be equal are."""
    for variable in ready.plan.must_be_equal:
        if not states[variable].is_equal:
            raise DivergedError(divergence(variable))
    if not ready.plan.held:
        return
    rows = ready.rows
    wanted = rows.lengths if rows.on_replicas is None else rows.on_replicas.held
    for variable in ready.plan.held:
        held = states[variable].rows_per_replica
        if held != wanted:
            raise ValueError(
                f"{ready.function.name}: {variable.name} holds {list(held or ())} rows on the replicas, but this call "
                f"gives them {list(wanted or ())}. Scatter as many rows, or broadcast {variable.name}."
            )


def _before_last(ready: ReadyCall, states: dict[Shared, VariableState]) -> list[Sequence[Any]]:
    """Run the slices of a sliced call, and return the arguments of the program that ends the call."""
    plan, lengths = ready.plan, ready.rows.lengths
    leaves, rows = leaves_taken(ready, states), rows_taken(ready)
    if plan.finish is None:
        parts = split_into_launches(lengths, 1)[0] if lengths else None
        values = values_of(ready, rows, parts)
        if parts is not None and not ready.call.is_plain:
            values.append(place_table(ready, parts))
        return [*[leaves[v] for v in plan.reads[1]], [], values]
    assert lengths is not None
    assert plan.start is not None
    carry = run(ready.function.name, plan.start, [])
    slot = 0
    for j, parts in enumerate(split_into_launches(lengths, ready.num_slices)):
        values = [*values_of(ready, rows, parts), place_table(ready, parts, slot, j)]
        carry = run(ready.function.name, plan.program_of(parts), [*(leaves[v] for v in plan.reads[0]), carry, values])
        slot += parts.max_rows
    whole = split_into_launches(lengths, 1)[0]
    return [*(leaves[v] for v in plan.reads[1]), carry, [*ready.broadcast, place_table(ready, whole)]]


def leaves_taken(ready: ReadyCall, states: dict[Shared, VariableState]) -> dict[Shared, list[jax.Array]]:
    """Return the leaves of variables in the layouts that programs take."""
    leaves: dict[Shared, list[jax.Array]] = {}
    for variable, layout in ready.plan.layouts.items():
        state = states[variable]
        is_there = state.layout == layout
        leaves[variable] = state.leaves if is_there else relayout(ready.group, state.leaves, state.layout, layout)
    return leaves


def rows_taken(ready: ReadyCall) -> Rows:
    """Return the rows of a call, after replicas have exchanged those that they need."""
    start = perf_counter()
    rows = exchanged(ready.group, ready.rows)
    ready.function.stats.sending += perf_counter() - start
    return rows


def values_of(ready: ReadyCall, rows: Rows, parts: PartRows | None) -> list[Any]:
    """Return the arguments of a launch beside variables and states: rows, indexes of rows, and broadcast arguments."""
    group, stats = ready.group, ready.function.stats
    start = perf_counter()
    values: list[Any] = []
    if parts is not None:
        values = feed_rows(group, rows, parts)
        if ready.call.held_index is not None:
            values.append(index_on_replicas(group, ready.call.held_index, rows.on_replicas, parts))
    stats.sending += perf_counter() - start
    return [*values, *ready.broadcast]


def place_table(ready: ReadyCall, parts: PartRows, row_slot: int = 0, part_slot: int = 0, ended: int = 0) -> jax.Array:
    """Bring every replica `part_table`: the numbers by which a program finds each replica's part in a launch."""
    assert ready.rows.lengths is not None
    table = part_table(parts, ready.rows.lengths, row_slot, part_slot, ended)
    return constant(ready.group, "replicated", table, "int32")


def _launch(
    ready: ReadyCall, arguments: list[Sequence[Any]], on_failure: Callable[[Exception], None]
) -> list[jax.Array]:
    """Start the program that ends the call; take outputs of "first" from the first replica that has rows."""
    plan = ready.plan
    values = run(ready.function.name, plan.last, arguments, on_failure)
    if plan.from_first:
        lengths = ready.rows.lengths
        rank = next((r for r, n in enumerate(lengths) if n), 0) if lengths else 0
        for i in plan.from_first:
            values[i] = shard_of_rank(ready.group, values[i], rank)
    return values


_FEWER = "Run it with num_slices=2 or more, which needs the memory of one slice."


def run(
    name: str,
    program: Executable,
    arguments: list[Sequence[Any]],
    on_failure: Callable[[Exception], None] = ignore_failure,
    advice: str = _FEWER,
) -> list[jax.Array]:
    """Start a program; raise its failure in words that name the function."""
    try:
        return program.launch(arguments, on_failure)
    except Exception as error:
        translated = translate_error(error, name, advice)
        if translated is error:
            raise
        raise translated from error


def translate_error(error: Exception, name: str, advice: str = _FEWER) -> Exception:
    """Return JAX's error about a launch in words that name the function; other errors unchanged."""
    if isinstance(error, SynkError):
        return error
    if checks_floats() and type(error).__name__ == "InternalFloatingPointError":
        return NotFinite(f"{name}: a result holds NaN or infinity, which jax_debug_nans or _infs forbids.")
    # XLA says "Out of memory" where the host has no more.
    if "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error):
        first = str(error).splitlines()[0]
        return MemoryError(f"{name}: {first} {advice}")
    return error


def _updates(
    ready: ReadyCall, values: list[jax.Array], states: dict[Shared, VariableState]
) -> dict[Shared, VariableState]:
    """Return the new states of the variables that the call writes."""
    updates: dict[Shared, VariableState] = {}
    for variable, start, stop, abstract, depends_on in ready.plan.updates:
        is_equal = depends_on is not None and all([states[v].is_equal for v in depends_on])
        by = "" if is_equal else ready.function.name
        updates[variable] = VariableState(values[start:stop], abstract, is_equal, by)
    return updates
