"""Synchronous: training steps by the mean gradient of all rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp

from .._base.errors import public_api, shown
from .._base.old_names import instead_of
from .._base.pytree import PyTree
from .._call.binding import check_slices
from .._call.spec import Stats
from .._function.decorator import Inputs, checked_options
from .._function.function import Function
from .._loops.prefetch import Prefetch
from .._reductions.reduction import REDUCTIONS, Reduction, Weighted
from .._reductions.wire import WireName
from .._runtime.way import EngineName
from .._tracing.context import current_trace
from .._variables.variable import Shared
from .model import GradientSum, LeafKind, StepOptions, TrainingModel, checked_step, is_sum, kinds_of

if TYPE_CHECKING:
    from .._check.blame import Blame
    from .._explain.report import Explanation

# A step is a public call itself, and a second wrapper would cost each step some microseconds.
_call: Callable[..., Any] = inspect.unwrap(Function.__call__)


@dataclass(frozen=True, eq=False, repr=False)
class Step:
    """A training step; made by `synk.train.step`.

    Attributes:
      function: the `synk.typing.Function` that it calls.
      params: the shared variable that holds the parameters; their tree is `params.value`.
      opt_state: the shared variable that holds the optimizer's state.
      state: the shared variable that holds the model's state; None if there is none.
      ema: the shared variable that holds the exponential moving average of the parameters; None without `ema=`.
      variables: all shared variables that a step updates by name, as `synk.save` and `synk.load` take them; those
        of a `wire=` that adds up gradients itself too.

    Example:
      >>> import numpy as np, optax, synk.train
      >>> step = synk.train.step(lambda w, x: ((w - x) ** 2).mean(), np.float32(0), optax.sgd(0.5))
      >>> for loss in step.iterate(np.ones(12), batches=[4, slice(4, 12)]):
      ...     print(loss)
      1.0
      0.0
      >>> print(step.params.value, step.stats.rows)
      1.0 12
    """

    function: Function
    params: Shared
    opt_state: Shared
    state: Shared | None
    ema: Shared | None
    variables: dict[str, Shared]
    # Makes the function with other settings of its programs.
    _build: Callable[[StepOptions], Function]
    _options: StepOptions

    def __repr__(self) -> str:
        return f"synk.train.step({', '.join([self.function.name, *map(repr, self.variables.values())])})"

    def __getattr__(self, member: str) -> Any:
        raise AttributeError(f"a training step has no {member!r}{instead_of(member)}")

    def _with_slices(self, options: dict[str, Any]) -> dict[str, Any]:
        slices = self._options.num_slices
        return options if slices is None else {"num_slices": slices} | options

    @property
    def stats(self) -> Stats:
        """Return what the step's function has done so far."""
        return self.function.stats

    @public_api
    def __call__(
        self, *args: Any, batch: Any = None, num_slices: int | Literal["auto"] | None = None, **options: Any
    ) -> Any:
        """Take one step.

        Args:
          *args: the rows, as the loss takes them.
          batch: which rows to take, as in a call of a synk function; None for all.
          num_slices: in how many slices each replica runs its rows; None for those that the step was made with.
          **options: other options of a call of a synk function, and keyword arguments of the loss.

        Returns:
          The mean loss of all rows before the step. With `aux` the pair of the loss and the aux outputs.
        """
        slices = (self._options.num_slices or 1) if num_slices is None else num_slices
        return _call(self.function, *args, batch=batch, num_slices=slices, **options)

    @public_api
    def iterate(self, *args: Any, **options: Any) -> Prefetch[Any, Any]:
        """Take a step for each of `batches`, and return an iterator of the results; see `synk.typing.Function.iterate`.

        For dropout and augmentation give each batch its own PRNG key by `synk.each`: one key for all batches draws the
        same noise in every step.
        """
        return self.function.iterate(*args, **self._with_slices(options))

    @public_api
    def stream(self, source: Iterable[Any], **options: Any) -> Prefetch[Any, Any]:
        """Take a step for each item of a loader, and return an iterator of the results.

        See `synk.typing.Function.stream`.
        """
        return self.function.stream(source, **self._with_slices(options))

    @public_api
    def check(self, *args: Any, **options: Any) -> None:
        """Compare a step with the serial one, and take none; see `synk.typing.Function.check`.

        Raises:
          LawError: the steps differ, for example by the statistics of a BatchNorm.
        """
        self.function.check(*args, **self._with_slices(options))

    @public_api
    def serial(self, *args: Any, **options: Any) -> Any:
        """Take the step on one device, and keep nothing unless `update=True`; see `synk.typing.Function.serial`."""
        return self.function.serial(*args, **options)

    @public_api
    def compile(self, *args: Any, **options: Any) -> jax.stages.Compiled:
        """Compile the program of a step ahead, and take none; see `synk.typing.Function.compile`."""
        return self.function.compile(*args, **self._with_slices(options))

    @public_api
    def explain(self, *args: Any, **options: Any) -> Explanation:
        """Say what a step with these arguments would do, without taking it; see `synk.typing.Function.explain`."""
        return self.function.explain(*args, **self._with_slices(options))

    @public_api
    def blame(self, *args: Any, **options: Any) -> Blame | None:
        """Find the first row whose loss or gradients are not finite, and take no step.

        See `synk.typing.Function.blame`.
        """
        return self.function.blame(*args, **self._with_slices(options))

    @public_api
    def with_options(
        self,
        *,
        compiler_options: Mapping[str, Any] | None = None,
        wire: WireName | EllipsisType | None = ...,
        num_slices: int | Literal["auto"] | None = None,
        barrier: bool | None = None,
        engine: EngineName | None = None,
    ) -> Step:
        """Make a step by another program over the same shared variables; what is not given stays as it is.

        Both steps may be called, in any order: each continues with the values that the other has left.

        Args:
          compiler_options: options of XLA by name, in addition to those that the step has.
          wire: how gradients travel, as for `synk.train.step`; None for unrounded. A step whose wire adds up
            gradients itself keeps that.
          num_slices: in how many slices calls run that do not name a number.
          barrier: whether, on several GPUs, all gradients are combined before the update of the first parameter
            begins.
          engine: as for `synk.train.step`.

        Returns:
          The new step; `synk.contrib.tune` finds out which is fastest.

        Raises:
          TypeError, ValueError: an option is of a wrong kind or value.

        Example:
          >>> import numpy as np, optax, synk.train
          >>> step = synk.train.step(lambda w, x: ((w - x) ** 2).mean(), np.float32(0), optax.sgd(0.25))
          >>> sliced = step.with_options(num_slices=2)
          >>> print(step(np.ones(4)), sliced(np.ones(4)), step(np.ones(4)))
          1.0 0.25 0.0625
        """
        name, old = f"{self.function.name}.with_options", self._options
        if num_slices is not None:
            check_slices(num_slices, name)
        if not (barrier is None or isinstance(barrier, bool)):
            raise TypeError(f"{name}: barrier is {shown(barrier)}; give True or False.")
        # Such a wire keeps its feedback in variables of the step, and another step would need its own.
        if is_sum(wire) or (not isinstance(wire, EllipsisType) and is_sum(old.wire)):
            kept = wire if is_sum(wire) else old.wire
            raise ValueError(
                f"{name}: wire={kept!r} has variables of its step; make another step by synk.train.step(..., wire=...)."
            )
        options = old._replace(
            wire=old.wire if isinstance(wire, EllipsisType) else wire,
            compiler_options={**(old.compiler_options or {}), **dict(checked_options(compiler_options, name))},
            has_barrier=old.has_barrier if barrier is None else barrier,
            num_slices=old.num_slices if num_slices is None else num_slices,
            engine=engine or old.engine,
        )
        # Options are checked together, as those of a new step: a wire may not go with the engine, say.
        options = checked_step(options, name)
        return replace(self, function=self._build(options), _options=options)


@public_api
def step(
    loss: Callable[..., Any],
    params: PyTree,
    optimizer: Any,
    *,
    state: PyTree = None,
    inputs: Inputs = None,
    aux: PyTree = None,
    clip: float | None = None,
    donate: bool = True,
    nan: Literal["raise"] | None = None,
    wire: WireName | GradientSum | None = None,
    shard_optimizer: bool = False,
    shard_params: bool = False,
    blocks: int | None = None,
    ema: float | None = None,
    log: Callable[[PyTree, PyTree, PyTree], PyTree] | None = None,
    axis_name: str = "replica",
    engine: EngineName = "shard_map",
    compiler_options: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> Step:
    """Make a training step: gradients of each replica's rows, their mean, and the optimizer's update on every replica.

    It is the serial step for any rows, replicas and slices, unless the loss computes something *across* rows, as
    BatchNorm does: its statistics are then those of each part, and running averages are combined weighted by rows. With
    `engine="jit"` they are those of the whole batch, and the step is serial again. So it is with a loss that
    communicates itself, as by `flax.linen.BatchNorm(axis_name="replica")` or `jax.lax.pmean(x, "replica")`.

    Args:
      loss: `loss(params, *rows)` returns the mean loss of its rows (per replica): a scalar, or
        `synk.Weighted(mean, weight)`, e.g. by tokens. The weight must not depend on the parameters. If a whole batch
        weighs 0, the mean is NaN, as serially, and spoils the parameters. With `state` it is
        `loss(params, state, *rows)`. With a state or aux outputs it returns `(loss, new_state)`, `(loss, aux)` or
        `(loss, new_state, aux)`.
      params: a pytree of floating arrays, a function without arguments that makes it (with `shard_params` in shards, so
        that no device holds all of it), or a shared variable that holds it.
      optimizer: an optimizer of optax's; it sees the mean gradient, and the loss as `value` if it takes that.
      state: a pytree, or a shared variable, that the model keeps beside its parameters, such as BatchNorm's running
        averages. Floats are averaged weighted by rows, without parts of weight 0. PRNG keys, typed or raw (unsigned
        integers), advance alike on every replica, so all parts draw the same noise (`synk.part_key` makes a key for
        each part). The keys of the first part with rows are kept; of other integers the largest.
      inputs: how the other parameters of `loss` are dealt out, as for `synk.function`; by default scattered.
      aux: the op, or tree of ops, that combines aux outputs; None if the loss has none.
      clip: the largest global norm of the mean gradient; a larger gradient is scaled down to it before the update.
      donate: as for `synk.function`.
      nan: as for `synk.function`: "raise" raises FloatingPointError if the loss, aux outputs or updates are not finite.
        The error names the row to blame, and no step is taken.
      wire: how gradients travel between replicas, as for `synk.function`; the loss, the state and leaves below 256
        numbers travel as they are. Or an object with the two methods of `synk.contrib.PowerSGD`, which adds up
        gradients itself; `check` compares as if all travelled.
      shard_optimizer: whether each replica keeps one n-th of the optimizer's state: it takes its shard of the gradient
        and updates one n-th of the parameters, and all gather them (ZeRO-1). The step is the same for any optimizer.
        What lies in shards is placed now, in the current group.
      shard_params: whether parameters, gradients and `ema` lie in shards too, as by `synk.shared(params,
        sharded=True)`, which `params` may also be. Leaves are gathered where the loss uses them.
      blocks: as for `synk.function`: gradients of blocks of so many rows combine by one fixed tree, so all parameters
        have the same bits for any replicas and slices. Not with a `state` that holds PRNG keys.
      ema: the decay of an exponential moving average of the parameters, e.g. 0.999: after each step `step.ema` becomes
        ema * step.ema + (1 - ema) * params. It begins as the parameters.
      log: a function `log(grads, updates, params)` of the mean gradient before clipping, the optimizer's updates and
        the new parameters, for what is to be logged, such as their norms. It runs on every replica after each update.
        A step returns its tree last.
      axis_name: as for `synk.function`.
      engine: as for `synk.function`: "jit" if rows of a batch see one another. Not with variables in shards.
      compiler_options: as for `synk.function`; `synk.contrib.tune` finds some that help.
      name: what messages call the step; by default the loss's name.

    Returns:
      A `Step`: call it with rows.

    Raises:
      ImportError: optax is not installed.
      TypeError, ValueError: an argument is of a wrong kind or value.

    Example:
      >>> import jax.numpy as jnp, numpy as np, optax, synk, synk.train
      >>> def loss(params, x, y):
      ...     return jnp.mean((params["w"] * x - y) ** 2)
      >>> step = synk.train.step(loss, {"w": np.float32(0)}, optax.sgd(0.1))
      >>> x = np.arange(7, dtype=np.float32)
      >>> print(f"{step(x, 3 * x):.1f} {step.params.value['w']:.1f}")
      117.0 7.8
    """
    model = TrainingModel("synk.train.step", StepOptions(**locals()))
    build = _builder(model)
    return Step(
        build(model.options), model.params, model.opt_state, model.state, model.ema, model.variables, build,
        model.options,
    )  # fmt: skip


def _builder(model: TrainingModel) -> Callable[[StepOptions], Function]:
    """Return the function that makes the function of a step, with some settings of its programs."""
    # Variables in cells of `on_part` and `then` are expected by tracing, which saves a second trace.
    held, opt_state, running, average = model.params, model.opt_state, model.state, model.ema
    decay, log = model.options.ema or 0.0, model.options.log

    def on_part(*args: Any, **kwargs: Any) -> PyTree:
        value, weight, grads, state, aux = model.value_and_grad(held.value, running, args, kwargs)
        loss_and_grads: Any = (value, grads)
        counted: Any = ()
        # Without a weight the op "mean" weighs by rows.
        if weight is not None:
            # Two values, since the gradient may stay unreduced.
            loss_and_grads = Weighted(value, weight), Weighted(grads, weight)
            if running is not None:
                counted = jnp.asarray(weight) != 0
                state = _weighted_state(running, state, counted)
        return {"loss": loss_and_grads, "state": state, "counted": counted, "aux": aux}

    def then(unreduced: bool, combined: dict[str, Any]) -> PyTree:
        value, grads = combined["loss"]
        new, grads, updates = model.step(held, opt_state, grads, value, unreduced)
        if running is not None:
            new_state, counted = combined["state"], combined["counted"]
            if not isinstance(counted, tuple):
                # If all parts weigh 0, their mean is 0 / 0. The state stays as it is.
                new_state = jax.tree.map(lambda old, new: jnp.where(counted, new, old), running.value, new_state)
            running.value = new_state
        if average is not None:
            average.value = jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, average.value, new)
        results = [value, *[combined["aux"]] * model.has_aux, *([] if log is None else [log(grads, updates, new)])]
        return tuple(results) if len(results) > 1 else value

    state_ops = () if running is None else jax.tree.map(_STATE_OPS.__getitem__, kinds_of(running))
    # "counted" tells whether any part had a weight.
    ops = {"loss": "mean", "state": state_ops, "counted": "any"}
    return lambda options: model.function(options, on_part, ops, partial(then, False), partial(then, True))


# The reduction of each kind of leaf of a state over the parts. Keys advance alike everywhere, so the first part's
# serve. Their op has a name of its own, since "first" is refused with slices.
_STATE_OPS: dict[LeafKind, Reduction] = {
    "number": REDUCTIONS["mean"],
    "key": replace(REDUCTIONS["first"], name="first part"),
    "count": REDUCTIONS["max"],
}


def _weighted_state(state: Shared, new: PyTree, has_weight: jax.Array) -> PyTree:
    """Return the new state of a part whose loss has a weight. A part of weight 0 has no say in numbers and counts."""
    context = current_trace()
    assert context is not None
    rows = jnp.where(has_weight, jnp.float32(context.rows or 1), 0)

    def of_leaf(kind: LeafKind, new: Any, old: Any) -> Any:
        if kind == "number":
            # By rows, not by the weight of the loss: statistics such as BatchNorm's are of rows.
            return Weighted(new, rows)
        return jnp.where(has_weight, new, old) if kind == "count" else new

    return jax.tree.map(of_leaf, kinds_of(state), new, state.value)
