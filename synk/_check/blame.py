"""Blame: which row makes the first number that is not finite, where it ran, and by which line."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._base.errors import listed
from .._call.binding import BoundArguments, CallOptions
from .._call.execute import Outcome, evaluate
from .._call.feed import Fed, prepare
from .._call.parts import split_into_launches
from .._call.plan import PlanCache, Site
from .._data.process_rows import ProcessLocalRows
from .._runtime.dispatch import LOCK, drain
from .._runtime.executable import relayout, run_collective, translate_peer_errors
from .._runtime.group import Group
from .._runtime.layout import layouts
from .._runtime.way import Layout, replica_axis
from .._variables.variable import Shared
from .probe import ALL_KINDS, Kinds, Prober, kinds_of
from .serial import CallRows


@dataclass(frozen=True, repr=False)
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

    def __repr__(self) -> str:
        return f"Blame({self.what})"


def blame(site: Site, probe_plans: PlanCache, bound: BoundArguments, options: CallOptions) -> Blame | None:
    """Find what makes a call's numbers not finite; `probe_plans` are the plans of its probes."""
    function, site = site.function, site._replace(purpose="trial")
    # With these flags JAX raises where a probe computes NaN: https://docs.jax.dev/en/latest/debugging/flags.html
    with LOCK, jax.debug_nans(False), jax.debug_infs(False):
        drain()
        ready = prepare(site, bound, options)
        _refuse_rows(ready, bound)
        outcome = evaluate(ready)
        after = list(_not_finite_after(ready, outcome))
        # NaN comes first, since infinity before the call may be meant.
        before = sorted(_not_finite_before(ready), key=lambda cause: not cause[0])
        nans = [(variable, what) for is_nan, variable, what in before if is_nan]
        is_fine = not outcome.is_refused if function.refuses_nan else not after
        if is_fine or (nans and (nans[0][0] is None or function.then is None)):
            return Blame(nans[0][1]) if nans else None
        rows = CallRows(bound, ready.rows) if ready.rows.inputs else None
        prober = Prober(site._replace(plans=probe_plans), ready, bound, rows)
        shown = ALL_KINDS
        if after and len(nans) == len(before):
            shown = tuple(map(any, zip(*(kinds for _, kinds in after), strict=True)))
        span = prober.find(shown)
        # A variable that parts read comes before their rows, one that `then` alone reads comes after.
        for variable, what in nans:
            if variable in prober.reads:
                return Blame(what)
        if rows is not None and span is not None:
            row = _blame_row(ready, prober, rows.numbers, span)
            if row is not None:
                return row
        if before:
            return Blame(before[0][2])
        if rows is None and prober.is_bad(()):
            return Blame(f"{function.name}: its outputs are not finite; it has no rows.", probes=prober.probes)
        if rows is None or span is None:
            return Blame(after[0][0], probes=prober.probes) if after else None
        (first, last), line = (
            (int(rows.numbers[row]) for row in span),
            prober.run_alone(range(span[0], span[1] + 1))[1],
        )
        what = _together(function.name, _outputs_not_finite(site, bound, options), (first, last), line)
        return Blame(what, line=line, rows=(first, last), probes=prober.probes)


def _together(function: str, names: Sequence[str], rows: tuple[int, int], line: str | None) -> str:
    """Say that outputs are not finite by rows that are finite alone."""
    what, are = (listed(names), "are" if names[1:] else "is") if names else ("it", "is")
    said = (
        f"{function}: {what} {are} not finite, but no row by itself is to blame: rows {rows[0]} to {rows[1]} of the "
        f"inputs are, taken together (statistics across rows, sums that overflow), or every one of them"
    )
    return f"{said}; {line}" if line else f"{said}."


def _refuse_rows(ready: Fed, bound: BoundArguments) -> None:
    name = ready.function.name
    if any(bound.spec.overlaps):
        raise ValueError(f"{name}.blame: rows that bring their neighbours cannot be tried one by one.")
    if any(isinstance(leaf, ProcessLocalRows) for leaf in bound.leaves):
        raise ValueError(f"{name}.blame: it tries rows of all processes, not synk.local ones. Give all the same.")
    if ready.plan.held:
        held = ready.plan.held[0].name
        raise ValueError(
            f"{name}.blame: {held} holds rows, which cannot be tried in another order. Pass them as an argument: "
            f"x = synk.gather({held}, nd_up=0)."
        )


def _blame_row(ready: Fed, prober: Prober, numbers: np.ndarray, span: tuple[int, int]) -> Blame | None:
    """Blame one row, and say where it ran; None if rows are bad only together."""
    # `numbers` are the numbers of the call's rows in the inputs; `span` is the first and the last of the rows to blame.
    row, last = span
    # One row of the inputs may be there several times.
    if np.ptp(numbers[row : last + 1]):
        return None
    is_bad, line = prober.run_alone([row])
    if not is_bad:
        return None
    name, number = ready.function.name, int(numbers[row])
    replica, part = next(
        (replica, part)
        for part, parts in enumerate(split_into_launches(ready.rows.lengths or (), ready.num_slices))
        for replica, (start, count) in enumerate(zip(parts.starts, parts.counts, strict=True))
        if start <= row < start + count
    )
    where = f"replica {replica}" + (f", slice {part}" if ready.num_slices > 1 else "")
    what = f"{name}: row {number} makes it not finite, on {where}" + (f"; {line}" if line else "")
    return Blame(what, number, replica, part, line, None, prober.probes)


def _outputs_not_finite(site: Site, bound: BoundArguments, options: CallOptions) -> list[str]:
    """Return the names of combined outputs that are not finite, before any `then`."""
    # Without `then`, which may hide or make such numbers. A call that refuses them would return no outputs.
    function = replace(site.function, then=None, refuses_nan=False)
    outcome = evaluate(prepare(site._replace(function=function), bound, options))
    return [
        function.name_of_output(leaf.path)[0]
        for leaf, value in zip(outcome.plan.outputs.results, outcome.leaves, strict=True)
        if np.asarray(kinds_of(value)).any()
    ]


def _not_finite_before(ready: Fed) -> Iterator[tuple[bool, Shared | None, str]]:
    """Find variables, and broadcast arguments (None), that are not finite before the call, and if they hold NaN."""
    name, group = ready.function.name, ready.group
    for place, leaf in zip(ready.call.arguments.broadcast, ready.placed(), strict=True):
        kinds = _kinds_on_replicas(group, leaf, "replicated")
        if any(kinds):
            yield kinds[0], None, f"{name}: argument {ready.call.arguments.names[place]} is not finite."
    for variable in ready.plan.accepts:
        state = ready.state(variable)
        leaves = variable._spec.storage.apart(group, state.leaves, state.layout)
        for path, leaf in zip(variable._spec.paths, leaves, strict=True):
            kinds = _kinds_on_replicas(group, leaf, state.layout)
            if any(kinds):
                what = f"{name}: {variable.name}{path} holds numbers that are not finite, before the call."
                yield kinds[0], variable, what


def _not_finite_after(ready: Fed, outcome: Outcome) -> Iterator[tuple[str, Kinds]]:
    """Find outputs and updates that are not finite, in words for where no row is to blame, and their kinds."""
    name, plan, group = ready.function.name, ready.plan, ready.group
    has_weights = any(leaf.weight is not None for leaf in plan.outputs.leaves)
    hint = " A synk.Weighted mean is NaN where the weights of all rows add up to 0." if has_weights else ""
    for i, (path, leaf) in enumerate(zip(plan.result.paths, outcome.leaves, strict=True)):
        kinds = _kinds_on_replicas(group, leaf, "stacked" if i in plan.scattered else "replicated")
        if any(kinds):
            by = "then" if ready.function.then is not None else "combining its parts"
            yield f"{name}: every row is fine; {by} makes output{path} not finite.{hint}", kinds
    for variable, state in outcome.updates.items():
        before = ready.state(variable)
        olds = before.leaves
        # A variable that the replicas shared may hold one value each after the call, and the two are compared place by
        # place.
        if before.layout != state.layout:
            olds = relayout(group, olds, before.layout, state.layout)
        storage = variable._spec.storage
        leaves, olds = [storage.apart(group, stored, state.layout) for stored in (state.leaves, olds)]
        for path, leaf, old in zip(variable._spec.paths, leaves, olds, strict=True):
            # A variable may hold infinity on purpose, such as the best loss so far, so what was there before does not
            # count.
            kinds = _kinds_on_replicas(group, leaf, state.layout, old)
            if any(kinds):
                yield f"{name}: every row is fine; then makes {variable.name}{path} not finite.{hint}", kinds


def _kinds_on_replicas(group: Group, leaf: jax.Array, layout: Layout, *olds: jax.Array) -> Kinds:
    """Tell the kinds of a leaf on any replica; numbers that are in `olds` already do not count."""
    ins: list[Layout] = [layout] * (1 + len(olds))
    (kinds,) = run_collective(group, _kinds_anywhere, ins, layouts("replicated", 1), [leaf, *olds])
    with translate_peer_errors(group):
        return tuple(np.asarray(kinds).tolist())


def _kinds_anywhere(leaf: jax.Array, *olds: jax.Array) -> list[jax.Array]:
    # One program for all replicas, so that every process learns the same and none stays behind in a collective.
    return [lax.psum(kinds_of(leaf, olds).astype(jnp.int32), replica_axis()) > 0]
