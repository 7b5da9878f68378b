"""Prepare: bind, select and plan: from arguments to a call that only has to run."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from time import perf_counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._base.jax_context import checks_floats, trace_options
from .._base.pytree import SCALARS, narrow
from .._data.dataset import Data, resident, source_of
from .._data.selection import index_kind, select_on_replicas
from .._runtime.group import Group
from .._runtime.layout import put, replicate
from .._variables.state import AbstractState, VariableState
from .._variables.variable import Shared
from .binding import BoundArguments
from .execute import ReadyCall
from .feeding import launches
from .inputs import (
    RowInputs,
    check_leaves,
    lengths_of,
    passes_variables,
    select_rows,
    values_given,
)
from .plan import CallPlan, NeedsLengths, PlanCache, make_plan, plan_key
from .row_input import RowCall, RowRequest
from .spec import CallSpec, FunctionSpec, PartForm
from .traces import CallTraces, View


class Where(NamedTuple):
    """Where a call runs, and how it sees what lies elsewhere."""

    group: Group  # which runs it
    view: View | None = None  # of variables, where that is not their own group
    data_group: Group | None = None  # which scattered data lies in, where that is another one
    may_donate: bool = True  # whether old values may be overwritten
    is_abstract: bool = False  # whether shapes are enough: the call is compiled, and not run

    def state(self, variable: Shared) -> VariableState:
        """What a variable holds, as the call sees it."""
        return variable._state if self.view is None else self.view(variable)

    def abstract(self, variable: Shared) -> AbstractState:
        """Its shapes, layout and rows."""
        return self.state(variable).abstract


class _Holder(NamedTuple):
    """Which variable brings a call its rows, if any; for given states of the variables read."""

    variable: Shared | None
    accepts: dict[Shared, tuple[AbstractState, ...]]


def prepare(
    function: FunctionSpec, plans: PlanCache, bound: BoundArguments, request: RowRequest, subset: Any, where: Where
) -> ReadyCall:
    """Check a call's arguments and rows, and find or make its plan."""
    name, group, slices = function.name, where.group, request.num_slices
    looked = check_leaves(bound, name, where.data_group or group, where.is_abstract)
    spec = bound.spec
    call_rows = RowCall(
        name, spec.scattered_names, looked.scattered, request, group, where.data_group, spec.overlaps, where.is_abstract
    )
    rows = select_rows(call_rows)
    if group._is_multi_process and not where.is_abstract:
        remedy = "Give each process the same arguments and batch; synk.local marks rows of its own."
        group._peers.compare_values(f"the arguments of {name}", lambda: values_given(looked, rows), remedy)
    bring = abstract_broadcast if where.is_abstract else partial(place_broadcast, group, where.data_group)
    broadcast = [bring(leaf) for leaf in looked.broadcast]
    batch_s = None if where.data_group else request.batch_s
    form = (  # the first fields of CallSpec
        spec,
        trace_options(),
        tuple([(one.shape, one.dtype) for one in rows.each]),
        tuple([one.feed for one in rows.each]),
        tuple([(b.shape, b.dtype, b.weak_type) for b in broadcast]),
        looked.keys,
        None if batch_s is None else index_kind(batch_s),
        None if subset is None else checked_subset(subset, name),
        function.donate and where.may_donate and not (checks_floats() or (spec.overlaps and passes_variables(bound))),
    )
    if rows.lengths is None or (batch_s is not None and rows.on_replicas is None):
        rows = _rows_of_variable(function, plans, CallSpec(*form), rows, batch_s, where)
    if rows.lengths is None and slices > 1:
        raise ValueError(f"{name}: num_slices={slices} cuts rows, but this call has no scattered input, so no rows.")
    is_over = function.is_over
    call = CallSpec(*form, *part_form(rows.lengths, slices, function.gathers and not is_over), is_over=is_over)
    plan = _find(function, plans, call, where)
    if isinstance(plan, NeedsLengths):
        exact = len(launches(rows.lengths or (), slices))
        call = call._replace(lengths=rows.lengths, num_slices=exact)
        plan = _find(function, plans, call, where)
    assert isinstance(plan, CallPlan)
    if plan.least_rows > 1 and not is_over:
        check_row_count(name, plan.least_rows, rows.lengths)
    if plan.staying:
        _check_dealt_out(name, rows.lengths or (), group.size)
    return ReadyCall(function, group, call, plan, rows, broadcast, slices)


def start(function: FunctionSpec, prepare: Callable[[], ReadyCall], run: Callable[[ReadyCall], Any]) -> Any:
    """Prepare and run a call, and note how long both took."""
    stats = function.stats
    begun, sending, compiling = perf_counter(), stats.sending, stats.dispatching
    ready = prepare()
    prepared = perf_counter()
    stats.selecting += prepared - begun - (stats.dispatching - compiling)
    result = run(ready)
    stats.rows += sum(ready.rows.lengths or ())
    stats.dispatching += perf_counter() - prepared - (stats.sending - sending)
    return result


def check_row_count(name: str, least: int, lengths: tuple[int, ...] | None) -> None:
    """Some answers need so many rows in all."""
    count = sum(lengths or ())
    if count < least:
        raise ValueError(
            f"{name}: an output of it needs {least} rows, as top_k does, but this call has {count} in all."
        )


def _check_dealt_out(name: str, lengths: tuple[int, ...], size: int) -> None:
    """What stays on the replicas is data, whose rows lie as those of all data."""
    usual = lengths_of(sum(lengths), size)
    if lengths != usual:
        raise ValueError(
            f'{name}: an output of it is "scatter", for rows dealt out as {list(usual)}, but this call gives the '
            f'replicas {list(lengths)}. Use "concat".'
        )


def _find(function: FunctionSpec, plans: PlanCache, call: CallSpec, where: Where) -> CallPlan | NeedsLengths:
    """The plan of a kind of call; made where there is none."""

    def make() -> CallPlan | NeedsLengths:
        start = perf_counter()
        plan = make_plan(function, where.group, call, where.view, plans)
        function.stats.dispatching += perf_counter() - start
        return plan

    return plans.find(where.group, plan_key(function, call), where.abstract, make)


@lru_cache(maxsize=1024)
def part_form(lengths: tuple[int, ...] | None, slices: int, gathers: bool) -> PartForm:
    """What programs depend on of the rows of each replica: counts are data, and part sizes are not.

    Where something is gathered by its rows, programs of parts that differ depend on all counts.
    """
    if lengths is None:
        return PartForm()
    first, *later = [parts.sizes for parts in launches(lengths, slices)]
    is_even, count = len(set(lengths)) == 1, 1 + len(later)
    is_data = not gathers or (is_even and count == 1)
    num_slices = 1 if count == 1 else 2 if is_data else count
    return PartForm((first, *dict.fromkeys(later)), None if is_data else lengths, is_even, num_slices)


def _rows_of_variable(
    function: FunctionSpec, plans: PlanCache, call: CallSpec, rows: RowInputs, batch_s: Any, where: Where
) -> RowInputs:
    """Where a variable brings rows, or `batch_s` picks from those that it holds."""
    name, taken = function.name, None if rows.lengths is None else rows.lengths[0]

    def find() -> _Holder:
        traces = CallTraces(function, where.group, call._replace(held_index=None), where.view)
        traced = traces.of_rows(taken)
        holder = next((v for v in traced.variables if traces.holds_rows(v)), None)
        return _Holder(holder, {v: (traces.abstract(v),) for v in traces.touched})

    holder = plans.find(where.group, ("holder", call, taken, function.per_part), where.abstract, find).variable
    lengths = None if holder is None else where.state(holder).rows_per_replica
    if batch_s is None:
        return rows._replace(lengths=lengths)
    if holder is None or lengths is None:
        raise ValueError(
            f"{name}: batch_s picks rows that live on the replicas, but none of its inputs do. Use batch for rows in "
            f"host memory."
        )
    chosen = select_on_replicas(batch_s, lengths, name, holder.name)
    if rows.lengths is not None and sum(rows.lengths) != sum(chosen.lengths):
        raise ValueError(
            f"{name}: batch_s picks {sum(chosen.lengths)} rows of {holder.name}, but the scattered inputs have "
            f"{sum(rows.lengths)} to go with them. Give as many."
        )
    return rows._replace(lengths=chosen.lengths, on_replicas=chosen)


def abstract_broadcast(leaf: Any) -> jax.ShapeDtypeStruct:
    """What a broadcast argument will be on every replica; no more than its shape is looked at."""
    if isinstance(leaf, Data):
        source_of(leaf)  # SynkError where it was freed
    if isinstance(leaf, SCALARS):
        return jax.eval_shape(jnp.asarray, leaf)
    return jax.ShapeDtypeStruct(leaf.shape, narrow(leaf.dtype), weak_type=getattr(leaf, "weak_type", False))


def place_broadcast(group: Group, data_group: Group | None, leaf: Any) -> jax.Array:
    """Bring a broadcast argument to every replica; data is there already, unless another group is its home."""
    if isinstance(leaf, Data):
        source_of(leaf)  # SynkError where it was freed
        is_there = leaf.place == "broadcast" and data_group is None
        return resident(leaf, group) if is_there else replicate(group, leaf[:])
    if not isinstance(leaf, SCALARS):
        return replicate(group, leaf)
    # A number that stays, such as a learning rate, is placed once. Its text tells -0.0 from 0.0, and finds NaN again.
    key = (type(leaf), repr(leaf), jax.config.jax_enable_x64)  # type: ignore[attr-defined]  # an option
    return group._cached(place_broadcast, key, lambda: put(group, jnp.asarray(leaf), "replicated"))


def checked_subset(subset: Any, name: str) -> tuple[Any, ...]:
    """`output_subset` is a list of indexes or keys."""
    if isinstance(subset, str) or not isinstance(subset, Sequence):
        raise TypeError(f"{name}: output_subset is {subset!r}; give a list of indexes or keys.")
    if not all(isinstance(each, int | str | np.integer) for each in subset):
        raise TypeError(f"{name}: output_subset holds {subset!r}; give indexes or keys alone.")
    return tuple(subset)
