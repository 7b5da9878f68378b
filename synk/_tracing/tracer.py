"""Tracer: trace a user's function once a shape, and learn what it reads, writes, returns and communicates."""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from .._base.pytree import PyTree, as_keys
from .._runtime.shards import Shard
from .._runtime.way import axis_named, replica_axis
from .captured import split, without_places
from .context import TraceContext, tracing
from .equations import draws_by_rbg, equations, flops, is_over_axis, narrowest_float
from .fingerprint import fingerprint
from .moving import moving_along
from .nan_origin import first_bad_line
from .sharded import NO_SUMS, ShardedSum, evaluate_sharded


@dataclass(frozen=True)
class TraceRequest:
    """A function to trace.

    Attributes:
      fn: the user's function, which errors of JAX name.
      call: calls `fn` with the traced arguments, and with constants.
      arguments: trees of shapes. Typed PRNG keys have the shapes of their raw data.
      keys: the PRNG implementation of each argument leaf, None for plain arrays.
      pack: flattens the returned value, and returns the leaves and a description that is kept.
      sees: the surroundings of the function. Rank, rows and values of variables come with each trace.
      variables: variables that the function will probably read. Guessing right saves a second trace.
      keeps_lines: whether equations keep the user's line that each comes from.
      mesh: the devices among which XLA divides the work; None where it divides none.
    """

    fn: Callable[..., PyTree]
    call: Callable[..., PyTree]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    keys: Sequence[Any]
    pack: Callable[[PyTree], tuple[list[jax.Array], Any]]
    sees: TraceContext
    variables: Sequence[Any] = ()
    merges_equal: bool = False
    keeps_lines: bool = False
    mesh: Mesh | None = None


@dataclass(frozen=True)
class TracedFunction:
    """A function of plain arrays: it maps leaves of variables and arguments, the rank and the first row to leaves.

    Attributes:
      run: runs the function: takes the values of `known` by that name, and returns outputs, then new leaves. Of
        arguments in shards, and of `sums`, see `evaluate_sharded`.
      known: computes what depends on captured arrays alone, once; large arrays are `Constant`s.
      blame_line: takes the arguments of `run`, and returns the line that makes the first number that is not finite.
      variables: the variables whose leaves come first, in this order.
      reads: the variables in the order in which they are read.
      writes: the variables written, each with how slices combine.
      outputs: the description of the returned value by `pack`.
      shapes: the shapes of the outputs, then of the new leaves.
      uses_rank: what makes results that may differ between replicas with equal inputs: calls and primitives.
      has_effects: whether it prints or the like, so that a part must run once.
      has_callbacks: whether it has effects or calls the host, so that it must not run on rows that do not exist.
      draws_by_rbg: whether it draws by a generator whose numbers under `jax.vmap` depend on the other keys.
      over_axis: the primitives that name the axis of the replicas.
      named: the highest rank that each primitive names, of those that name replicas by number.
      communicates_at_top: whether it does so outside loops and branches too.
      has_convolution: whether XLA's CPU compiler should find it outside branches and loops.
      whole: the primitives that move numbers along the rows, where XLA divides the work: they run whole.
      flops: counts operations of matrix products and convolutions for some of its results.
      fingerprint: equal for functions that compute the same.
    """

    run: Callable[..., list[Any]]
    known: Callable[[], Sequence[Any]]
    blame_line: Callable[..., str | None]
    variables: tuple[Any, ...]
    reads: tuple[Any, ...]
    writes: tuple[tuple[Any, str | None], ...]
    outputs: Any
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    uses_rank: set[str]
    uses_size: bool
    has_effects: bool
    has_callbacks: bool
    draws_by_rbg: bool
    over_axis: frozenset[str]
    named: dict[str, int]
    communicates_at_top: bool
    has_convolution: bool
    whole: Sequence[str]
    narrowest: np.dtype | None
    flops: Callable[[Sequence[int]], int]
    fingerprint: Hashable

    @property
    def communicates(self) -> bool:
        return bool(self.over_axis)


def trace(request: TraceRequest) -> TracedFunction:
    """Trace a function for one replica. Trace it again if it reads variables that it was not expected to read."""
    with axis_named(request.sees.axis_name):
        return _trace(request)


def _trace(request: TraceRequest) -> TracedFunction:
    # Fields of TracedFunction, by the last trace.
    learned: dict[str, Any] = {}
    variables = tuple(dict.fromkeys(request.variables))
    flat_arguments, treedef = jax.tree.flatten(request.arguments)
    number = jax.ShapeDtypeStruct((), np.int32)
    axes = [(replica_axis(), request.sees.size)] if request.sees.has_axis else None
    # Each further trace has the variables that the traces before have read, and there are finitely many.
    while True:
        shapes = [shape for variable in variables for shape in request.sees.shapes_of(variable)]
        flat = functools.partial(_run_traced, request, learned, variables, treedef)
        closed = jax.make_jaxpr(flat, axis_env=axes)(*shapes, *flat_arguments, number, number)
        if set(learned["reads"]) <= set(variables):
            break
        variables = tuple(dict.fromkeys((*variables, *learned["reads"])))
    closed, large = without_places(closed, request.sees.name, request.merges_equal, request.mesh)
    # A wrong guess leaves leaves of variables in the jaxpr that nothing uses.
    is_used = [variable in learned["reads"] for variable in variables for _ in request.sees.shapes_of(variable)]
    invars = [*compress(closed.jaxpr.invars, is_used), *closed.jaxpr.invars[len(is_used) :]]
    closed = closed.replace(jaxpr=closed.jaxpr.replace(invars=invars))
    # All questions about the function are answered by one walk over its equations, inner ones included.
    all_equations = list(equations(closed.jaxpr.eqns))
    names, over_axis = {e.primitive.name for e in all_equations}, list(filter(is_over_axis, all_equations))
    # The host need not give all replicas the same answer.
    learned["uses_rank"] |= {"io_callback"} & names | {e.primitive.name for e in over_axis if _tells_ranks_apart(e)}
    known, late = split(closed, large)
    return TracedFunction(
        run=functools.partial(_run, closed, late),
        known=known,
        blame_line=lambda *args: first_bad_line(closed.jaxpr, closed.consts, args),
        variables=tuple(variable for variable in variables if variable in learned["reads"]),
        shapes=tuple(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in closed.out_avals),
        has_effects=bool(closed.effects),
        # What names the axis of the replicas has an effect too.
        has_callbacks="pure_callback" in names or any(type(e).__name__ != "NamedAxisEffect" for e in closed.effects),
        draws_by_rbg=any(map(draws_by_rbg, all_equations)),
        over_axis=frozenset(e.primitive.name for e in over_axis),
        named={e.primitive.name: max(ranks) for e in over_axis if (ranks := jax.tree.leaves(_ranks_in(e)))},
        communicates_at_top=bool(over_axis) and any(map(is_over_axis, equations(closed.jaxpr.eqns, is_at_top=True))),
        has_convolution="conv_general_dilated" in names,
        whole=list(moving_along(all_equations, request.sees.rows)) if request.mesh else [],
        narrowest=narrowest_float(all_equations),
        fingerprint=fingerprint(closed),
        flops=lambda results: flops(closed.jaxpr, [i in results for i in range(len(closed.out_avals))]),
        **learned,
    )


def _run_traced(
    request: TraceRequest, learned: dict[str, Any], variables: Sequence[Any], treedef: Any, *leaves: Any
) -> list[Any]:
    *rest, rank, first_row = leaves
    values = {variable: [rest.pop(0) for _ in request.sees.shapes_of(variable)] for variable in variables}
    args, kwargs = treedef.unflatten(map(as_keys, rest, request.keys))

    @functools.wraps(request.fn)
    def named(*args: Any, **kwargs: Any) -> list[Any]:
        context = replace(request.sees, rank=rank, first_row=first_row, values=values)
        with tracing(context):
            out, learned["outputs"] = request.pack(request.call(*args, **kwargs))
            context.check_values_unchanged()
        # Keep no more of the context: tracers must not outlive their trace.
        writes = tuple((variable, slices) for variable, (_, slices) in context.writes.items())
        learned.update(reads=tuple(context.reads), writes=writes)
        learned.update(uses_rank=context.uses_rank, uses_size=context.uses_size)
        return [*out, *(leaf for new, _ in context.writes.values() for leaf in new)]

    # jax.jit makes JAX's errors name the user's function and its arguments. Inlined, it leaves no equation behind, but
    # then all equations seem to come from this line.
    return jax.jit(named, inline=not request.keeps_lines)(*args, **kwargs)


def _ranks_in(equation: Any) -> Any:
    return equation.params.get("perm"), equation.params.get("axis_index_groups")


def _tells_ranks_apart(equation: Any) -> bool:
    """Check whether an equation over the replicas' axis may turn values that are equal on all replicas into others."""
    # psum and all_gather over all replicas give all of them the same; over groups of ranks each group has its own.
    by_rank = equation.primitive.name in ("axis_index", "ppermute", "all_to_all", "reduce_scatter")
    return by_rank or equation.params.get("axis_index_groups") is not None


def _run(
    closed: Any,
    late: Any,
    *args: Any,
    known: Sequence[Any],
    sums: Mapping[int, ShardedSum] = NO_SUMS,
    are_equal: bool = False,
) -> list[Any]:
    # Without shards JAX's own evaluator runs: it keeps source lines and contexts of all equations.
    if sums or any(isinstance(arg, Shard) for arg in args):
        results = evaluate_sharded(late, known, args, sums, are_equal)
    else:
        results = jax.core.eval_jaxpr(late, known, *args)
    # A result that depends on no input is a number of Python or NumPy.
    return [
        result if isinstance(result, jax.Array | Shard) else jnp.asarray(result, aval.dtype)
        for result, aval in zip(results, closed.out_avals, strict=True)
    ]
