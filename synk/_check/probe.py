"""Probes: run a function on some rows of a call, and find the first row that makes its numbers not finite."""

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._base.pytree import key_of
from .._call.binding import BoundArguments, CallOptions
from .._call.execute import evaluate
from .._call.feed import Fed, prepare
from .._call.parts import split_into_launches
from .._call.plan import PlanCache, Site
from .._call.rows import feed_rows
from .._call.spec import FunctionSpec, Stats
from .._call.traces import CallTraces
from .._reductions.monoid import Monoid
from .._reductions.outputs import is_whole
from .._reductions.reduction import REDUCTIONS, Weighted
from .._tracing.context import current_trace
from .._variables.variable import Shared
from .serial import CallRows, Runner

# Kinds of numbers that are not finite: for NaN, infinity and -infinity, whether there are such numbers.
Kinds = tuple[bool, ...]
ALL_KINDS: Kinds = (True, True, True)


def kinds_of(leaf: Any, olds: Sequence[jax.Array] = ()) -> jax.Array:
    """Tell the kinds of a leaf's numbers."""
    leaf = jnp.asarray(leaf)
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return jnp.zeros(3, bool)
    # Numbers that an array of `olds` has at the same place do not count: a variable may hold infinity on purpose.
    for old in olds:
        if (old.shape, old.dtype) == (leaf.shape, leaf.dtype):
            leaf = jnp.where(leaf == old, jnp.zeros_like(leaf), leaf)
    if jnp.iscomplexobj(leaf):
        leaf = jnp.stack([leaf.real, leaf.imag])
    return jnp.stack([is_kind(leaf).any() for is_kind in (jnp.isnan, jnp.isposinf, jnp.isneginf)])


def _flagging(function: FunctionSpec) -> FunctionSpec:
    """Make a function that returns the kinds of a part's outputs and updates of variables."""

    def flagged(*args: Any, **kwargs: Any) -> jax.Array:
        outputs = function.fn(*args, **kwargs)
        context = current_trace()
        assert context is not None
        olds = [leaf for variable in context.reads for leaf in context.values.get(variable, ())]
        kinds = [jnp.zeros(3, bool), *(kinds_of(leaf, olds) for new, _ in context.writes.values() for leaf in new)]
        for output in jax.tree.leaves(outputs, is_leaf=is_whole):
            leaves = jax.tree.leaves(output.state if isinstance(output, Monoid) else output)
            # A value of weight 0 counts for nothing.
            counts = jnp.asarray(output.weight) != 0 if isinstance(output, Weighted) else True
            kinds += [kinds_of(leaf, olds) & counts for leaf in leaves]
        return jnp.stack(kinds).any(0)

    flagged.__wrapped__ = function.fn  # type: ignore[attr-defined]  # calls look up the names of the function
    # The probe has statistics of its own, so that those of the function count the user's calls alone.
    ops = REDUCTIONS["any"]
    return replace(
        function, fn=flagged, ops=ops, then=None, stats=Stats(), gathers_all=True, refuses_nan=False, wires=None
    )


class Prober:
    """Prober of one call: runs its function on some of its rows, over and over, by programs of one shape.

    Attributes:
      probes: how often it ran.
      reads: the variables that the function reads.
    """

    def __init__(self, site: Site, ready: Fed, bound: BoundArguments, rows: CallRows | None) -> None:
        """Make the prober of a call that is ready; the site is where probes run, with plans of their own."""
        self.probes = 0
        self.reads: Collection[Shared] = ()
        self._function, self._ready = _flagging(ready.function), ready
        self._site = site._replace(function=self._function)
        self._bound, self._rows = bound, rows
        self._kinds = ALL_KINDS

    def is_bad(self, rows: Sequence[int]) -> bool:
        """Run the function on these rows, repeated to as many as the call has, and look for the kinds asked for."""
        self.probes += 1
        # With the same number of rows each time, one compiled program serves all probes.
        bound, options = self._bound, CallOptions()
        if self._rows is not None:
            bound, options = self._rows.call_of(np.resize(rows, len(self._rows.positions)))
        ready = prepare(self._site, bound, options._replace(num_slices=self._ready.num_slices))
        self.reads = ready.plan.accepts
        return self._has_kinds(ready)

    def _has_kinds(self, ready: Fed) -> bool:
        return bool((np.asarray(evaluate(ready).leaves[0]) & self._kinds).any())

    def find(self, kinds: Kinds) -> tuple[int, int] | None:
        """Find the first row to blame, or the first and last of rows that are bad together."""
        if self._rows is None:
            return None
        # The kinds that the answer shows come first, since infinity may be meant for some rows, as in a mask before a
        # maximum. Without such rows the search asks for all kinds: clipping makes NaN of an infinite gradient.
        for self._kinds in dict.fromkeys((kinds, ALL_KINDS)):
            if span := find_first(len(self._rows.positions), self.is_bad):
                return span
        return None

    def run_alone(self, rows: Sequence[int]) -> tuple[bool, str | None]:
        # Each row once, on one device: sums over a row that is repeated may overflow where its own do not.
        assert self._rows is not None
        runner = Runner(self._function, PlanCache(), *self._rows.call_of(rows), self._site.home or self._site.group)
        one, view = runner.serial.group, runner.serial.view
        try:
            ready = runner.ready(runner.serial, self._function)
            if not self._has_kinds(ready):
                return False, None
        except Exception:
            # The function may refuse so few rows, or one device has no room for so many. There is no line then.
            return True, None
        # The equations run one after the other.
        traced = CallTraces(self._function, one, ready.call, view).of_rows(len(rows), keeps_lines=True)
        pairs = [
            pair
            for v in traced.variables
            for pair in zip(runner.serial.state(v).leaves, runner.serial.state(v).abstract.shapes, strict=True)
        ]
        leaves = [leaf.reshape(shape.shape) for leaf, shape in pairs]
        arrays = feed_rows(one, ready.rows, split_into_launches((len(rows),), 1)[0])
        arguments = ready.call.arguments.in_tree_order(arrays, ready.placed())
        with jax.ensure_compile_time_eval():
            values = [leaf if key_of(leaf) else np.asarray(leaf) for leaf in (*leaves, *arguments)]
            return True, traced.blame_line(*values, np.int32(0), np.int32(0))


def find_first(rows: int, is_bad: Callable[[Sequence[int]], bool]) -> tuple[int, int] | None:
    """Find the first row that is bad by itself, or the ends of a run that is bad together; None if all are good."""
    # At most 2 log2(rows) + 4 questions: each is a run of the function.
    if not is_bad(range(rows)):
        return None
    # Rows before `row` are fine together, rows up to `row` are not.
    row = bisect_left(range(rows - 1), True, key=lambda last: is_bad(range(last + 1)))
    if not is_bad([row]):
        # Rows from `first` to `row` are not fine together, those after `first` are.
        first = bisect_left(range(1, row), True, key=lambda start: not is_bad(range(start, row + 1)))
        return first, row
    # The neighbour before and the first row, or two other rows for the first row itself.
    # A number that is computed across rows, such as a standard deviation, may be bad for any row alone. So a row is
    # named only if some other row is good by itself.
    others = {row - 1, 0} if row else {rows // 2, rows - 1}
    return (0, rows - 1) if all(is_bad([other]) for other in others) else (row, row)
