"""Decorator: `synk.function`, which checks what its user has given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, overload

from .._base.errors import public_api
from .._base.old_names import refuse_keywords
from .._base.pytree import PyTree
from .._reductions.outputs import check_ops
from .._reductions.reduction import Op
from .._runtime.engine import ENGINES
from .binding import ArgumentBinder
from .function import Function
from .spec import FunctionSpec, Stats, with_then

Inputs = Sequence[PyTree] | Mapping[str, PyTree] | None


@overload
def function(
    fn: Callable[..., PyTree],
    inputs: Inputs = ...,
    outputs: PyTree = ...,
    reduce: Op = ...,
    *,
    then: Callable[..., PyTree] | None = ...,
    engine: Literal["shard_map", "pmap"] = ...,
    donate: bool = ...,
    name: str | None = ...,
) -> Function: ...
@overload
def function(
    fn: None = ...,
    inputs: Inputs = ...,
    outputs: PyTree = ...,
    reduce: Op = ...,
    *,
    then: Callable[..., PyTree] | None = ...,
    engine: Literal["shard_map", "pmap"] = ...,
    donate: bool = ...,
    name: str | None = ...,
) -> Callable[[Callable[..., PyTree]], Function]: ...
@public_api
def function(
    fn: Callable[..., PyTree] | None = None,
    inputs: Inputs = None,
    outputs: PyTree = None,
    reduce: Op = "sum",
    *,
    then: Callable[..., PyTree] | None = None,
    engine: Literal["shard_map", "pmap"] = "shard_map",
    donate: bool = True,
    name: str | None = None,
    **removed: Any,
) -> Any:
    """Make a serial function run on every replica: rows scattered, outputs combined, the serial answer back.

    Also a decorator, bare or with options.

    Args:
      fn: a function of arrays, traced by JAX, called with one replica's rows.
      inputs: how each parameter is dealt out: "scatter" (the default; its rows, axis 0, over the replicas), "broadcast"
        (whole to each) or "static" (a hashable constant). A sequence of modes by position, each a pytree prefix; or a
        mapping from parameter to mode; or a sequence of parameters' names, all others being broadcast.
      outputs: how outputs combine: a pytree prefix of what `fn` returns with an op at each leaf: "sum", "mean"
        (weighted by rows), "max", "min", "prod", "any", "all", "concat", "stack", "first" or None, or a callable.
        Left out, or None: `reduce` for all.
      reduce: the op for all outputs.
      then: runs on every replica on the combined outputs; see `Function.then`.
      engine: "shard_map", or "pmap" for `jax.pmap`; equal bit for bit. Among several processes both are shard_map.
      donate: whether old values of shared variables that are updated may be overwritten in place.
      name: what messages call it; `fn`'s name.

    Returns:
      A `Function`.

    Raises:
      TypeError, ValueError: a mode or an op is none of synk's.

    Example:
      >>> import jax.numpy as jnp, numpy as np, synk
      >>> @synk.function(inputs=["x"], outputs=("mean", "max"))
      ... def statistics(x, scale):
      ...     return jnp.mean(x * scale), jnp.max(x)
      >>> [float(value) for value in statistics(np.arange(7.0), 2.0)]
      [6.0, 6.0]
    """
    refuse_keywords("function", removed)

    def make(fn: Callable[..., PyTree]) -> Function:
        if not callable(fn):
            raise TypeError(f"synk.function: fn is {fn!r}; give a function of arrays.")
        return make_function(
            FunctionOptions(fn, inputs, reduce if outputs is None else outputs, then, engine, donate, name)
        )

    return make if fn is None else make(fn)


class FunctionOptions(NamedTuple):
    """What `synk.function` takes."""

    fn: Callable[..., PyTree]
    inputs: Inputs
    ops: PyTree
    then: Callable[..., PyTree] | None = None
    engine: str = "shard_map"
    donate: bool = True
    name: str | None = None


def make_function(options: FunctionOptions) -> Function:
    """Check what a user has given, and make the function."""
    name = options.name or getattr(options.fn, "__name__", type(options.fn).__name__)
    engines = [engine for engine in ENGINES if engine != "vmap"]
    if options.engine not in engines:
        raise ValueError(f"{name}: engine={options.engine!r}; use {' or '.join(map(repr, engines))}.")
    binder = ArgumentBinder(options.fn, options.inputs, name)
    ops = check_ops(options.ops, name)
    spec = FunctionSpec(name, options.fn, ops, None, lambda count: (), options.engine, options.donate, Stats())
    return Function(spec if options.then is None else with_then(spec, binder, options.then), binder)
