"""Model: a user's loss, the variables that it trains, and the step that an optimizer of optax's takes."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._base.errors import shown
from .._base.pytree import PyTree
from .._function.decorator import Inputs, function
from .._function.function import Function
from .._reductions.outputs import check_ops
from .._reductions.reduction import REDUCTIONS, UNREDUCED_MEAN, WEIGHTS_APART, Weighted
from .._reductions.wire import check_wire
from .._variables.value import conform
from .._variables.variable import Shared, map_value, shared
from .optimizer import update_of
from .power_sgd import LowRankSum, PowerSGD
from .sharded import ShardedOptimizer

# A leaf of a state is a number to average, a PRNG key, or a count, which may be behind on some replicas.
LeafKind = Literal["number", "key", "count"]

_ADVICE = "A loss is that of its rows: return the mean over them, or synk.Weighted(mean, weight)."


class ProgramOptions(NamedTuple):
    """Settings of how a step's programs compute.

    Attributes:
      wire: the format in which gradients travel; None for their own.
      compiler_options: options of XLA.
      has_barrier: whether a barrier may stand between combining and the update.
      num_slices: the number of slices of calls that name none.
    """

    wire: str | None = None
    compiler_options: Mapping[str, Any] | None = None
    has_barrier: bool = True
    num_slices: int | Literal["auto"] | None = None


class TrainingModel:
    """A loss, the variables that it trains, and the step that updates them.

    Attributes:
      call: the call that made it, in messages.
      params, opt_state, state: the shared variables; `state` is None for a model without one.
      variables: all shared variables that a step updates, by name.
      options: settings of the step's programs.
    """

    def __init__(
        self,
        call: str,
        loss: Callable[..., Any],
        params: PyTree,
        optimizer: Any,
        *,
        state: PyTree,
        inputs: Inputs,
        aux: PyTree,
        clip: float | None,
        donate: bool,
        name: str | None,
        axis_name: str,
        nan: Literal["raise"] | None = None,
        wire: str | PowerSGD | None = None,
        blocks: int | None = None,
        shard_optimizer: bool = False,
        compiler_options: Mapping[str, Any] | None = None,
        log: Callable[[PyTree, PyTree, PyTree], PyTree] | None = None,
    ) -> None:
        try:
            import optax  # type: ignore[import-untyped]  # it has no stubs
        except ImportError as error:
            raise ImportError("synk.train: optax is not installed. Get it by: pip install optax") from error
        if not callable(loss):
            raise TypeError(f"{call}: loss is {shown(loss)}; give a function of the parameters and rows.")
        if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
            raise TypeError(f"{call}: optimizer is {shown(optimizer)}; give one of optax's, e.g. optax.sgd(0.1).")
        if clip is not None:
            wanted = "give the largest global norm of a gradient, a number > 0"
            clip = checked_number(clip, f"{call}: clip", wanted, lambda clip: clip > 0)
        if blocks is not None and (shard_optimizer or wire is not None):
            option = "shard_optimizer=True" if wire is None else f"wire={wire!r}"
            raise ValueError(f"{call}: {option} works on each replica's sums, so it does not go with blocks={blocks}.")
        _check_log(log, shard_optimizer, call)
        self.call, self.name = call, name or getattr(loss, "__name__", type(loss).__name__)
        self.loss, self.donate, self.inputs, self.axis_name = loss, donate, inputs, axis_name
        self.nan: Literal["raise"] | None = nan
        self._log = log
        narrow = None if isinstance(wire, PowerSGD) else check_wire(wire, call)
        self.options, self.blocks = ProgramOptions(narrow, compiler_options), blocks
        self.has_aux, self.aux_ops = aux is not None, () if aux is None else check_ops(aux, self.name)
        self.params = params if isinstance(params, Shared) else shared(params, "params")
        _check_params(self.params, call)
        self._optax, self._clip, self._update = optax, clip, update_of(optax, optimizer)
        self._sharded: ShardedOptimizer | None = None
        if shard_optimizer:
            self._sharded = ShardedOptimizer(optimizer, self._update, self.params)
            self.opt_state = self._sharded.state
        else:
            self.opt_state = shared(map_value(self.params, optimizer.init), "opt_state")
        self.variables = {"params": self.params, "opt_state": self.opt_state}
        self.state = state if isinstance(state, Shared) or state is None else shared(state, "state")
        if self.state is not None:
            self.variables["state"] = self.state
        self._low_rank = LowRankSum(wire, self.params) if isinstance(wire, PowerSGD) else None
        if self._low_rank is not None:
            self.variables |= {"feedback": self._low_rank.feedback, "basis": self._low_rank.basis}
        self.signature = self._signature_of_rows(call)

    def _signature_of_rows(self, call: str) -> inspect.Signature:
        """Return the signature of the loss without parameters and state."""
        signature = inspect.signature(self.loss)
        parameters = list(signature.parameters.values())
        count = 1 if self.state is None else 2
        first = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:count]
        if len(first) < count:
            what = "the parameters" if count == 1 else "the parameters and the state"
            raise TypeError(f"{call}: the loss {self.name}{signature} must take {what} first, and after them rows.")
        bound = self.loss.keywords if isinstance(self.loss, functools.partial) else ()
        return signature.replace(parameters=[p for p in parameters if p not in first and p.name not in bound])

    def function(
        self,
        fn: Callable[..., PyTree],
        outputs: dict[str, PyTree],
        then: Callable[..., PyTree],
        then_of_unreduced: Callable[..., PyTree] | None = None,
        options: ProgramOptions | None = None,
    ) -> Function:
        """Make a function of rows that looks like the loss, in messages and to `inputs`.

        If the step itself adds up the gradients of the replicas, `then_of_unreduced` takes the place of `then`. Without
        `options`, programs have the settings of the model.
        """
        narrow, compiler_options, has_barrier, _ = options or self.options
        fn.__name__, fn.__signature__ = self.name, self.signature  # type: ignore[attr-defined]  # inspect reads it
        fn.__wrapped__ = self.loss  # type: ignore[attr-defined]  # calls look up names of the loss
        ops = {**outputs, "aux": self.aux_ops}
        wire = None if narrow is None else {**dict.fromkeys(ops), "loss": (None, narrow)}
        made = function(
            fn, self.inputs, ops, then=then, name=self.name, axis_name=self.axis_name, donate=self.donate, nan=self.nan,
            wire=wire, blocks=self.blocks, compiler_options=compiler_options,
        )  # fmt: skip
        names = {
            "['loss'][0]": ("the loss", False),
            "['loss'][1]": (f"the gradient of {self.params.name}", False),
            "['state']": ("state" if self.state is None else self.state.name, False),
            "['aux']": ("aux", True),
        }
        inside = f"Read {self.params.name}.value there."
        spec = replace(
            made._spec, made_by=self.call, advice=_ADVICE, output_names=names, inside=inside, has_barrier=has_barrier,
            log=self._log,
        )  # fmt: skip
        if self._low_rank is not None or (self._sharded is not None and narrow is None):
            unreduced = {**spec.ops, "loss": (REDUCTIONS["mean"], UNREDUCED_MEAN)}
            spec = replace(spec, ops=unreduced, then=then_of_unreduced, plain=spec)
        made._spec = spec
        return made

    def value_and_grad(
        self, params: PyTree, state: Shared | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[jax.Array, Any, PyTree, PyTree, PyTree]:
        """Compute the mean loss of a part's rows, its weight, its gradient, the model's new state and the aux outputs.

        The weight is that of a `synk.Weighted` loss, None for others. State and aux outputs are `()` without any.
        """
        # The loss gets a tree of its own, which it may change in place.
        before = () if state is None else (jax.tree.map(lambda leaf: leaf, state.value),)

        def value(params: PyTree) -> tuple[Any, Any]:
            value, *rest = self._unpack(self.loss(params, *before, *args, **kwargs))
            value, weight = (value.value, value.weight) if isinstance(value, Weighted) else (value, None)
            is_array = isinstance(value, jax.Array | np.ndarray | np.generic | int | float)
            form = f"{jnp.result_type(value).name}{list(jnp.shape(value))}" if is_array else type(value).__name__
            if not is_array or jnp.shape(value) or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
                raise TypeError(
                    f"{self.name}: it returned a loss of {form}; return the mean over the rows, one floating number, "
                    f"or synk.Weighted(mean, weight)."
                )
            if weight is not None and jnp.ndim(weight):
                raise ValueError(
                    f"{self.name}: the weight of its loss has shape {jnp.shape(weight)}; a part has one scalar weight."
                )
            return value, (weight, rest)

        (mean, (weight, rest)), grads = jax.value_and_grad(value, has_aux=True)(params)
        new_state: PyTree = ()
        if state is not None:
            new_state = rest[0]
            conform(state._spec, new_state, state._spec.shapes, state.name, self.name)
        return mean, weight, grads, new_state, rest[-1] if self.has_aux else ()

    def _unpack(self, out: Any) -> tuple[Any, ...]:
        """Return a tuple of all that the loss returns; raise TypeError if that is not as many values as announced."""
        names = ["the loss", *["the new state"] * (self.state is not None), *["aux outputs"] * self.has_aux]
        values = out if isinstance(out, tuple) else (out,)
        if sum(isinstance(value, Weighted) for value in values) > 1:
            raise TypeError(f"{self.name}: it returned several synk.Weighted, but a step has one loss. {WEIGHTS_APART}")
        if len(values) != len(names):
            returned = "one value" if len(values) == 1 else f"{len(values)} values"
            wanted = f"{' and '.join(names)}, as a tuple" if len(names) > 1 else "the loss alone"
            raise TypeError(
                f"{self.name}: it returned {returned}; return {wanted}. Announce a new state by state=, and aux "
                f'outputs by aux="mean" (or another op).'
            )
        return values

    def step(
        self, params: Shared, opt_state: Shared, grads: PyTree, loss: jax.Array, unreduced: bool
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Take a step inside `then`, by a mean gradient or this replica's unreduced part.

        Return the new parameters, the mean gradient and the updates; the latter two are None if they lie in shards.
        """
        if self._low_rank is not None and unreduced:
            grads, unreduced = self._low_rank.sum(grads), False
        if self._sharded is not None:
            params.value = new = self._sharded.update(params.value, grads, loss, self._clip, unreduced)
            return new, None, None
        new, opt_state.value, updates = self.apply_updates(params.value, opt_state.value, grads, loss)
        params.value = new
        return new, grads, updates

    def apply_updates(
        self, params: PyTree, opt_state: PyTree, grads: PyTree, loss: jax.Array
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Return parameters and optimizer state after a step, and the updates of the parameters."""
        if self._clip is not None:
            grads, _ = self._optax.clip_by_global_norm(self._clip).update(grads, self._optax.EmptyState())
        return self._update(grads, opt_state, params, loss)


def _check_log(log: Any, shard_optimizer: bool, call: str) -> None:
    if log is not None and not callable(log):
        raise TypeError(f"{call}: log is {shown(log)}; give a function of gradients, updates and parameters.")
    if log is not None and shard_optimizer:
        raise ValueError(
            f"{call}: log sees whole gradients and updates, which no replica has with shard_optimizer=True."
        )


def checked_number(value: Any, what: str, wanted: str, is_valid: Callable[[float], bool]) -> float:
    """Return a user's number as a float. Raise TypeError if it is none, ValueError if it is not valid."""
    if isinstance(value, str | bool) or np.ndim(value):
        raise TypeError(f"{what} is {shown(value)}; {wanted}.")
    if not is_valid(float(value)):
        raise ValueError(f"{what} is {shown(value)}; {wanted}.")
    return float(value)


def _check_params(params: Shared, call: str) -> None:
    spec = params._spec
    for path, shape, key in zip(spec.paths, spec.shapes, spec.keys, strict=True):
        if key is not None or not jnp.issubdtype(shape.dtype, jnp.inexact):
            what = shape.dtype.name if key is None else "a PRNG key"
            raise TypeError(
                f"{call}: params{path} is {what}, which has no gradient. Keep it in state=, or convert it to a "
                f"floating dtype."
            )


def kinds_of(variable: Shared) -> PyTree:
    """Return the tree of the kinds of leaves; unsigned integers count as raw PRNG keys."""

    def kind(shape: jax.ShapeDtypeStruct, key: Any) -> LeafKind:
        if key is not None or jnp.issubdtype(shape.dtype, jnp.unsignedinteger):
            return "key"
        return "number" if jnp.issubdtype(shape.dtype, jnp.inexact) else "count"

    return variable._spec.treedef.unflatten(map(kind, variable._spec.shapes, variable._spec.keys))
