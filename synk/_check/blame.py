"""Blame: which row makes the first number that is not finite, where it ran, and by which line."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import keystr, tree_leaves_with_path

from .._base.errors import SynkError
from .._call.binding import BoundArguments, CallOptions, check_leaves
from .._call.execute import Outcome, ReadyCall, evaluate
from .._call.parts import split_into_launches
from .._call.plan import PlanCache, Site
from .._call.prepare import prepare
from .._call.rows import feed_rows
from .._call.spec import FunctionSpec, Stats
from .._call.traces import CallTraces
from .._data.dataset import Data
from .._data.process_rows import ProcessLocalRows
from .._runtime.dispatch import LOCK, drain
from .._runtime.executable import relayout, run_collective, translate_peer_errors
from .._runtime.group import AXIS, Group
from .._runtime.layout import Layout, layouts
from .._variables.variable import Shared, bind
from .probe import ALL_KINDS, Prober, kinds_of
from .serial import HostRows
from .views import one_device, view_of_one


@dataclass(frozen=True)
class Blame:
    """The cause of outputs, gradients or updates that are not finite; `f.blame` finds it.

    Attributes:
      what: the finding, in words.
      row: the number of the row in the inputs; None where no row is to blame by itself.
      replica, slice: where that row ran.
      line: the line that made the first number that is not finite, 'model.py:58: h = jnp.log(x)'; None: not known.
      rows: the first and the last of rows that are bad together; None otherwise.
      probes: how often the function was run to find it.

    Example:
      >>> import jax.numpy as jnp, numpy as np, synk
      >>> f = synk.function(lambda x: jnp.log(x).sum())
      >>> x = np.ones(100, np.float32)
      >>> f.blame(x) is None
      True
      >>> x[77] = -1
      >>> f.blame(x).row
      77
    """

    what: str
    row: int | None = None
    replica: int | None = None
    slice: int | None = None
    line: str | None = None
    rows: tuple[int, int] | None = None
    probes: int = 0

    def __str__(self) -> str:
        return self.what


def blame(site: Site, probe_plans: PlanCache, bound: BoundArguments, options: CallOptions) -> Blame | None:
    """Find what makes a call's numbers not finite; `probe_plans` are the plans of its probes."""
    function = site.function
    # With these flags JAX raises where a probe computes NaN: https://docs.jax.dev/en/latest/debugging/flags.html
    with LOCK, jax.debug_nans(False), jax.debug_infs(False):
        drain()
        ready = prepare(replace(site, may_donate=False), bound, options)
        numbers = _row_numbers(ready, bound)
        outcome = evaluate(ready, None)
        after = list(_not_finite_after(ready, outcome))
        before = list(_not_finite_before(ready))
        nans = [(variable, cause) for variable, is_nan, cause in before if is_nan]
        # Infinity before the call may be meant, so it is to blame only if nothing else is.
        infinite = next((cause for _, is_nan, cause in before if not is_nan), None)
        # Outputs of the first replica alone are not looked at in `after`, so probes must tell.
        if not (outcome.is_refused or (not function.refuses_nan and (after or ready.plan.from_first))):
            return next((cause for _, cause in nans), None)
        for variable, cause in nans:
            if variable is None or function.then is None:
                return cause
        rows = HostRows(site, bound, options) if sum(ready.rows.lengths or ()) else None
        prober = Prober(ready, probe_plans, bound, rows)
        shows_kinds = after and infinite is None and not ready.plan.from_first
        span = prober.find(np.any([kinds for _, kinds in after], axis=0) if shows_kinds else ALL_KINDS)
        # A variable that parts read comes before their rows, one that `then` alone reads comes after.
        for variable, cause in nans:
            if variable in prober.reads or span is None:
                return cause
        if rows is None and prober.is_bad(()):
            no_rows = f"{function.name}: its outputs are not finite; it has no rows."
            return infinite or Blame(no_rows, probes=prober.probes)
        if rows is None or span is None:
            return infinite or (Blame(after[0][0], probes=prober.probes) if after else None)
        return _blame_rows(ready, prober, rows, numbers, span, infinite)


def _row_numbers(ready: ReadyCall, bound: BoundArguments) -> np.ndarray:
    """Return the numbers that the call's rows have in the inputs; ValueError if rows cannot be tried one by one."""
    name = ready.function.name
    if any(bound.spec.overlaps):
        raise ValueError(f"{name}.blame: rows that bring their neighbours cannot be tried one by one.")
    scattered = check_leaves(bound, name, ready.group).scattered
    if any(isinstance(leaf, ProcessLocalRows) for leaf in scattered):
        raise ValueError(f"{name}.blame: it tries rows of all processes, not synk.local ones. Give all the same.")
    if ready.plan.held:
        held = ready.plan.held[0].name
        raise ValueError(
            f"{name}.blame: {held} holds rows, which cannot be tried in another order. Pass them as an argument: "
            f"x = synk.gather({held}, nd_up=0)."
        )
    numbers = np.arange(0)
    if ready.rows.each:
        # Rows of minibatch data have no numbers in the inputs, so another argument gives them if there is one.
        has_numbers = [not (isinstance(leaf, Data) and leaf.is_minibatch) for leaf in scattered]
        selection = ready.rows.each[has_numbers.index(True) if any(has_numbers) else 0].selection
        numbers = selection.positions(0, sum(ready.rows.lengths or ()))
    if bound.numbers is not None:
        numbers = bound.numbers.positions(0, bound.numbers.rows)[numbers]
    return numbers


def _blame_rows(
    ready: ReadyCall,
    prober: Prober,
    rows: HostRows,
    numbers: np.ndarray,
    span: tuple[int, int],
    infinite: Blame | None,
) -> Blame:
    """Blame one row, or rows that are bad together; `span` is the first and the last of the call's rows."""
    name, probes = ready.function.name, prober.probes
    row = span[0]
    first, last = (int(numbers[number]) for number in span)
    # One row of the inputs may be there several times.
    is_one = not np.ptp(numbers[row : span[1] + 1])
    if not (is_one and prober.is_bad_alone(row)):
        return infinite or Blame(
            f"{name}: it is not finite, but no row by itself is to blame: rows {first} to {last} of the "
            f"inputs are, taken together (statistics across rows, sums that overflow), or every one of them.",
            rows=(first, last),
            probes=probes,
        )
    replica, part = _place_of(ready.rows.lengths or (), ready.num_slices, row)
    line = _line(ready.function, rows.take([row]), ready.group)
    where = f"replica {replica}" + (f", slice {part}" if ready.num_slices > 1 else "")
    what = f"{name}: row {first} makes it not finite, on {where}" + (f"; {line}" if line else "")
    return Blame(what, first, replica, part, line, None, probes)


def _place_of(lengths: tuple[int, ...], num_slices: int, row: int) -> tuple[int, int]:
    """Return the replica and the slice that run a row of a call."""
    for number, parts in enumerate(split_into_launches(lengths, num_slices)):
        for replica, (start, count) in enumerate(zip(parts.starts, parts.counts, strict=True)):
            if start <= row < start + count:
                return replica, number
    raise AssertionError(row)


def _not_finite_before(ready: ReadyCall) -> Iterator[tuple[Shared | None, bool, Blame]]:
    """Find variables, and broadcast arguments (None), that are not finite before the call, and if they hold NaN."""
    name, group = ready.function.name, ready.group
    for place, leaf in zip(ready.call.arguments.broadcast, ready.broadcast, strict=True):
        kinds = _kinds_on_replicas(group, leaf, "replicated")
        if kinds.any():
            yield None, kinds[0], Blame(f"{name}: argument {ready.call.arguments.names[place]} is not finite.")
    for variable in ready.plan.accepts:
        state = bind(variable, group)
        for path, leaf in zip(_paths(variable._spec.paths, len(state.leaves)), state.leaves, strict=True):
            kinds = _kinds_on_replicas(group, leaf, state.layout)
            if kinds.any():
                what = f"{name}: {variable.name}{path} holds numbers that are not finite, before the call."
                yield variable, kinds[0], Blame(what)


def _paths(paths: Sequence[str], count: int) -> Sequence[str]:
    """Return the paths of a variable's stored leaves, empty if it stores others than its user sees."""
    return paths if len(paths) == count else [""] * count


def _kinds_on_replicas(group: Group, leaf: jax.Array, layout: Layout, *olds: jax.Array) -> np.ndarray:
    """Tell the kinds of a leaf on any replica; numbers that are in `olds` already do not count."""
    ins: list[Layout] = [layout] * (1 + len(olds))
    (kinds,) = run_collective(group, _kinds_anywhere, ins, layouts("replicated", 1), [leaf, *olds])
    with translate_peer_errors(group):
        return np.asarray(kinds)


def _kinds_anywhere(leaf: jax.Array, *olds: jax.Array) -> list[jax.Array]:
    return [lax.psum(kinds_of(leaf, olds).astype(jnp.int32), AXIS) > 0]


def _not_finite_after(ready: ReadyCall, outcome: Outcome) -> Iterator[tuple[str, np.ndarray]]:
    """Find outputs and updates that are not finite, in words for where no row is to blame, and their kinds."""
    name, plan, group = ready.function.name, ready.plan, ready.group
    has_weights = any(leaf.weight is not None for leaf in plan.outputs.reduced)
    hint = " A synk.Weighted mean is NaN where the weights of all rows add up to 0." if has_weights else ""
    treedef = plan.result.treedef
    paths = tree_leaves_with_path(treedef.unflatten(range(treedef.num_leaves)))
    for i, ((path, _), leaf) in enumerate(zip(paths, outcome.leaves, strict=False)):
        if i in plan.from_first:
            continue
        kinds = _kinds_on_replicas(group, leaf, "stacked" if i in plan.staying else "replicated")
        if kinds.any():
            by = "then" if ready.function.then is not None else "combining its parts"
            yield f"{name}: every row is fine; {by} makes output{keystr(path)} not finite.{hint}", kinds
    for variable, state in outcome.updates.items():
        before = bind(variable, group)
        has_layout = before.layout == state.layout
        olds = before.leaves if has_layout else relayout(group, before.leaves, before.layout, state.layout)
        for path, leaf, old in zip(_paths(variable._spec.paths, len(olds)), state.leaves, olds, strict=True):
            kinds = _kinds_on_replicas(group, leaf, state.layout, old)
            if kinds.any():
                yield f"{name}: every row is fine; then makes {variable.name}{path} not finite.{hint}", kinds


def _line(function: FunctionSpec, bound: BoundArguments, group: Group) -> str | None:
    """Find the line for one row: run the function's equations one after the other, on one device."""
    one, view = one_device(group), view_of_one(group, None)
    try:
        plain = replace(function, then=None, stats=Stats(), refuses_nan=False)
        ready = prepare(Site(plain, PlanCache(), one, view, group, may_donate=False), bound, CallOptions())
        traces = CallTraces(plain, one, ready.call, view)
        traced = traces.of_rows(1, keeps_lines=True)
        leaves = [
            leaf[0] if view(variable).layout == "stacked" else leaf
            for variable in traced.variables
            for leaf in view(variable).leaves
        ]
        rows = feed_rows(one, ready.rows, split_into_launches((1,), 1)[0])
        arguments = ready.call.arguments.in_tree_order(rows, ready.broadcast)
        with jax.ensure_compile_time_eval():
            values = [np.asarray(leaf) for leaf in (*leaves, *arguments)]
            return traced.blame_line(*values, np.int32(0), np.int32(0))
    except (SynkError, ValueError, TypeError):
        # The function may refuse a call of one row. The row is blamed without a line then.
        return None
