"""Look: what a call is given: its arguments and rows, checked, and the kind of call that they make."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._base.errors import shown
from .._base.jax_context import checks_floats, trace_options
from .._base.pytree import SCALARS, is_weak, narrow
from .._data.dataset import Data, resident, source_of
from .._data.selection import index_kind, select_on_replicas
from .._runtime.group import Group
from .._runtime.layout import host_copy, put, replicate
from .._variables.state import AbstractState
from .._variables.variable import Shared
from .binding import BoundArguments, CallOptions, check_leaves, passes_variables
from .plan import Site, Traced
from .rows import RowCall, RowInputs, launches, select_rows, values_given
from .spec import CallSpec, FunctionSpec, PartForm
from .traces import CallTraces, rows_not_in_blocks

FORM_FIELDS = CallSpec._fields.index("part_sizes")
MOST_ROWS = 2**31 - 1  # of one call, whose rows have numbers in int32


class Looked(NamedTuple):
    """What a call is given."""

    rows: RowInputs  # its scattered arguments
    broadcast: list[Any]  # its broadcast ones, where they are wanted
    form: tuple[Any, ...]  # the first fields of `CallSpec`: the kind of call that it is, whatever its parts

    def call(self, slices: int, function: FunctionSpec) -> CallSpec:
        """The kind of call that it is in so many slices."""
        is_over = function.is_over
        lengths, block = self.rows.lengths, function.blocks
        if block is not None and lengths is not None:  # who has which is compiled in; programs have no branches then
            parts = PartForm(((max(lengths),),), lengths, is_even=False)
            return CallSpec._make((*self.form, *parts, False, False, block))
        parts = part_form(lengths, slices, function.gathers and not is_over)
        return CallSpec._make((*self.form, *parts, False, is_over, None))


@dataclass(frozen=True, eq=False)
class _Holder:
    """Which variable brings a call its rows, if any; for given states of the variables read."""

    variable: Shared | None
    accepts: dict[Shared, tuple[AbstractState, ...]]


def check_call(site: Site, bound: BoundArguments, options: CallOptions) -> Looked:
    """Check a call's arguments and rows, and bring the broadcast ones to the replicas."""
    function, group, slices = site.function, site.group, options.num_slices
    name, is_abstract, data_group = function.name, site.is_abstract, site.data_group
    if function.blocks is not None:
        check_blocks(function, bound, options)
    looked = check_leaves(bound, name, data_group or group, is_abstract)
    spec = bound.spec
    call_rows = RowCall(
        name,
        spec.scattered_names,
        looked.scattered,
        options,
        group,
        data_group,
        spec.overlaps,
        is_abstract,
        function.blocks,
    )
    rows = select_rows(call_rows)
    if group._is_multi_process and not is_abstract:
        remedy = "Give each process the same arguments and batch; synk.local marks rows of its own."
        group._peers.compare_values(f"the arguments of {name}", lambda: values_given(looked, rows), remedy)
    bring = abstract_broadcast if is_abstract else partial(place_broadcast, group, data_group, slices == 1)
    broadcast = [bring(leaf) for leaf in looked.broadcast]
    batch_s = None if data_group else options.batch_s
    form = (  # as many as FORM_FIELDS says
        spec,
        trace_options(),
        tuple([(one.shape, one.dtype) for one in rows.each]),
        tuple([one.feed for one in rows.each]),
        tuple([(b.shape, b.dtype, is_weak(a)) for a, b in zip(looked.broadcast, broadcast, strict=True)]),
        looked.keys,
        None if batch_s is None else index_kind(batch_s),
        None if options.output_subset is None else checked_subset(options.output_subset, name),
        site.may_donate and function.donates and not (checks_floats() or (spec.overlaps and passes_variables(bound))),
    )
    if rows.lengths is None or (batch_s is not None and rows.on_replicas is None):
        rows = _rows_of_variable(site, CallSpec(*form), rows, batch_s)
    check_row_numbers(name, sum(rows.lengths or ()))
    if rows.lengths is None and slices > 1:
        raise ValueError(f"{name}: num_slices={slices} cuts rows, but this call has no scattered input, so no rows.")
    return Looked(rows, broadcast, form)


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


def _rows_of_variable(site: Site, call: CallSpec, rows: RowInputs, batch_s: Any) -> RowInputs:
    """Where a variable brings rows, or `batch_s` picks from those that it holds."""
    function = site.function
    name, taken = function.name, None if rows.lengths is None else rows.lengths[0]

    def trace() -> Traced:
        traces = CallTraces(function, site.group, call._replace(held_index=None), site.view)
        traced = traces.of_rows(taken)
        holder = next((v for v in traced.variables if traces.holds_rows(v)), None)
        found = _Holder(holder, {v: (traces.abstract(v),) for v in traces.touched})
        return Traced(traces.touched, (*traces.record, None if holder is None else holder._number), lambda: found)

    key = ("holder", call, taken, function.per_part)
    holder = site.find(key, trace).variable
    lengths = None if holder is None else site.state(holder).rows_per_replica
    if holder is not None and function.blocks is not None:
        raise rows_not_in_blocks(name, holder.name, function.blocks)
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


def check_blocks(function: FunctionSpec, bound: BoundArguments, options: CallOptions) -> None:
    """What does not go with rows that are dealt out in blocks."""
    name, block = function.name, function.blocks
    if options.batch_s is not None:
        raise ValueError(f"{name}: batch_s picks rows on the replicas, but blocks={block} deals rows out. Use batch.")
    if any(bound.spec.overlaps):
        raise ValueError(
            f"{name}: blocks={block} and synk.Overlap do not go together: a row's neighbours cross blocks."
        )
    if function.is_over:
        raise ValueError(
            f"{name}.over: blocks={block} are blocks of one call. Call it on all rows, or leave blocks out."
        )


def abstract_broadcast(leaf: Any) -> jax.ShapeDtypeStruct:
    """What a broadcast argument will be on every replica; no more than its shape is looked at."""
    if isinstance(leaf, Data):
        source_of(leaf)  # SynkError where it was freed
    if isinstance(leaf, SCALARS):
        return jax.eval_shape(jnp.asarray, leaf)
    return jax.ShapeDtypeStruct(leaf.shape, narrow(leaf.dtype), weak_type=getattr(leaf, "weak_type", False))


def place_broadcast(group: Group, data_group: Group | None, is_used_once: bool, leaf: Any) -> Any:
    """Bring a broadcast argument to every replica; data is there already, unless another group is its home."""
    if isinstance(leaf, Data):
        source_of(leaf)  # SynkError where it was freed
        is_there = leaf._home.layout == "replicated" and data_group is None
        return resident(leaf, group) if is_there else replicate(group, leaf[:])
    if is_used_once and group._has_one_device and isinstance(leaf, np.generic | np.ndarray | int | float | complex):
        return host_copy(leaf)  # the compiled call brings it in a third of the time
    if not isinstance(leaf, SCALARS):
        return replicate(group, leaf)
    # A number that stays, such as a learning rate, is placed once. Its bits tell -0.0 from 0.0, and find NaN again.
    number = host_copy(leaf)
    key = number.dtype, number.tobytes()
    return group._cached(place_broadcast, key, lambda: put(group, number, "replicated"))


def check_row_numbers(name: str, rows: int) -> None:
    """Each row of a call has a number."""
    if rows > MOST_ROWS:
        raise ValueError(
            f"{name}: a call has at most {MOST_ROWS} rows, whose numbers are int32; this one has {rows}. Give them in "
            f"batches to {name}.over."
        )


def checked_subset(subset: Any, name: str) -> tuple[Any, ...]:
    """`output_subset` is a list of indexes or keys."""
    if isinstance(subset, str) or not isinstance(subset, Sequence):
        raise TypeError(f"{name}: output_subset is {shown(subset)}; give a list of indexes or keys.")
    if not all(isinstance(each, int | str | np.integer) for each in subset):
        raise TypeError(f"{name}: output_subset holds {shown(subset)}; give indexes or keys alone.")
    return tuple(subset)
