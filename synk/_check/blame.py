"""Blame: which row makes the first number that is not finite, where it ran, and by which line."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import keystr, tree_leaves_with_path

from .._base.errors import SynkError
from .._base.pytree import PyTree
from .._call.binding import BoundArguments, CallOptions, check_leaves
from .._call.execute import Outcome, ReadyCall, evaluate
from .._call.plan import PlanCache, Site
from .._call.prepare import prepare
from .._call.rows import feed_rows, launches
from .._call.spec import FunctionSpec, Stats
from .._call.traces import CallTraces
from .._data.dataset import Data
from .._data.process_rows import ProcessLocalRows
from .._reductions.monoid import Monoid
from .._reductions.reduction import REDUCTIONS, Weighted
from .._runtime.dispatch import LOCK, drain
from .._runtime.executable import relayout, run_collective, translate_peer_errors
from .._runtime.group import AXIS, Group
from .._runtime.layout import Layout, layouts
from .._tracing.context import current_trace
from .._variables.access import bind
from .._variables.variable import Shared
from .host_rows import HostRows
from .search import Found, find_first
from .views import one_device, view_of_one


@dataclass(frozen=True)
class Blame:
    """What makes a call's outputs, gradients or updates not finite; made by `f.blame`.

    Attributes:
      what: the finding, in words.
      row: which row of the inputs; None where no row is to blame by itself.
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


def flagging(function: FunctionSpec) -> FunctionSpec:
    """A function that says of which kinds a part's outputs and local updates are not finite."""

    def flagged(*args: Any, **kwargs: Any) -> jax.Array:
        out = function.fn(*args, **kwargs)
        context = current_trace()
        assert context is not None
        written = [leaf for new, _ in context.writes.values() for leaf in new]
        olds = [leaf for variable in context.reads for leaf in context.values.get(variable, ())]
        found = [*_kinds_of_outputs(out, olds), *(_kinds_of(leaf, olds) for leaf in written)]
        return jnp.stack([jnp.zeros(len(_KINDS), bool), *found]).any(0)

    ops = REDUCTIONS["any"]
    return replace(
        function, fn=flagged, ops=ops, then=None, stats=Stats(), gathers_all=True, refuses_nan=False, wires=None
    )


def _kinds_of_outputs(out: PyTree, olds: Sequence[jax.Array]) -> list[jax.Array]:
    """One a leaf; what has no weight counts for nothing."""
    found: list[jax.Array] = []
    for one in jax.tree.leaves(out, is_leaf=lambda node: isinstance(node, Weighted | Monoid)):
        if isinstance(one, Weighted):
            weight = jnp.asarray(one.weight)
            found += [(weight != 0) & kinds for kinds in (*_kinds_of_outputs(one.value, olds), _kinds_of(weight))]
        else:
            found += [_kinds_of(leaf, olds) for leaf in jax.tree.leaves(one.state if isinstance(one, Monoid) else one)]
    return found


_KINDS = ("NaN", "infinity", "-infinity")


def _kinds_of(leaf: Any, olds: Sequence[jax.Array] = ()) -> jax.Array:
    """Of which of these kinds is it, other than what is infinite in a variable of its shape already?"""
    leaf = jnp.asarray(leaf)
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return jnp.zeros(len(_KINDS), bool)
    for old in [old for old in olds if (old.shape, old.dtype) == (leaf.shape, leaf.dtype)]:
        leaf = jnp.where(leaf == old, jnp.zeros_like(leaf), leaf)
    is_nan, is_infinite = jnp.isnan(leaf), jnp.isinf(leaf)
    below = is_infinite & (leaf.real < 0) if not jnp.iscomplexobj(leaf) else is_infinite
    above = is_infinite & (leaf.real > 0) if not jnp.iscomplexobj(leaf) else is_infinite
    return jnp.stack([is_nan.any(), above.any(), below.any()])


class Prober:
    """Runs a function on rows of one call, over and over, by programs of one shape."""

    def __init__(self, function: FunctionSpec, plans: PlanCache, bound: BoundArguments, ready: ReadyCall) -> None:
        self.function, self.plans, self.bound, self.group = function, plans, bound, ready.group
        self.num_slices, self.lengths, self.probes = ready.num_slices, ready.rows.lengths, 0
        name, spec, group = function.name, bound.spec, ready.group
        if any(spec.overlaps):
            raise ValueError(f"{name}.blame: rows that bring their neighbours cannot be tried one by one.")
        looked = check_leaves(bound, name, group)
        if any(isinstance(leaf, ProcessLocalRows) for leaf in looked.scattered):
            raise ValueError(f"{name}.blame: it tries rows of all processes, not synk.local ones. Give all the same.")
        if ready.plan.held:
            held = ready.plan.held[0].name
            raise ValueError(
                f"{name}.blame: {held} holds rows, which cannot be tried in another order. Pass them as an argument: "
                f"x = synk.gather({held}, nd_up=0)."
            )
        self.numbers = np.arange(0)
        if ready.rows.each:  # of minibatch data no more than its own rows is known
            known = [not (isinstance(leaf, Data) and leaf.is_minibatch) for leaf in looked.scattered]
            selection = ready.rows.each[known.index(True) if any(known) else 0].selection
            self.numbers = selection.positions(0, sum(self.lengths or ()))
        if bound.numbers is not None:
            self.numbers = bound.numbers.positions(0, bound.numbers.rows)[self.numbers]
        self.rows: HostRows | None = None
        self.reads: Collection[Shared] = ()
        self.kinds = np.ones(len(_KINDS), bool)  # of which it asks

    def is_bad(self, rows: Sequence[int]) -> bool:
        """Does something of the parts come out of the kinds asked for, of these rows, as often as makes as many?"""
        self.probes += 1
        count = sum(self.lengths or ())
        bound = self.bound if self.rows is None else self.rows.take(np.resize(np.asarray(rows), count))
        site = Site(self.function, self.plans, self.group, may_donate=False)
        ready = prepare(site, bound, CallOptions(num_slices=self.num_slices))
        self.reads = ready.plan.accepts
        return bool((np.asarray(evaluate(ready, None).leaves[0]) & self.kinds).any())

    def find(self, kinds: np.ndarray) -> Found | None:
        """The first row that is to blame: of the kinds that the answer shows, since infinity may be meant for some rows
        (a mask before a maximum); of any, where no single row shows these."""
        self.kinds = kinds
        count = sum(self.lengths or ())
        found = find_first(count, self.is_bad) if count else None
        if kinds.all() or not count or (found is not None and found.is_alone):
            return found
        self.kinds = np.ones(len(_KINDS), bool)
        other = find_first(count, self.is_bad)
        if other is not None and (found is None or other.is_alone):
            return other
        self.kinds = kinds
        return found


def blame(site: Site, probe_plans: PlanCache, bound: BoundArguments, options: CallOptions) -> Blame | None:
    """Find what makes a call's numbers not finite; `probe_plans` are the plans of its probes."""
    function, group = site.function, site.group
    with LOCK, jax.debug_nans(False), jax.debug_infs(False):  # which would raise in a probe
        drain()
        whole = prepare(replace(site, may_donate=False), bound, options)
        prober = Prober(flagging(function), probe_plans, bound, whole)
        outcome = evaluate(whole, None)
        bad = list(_of_whole(whole, outcome))
        states = [*_of_state(whole)]
        nans = [(variable, found) for variable, is_nan, found in states if is_nan]
        infinite = next((found for _, is_nan, found in states if not is_nan), None)  # which may be meant so
        if not (outcome.is_refused or (not function.refuses_nan and (bad or whole.plan.own))):
            return next((found for _, found in nans), None)
        for variable, found in nans:
            if variable is None or function.then is None:
                return found
        count = sum(prober.lengths or ())
        prober.rows = HostRows(bound, function.name, options, group) if count else None
        is_seen = bad and infinite is None and not whole.plan.own
        rows = prober.find(np.any([kinds for _, kinds in bad], axis=0) if is_seen else prober.kinds)
        for variable, found in nans:  # what parts read comes before their rows, what then alone reads after these
            if variable in prober.reads or rows is None:
                return found
        if not count and prober.is_bad(()):
            no_rows = f"{function.name}: its outputs are not finite; it has no rows."
            return infinite or Blame(no_rows, probes=prober.probes)
        if rows is None or prober.rows is None:
            return infinite or (Blame(bad[0][0], probes=prober.probes) if bad else None)
        first, last = int(prober.numbers[rows.first]), int(prober.numbers[rows.last])
        is_one = rows.is_alone or not np.ptp(prober.numbers[rows.first : rows.last + 1])  # which may be there twice
        if not (is_one and _is_bad_alone(prober, rows.first)):
            return infinite or Blame(
                f"{function.name}: it is not finite, but no row by itself is to blame: rows {first} to {last} of the "
                f"inputs are, taken together (statistics across rows, sums that overflow), or every one of them.",
                rows=(first, last),
                probes=prober.probes,
            )
        replica, part = _place_of(prober.lengths or (), prober.num_slices, rows.first)
        line = _line(function, prober.rows.take([rows.first]), group)
        where = f"replica {replica}" + (f", slice {part}" if prober.num_slices > 1 else "")
        what = f"{function.name}: row {first} makes it not finite, on {where}" + (f"; {line}" if line else "")
        return Blame(what, first, replica, part, line, None, prober.probes)


def _is_bad_alone(prober: Prober, row: int) -> bool:
    """Is a row bad in a call of it alone? As often as the call has rows it may overflow where once it does not."""
    assert prober.rows is not None
    view = view_of_one(prober.group, None)
    site = Site(prober.function, PlanCache(), one_device(prober.group), view, prober.group, may_donate=False)
    ready = prepare(site, prober.rows.take([row]), CallOptions())
    return bool((np.asarray(evaluate(ready, view).leaves[0]) & prober.kinds).any())


def _place_of(lengths: tuple[int, ...], num_slices: int, row: int) -> tuple[int, int]:
    """Which replica and slice run a row of a selection."""
    for number, parts in enumerate(launches(lengths, num_slices)):
        for replica, (start, count) in enumerate(zip(parts.starts, parts.counts, strict=True)):
            if start <= row < start + count:
                return replica, number
    raise AssertionError(row)


def _of_state(ready: ReadyCall) -> Iterator[tuple[Shared | None, bool, Blame]]:
    """Broadcast arguments (None) and shared variables that are not finite before the call; whether they hold NaN."""
    name, group = ready.function.name, ready.group
    for place, leaf in zip(ready.call.arguments.broadcast, ready.broadcast, strict=True):
        kinds = _look_at(group, leaf, "replicated")
        if kinds.any():
            yield None, kinds[0], Blame(f"{name}: argument {ready.call.arguments.names[place]} is not finite.")
    for variable in ready.plan.accepts:
        state = bind(variable, group)
        for path, leaf in zip(_paths(variable._spec.paths, len(state.leaves)), state.leaves, strict=True):
            kinds = _look_at(group, leaf, state.layout)
            if kinds.any():
                what = f"{name}: {variable.name}{path} holds numbers that are not finite, before the call."
                yield variable, kinds[0], Blame(what)


def _paths(paths: Sequence[str], count: int) -> Sequence[str]:
    return paths if len(paths) == count else [""] * count  # flat ones are stored otherwise


def _look_at(group: Group, leaf: jax.Array, layout: Layout, *olds: jax.Array) -> np.ndarray:
    """Of which kinds is it on some replica, other than what was infinite before?"""
    ins: list[Layout] = [layout] * (1 + len(olds))
    (kinds,) = run_collective(group, _kinds_anywhere, ins, layouts("replicated", 1), [leaf, *olds])
    with translate_peer_errors(group):
        return np.asarray(kinds)


def _kinds_anywhere(leaf: jax.Array, *olds: jax.Array) -> list[jax.Array]:
    return [lax.psum(_kinds_of(leaf, olds).astype(jnp.int32), AXIS) > 0]


def _of_whole(ready: ReadyCall, outcome: Outcome) -> Iterator[tuple[str, np.ndarray]]:
    """What of the answer is not finite, as it is said where no row is to blame, and of which kinds."""
    name, plan, group = ready.function.name, ready.plan, ready.group
    has_weights = any(leaf.weight is not None for leaf in plan.outputs.reduced)
    hint = " A synk.Weighted mean is NaN where the weights of all rows add up to 0." if has_weights else ""
    treedef = plan.result.treedef
    paths = tree_leaves_with_path(treedef.unflatten(range(treedef.num_leaves)))
    for i, ((path, _), leaf) in enumerate(zip(paths, outcome.leaves, strict=False)):
        if i in plan.own:
            continue
        kinds = _look_at(group, leaf, "stacked" if i in plan.staying else "replicated")
        if kinds.any():
            by = "then" if ready.function.then is not None else "combining its parts"
            yield f"{name}: every row is fine; {by} makes output{keystr(path)} not finite.{hint}", kinds
    for variable, state in outcome.updates.items():
        before = bind(variable, group)
        is_there = before.layout == state.layout
        olds = before.leaves if is_there else relayout(group, before.leaves, before.layout, state.layout)
        for path, leaf, old in zip(_paths(variable._spec.paths, len(olds)), state.leaves, olds, strict=True):
            kinds = _look_at(group, leaf, state.layout, old)
            if kinds.any():
                yield f"{name}: every row is fine; then makes {variable.name}{path} not finite.{hint}", kinds


def _line(function: FunctionSpec, bound: BoundArguments, group: Group) -> str | None:
    """Which line it is, of one row: the function as equations, one after the other on one device."""
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
        rows = feed_rows(one, ready.rows, launches((1,), 1)[0])
        given = ready.call.arguments.in_tree_order(rows, ready.broadcast)
        with jax.ensure_compile_time_eval():
            values = [np.asarray(leaf) for leaf in (*leaves, *given)]
            return traced.blame_line(*values, np.int32(0), np.int32(0))
    except (SynkError, ValueError, TypeError):
        return None
