"""Decorator: `synk.function`, which checks what its user has given."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack, get_args, overload

import jax

from .._base.errors import checked_integer, public_api, shown
from .._base.jax_context import is_checked
from .._base.pytree import PyTree
from .._call.binding import ArgumentBinder
from .._call.spec import FunctionSpec, with_then
from .._reductions.outputs import check_ops
from .._reductions.reduction import Op
from .._reductions.wire import check_wire
from .._runtime.way import EngineName
from .function import Function

Inputs = Sequence[PyTree] | Mapping[str, PyTree] | None


class Options(TypedDict, total=False):
    """Options of `synk.function` that are given by name."""

    then: Callable[..., PyTree] | None
    axis_name: str
    engine: EngineName
    donate: bool
    nan: Literal["raise"] | None
    wire: PyTree
    blocks: int | None
    compiler_options: Mapping[str, Any] | None
    name: str | None


@overload
def function(
    fn: Callable[..., PyTree], inputs: Inputs = ..., outputs: PyTree = ..., reduce: Op = ..., **options: Unpack[Options]
) -> Function: ...
@overload
def function(
    fn: None = ..., inputs: Inputs = ..., outputs: PyTree = ..., reduce: Op = ..., **options: Unpack[Options]
) -> Callable[[Callable[..., PyTree]], Function]: ...
@public_api
def function(
    fn: Callable[..., PyTree] | None = None,
    inputs: Inputs = None,
    outputs: PyTree = None,
    reduce: Op = "sum",
    *,
    then: Callable[..., PyTree] | None = None,
    axis_name: str = "replica",
    engine: EngineName = "shard_map",
    donate: bool = True,
    nan: Literal["raise"] | None = None,
    wire: PyTree = None,
    blocks: int | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> Any:
    """Make a serial function run on every replica: rows scattered, outputs combined, the serial answer back.

    Also a decorator, bare or with options. Most functions need three of them: `inputs`, `reduce` (or `outputs`) and
    `then`. The others are about communication inside `fn` (`axis_name`, `engine`), memory (`donate`), wrong numbers
    (`nan`), what travels and in which bits (`wire`, `blocks`), and the compiler.

    Args:
      fn: a function of arrays, traced by JAX, called with one replica's rows.
      inputs: how each parameter is dealt out: "scatter" (the default; its rows, axis 0, over the replicas), "broadcast"
        (whole to each), "static" (a hashable constant), or `synk.Overlap` (rows with their neighbours). A sequence
        of modes by position, each a pytree prefix; or a mapping from parameter to mode; or a sequence of parameters'
        names, all others being broadcast.
      outputs: how outputs combine: a pytree prefix of what `fn` returns with an op at each leaf: "sum", "mean"
        (weighted by rows), "max", "min", "prod", "any", "all", "concat", "scatter" (as "concat", but rows stay where
        they were made), "merge" (of a `synk.Monoid`), "stack", "same" (equal on all replicas already: nothing is
        sent), "first" or None, or a callable. A list of them
        goes with a tuple too. Left out, or None: `reduce` for all.
      reduce: the op for all outputs.
      then: runs on every replica on the combined outputs; see `Function.then`.
      axis_name: what the replicas' axis is called in `fn` and `then`, so that functions written for
        `jax.pmap(f, axis_name="batch")` run as they are.
      engine: "shard_map", or "pmap" for `jax.pmap`; equal bit for bit. Among several processes both are shard_map.
        "jit" is for rows that see one another, as in a batch norm or a contrastive loss: `fn` runs once, over all rows
        of the call, any number of them, and XLA divides its work among the devices. Not with `num_slices`, `batch_s`,
        `synk.Overlap`, `synk.local`, `wire`, `blocks`, "scatter", "stack" or callables.
      donate: whether old values of shared variables that are updated may be overwritten in place.
      nan: "raise" raises FloatingPointError, naming the row to blame (`Function.blame`), if an output or a newly
        updated value is not finite. Such a call updates nothing. Each call is waited for. Under `jit` and the like,
        such a function raises ValueError.
      wire: the format in which sums of floats ("sum", "mean", `synk.Weighted`) travel between replicas: "bf16" (half of
        the bytes) or "int8" (a quarter, with a scale for each 256 numbers); a pytree prefix of the outputs. Sums are
        made in float32, and all replicas get the same bits; the answer is the serial one to that rounding. With "int8"
        one NaN or infinity turns its 256 numbers to NaN. Arrays below 256 numbers, float64, and all arrays under `jit`
        or `grad` travel unrounded.
      blocks: rows of a block. `fn` runs on each block, and blocks combine by one fixed tree, so the bits of the answer
        depend on neither replicas nor slices; `f.serial` has them too. Replicas get whole blocks. Not with "stack",
        "first", "scatter", callables, `batch_s`, rows that variables hold, or under `jit` and the like.
      compiler_options: options of XLA by name, as `jax.jit` takes them. On GPUs they override synk's own, which let
        gradients travel while others are computed. Under `jit` and the like they raise ValueError, as those of an inner
        `jax.jit` do.
      name: the name in messages; None for `fn`'s name.

    Returns:
      A `Function`.

    Raises:
      TypeError, ValueError: a mode, an op or a wire is none of synk's.

    Example:
      >>> import jax.numpy as jnp, numpy as np, synk
      >>> @synk.function(inputs=["x"], outputs=("mean", "max"))
      ... def statistics(x, scale):
      ...     return jnp.mean(x * scale), jnp.max(x)
      >>> [round(float(value), 4) for value in statistics(np.arange(7.0), 2.0)]
      [6.0, 6.0]
      >>> with synk.simulate(4):
      ...     centred = synk.function(lambda x: x - x.mean(0), reduce="concat", engine="jit")
      ...     print(centred(np.arange(3.0)))
      [-1.  0.  1.]
    """

    # Options are checked when the function is made: an error at the first call would show another line of the user's.
    def make(fn: Callable[..., PyTree]) -> Function:
        if not callable(fn):
            raise TypeError(f"synk.function: fn is {shown(fn)}; give a function of arrays.")
        called = name or getattr(fn, "__name__", type(fn).__name__)
        if engine not in get_args(EngineName):
            raise ValueError(f"{called}: engine={engine!r}; use {' or '.join(map(repr, get_args(EngineName)))}.")
        binder = ArgumentBinder(fn, inputs, called)
        if nan not in (None, "raise"):
            raise ValueError(f'{called}: nan={nan!r}; use "raise", or None.')
        spec = FunctionSpec(
            name=called,
            fn=fn,
            ops=_checked_ops(reduce if outputs is None else outputs, called, engine, wire, blocks),
            axis_name=checked_axis(axis_name, called),
            engine=engine,
            donate=donate,
            refuses_nan=nan == "raise",
            compiler_options=checked_options(compiler_options, called),
            wires=check_wire(wire, called),
            blocks=_checked_blocks(blocks, wire, called),
            on_first_call=_check_first_call,
        )
        return Function(spec if then is None else with_then(spec, binder, then), binder)

    return make if fn is None else make(fn)


def _check_first_call(*call: Any) -> None:
    if is_checked("law"):
        # Imported where it is asked for, so that `import synk` is quick.
        from .._check.check import check_first_call

        check_first_call(*call)


def _checked_ops(ops: PyTree, name: str, engine: EngineName, wire: PyTree, blocks: Any) -> PyTree:
    """Check the ops, and that they and all else speak of no parts where engine="jit" has one."""
    checked = check_ops(ops, name)
    named = [repr(op.name) for op in jax.tree.leaves(checked) if op.name in ("scatter", "stack", "callable")]
    asked = [*named, *["wire"] * bool(jax.tree.leaves(wire)), *["blocks"] * (blocks is not None)]
    # There is one part, of all rows, so an op or a format that is about parts has nothing to do.
    if engine == "jit" and asked:
        raise ValueError(
            f'{name}: engine="jit" runs all rows as one part, so it does not go with {asked[0]}. Use "concat" for an '
            f"entry a row, or leave out one of the two."
        )
    return checked


def checked_axis(axis_name: Any, name: str) -> str:
    if not isinstance(axis_name, str) or not axis_name:
        raise TypeError(f'{name}: axis_name is {shown(axis_name)}; give a string, such as "batch".')
    return axis_name


def _checked_blocks(blocks: Any, wire: PyTree, name: str) -> int | None:
    if blocks is None:
        return None
    blocks = checked_integer(blocks, f"{name}: blocks", 1, "give how many rows a block has, an integer >= 1")
    if jax.tree.leaves(wire):
        raise ValueError(f"{name}: wire={wire!r} rounds each replica's sum, so it does not go with blocks={blocks}.")
    return blocks


def checked_options(options: Any, name: str) -> tuple[tuple[str, Any], ...]:
    if options is None:
        return ()
    if not isinstance(options, Mapping) or not all(isinstance(option, str) for option in options):
        raise TypeError(
            f"{name}: compiler_options is {shown(options)}; give a mapping from the names of XLA's options."
        )
    wrong = [option for option, value in options.items() if not isinstance(value, str | bool | int | float)]
    if wrong:
        raise TypeError(
            f"{name}: compiler_options[{wrong[0]!r}] is {options[wrong[0]]!r}; give a string, a boolean or a number."
        )
    # A tuple, since the options are in the key of a plan.
    return tuple(options.items())
