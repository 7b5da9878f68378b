"""Measure: how long calls take, whose results and updates are dropped."""

from collections.abc import Callable
from dataclasses import replace
from statistics import median
from time import perf_counter

import jax

from .._call.execute import ReadyCall, evaluate
from .._runtime.executable import relayout
from .._runtime.group import Group
from .._variables.access import bind
from .._variables.state import VariableState
from .report import Measured


def measure(prepare: Callable[[], ReadyCall], calls: int) -> Measured:
    """Medians of so many calls, after one more."""
    times = [_timed(prepare) for _ in range(calls + 1)][1:]
    return Measured(calls, median(whole for whole, _ in times), median(host for _, host in times))


def _timed(prepare: Callable[[], ReadyCall]) -> tuple[float, float]:
    """Seconds of one call, and of its part on the host. It may overwrite what it is given: copies of variables."""
    group, plan = prepare().group, prepare().plan
    states = {variable: _copied(bind(variable, group), group) for variable in plan.accepts}
    jax.block_until_ready([state.leaves for state in states.values()])
    start = perf_counter()
    outcome = evaluate(prepare(), states.__getitem__)
    host = perf_counter() - start
    jax.block_until_ready((outcome.leaves, [state.leaves for state in outcome.updates.values()]))
    return perf_counter() - start, host


def _copied(state: VariableState, group: Group) -> VariableState:
    return replace(state, leaves=relayout(group, state.leaves, state.layout, state.layout))
