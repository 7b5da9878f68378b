"""Probes: run a function on some rows of a call, and find the first row that makes its numbers not finite."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._base.pytree import PyTree
from .._call.binding import BoundArguments, CallOptions
from .._call.execute import ReadyCall, evaluate
from .._call.plan import PlanCache, Site
from .._call.prepare import prepare
from .._call.spec import FunctionSpec, Stats
from .._reductions.monoid import Monoid
from .._reductions.reduction import REDUCTIONS, Weighted
from .._tracing.context import current_trace
from .._variables.variable import Shared
from .serial import HostRows
from .views import one_device, view_of_one

# The kinds of numbers that are not finite: NaN, infinity, -infinity.
ALL_KINDS = np.ones(3, bool)


def kinds_of(leaf: Any, olds: Sequence[jax.Array] = ()) -> jax.Array:
    """Tell for each kind whether a leaf has such numbers.

    Numbers that an array of `olds` has at the same place do not count: a variable may hold infinity on purpose.
    """
    leaf = jnp.asarray(leaf)
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return jnp.zeros(3, bool)
    for old in olds:
        if (old.shape, old.dtype) == (leaf.shape, leaf.dtype):
            leaf = jnp.where(leaf == old, jnp.zeros_like(leaf), leaf)
    is_nan, is_infinite = jnp.isnan(leaf), jnp.isinf(leaf)
    above = below = is_infinite
    if not jnp.iscomplexobj(leaf):
        above, below = is_infinite & (leaf > 0), is_infinite & (leaf < 0)
    return jnp.stack([is_nan.any(), above.any(), below.any()])


def _kinds_of_outputs(outputs: PyTree, olds: Sequence[jax.Array]) -> list[jax.Array]:
    """List the kinds of every output of a part; a value of weight 0 has none."""
    kinds: list[jax.Array] = []
    for output in jax.tree.leaves(outputs, is_leaf=lambda node: isinstance(node, Weighted | Monoid)):
        if isinstance(output, Weighted):
            weight = jnp.asarray(output.weight)
            both = [*_kinds_of_outputs(output.value, olds), kinds_of(weight)]
            kinds += [(weight != 0) & value_kinds for value_kinds in both]
        else:
            leaves = jax.tree.leaves(output.state if isinstance(output, Monoid) else output)
            kinds += [kinds_of(leaf, olds) for leaf in leaves]
    return kinds


def _flagging(function: FunctionSpec) -> FunctionSpec:
    """Make a function that returns the kinds of a part's outputs and updates of variables."""

    def flagged(*args: Any, **kwargs: Any) -> jax.Array:
        outputs = function.fn(*args, **kwargs)
        context = current_trace()
        assert context is not None
        olds = [leaf for variable in context.reads for leaf in context.values.get(variable, ())]
        written = [kinds_of(leaf, olds) for new, _ in context.writes.values() for leaf in new]
        return jnp.stack([jnp.zeros(3, bool), *_kinds_of_outputs(outputs, olds), *written]).any(0)

    # The probe has statistics of its own, so that those of the function count the user's calls alone.
    ops = REDUCTIONS["any"]
    return replace(
        function, fn=flagged, ops=ops, then=None, stats=Stats(), gathers_all=True, refuses_nan=False, wires=None
    )


class Prober:
    """Runs a function on rows of one call, over and over, by programs of one shape.

    Attributes:
      probes: how often it ran.
      reads: the variables that the function reads.
    """

    def __init__(self, ready: ReadyCall, plans: PlanCache, bound: BoundArguments, rows: HostRows | None) -> None:
        self.probes = 0
        self.reads: Collection[Shared] = ()
        self._function, self._group, self._plans = _flagging(ready.function), ready.group, plans
        self._bound, self._rows, self._count = bound, rows, sum(ready.rows.lengths or ())
        self._num_slices = ready.num_slices
        self._kinds = ALL_KINDS

    def is_bad(self, rows: Sequence[int]) -> bool:
        """Run the function on these rows, repeated to as many as the call has, and look for the kinds asked for."""
        self.probes += 1
        # With the same number of rows each time, one compiled program serves all probes.
        bound = self._bound if self._rows is None else self._rows.take(np.resize(np.asarray(rows), self._count))
        site = Site(self._function, self._plans, self._group, may_donate=False)
        ready = prepare(site, bound, CallOptions(num_slices=self._num_slices))
        self.reads = ready.plan.accepts
        return self._has_kinds(ready, None)

    def is_bad_alone(self, row: int) -> bool:
        """Run the function on one row, once: sums over a row that is repeated may overflow where its own do not."""
        assert self._rows is not None
        view = view_of_one(self._group, None)
        site = Site(self._function, PlanCache(), one_device(self._group), view, self._group, may_donate=False)
        return self._has_kinds(prepare(site, self._rows.take([row]), CallOptions()), view)

    def _has_kinds(self, ready: ReadyCall, view: Any) -> bool:
        return bool((np.asarray(evaluate(ready, view).leaves[0]) & self._kinds).any())

    def find(self, kinds: np.ndarray) -> tuple[int, int] | None:
        """Find the first row to blame, or the first and last of rows that are bad together.

        It asks for the kinds that the answer shows first, since infinity may be meant for some rows, as in a mask
        before a maximum. If no single row shows those, it asks for all kinds.
        """
        self._kinds = kinds
        rows = find_first(self._count, self.is_bad) if self._count else None
        if kinds.all() or not self._count or (rows is not None and rows[0] == rows[1]):
            return rows
        self._kinds = ALL_KINDS
        others = find_first(self._count, self.is_bad)
        if others is not None and (rows is None or others[0] == others[1]):
            return others
        self._kinds = kinds
        return rows


def find_first(rows: int, is_bad: Callable[[Sequence[int]], bool]) -> tuple[int, int] | None:
    """Find the first row that is bad by itself, or a run of rows that are bad together; None if all are good.

    It asks at most 2 log2(rows) + 4 times. A row is named only if some other is good by itself, since a number that is
    computed across rows, such as a standard deviation, may be bad for any row alone.

    Returns:
      The first and the last row; they are equal if one row is bad by itself.
    """
    if not is_bad(range(rows)):
        return None
    good, bad = 0, rows  # the first `good` rows are fine together, the first `bad` rows are not
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (good, middle) if is_bad(range(middle)) else (middle, bad)
    row = bad - 1
    if not is_bad([row]):
        bad, good = 0, row  # rows from `bad` to `row` are not fine together, rows from `good` to `row` are
        while good - bad > 1:
            middle = (good + bad) // 2
            good, bad = (good, middle) if is_bad(range(middle, row + 1)) else (middle, bad)
        return bad, row
    # The neighbour before and the first row, or two other rows for the first row itself.
    others = [other for other in dict.fromkeys((row - 1, 0) if row else (rows // 2, rows - 1)) if 0 <= other != row]
    if rows == 1 or not all(is_bad([other]) for other in others):
        return row, row
    return 0, rows - 1
