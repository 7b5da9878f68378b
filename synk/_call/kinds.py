"""Kinds: check a call's arguments and rows, compute the key of its plan, and find or make the plan."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._base.errors import shown
from .._base.jax_context import checks_floats, trace_options
from .._base.partition import lengths_of
from .._base.pytree import SCALARS, is_weak, narrow
from .._data.dataset import Data, resident, source_of
from .._data.selection import index_kind, select_on_replicas
from .._runtime.dispatch import retire_finished
from .._runtime.layout import host_copy, put, replicate
from .._variables.variable import Shared
from .auto_slices import choose_slices
from .binding import AUTO, BoundArguments, CallOptions, check_leaves
from .execute import ReadyCall, translate_error
from .parts import split_into_launches
from .plan import CallPlan, Site, SliceChoice, Traced, plan_key, trace_plan
from .rows import RowInputs, check_equal_counts, select_rows, values_on_host
from .spec import CallSpec, FunctionSpec
from .traces import CallTraces, rows_not_in_blocks

# Rows of a call have numbers in int32.
MOST_ROWS = 2**31 - 1


def check_call(site: Site, bound: BoundArguments, options: CallOptions) -> tuple[CallSpec, RowInputs, list[Any]]:
    """Check a call's arguments and rows, and compute the key of its plan.

    Returns:
      The key, the rows of the scattered arguments, and the broadcast arguments on the replicas; of a call that does not
      run, the shapes of the broadcast arguments.
    """
    function, group, slices, spec = site.function, site.group, options.num_slices, bound.spec
    name, data_group = function.name, site.data_group
    batch_s = None if data_group else options.batch_s
    if function.blocks is not None and (options.batch_s is not None or any(spec.overlaps) or function.is_over):
        raise ValueError(
            f"{name}: blocks={function.blocks} are blocks of one call, and deal its rows out anew. So it does not go "
            f"with over, batch_s or synk.Overlap."
        )
    scattered, broadcast, keys = check_leaves(bound, name, data_group or group, site.is_abstract)
    rows = select_rows(site, spec, scattered, options)
    if group._is_multi_process and not site.is_abstract:
        remedy = "Give each process the same arguments and batch; synk.local marks rows of its own."
        group._peers.compare_values(
            f"the arguments of {name}", lambda: values_on_host(scattered, broadcast, rows), remedy
        )
    placed: list[Any] = []
    kinds: list[tuple[tuple[int, ...], np.dtype, bool]] = []
    for leaf in broadcast:
        array = _place_broadcast(site, leaf, is_used_once=slices == 1)
        placed.append(array)
        kinds.append((array.shape, array.dtype, is_weak(leaf)))
    # jax_debug_nans runs a program again to find where NaN came from, so its arguments must be there still. So must
    # the rows of a variable that is an argument of its own update, as one with neighbours is.
    may_donate = site.may_donate and function.donate and not function.refuses_nan and not checks_floats()
    passes_variables = any(spec.overlaps) and any(isinstance(leaf, Shared) for leaf in bound.leaves)
    call = CallSpec(
        arguments=spec,
        options=trace_options(),
        rows=tuple([(row.shape, row.dtype) for row in rows.each]),
        feeds=tuple([row.feed for row in rows.each]),
        broadcast=tuple(kinds),
        keys=keys,
        held_index=None if batch_s is None else index_kind(batch_s),
        subset=None if options.output_subset is None else checked_subset(options.output_subset, name),
        donate=may_donate and not passes_variables,
        is_over=function.is_over,
    )
    if rows.lengths is None or (batch_s is not None and rows.on_replicas is None):
        rows = _rows_of_variable(site, call, rows, batch_s)
    if rows.lengths is None and slices > 1:
        raise ValueError(f"{name}: num_slices={slices} cuts rows, but this call has no scattered input, so no rows.")
    return with_parts(function, call, rows.lengths, slices), rows, placed


def with_parts(function: FunctionSpec, call: CallSpec, lengths: tuple[int, ...] | None, slices: int) -> CallSpec:
    """Return the key of a call whose replicas have so many rows each, in so many slices.

    How many rows each replica has is data of programs; part sizes are compiled in. Where outputs have an entry a row
    or a part, programs of unequal parts know all lengths.
    """
    if lengths is None:
        return call
    rows = sum(lengths)
    if rows > MOST_ROWS:
        raise ValueError(
            f"{function.name}: a call has at most {MOST_ROWS} rows, whose numbers are int32; this one has {rows}. Give "
            f"them in batches to {function.name}.over."
        )
    if function.blocks is not None:
        # Programs know which replica has which blocks, so that they need no branches.
        return call._replace(part_sizes=((max(lengths),),), lengths=lengths, is_even=False, block=function.blocks)
    part_sizes, is_even, count = _part_sizes(lengths, slices)
    is_data = not function.gathers or function.is_over or (is_even and count == 1)
    num_slices = 1 if count == 1 else 2 if is_data else count
    return call._replace(
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
    holder = site.plans.find(site, key, trace)
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
    if rows.lengths is not None:
        check_equal_counts(name, {holder.name: sum(chosen.lengths), "the scattered arguments": sum(rows.lengths)})
    return rows._replace(lengths=chosen.lengths, on_replicas=chosen)


def _place_broadcast(site: Site, leaf: Any, is_used_once: bool) -> Any:
    """Bring a broadcast argument to every replica; of a call that does not run, return its shape there."""
    if site.is_abstract:
        if isinstance(leaf, SCALARS):
            return jax.eval_shape(jnp.asarray, leaf)
        return jax.ShapeDtypeStruct(leaf.shape, narrow(leaf.dtype), weak_type=getattr(leaf, "weak_type", False))
    group = site.group
    if isinstance(leaf, Data):
        # This raises if the data was freed.
        source_of(leaf)
        # Data of the group may be there already.
        is_there = leaf._home.layout == "replicated" and site.data_group is None
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
    return group._cached(_place_broadcast, key, lambda: put(group, number, "replicated"))


def checked_subset(subset: Any, name: str) -> tuple[Any, ...]:
    """Check that `output_subset` is a sequence of indexes or keys, and return it as a tuple."""
    is_list = isinstance(subset, Sequence) and not isinstance(subset, str)
    if not is_list or not all(isinstance(entry, int | str | np.integer) for entry in subset):
        raise TypeError(f"{name}: output_subset is {shown(subset)}; give a list of indexes or keys.")
    return tuple(subset)


def find_plan(
    site: Site, call: CallSpec, lengths: tuple[int, ...] | None, slices: int, is_probe: bool = False
) -> tuple[CallSpec, CallPlan]:
    """Return the plan of a call in so many slices, and its key; make the plan if there is none.

    A probe shows how much memory programs need. It compiles only one of the programs that run slices: one whose parts
    differ, if there is one, since that program holds both sizes.
    """
    function = site.function
    if is_probe:
        call = call._replace(part_sizes=(max(call.part_sizes, key=lambda sizes: (len(sizes), sizes)),))

    def trace() -> Traced:
        start = perf_counter()
        traced = trace_plan(site, call)
        function.stats.dispatching += perf_counter() - start
        return traced._replace(finish=partial(_compile, traced, function))

    plan = site.plans.find(site, plan_key(function, call), trace, holds_function=call.is_over)
    if plan is None:
        call = call._replace(lengths=lengths, num_slices=len(split_into_launches(lengths or (), slices)))
        return find_plan(site, call, lengths, slices)
    return call, plan


def _compile(traced: Traced, function: FunctionSpec) -> Any:
    """Make the plan of a trace, and count the seconds."""
    start = perf_counter()
    try:
        return traced.finish()
    except jax.errors.JaxRuntimeError as error:
        # XLA tries kernels on a GPU while it compiles, for which memory may not do.
        translated = translate_error(error, function.name)
        if translated is error:
            raise
        raise translated from error
    finally:
        function.stats.dispatching += perf_counter() - start


def prepare(site: Site, bound: BoundArguments, options: CallOptions) -> ReadyCall:
    """Check a call's arguments and rows, and find or make its plan."""
    choice, function = None, site.function
    # Blocks run one at a time anyway.
    if function.blocks is not None:
        options = options._replace(num_slices=1)
    if options.num_slices == AUTO:
        choice = _choose(site, bound, options)
        options = options._replace(num_slices=choice.slices)
    call, rows, broadcast = check_call(site, bound, options)
    call, plan = find_plan(site, call, rows.lengths, options.num_slices)
    if plan.least_rows > 1 and not function.is_over:
        check_row_count(function.name, plan.least_rows, rows.lengths)
    lengths = rows.lengths or ()
    if plan.staying and lengths != (dealt_out := lengths_of(sum(lengths), site.group.size)):
        raise ValueError(
            f'{function.name}: an output of it is "scatter", for rows dealt out as {list(dealt_out)}, but this call '
            f'gives the replicas {list(lengths)}. Use "concat".'
        )
    return ReadyCall(function, site.group, call, plan, rows, broadcast, options.num_slices, choice)


def _choose(site: Site, bound: BoundArguments, options: CallOptions) -> SliceChoice:
    """Return the number of slices for num_slices="auto"."""
    site = replace(site, is_abstract=True)

    def plan_of(slices: int, is_probe: bool = False) -> CallPlan:
        call, rows, _ = check_call(site, bound, options._replace(num_slices=slices))
        return find_plan(site, call, rows.lengths, slices, is_probe)[1]

    call, rows, _ = check_call(site, bound, options._replace(num_slices=1))
    return choose_slices(site, plan_key(site.function, call), rows, plan_of)


def start(function: FunctionSpec, prepare: Callable[[], ReadyCall], run: Callable[[ReadyCall], Any]) -> Any:
    """Prepare and run a call, and count rows and seconds in the function's stats."""
    stats = function.stats
    # A variable that a dead program was to write raises now, before anything is checked.
    retire_finished()
    begun, sending, compiling = perf_counter(), stats.sending, stats.dispatching
    ready = prepare()
    prepared = perf_counter()
    stats.selecting += prepared - begun - (stats.dispatching - compiling)
    result = run(ready)
    stats.rows += sum(ready.rows.lengths or ())
    stats.dispatching += perf_counter() - prepared - (stats.sending - sending)
    return result


def check_row_count(name: str, least: int, lengths: tuple[int, ...] | None) -> None:
    """Check that a call has as many rows in all as its outputs need."""
    count = sum(lengths or ())
    if count < least:
        raise ValueError(
            f"{name}: an output of it needs {least} rows, as top_k does, but this call has {count} in all."
        )


def is_stale(site: Site, bound: BoundArguments, options: CallOptions) -> bool:
    """Tell whether calls run another program than the function would make now, since what it captures has changed."""
    if options.num_slices == AUTO:
        options = options._replace(num_slices=_choose(site, bound, options).slices)
    call, rows, _ = check_call(site, bound, options)
    calls, lengths = [call], rows.lengths
    if lengths is not None:
        launches = split_into_launches(lengths, options.num_slices)
        calls.append(call._replace(lengths=lengths, num_slices=len(launches)))
    return any(
        site.plans.is_stale(site, plan_key(site.function, call), partial(trace_plan, site, call)) for call in calls
    )
