"""Compose: trace a call under an outer jit, grad, vmap or checkpoint as one operation."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from weakref import ref

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, get_abstract_mesh, use_abstract_mesh

from .._base.errors import SynkError
from .._base.jax_context import named_axes, trace_options, trace_surroundings, transfers_on_purpose
from .._base.partition import lengths_of
from .._base.pytree import PyTree, named, narrowed, to_jax
from .._data.feed import SENT
from .._data.overlap import Overlap, halo_of, with_neighbours
from .._data.process_rows import ProcessLocalRows
from .._data.transfer import gather_rows
from .._reductions.outputs import ResultSpec
from .._runtime.group import Group
from .._runtime.layout import put
from .._runtime.way import Layout, axis_named, replica_axis
from .binding import AUTO, BoundArguments, CallOptions
from .compiler import Compiler
from .feed import check_row_count
from .kinds import Kind, checked_subset, parts_asked
from .leaves import recognise_leaves, spec_of_part
from .parts import with_parts
from .plan import Site, Traced, plan_key
from .program import Epilogue
from .rows import Rows
from .spec import CallSpec, FunctionSpec
from .states import TracedCall
from .traces import CallTraces, NeedsAllRows

# The options of a call that a traced one heeds. All others are refused.
KNOWN = ("batch", "num_slices", "output_subset")


@transfers_on_purpose()
def compose(site: Site, bound: BoundArguments, options: CallOptions) -> PyTree:
    function, name, defaults = site.function, site.function.name, CallOptions._field_defaults
    unknown = [option for option in options._fields if option not in KNOWN]
    refused = {
        **{option: getattr(options, option) is not defaults[option] for option in unknown},
        "blocks=": function.blocks is not None,
        'nan="raise"': function.refuses_nan,
        "compiler_options=": bool(function.compiler_options),
        'num_slices="auto"': options.num_slices == AUTO,
        "synk.local rows": any(isinstance(leaf, ProcessLocalRows) for leaf in bound.leaves),
    }
    for words, is_used in refused.items():
        if is_used:
            raise ValueError(f"{name}: {words} cannot enter jit, grad, vmap or the like. Call it outside, or without.")
    site.group._way.refuse_parts(name, parts_asked(bound.spec, options.num_slices))
    with axis_named(function.axis_name), own_mesh(name, site.group):
        # A traced result must be one array: rows cannot stay on replicas as `Data`, which no transformation knows.
        site = site._replace(function=function.gathering())
        try:
            return _compose(site, bound, options)
        # A function that communicates, over rows that do not divide, runs as one replica of all devices.
        except NeedsAllRows:
            return _compose(site.as_one(), bound, options)


def _compose(site: Site, bound: BoundArguments, options: CallOptions) -> PyTree:
    function, group, batch, subset = site.function, site.group, options.batch, options.output_subset
    name, spec = function.name, bound.spec
    leaves, parts = recognise_leaves(bound, name)
    specs = [spec_of_part(part) for part in parts]
    subset = None if subset is None else checked_subset(subset, name)
    picks = CallOptions(None if isinstance(batch, jax.core.Tracer) else batch, output_subset=subset)
    # All rows come as from another group's host; `in_blocks` adds neighbours.
    apart = site._replace(home=site.home or group)
    kind = Kind(apart, replace(spec, overlaps=(None,) * len(spec.scattered)), specs, picks)
    if picks.batch is batch:
        sources = _picked(kind.select(apart, leaves, picks)[1])
    elif any(specs[i].is_minibatch for i in spec.scattered):
        raise ValueError(f"{name}: minibatch data cannot go with a traced batch. Pass its array.")
    else:
        sources = _picked_later(name, kind.select(apart, leaves, picks)[1], batch)
    broadcast = [to_jax(leaves[i], f"{name}: argument {spec.names[i]}") for i in spec.broadcast]
    rows = len(sources[0]) if sources else None
    if rows is None and options.num_slices > 1:
        raise ValueError(f"{name}: num_slices cuts rows, but no argument is scattered.")
    lengths = None if rows is None else lengths_of(rows, group.size)
    # The rows of each replica are compiled in: their number is part of the outer trace anyway.
    slices = 1 if lengths is None else min(options.num_slices, max(lengths))
    base = kind.base._replace(
        arguments=spec,
        options=(*trace_options(), *trace_surroundings()),
        rows=tuple((s.shape[1:], s.dtype) for s in sources),
        feeds=(SENT,) * len(sources),
        donate=False,
        is_composed=True,
    )
    call = with_parts(function, base, lengths, 1)._replace(lengths=lengths, num_slices=slices)

    def trace() -> Traced:
        # A program that touches a variable is refused, so none is touched here.
        made = _make(function, group, call)
        function.on_first_call(site, bound, options, None)
        return Traced({}, (ref(made[0]),), lambda: made)

    mapped, result = site.plans.find(site, plan_key(function, call), trace, holds_function=True)
    pairs = zip(sources, spec.overlaps, strict=True)
    layout: Layout = "rows" if group.size > 1 else "replicated"
    blocks = [place_traced(group, in_blocks(source, lengths or (), overlap), layout) for source, overlap in pairs]
    placed = [*blocks, *(place_traced(group, leaf, "replicated") for leaf in broadcast)]
    return result.tree(run_inlined(group, mapped, placed))


@contextmanager
def own_mesh(name: str, group: Group) -> Generator[None]:
    """Trace programs of a group without the mesh of the trace under way; raise SynkError if that is another mesh, or
    has taken the name of the replicas' axis."""
    mesh = get_abstract_mesh()
    is_its_own = mesh == group.mesh.abstract_mesh
    if not (mesh.empty or is_its_own or group._way.fits_in(mesh)):
        # How JAX 0.9 and later, and how 0.8, call the axis of a pmap without a name.
        if any(str(axis).startswith(("_internal_pmap_axis_name", "<axis ")) for axis in mesh.shape):
            raise SynkError(f"{name}: it is traced inside jax.pmap, but runs on {group} itself. Leave jax.pmap out.")
        raise SynkError(
            f"{name}: it is traced inside jax.set_mesh, jax.shard_map or jax.pmap with the mesh {dict(mesh.shape)}, "
            f"but runs on that of {group}. Call it outside of these, or under jax.set_mesh(synk.group().mesh)."
        )
    if replica_axis() in named_axes():
        raise SynkError(
            f'{name}: a transformation around it (vmap, pmap) has an axis named "{replica_axis()}", as that of the '
            f"replicas is called. Give it another axis_name."
        )
    with use_abstract_mesh(AbstractMesh((), ())) if is_its_own else nullcontext():
        yield


def run_inlined(
    group: Group, mapped: Callable[..., Sequence[jax.Array]], placed: Sequence[jax.Array]
) -> Sequence[jax.Array]:
    try:
        return mapped(*placed)
    except ValueError as error:
        # Under an eager grad or vmap a traced value may wrap one that lives on one device alone.
        if "incompatible devices" not in str(error):
            raise
        return mapped(*(jax.device_put(a, group.replicated) for a in placed))


def _picked(rows: Rows) -> list[jax.Array]:
    picked: list[jax.Array] = []
    for of_argument, array, selection in zip(rows.inputs, rows.sources, rows.selections, strict=True):
        with named(of_argument.what):
            # A constant of the trace holds only the rows that are picked.
            if not isinstance(array, jax.Array):
                picked.append(jnp.asarray(gather_rows(array, selection, of_argument.dtype)))
                continue
            # A slice has a cheap gradient, where that of a gather is a scatter.
            index = slice(selection.start, selection.start + selection.rows)
            array = narrowed(array[index if selection.indexes is None else selection.indexes])
            picked.append(array.astype(of_argument.dtype))
    return picked


def _picked_later(name: str, rows: Rows, batch: jax.Array) -> list[jax.Array]:
    """Pick rows of the scattered arguments by a traced batch, when the program runs."""
    if not jnp.issubdtype(batch.dtype, jnp.integer) or batch.ndim != 1:
        form = f"{batch.dtype}{batch.shape}"
        raise TypeError(f"{name}: a traced batch is a 1-d integer array; this one is {form}.")
    if not batch.shape[0]:
        raise ValueError(f"{name}: the batch selects no rows. A call needs at least one.")
    # Traced indexes cannot be checked. A row that is not there is NaN (of integers the least or the largest number),
    # and never another row.
    wide = batch if batch.dtype.itemsize >= 4 else batch.astype(jnp.int32)
    sources = [to_jax(leaf, of.what) for of, leaf in zip(rows.inputs, rows.sources, strict=True)]
    return [source.at[wide].get(mode="fill") for source in sources]


def in_blocks(source: jax.Array, lengths: Sequence[int], overlap: Overlap | None) -> jax.Array:
    """Cut rows into equal blocks, one a replica, with their neighbours; copies of real rows fill short blocks."""
    if len(set(lengths)) == 1 and overlap is None:
        return source
    numbers = np.arange(len(source)) if overlap is None else with_neighbours(len(source), overlap)
    starts = np.cumsum([0, *lengths[:-1]])[:, None]
    # Blocks must be equal for shard_map; copies of real rows fill short ones, since `fn` of zeros may be NaN.
    index = np.minimum(starts + np.arange(lengths[0] + halo_of(overlap)), len(numbers) - 1)
    return source.at[numbers[index.ravel()]].get(mode="promise_in_bounds")


def place_traced(group: Group, array: jax.Array, layout: Layout) -> jax.Array:
    """Move an array that one device holds to where a program over several devices can take it."""
    # An uncommitted array moves by itself, and a tracer is placed by the program around.
    if isinstance(array, jax.core.Tracer) or not array.committed:
        return array
    return put(group, array, layout)


def _make(
    function: FunctionSpec, group: Group, call: CallSpec
) -> tuple[Callable[..., Sequence[jax.Array]], ResultSpec]:
    """Make the program of a traced call, to be inlined, and the structure of what it returns."""
    traced = TracedCall(CallTraces(function, group, call))
    # This traces `then`, which may touch variables too.
    epilogue = Epilogue(traced)
    result = epilogue.result
    least = traced.outputs.least_rows(traced.combined) if call.has_rows else 0
    check_row_count(function.name, least, call.lengths)
    for variable in traced.traces.touched:
        raise SynkError(
            f"{function.name}: it uses the shared variable {variable.name}, so it cannot run inside jit, grad or vmap: "
            f'they would keep the value of now. Make it a "broadcast" argument and pass {variable.name}.value.'
        )
    # Under jit the equations are traced once for all calls of the kind; without it each outer trace would repeat them.
    return jax.jit(Compiler(epilogue, (), {}).inlined()), result
