"""Tracer: trace a user's function once a shape, and learn what it reads, writes, returns and communicates."""

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from .._base.pytree import PyTree, as_keys
from .._runtime.group import AXIS
from .captured import split, without_places
from .context import TraceContext, tracing
from .equations import equations, flops, is_over_axis, merge_equal, narrowest_float
from .fingerprint import fingerprint
from .nan_origin import first_bad_line

# A user's inner jax.jit caches what it traced; a fresh value of this context makes it trace anew.
_context = jax.make_user_context(None)


@dataclass(frozen=True)
class TraceRequest:
    """What to trace."""

    fn: Callable[..., PyTree]  # the user's function, whom errors name
    call: Callable[..., PyTree]  # calls it with the arguments, perhaps with more than are traced
    arguments: tuple[tuple[Any, ...], dict[str, Any]]  # trees of shapes; of typed PRNG keys those of their raw data
    keys: Sequence[Any]  # the PRNG implementation of each argument leaf, None for plain arrays
    pack: Callable[[PyTree], tuple[list[jax.Array], Any]]  # flattens what it returned; what it says of that is kept
    sees: TraceContext  # what it may see; rank, rows and values of variables come with each trace
    variables: Sequence[Any] = ()  # those that it is expected to read, so that one trace is enough
    merges_equal: bool = False  # whether what it computes twice shall be computed once
    keeps_lines: bool = False  # whether equations shall tell the user's line that each comes from


@dataclass(frozen=True)
class TracedFunction:
    """A function of plain arrays: leaves of variables and of arguments, rank, first row -> outputs, new leaves."""

    run: Callable[..., list[jax.Array]]  # takes what is `known` by name
    consts: Sequence[Any]  # arrays that it closes over
    known: Callable[[Sequence[Any]], Sequence[Any]]  # what they alone determine, for constants of the same values
    blame_line: Callable[..., str | None]  # of the same arguments: the line that makes the first number not finite
    variables: tuple[Any, ...]  # those whose leaves come first, in this order
    reads: tuple[Any, ...]  # the same in the order in which they are read
    writes: tuple[tuple[Any, str | None], ...]  # the variables written, each with how slices combine
    outputs: Any  # what `pack` said of the return value
    shapes: tuple[jax.ShapeDtypeStruct, ...]  # of the outputs, then of what is written
    uses_rank: bool  # whether its results may differ between replicas that were given equal values
    has_effects: bool  # prints or the like, so that a part must run once
    has_callbacks: bool  # these, and pure calls of the host: it must not run on rows that are not there
    communicates: bool  # whether it names the axis of the replicas
    has_convolution: bool  # whether XLA's CPU compiler should find it outside branches and loops
    narrowest: np.dtype | None  # of the floats that it computes
    flops: Callable[[Sequence[int]], int]  # of matrix products and convolutions, for these of its results
    fingerprint: Hashable  # of what it computes, as far as equations and captured arrays tell


def trace(request: TraceRequest) -> TracedFunction:
    """Trace a function for one replica; again where it reads variables that it was not expected to."""
    found: dict[str, Any] = {}  # by the last trace: fields of TracedFunction
    variables = tuple(dict.fromkeys(request.variables))
    flat_arguments, treedef = jax.tree.flatten(request.arguments)
    number = jax.ShapeDtypeStruct((), np.int32)
    axes = [(AXIS, request.sees.size)] if request.sees.has_axis else None
    while True:
        shapes = [shape for variable in variables for shape in request.sees.shapes_of(variable)]
        flat = functools.partial(_run_traced, request, found, variables, treedef)
        closed = jax.make_jaxpr(flat, axis_env=axes)(*shapes, *flat_arguments, number, number)
        if set(found["reads"]) <= set(variables):
            break
        variables = tuple(dict.fromkeys((*variables, *found["reads"])))
    closed = without_places(closed, request.sees.name)
    closed = closed.replace(jaxpr=merge_equal(closed.jaxpr)) if request.merges_equal else closed
    # Variables that other branches read are in the jaxpr, but nothing in it uses them.
    is_used = [variable in found["reads"] for variable in variables for _ in request.sees.shapes_of(variable)]
    found_equations = list(equations(closed.jaxpr))
    found["uses_rank"] |= any(map(_tells_ranks_apart, found_equations))
    has_callbacks = bool(closed.effects) or any(e.primitive.name == "pure_callback" for e in found_equations)
    parts = split(closed)
    return TracedFunction(
        run=_runner(closed, parts.late, is_used),
        consts=closed.consts,
        known=lambda consts: jax.core.eval_jaxpr(parts.early, consts),
        blame_line=lambda *args: first_bad_line(closed.jaxpr, closed.consts, _all_of(closed.jaxpr, is_used, args)),
        variables=tuple(variable for variable in variables if variable in found["reads"]),
        shapes=tuple(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in closed.out_avals),
        has_effects=bool(closed.effects),
        has_callbacks=has_callbacks,
        communicates=any(map(is_over_axis, found_equations)),
        has_convolution=any(equation.primitive.name == "conv_general_dilated" for equation in found_equations),
        narrowest=narrowest_float(found_equations),
        fingerprint=fingerprint(closed),
        flops=lambda results: flops(closed.jaxpr, [closed.jaxpr.outvars[i] for i in results]),
        **found,
    )


def _run_traced(
    request: TraceRequest, found: dict[str, Any], variables: Sequence[Any], treedef: Any, *leaves: Any
) -> list[Any]:
    *rest, rank, first_row = leaves
    values = {variable: [rest.pop(0) for _ in request.sees.shapes_of(variable)] for variable in variables}
    args, kwargs = treedef.unflatten(map(as_keys, rest, request.keys))

    @functools.wraps(request.fn)
    def named(*args: Any, **kwargs: Any) -> list[Any]:
        context = replace(request.sees, rank=rank, first_row=first_row, values=values)
        with tracing(context), _context(object()):
            out, found["outputs"] = request.pack(request.call(*args, **kwargs))
            context.check_values_unchanged()
        # And no more of the context: what is traced must not outlive its trace.
        found.update(reads=tuple(context.reads), uses_rank=context.uses_rank)
        found["writes"] = tuple((variable, slices) for variable, (_, slices) in context.writes.items())
        return [*out, *(leaf for new, _ in context.writes.values() for leaf in new)]

    # Through jit, so that JAX's errors name the user's function and its arguments; inlined, it leaves nothing behind,
    # and its equations come from this line.
    return jax.jit(named, inline=not request.keeps_lines)(*args, **kwargs)


def _tells_ranks_apart(equation: Any) -> bool:
    """Does it give replicas different values of what was equal on all?"""
    name, params = equation.primitive.name, equation.params
    if name == "io_callback":  # a host's answers need not be the same for each
        return True
    by_rank = name in ("axis_index", "ppermute", "all_to_all", "reduce_scatter")
    return is_over_axis(equation) and (by_rank or params.get("axis_index_groups") is not None)


def _all_of(jaxpr: Any, is_used: Sequence[bool], args: Sequence[Any]) -> list[Any]:
    """Values of all inputs: zeros where nothing uses one."""
    given = iter(args)
    shapes = [variable.aval for variable in jaxpr.invars]
    used = [*is_used, *(True for _ in shapes[len(is_used) :])]
    return [next(given) if one else np.zeros(s.shape, s.dtype) for one, s in zip(used, shapes, strict=True)]


def _runner(closed: Any, late: Any, is_used: Sequence[bool]) -> Callable[..., list[jax.Array]]:
    def run(*args: jax.Array, known: Sequence[Any]) -> list[jax.Array]:
        given = iter(args)
        variables = [next(given) if used else None for used in is_used]
        results = jax.core.eval_jaxpr(late, known, *variables, *given)
        # A result that depends on nothing is a number of Python's, or one of NumPy's.
        return [
            result if isinstance(result, jax.Array) else jnp.asarray(result, aval.dtype)
            for result, aval in zip(results, closed.out_avals, strict=True)
        ]

    return run
