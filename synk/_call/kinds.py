"""Kinds: check a call's arguments and rows, compute the key of its plan, and find the plan."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from time import perf_counter
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
from .binding import BoundArguments, CallOptions, check_leaves, passes_variables
from .execute import translate_error
from .parts import split_into_launches
from .plan import CallPlan, Site, Traced, plan_key, trace_plan
from .rows import RowInputs, select_rows, values_on_host
from .spec import CallSpec, FunctionSpec
from .traces import CallTraces, rows_not_in_blocks

# Rows of a call have numbers in int32.
MOST_ROWS = 2**31 - 1


class CheckedCall(NamedTuple):
    """A call whose arguments and rows are checked.

    Attributes:
      kind: the key of its plan, but for the parts that replicas run.
      rows: the scattered arguments, and the rows of each replica.
      broadcast: the broadcast arguments, on the replicas; shapes, if the call does not run.
    """

    kind: CallSpec
    rows: RowInputs
    broadcast: list[Any]

    def in_slices(self, slices: int, function: FunctionSpec) -> CallSpec:
        """Return the key of the plan that runs the call in so many slices."""
        lengths, block = self.rows.lengths, function.blocks
        if block is not None and lengths is not None:
            # Programs know which replica has which blocks, so that they need no branches.
            return self.kind._replace(part_sizes=((max(lengths),),), lengths=lengths, is_even=False, block=block)
        return with_parts(self.kind, lengths, slices, function.gathers and not function.is_over)


def check_call(site: Site, bound: BoundArguments, options: CallOptions) -> CheckedCall:
    """Check a call's arguments and rows, and compute the key of its plan; bring broadcast arguments to the replicas."""
    function, group, slices, spec = site.function, site.group, options.num_slices, bound.spec
    name, is_abstract, data_group = function.name, site.is_abstract, site.data_group
    if function.blocks is not None:
        check_blocks(function, bound, options)
    arguments = check_leaves(bound, name, data_group or group, is_abstract)
    rows = select_rows(site, spec, arguments.scattered, options)
    if group._is_multi_process and not is_abstract:
        remedy = "Give each process the same arguments and batch; synk.local marks rows of its own."
        group._peers.compare_values(f"the arguments of {name}", lambda: values_on_host(arguments, rows), remedy)
    bring = abstract_broadcast if is_abstract else partial(place_broadcast, group, data_group, slices == 1)
    broadcast = [bring(leaf) for leaf in arguments.broadcast]
    batch_s = None if data_group else options.batch_s
    # jax_debug_nans runs a program again to find where NaN came from, so its arguments must be there still. So must
    # the rows of a variable that is an argument of its own update.
    may_donate = site.may_donate and function.donates and not checks_floats()
    kind = CallSpec(
        arguments=spec,
        options=trace_options(),
        rows=tuple([(row.shape, row.dtype) for row in rows.each]),
        feeds=tuple([row.feed for row in rows.each]),
        broadcast=tuple([(b.shape, b.dtype, is_weak(a)) for a, b in zip(arguments.broadcast, broadcast, strict=True)]),
        keys=arguments.keys,
        held_index=None if batch_s is None else index_kind(batch_s),
        subset=None if options.output_subset is None else checked_subset(options.output_subset, name),
        donate=may_donate and not (spec.overlaps and passes_variables(bound)),
        is_over=function.is_over,
    )
    if rows.lengths is None or (batch_s is not None and rows.on_replicas is None):
        rows = _rows_of_variable(site, kind, rows, batch_s)
    check_row_numbers(name, sum(rows.lengths or ()))
    if rows.lengths is None and slices > 1:
        raise ValueError(f"{name}: num_slices={slices} cuts rows, but this call has no scattered input, so no rows.")
    return CheckedCall(kind, rows, broadcast)


def with_parts(kind: CallSpec, lengths: tuple[int, ...] | None, slices: int, gathers: bool) -> CallSpec:
    """Return the kind of a call whose replicas have so many rows each, in so many slices.

    How many rows each replica has is data of programs; part sizes are compiled in. Where outputs have an entry a row
    or a part (`gathers`), programs of unequal parts know all lengths.
    """
    if lengths is None:
        return kind
    part_sizes, is_even, count = _part_sizes(lengths, slices)
    is_data = not gathers or (is_even and count == 1)
    num_slices = 1 if count == 1 else 2 if is_data else count
    return kind._replace(
        part_sizes=part_sizes, lengths=None if is_data else lengths, is_even=is_even, num_slices=num_slices
    )


@lru_cache(maxsize=1024)
def _part_sizes(lengths: tuple[int, ...], slices: int) -> tuple[tuple[tuple[int, ...], ...], bool, int]:
    """Return the sizes of parts of the first launch and of each further kind of launch, whether replicas have equally
    many rows, and how many launches there are."""
    first, *later = [parts.sizes for parts in split_into_launches(lengths, slices)]
    return (first, *dict.fromkeys(later)), len(set(lengths)) == 1, 1 + len(later)


def _rows_of_variable(site: Site, call: CallSpec, rows: RowInputs, batch_s: Any) -> RowInputs:
    """Take the rows that a variable brings, or those that `batch_s` picks from it."""
    function = site.function
    name, taken = function.name, None if rows.lengths is None else rows.lengths[0]

    def trace() -> Traced:
        traces = CallTraces(function, site.group, call._replace(held_index=None), site.view)
        traced = traces.of_rows(taken)
        holder = next((v for v in traced.variables if traces.holds_rows(v)), None)
        record = (*traces.record, None if holder is None else holder._number)
        return Traced(traces.accepts, record, lambda: holder)

    key = ("holder", call, taken, function.per_part)
    holder = site.find(key, trace)
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
    """Refuse what does not go with rows that are dealt out in blocks."""
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
    """Return the shape that a broadcast argument has on every replica, without looking at its values."""
    if isinstance(leaf, Data):
        source_of(leaf)
    if isinstance(leaf, SCALARS):
        return jax.eval_shape(jnp.asarray, leaf)
    return jax.ShapeDtypeStruct(leaf.shape, narrow(leaf.dtype), weak_type=getattr(leaf, "weak_type", False))


def place_broadcast(group: Group, data_group: Group | None, is_used_once: bool, leaf: Any) -> Any:
    """Bring a broadcast argument to every replica; data of the group is there already."""
    if isinstance(leaf, Data):
        source_of(leaf)
        is_there = leaf._home.layout == "replicated" and data_group is None
        return resident(leaf, group) if is_there else replicate(group, leaf[:])
    # The compiled call itself brings a host value to one device in a third of the time.
    if is_used_once and group._has_one_device and isinstance(leaf, np.generic | np.ndarray | int | float | complex):
        return host_copy(leaf)
    if not isinstance(leaf, SCALARS):
        return replicate(group, leaf)
    # A number that stays the same, such as a learning rate, is placed once. Its bits are the key: they tell -0.0 from
    # 0.0, and NaN equals itself.
    number = host_copy(leaf)
    key = number.dtype, number.tobytes()
    return group._cached(place_broadcast, key, lambda: put(group, number, "replicated"))


def check_row_numbers(name: str, rows: int) -> None:
    """Check that each row of a call can have an int32 number."""
    if rows > MOST_ROWS:
        raise ValueError(
            f"{name}: a call has at most {MOST_ROWS} rows, whose numbers are int32; this one has {rows}. Give them in "
            f"batches to {name}.over."
        )


def checked_subset(subset: Any, name: str) -> tuple[Any, ...]:
    """Check that `output_subset` is a sequence of indexes or keys, and return it as a tuple."""
    if isinstance(subset, str) or not isinstance(subset, Sequence):
        raise TypeError(f"{name}: output_subset is {shown(subset)}; give a list of indexes or keys.")
    if not all(isinstance(each, int | str | np.integer) for each in subset):
        raise TypeError(f"{name}: output_subset holds {shown(subset)}; give indexes or keys alone.")
    return tuple(subset)


def find_plan(site: Site, checked: CheckedCall, slices: int, is_probe: bool = False) -> tuple[CallSpec, CallPlan]:
    """Return the plan of a call in so many slices, and its key; make the plan if there is none.

    A probe shows how much memory programs need. It compiles only one of the programs that run slices: one whose parts
    differ, if there is one, since that program holds both sizes.
    """
    kind, lengths = checked.in_slices(slices, site.function), checked.rows.lengths
    if is_probe:
        kind = kind._replace(part_sizes=(max(kind.part_sizes, key=lambda sizes: (len(sizes), sizes)),))
    plan = _find(site, kind)
    if plan is None:
        kind = kind._replace(lengths=lengths, num_slices=len(split_into_launches(lengths or (), slices)))
        plan = _find(site, kind)
    assert plan is not None
    return kind, plan


def _find(site: Site, kind: CallSpec) -> CallPlan | None:
    function = site.function

    def timed(act: Callable[[], Any]) -> Any:
        start = perf_counter()
        result = act()
        function.stats.dispatching += perf_counter() - start
        return result

    def trace() -> Traced:
        traced: Traced = timed(partial(trace_plan, site, kind))
        return traced._replace(finish=lambda: timed(partial(_compile, traced, function.name)))

    return site.find(plan_key(function, kind), trace, holds_function=kind.is_over)


def _compile(traced: Traced, name: str) -> Any:
    try:
        return traced.finish()
    except jax.errors.JaxRuntimeError as error:
        # XLA tries kernels on a GPU while it compiles, for which memory may not do.
        translated = translate_error(error, name)
        if translated is error:
            raise
        raise translated from error
