"""Tracer: trace a user's function once a shape, and learn what it reads, writes, returns and communicates."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from .._base.errors import SynkError
from .._base.pytree import PyTree, as_keys, key_of
from .._runtime.group import AXIS
from .context import PartInfo, TraceContext, tracing

# A user's inner jax.jit caches what it traced; a fresh value of this context makes it trace anew.
_context = jax.make_user_context(None)


@dataclass(frozen=True)
class TraceRequest:
    """What to trace.

    Attributes:
      fn: the user's function, whom errors name.
      call: calls it with the arguments, perhaps with more than are traced.
      arguments: ((positional), {keyword}): trees of shapes and dtypes, of typed PRNG keys those of their raw data.
      keys: the PRNG implementation of each argument leaf, None for plain arrays.
      pack: flattens what it returned; what it says of that is kept.
      name: what messages call the function.
      size: how many replicas there are.
      shapes_of: the shapes of a variable's stored leaves on one replica.
      variables: those that it is expected to read, so that one trace is enough.
      slices: more than 1 where updates must say how slices combine.
      has_axis: whether replicas may communicate inside.
    """

    fn: Callable[..., PyTree]
    call: Callable[..., PyTree]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    keys: Sequence[Any]
    pack: Callable[[PyTree], tuple[list[jax.Array], Any]]
    name: str
    size: int
    shapes_of: Callable[[Any], Sequence[jax.ShapeDtypeStruct]]
    variables: Sequence[Any] = ()
    slices: int = 1
    has_axis: bool = True


@dataclass(frozen=True)
class TracedFunction:
    """A function as a jaxpr of plain arrays: leaves of variables and arguments, rank, first row -> outputs, new leaves.

    Attributes:
      run: calls it.
      variables: those whose leaves come first, in this order.
      reads: the same in the order in which they are read.
      writes: the variables written, each with how slices combine.
      outputs: what `pack` said of the return value.
      shapes: of the outputs, then of what is written.
      uses_rank: whether its results may differ between replicas that were given equal values.
      has_effects: prints or calls back to the host, so it must not run on rows that are not there.
      has_convolution: whether XLA's CPU compiler should find it outside branches and loops.
    """

    run: Callable[..., list[jax.Array]]
    variables: tuple[Any, ...]
    reads: tuple[Any, ...]
    writes: tuple[tuple[Any, str | None], ...]
    outputs: Any
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    uses_rank: bool
    has_effects: bool
    has_convolution: bool


@dataclass
class _Seen:
    """What one trace finds."""

    outputs: Any = None
    reads: tuple[Any, ...] = ()
    writes: tuple[tuple[Any, str | None], ...] = ()
    shapes: tuple[jax.ShapeDtypeStruct, ...] = ()
    uses_rank: bool = False
    variables: dict[Any, None] = field(default_factory=dict)


def trace(request: TraceRequest) -> TracedFunction:
    """Trace a function for one replica; twice where it reads variables that it was not expected to."""
    seen = _Seen(variables=dict.fromkeys(request.variables))
    flat_arguments, treedef = jax.tree.flatten(request.arguments)
    number = jax.ShapeDtypeStruct((), np.int32)
    while True:
        variables = tuple(seen.variables)
        shapes = [shape for variable in variables for shape in request.shapes_of(variable)]
        flat = functools.partial(_traced_once, request, seen, variables, treedef)
        axes = [(AXIS, request.size)] if request.has_axis else None
        closed = jax.make_jaxpr(flat, axis_env=axes)(*shapes, *flat_arguments, number, number)
        if set(seen.reads) <= set(variables):
            break
        seen.variables.update(dict.fromkeys(seen.reads))
    # Variables that other branches read are in the jaxpr, but nothing in it uses them.
    is_used = [variable in seen.reads for variable in variables for _ in request.shapes_of(variable)]
    names = set(_primitives(closed.jaxpr))
    return TracedFunction(
        run=_runner(closed, is_used, request.name),
        variables=tuple(variable for variable in variables if variable in seen.reads),
        reads=seen.reads,
        writes=seen.writes,
        outputs=seen.outputs,
        shapes=seen.shapes,
        uses_rank=seen.uses_rank or _tells_ranks_apart(closed.jaxpr),
        has_effects=bool(closed.effects),
        has_convolution="conv_general_dilated" in names,
    )


def _traced_once(request: TraceRequest, seen: _Seen, variables: Sequence[Any], treedef: Any, *leaves: Any) -> list[Any]:
    *rest, rank, first_row = leaves
    values = {variable: [rest.pop(0) for _ in request.shapes_of(variable)] for variable in variables}
    args, kwargs = treedef.unflatten(map(as_keys, rest, request.keys))

    @functools.wraps(request.fn)
    def named(*args: Any, **kwargs: Any) -> list[Any]:
        context = TraceContext(
            request.name, PartInfo(rank, first_row), request.size, request.slices, request.has_axis, values,
            request.shapes_of,
        )  # fmt: skip
        with tracing(context), _context(object()):
            out, seen.outputs = request.pack(request.call(*args, **kwargs))
            context.check_values_unchanged()
        # And no more of the context: what is traced must not outlive its trace.
        seen.reads, seen.uses_rank = tuple(context.reads), context.uses_rank
        seen.writes = tuple((variable, slices) for variable, (_, slices) in context.writes.items())
        written = [leaf for new, _ in context.writes.values() for leaf in new]
        seen.shapes = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (*out, *written))
        return [*out, *written]

    # Through jit, so that JAX's errors name the user's function and its arguments; inlined, it leaves nothing behind.
    return jax.jit(named, inline=True)(*args, **kwargs)


# What gives replicas different values of what was equal on all. A host's answers need not be the same for each.
_BY_RANK = ("axis_index", "ppermute", "all_to_all", "reduce_scatter")
_BY_HOST = ("io_callback",)


def _tells_ranks_apart(jaxpr: Any) -> bool:
    """Does it use the replicas' axis in a way whose result depends on the rank?"""
    for equation in _equations(jaxpr):
        params = equation.params
        if equation.primitive.name in _BY_HOST:
            return True
        if AXIS in str(params.get("axis_name", params.get("axes", ""))) and (
            equation.primitive.name in _BY_RANK or params.get("axis_index_groups") is not None
        ):
            return True
    return False


def _primitives(jaxpr: Any) -> Iterator[str]:
    return (equation.primitive.name for equation in _equations(jaxpr))


def _equations(jaxpr: Any) -> Iterator[Any]:
    """All equations, those of inner functions too."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(tuple(equation.params.values())):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _equations(inner)


def _runner(closed: Any, is_used: Sequence[bool], name: str) -> Callable[..., list[jax.Array]]:
    if any(isinstance(const, jax.core.Tracer) for const in closed.consts):
        raise SynkError(
            f"{name}: it uses values of a transformation around the call (jit, grad, vmap, ...) that are not among its "
            f'arguments. Pass them as "broadcast" arguments.'
        )
    # A constant that lives on one device cannot enter a program over several; on the host it can.
    committed = [isinstance(c, jax.Array) and key_of(c) is None and c.committed for c in closed.consts]
    consts = [np.asarray(c) if pinned else c for c, pinned in zip(closed.consts, committed, strict=True)]

    def run(*args: jax.Array) -> list[jax.Array]:
        given = iter(args)
        variables = [next(given) if used else None for used in is_used]
        results = jax.core.eval_jaxpr(closed.jaxpr, consts, *variables, *given)
        # A result that depends on nothing is a number of Python's, or one of NumPy's.
        return [
            result if isinstance(result, jax.Array) else jnp.asarray(result, aval.dtype)
            for result, aval in zip(results, closed.out_avals, strict=True)
        ]

    return run


def variables_named_in(fn: Any, is_variable: Callable[[Any], bool], depth: int = 2) -> Iterator[Any]:
    """The variables that a function names, or functions that it names: a guess at what it reads."""
    fn = inspect.unwrap(getattr(fn, "__func__", fn)) if callable(fn) else fn
    code = getattr(fn, "__code__", None)
    if code is None:
        return
    names = (*code.co_names, *(name for const in code.co_consts for name in getattr(const, "co_names", ())))
    values = [fn.__globals__.get(name) for name in names]
    for cell in fn.__closure__ or ():
        with contextlib.suppress(ValueError):  # it is empty yet
            values.append(cell.cell_contents)
    for value in values:
        if is_variable(value):
            yield value
        elif depth and inspect.isfunction(value):
            yield from variables_named_in(value, is_variable, depth - 1)
