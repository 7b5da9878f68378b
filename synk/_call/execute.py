"""Execute: launch a call that is fed, or several, and commit the updates."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple
from weakref import ref

import jax
import numpy as np

from .._base.errors import DivergedError
from .._data.dataset import data_of_replicas
from .._data.transfer import PartRows
from .._runtime.dispatch import IN_FLIGHT, drain, ignore_failure, retire_finished, uninterrupted
from .._runtime.executable import FEWER_ROWS, Executable, NotFinite, relayout, translate_error, translate_peer_errors
from .._runtime.layout import constant, put
from .._variables.state import VariableState
from .._variables.variable import Shared, divergence, invalidate
from .compiler import NotTogether
from .feed import Fed, place_table, planned, prepare, rows_taken, values_of
from .leaves import stack_leaves
from .parts import split_into_launches
from .plan import CallPlan, SliceChoice
from .rows import feed_calls
from .spec import Repeat


class Outcome(NamedTuple):
    """Outcome of a call whose updates are not committed.

    Attributes:
      is_refused: whether a number is not finite, which the function refuses.
    """

    leaves: list[jax.Array]
    updates: dict[Shared, VariableState]
    plan: CallPlan
    is_refused: bool


def execute(ready: Fed) -> Any:
    """Run a call that has a plan, and commit its updates: all or none, Ctrl-C included. Return its result."""
    plan = ready.plan
    # States are read once: what runs and what is committed belong to one moment.
    states = ready.states or _states(ready)
    values = _launch(ready, states, _arguments(ready, states), partial(_refuse_one, ready) if plan.has_flag else None)
    leaves: list[Any] = values[plan.num_updated :] if plan.updates else values
    for i in plan.scattered:
        rows, name = sum(ready.rows.lengths or ()), f"{ready.function.name}(...)"
        leaves[i] = data_of_replicas(ready.group, leaves[i], rows, plan.result.keys[i], name)
    return plan.result.tree(leaves)


def _refuse_one(ready: Fed, values: list[jax.Array]) -> int:
    """Take the flag from the results of a call, and raise if a number is not finite."""
    if _is_refused(ready, values.pop()):
        raise NotFinite
    return 1


def execute_calls(
    calls: Sequence[Fed], repeat: Repeat, given: Mapping[Shared, VariableState] | None = None
) -> list[Any]:
    """Run several calls in a row by the plan of the first, and commit their updates.

    Where states are given they take these, and nothing is committed. Return the results, up to the first
    call that is refused since its numbers are not finite.

    Raises:
      NotTogether: rows or broadcast arguments do not come for all calls.
      NotFinite: the first call is refused.
    """
    ready, ran = calls[0], len(calls)
    plan, lengths = ready.plan, ready.rows.lengths
    states = _states(ready) if given is None else given
    if plan.must_be_equal or plan.held:
        check_variables(ready, states)
    try:
        values = values_of_calls(calls, repeat)
    # Rows of a later call may raise, which the user is to see only when the loop comes to that call.
    except Exception as error:
        raise NotTogether(str(error)) from error
    if lengths and not ready.form.is_plain:
        values.append(place_table(ready, split_into_launches(lengths, 1)[0]))
    values.append(flags_of(ready, len(calls), repeat))
    arguments: list[Sequence[Any]] = [*leaves_taken(ready, states, plan.reads[1]), [], values]
    size = len(plan.result.picked) + plan.has_flag

    def count(values: list[jax.Array]) -> int:
        nonlocal ran
        last = plan.num_updated + size - 1
        # Each call has results of its own, the flag last; new values stand in front once, for all calls.
        refused = (i for i in range(len(calls)) if plan.has_flag and _is_refused(ready, values[last + i * size]))
        ran = next(refused, ran)
        if not ran:
            raise NotFinite
        return ran

    if given is not None:
        values = run(ready.function.name, plan.last, arguments)
    else:
        values = _launch(ready, states, arguments, count)
    starts = range(plan.num_updated, plan.num_updated + ran * size, size) if size else [plan.num_updated] * ran
    return [plan.result.tree(values[start : start + len(plan.result.picked)]) for start in starts]


def values_of_calls(calls: Sequence[Fed], repeat: Repeat) -> list[Any]:
    """Return the arguments of several calls in a row, as `values_of` does for one."""
    start, ready = perf_counter(), calls[0]
    group, lengths, rows = ready.group, ready.rows.lengths, [fed.rows for fed in calls]
    values = feed_calls(group, rows, split_into_launches(lengths, 1)[0], repeat.most) if lengths else []
    broadcast = list(ready.placed())
    # Broadcast arguments that all calls share are sent once.
    for i in repeat.own:
        leaf = ready.call.arguments.broadcast[i]
        # Data may have been written to since its call was fed.
        values_of_leaf = [fed.placed()[i] if i in fed.seen else fed.leaves[leaf] for fed in calls]
        broadcast[i] = stack_leaves(group, values_of_leaf, repeat.most)
    ready.function.stats.sending += perf_counter() - start
    return [*values, *broadcast]


def flags_of(ready: Fed, count: int, repeat: Repeat) -> jax.Array:
    """Tell a program of several calls which of them are there: the first `count`."""
    return constant(ready.group, "replicated", tuple([i < count for i in range(repeat.most)]), "bool")


def _states(ready: Fed) -> dict[Shared, VariableState]:
    states: dict[Shared, VariableState] = {}
    for variable in ready.plan.accepts:
        state = variable._state
        # Most variables are in the group already: a call of `bind` for each takes time in every warm step.
        is_there = variable._group is ready.group and state.failure is None
        states[variable] = state if is_there else ready.state(variable)
    return states


def _launch(
    ready: Fed,
    states: Mapping[Shared, VariableState],
    arguments: list[Sequence[Any]],
    count: Callable[[list[jax.Array]], int] | None,
) -> list[jax.Array]:
    """Launch the program that ends a call or several. Commit the updates of one call, or of as many as `count` returns,
    which may raise."""
    plan, name = ready.plan, ready.site.function.name
    if not plan.updates:
        values = run(name, plan.last, arguments)
        if count is not None:
            count(values)
        return values
    # `lose` lives as long as the program is in flight. It must keep no argument, variable or value alive, so it refers
    # to variables and their new states weakly.
    written: list[tuple[ref[Shared], ref[VariableState]]] = []

    def lose(error: Exception) -> None:
        for of_variable, of_state in written:
            variable, state = of_variable(), of_state()
            if variable is not None and state is not None:
                invalidate(variable, state, name, error)

    # From the launch to the last assignment no Ctrl-C comes between: a donated value is gone once the program has
    # started.
    with uninterrupted():
        try:
            values = run(name, plan.last, arguments, lose)
            ran = 1 if count is None else count(values)
        except Exception as error:
            for update in plan.updates:
                # A program that failed after it took donated values leaves the variables without any.
                old = states[update.variable]
                if any(leaf.is_deleted() for leaf in old.leaves):
                    invalidate(update.variable, old, name, error)
            raise
        for variable, state in _updates(ready, values, states, ran).items():
            written.append((ref(variable), ref(state)))
            variable._state = state
    return values


def _is_refused(ready: Fed, flag: jax.Array) -> bool:
    """Wait for the flag of a function with nan="raise", and tell whether a number is not finite."""
    with translate_peer_errors(ready.group):
        return bool(np.asarray(flag))


def launch(fed: Fed, execute: Callable[[Fed], Any] = execute) -> Any:
    """Launch a call: find its plan, run it, and count rows and seconds in the function's stats."""
    stats = fed.site.function.stats
    # A variable that a dead program was to write raises now, before anything is checked.
    if IN_FLIGHT:
        retire_finished()
    begun, sending, compiling = perf_counter(), stats.sending, stats.dispatching
    fed = planned(fed, may_check=True)
    prepared = perf_counter()
    stats.selecting += prepared - begun - (stats.dispatching - compiling)
    lengths, slices = fed.rows.lengths, fed.num_slices
    stats.slices = len(split_into_launches(lengths, slices)) if lengths and slices > 1 else 1
    result = execute(fed)
    if lengths is not None:
        stats.rows += sum(lengths)
    stats.dispatching += perf_counter() - prepared - (stats.sending - sending)
    return result


def evaluate(ready: Fed, given: Mapping[Shared, VariableState] | None = None) -> Outcome:
    """Run a call, perhaps with other states of variables, without committing its updates."""
    states = given or {variable: ready.state(variable) for variable in ready.plan.accepts}
    values = run(ready.function.name, ready.plan.last, _arguments(ready, states))
    is_refused = ready.plan.has_flag and _is_refused(ready, values.pop())
    # A peer's failure is to be named here, and not at some later read.
    if ready.group._is_multi_process:
        with translate_peer_errors(ready.group):
            jax.block_until_ready(values)
    return Outcome(values[ready.plan.num_updated :], _updates(ready, values, states), ready.plan, is_refused)


def check_variables(ready: Fed, states: Mapping[Shared, VariableState]) -> None:
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


def _arguments(ready: Fed, states: Mapping[Shared, VariableState]) -> list[Sequence[Any]]:
    """Run all launches of a call but the last, and return the arguments of the program that ends the call."""
    plan, lengths = ready.plan, ready.rows.lengths
    if plan.must_be_equal or plan.held:
        check_variables(ready, states)
    # The usual call: one program, and no states between launches.
    if plan.finish is None:
        return [*leaves_taken(ready, states, plan.reads[1]), [], ready.sent or ready.send()]
    assert lengths is not None
    assert plan.start is not None
    first, last = leaves_taken(ready, states, plan.reads[0]), leaves_taken(ready, states, plan.reads[1])
    carry = run(ready.function.name, plan.start, [])
    slot, part = 0, 0

    def table(parts: PartRows) -> jax.Array:
        nonlocal slot, part
        # Gathered rows of a slice take as many places as its longest part, on every replica.
        slot, part = slot + parts.max_rows, part + 1
        return place_table(ready, parts, slot - parts.max_rows, part - 1)

    for _, states_so_far, _ in run_parts(ready, first, carry, table):
        carry = states_so_far
    whole = split_into_launches(lengths, 1)[0]
    return [*last, carry, [*ready.placed(), place_table(ready, whole)]]


def run_parts(
    ready: Fed, reads: list[list[jax.Array]], carry: list[jax.Array], table: Callable[[PartRows], jax.Array]
) -> Iterator[tuple[PartRows, list[jax.Array], list[jax.Array]]]:
    """Launch the parts of a call one after another. Yield each, the states so far, and what else it has made."""
    rows, size = rows_taken(ready), len(carry)
    for parts in split_into_launches(ready.rows.lengths or (), ready.num_slices):
        arguments: list[Sequence[Any]] = [*reads, carry, [*values_of(ready, rows, parts), table(parts)]]
        results = run(ready.function.name, ready.plan.program_of(parts), arguments)
        # The program may have overwritten the old states, which it was given to donate.
        carry = results[:size]
        yield parts, carry, results[size:]


def leaves_taken(
    ready: Fed, states: Mapping[Shared, VariableState], variables: Sequence[Shared]
) -> list[list[jax.Array]]:
    taken: list[list[jax.Array]] = []
    layouts = ready.plan.layouts
    for variable in variables:
        state = states[variable]
        here, layout = state.abstract.layout, layouts[variable]
        # A variable that will differ from this call on is stacked before, so that its program has one layout for both.
        taken.append(state.leaves if here == layout else relayout(ready.group, state.leaves, here, layout))
    return taken


def run(
    name: str,
    program: Executable,
    arguments: list[Sequence[Any]],
    on_failure: Callable[[Exception], None] = ignore_failure,
    advice: str = FEWER_ROWS,
) -> list[jax.Array]:
    try:
        return program.launch(arguments, on_failure)
    except Exception as error:
        translated = translate_error(error, name, advice)
        if translated is error:
            raise
        raise translated from error


def _updates(
    ready: Fed, values: list[jax.Array], states: Mapping[Shared, VariableState], count: int = 1
) -> dict[Shared, VariableState]:
    updates: dict[Shared, VariableState] = {}
    # What one call makes unequal, the next one reads.
    for _ in range(count):
        states = {**states, **updates} if updates else states
        for variable, start, stop, abstract, depends_on in ready.plan.updates:
            # Equal inputs give equal values, so only what a new value depends on is looked at, never the value.
            is_equal = depends_on is not None
            for needed in depends_on or ():
                is_equal = is_equal and states[needed].is_equal
            by = "" if is_equal else ready.function.name
            updates[variable] = VariableState(values[start:stop], abstract, is_equal, by)
    return updates


def execute_fitting(ready: Fed) -> Any:
    """Run a call whose slices synk has chosen. If memory runs out, run it in twice as many, with nothing lost."""
    while True:
        choice, lengths = ready.choice, ready.rows.lengths
        assert choice is not None
        ready.function.stats.slices = len(split_into_launches(lengths, ready.num_slices)) if lengths else 1
        # The other processes would not know that this process has run out of memory.
        if ready.group._is_multi_process:
            return execute(ready)
        try:
            # An estimate may be too low: allocators fragment, and other programs use the device. So the first run is
            # waited for.
            return execute(ready) if choice.has_run else _execute_first(ready, choice)
        except MemoryError:
            is_lost = any(update.variable._state.failure for update in ready.plan.updates)
            if is_lost or choice.slices == choice.most:
                raise
            choice.slices, choice.has_run = min(2 * choice.slices, choice.most), False
        assert ready.given is not None
        ready = prepare(ready.site, *ready.given)


def _execute_first(ready: Fed, choice: SliceChoice) -> Any:
    """Run a call whose slices have not run yet, and wait. Out of memory, its variables get their old values back, from
    copies on the host if the call donates."""
    kept: dict[Shared, tuple[VariableState, list[np.ndarray]]] = {}
    # A donated value is overwritten by the program that fails, so only a copy on the host can bring it back.
    for variable in [update.variable for update in ready.plan.updates]:
        state = ready.state(variable)
        kept[variable] = state, [np.array(leaf) for leaf in state.leaves] if ready.call.donate else []
    try:
        result = execute(ready)
        jax.block_until_ready((result, [update.variable._state.leaves for update in ready.plan.updates]))
    except Exception as error:
        translated = translate_error(error, ready.function.name)
        if not isinstance(translated, MemoryError):
            raise
        # Wait for the programs under way: afterwards none marks a variable as lost.
        drain()
        for variable, (state, leaves) in kept.items():
            restored = state.leaves
            if any(leaf.is_deleted() for leaf in restored):
                placed = [put(ready.group, leaf, state.layout) for leaf in leaves]
                # A copy on the devices: `put` may share the host's memory.
                restored = relayout(ready.group, placed, state.layout, state.layout)
            variable._state = replace(state, leaves=restored)
        raise translated from error
    choice.has_run = True
    return result
