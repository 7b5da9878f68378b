"""Synchronous: training steps by the mean gradient of all rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp

from .._base.errors import public_api
from .._base.pytree import PyTree
from .._call.spec import Stats
from .._data.prefetch import Prefetch
from .._function.decorator import Inputs
from .._function.function import Function
from .._reductions.reduction import REDUCTIONS, Reduction, Weighted
from .._reductions.wire import WireName
from .._tracing.context import current_trace
from .._variables.variable import Shared, map_value, shared
from .model import LeafKind, TrainingModel, checked_number, kinds_of
from .power_sgd import PowerSGD

if TYPE_CHECKING:
    from .._check.blame import Blame
    from .._explain.report import Explanation


@dataclass(frozen=True, eq=False)
class Step:
    """A training step; made by `synk.train.step`.

    Attributes:
      function: the `synk.Function` that it calls.
      params: the shared variable that holds the parameters; their tree is `params.value`.
      opt_state: the shared variable that holds the optimizer's state.
      state: the shared variable that holds the model's state; None if there is none.
      ema: the shared variable that holds the exponential moving average of the parameters; None without `ema=`.
      variables: all shared variables that a step updates by name, as `synk.save` and `synk.load` take them; with
        `wire=synk.train.PowerSGD(...)` also its "feedback" and "basis".

    Example:
      >>> import numpy as np, optax, synk.train
      >>> step = synk.train.step(lambda w, x: ((w - x) ** 2).mean(), np.float32(0), optax.sgd(0.5))
      >>> for loss in step.iterate(np.ones(10), batches=[4, slice(4, 10)]):
      ...     print(loss)
      1.0
      0.0
      >>> print(step.params.value, step.stats.rows)
      1.0 10
    """

    function: Function
    params: Shared
    opt_state: Shared
    state: Shared | None
    ema: Shared | None
    variables: dict[str, Shared]

    @property
    def stats(self) -> Stats:
        """Return what the step's function has done so far."""
        return self.function.stats

    @public_api
    def __call__(self, *args: Any, **options: Any) -> Any:
        """Take one step.

        Args:
          *args: the rows, as the loss takes them.
          **options: `batch`, `num_slices` and other options of a call of a synk function.

        Returns:
          The mean loss of all rows before the step. With `aux` the pair of the loss and the aux outputs.
        """
        return self.function(*args, **options)

    @public_api
    def iterate(self, *args: Any, **options: Any) -> Prefetch[Any, Any]:
        """Take a step for each of `batches`, and return an iterator of the results; see `synk.Function.iterate`.

        For dropout and augmentation give each batch its own PRNG key by `synk.each`: one key for all batches draws the
        same noise in every step.
        """
        return self.function.iterate(*args, **options)

    @public_api
    def stream(self, source: Iterable[Any], **options: Any) -> Prefetch[Any, Any]:
        """Take a step for each item of a loader, and return an iterator of the results; see `synk.Function.stream`."""
        return self.function.stream(source, **options)

    @public_api
    def check(self, *args: Any, **options: Any) -> None:
        """Compare a step with the serial one, and take none; see `synk.Function.check`.

        Raises:
          LawError: the steps differ, for example by the statistics of a BatchNorm.
        """
        self.function.check(*args, **options)

    @public_api
    def serial(self, *args: Any, **options: Any) -> Any:
        """Take the step on one device, and keep nothing unless `update=True`; see `synk.Function.serial`."""
        return self.function.serial(*args, **options)

    @public_api
    def compile(self, *args: Any, **options: Any) -> jax.stages.Compiled:
        """Compile the program of a step ahead, and take none; see `synk.Function.compile`."""
        return self.function.compile(*args, **options)

    @public_api
    def explain(self, *args: Any, **options: Any) -> Explanation:
        """Say what a step with these arguments would do, without taking it; see `synk.Function.explain`."""
        return self.function.explain(*args, **options)

    @public_api
    def blame(self, *args: Any, **options: Any) -> Blame | None:
        """Find the first row whose loss or gradients are not finite, and take no step; see `synk.Function.blame`."""
        return self.function.blame(*args, **options)


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
    wire: WireName | PowerSGD | None = None,
    shard_optimizer: bool = False,
    blocks: int | None = None,
    ema: float | None = None,
    name: str | None = None,
) -> Step:
    """Make a training step: gradients of each replica's rows, their mean, and the optimizer's update on every replica.

    It is the serial step for any rows, replicas and slices, unless the loss computes something *across* rows, as
    BatchNorm does: its statistics are then those of each part, and running averages are combined weighted by rows. If
    all parts have as many rows, `flax.linen.BatchNorm(axis_name="replica")`, or `jax.lax.pmean(x, "replica")` in the
    loss, computes statistics of the whole batch, and the step is serial again. Other numbers of rows then raise.

    Args:
      loss: `loss(params, *rows)` returns the mean loss of its rows (per replica): a scalar, or
        `synk.Weighted(mean, weight)`, e.g. by tokens. The weight must not depend on the parameters. If a whole batch
        weighs 0, the mean is NaN, as serially, and spoils the parameters. With `state` it is
        `loss(params, state, *rows)`. With a state or aux outputs it returns `(loss, new_state)`, `(loss, aux)` or
        `(loss, new_state, aux)`.
      params: a pytree of floating arrays, or a shared variable that holds one.
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
        numbers travel as they are. `synk.train.PowerSGD(rank)` sends thin factors, and adds what they leave out to the
        next gradient; `check` compares as if all travelled.
      shard_optimizer: whether each replica keeps one n-th of the optimizer's state, updates one n-th of the parameters,
        and gathers the rest (ZeRO-1). The step is the same, and sends as many bytes. `opt_state.value` is the whole
        state. The optimizer must treat each number alone; `clip` clips by the global norm.
      blocks: as for `synk.function`: gradients of blocks of so many rows combine by one fixed tree, so all parameters
        have the same bits for any replicas and slices. Not with a `state` that holds PRNG keys.
      ema: the decay of an exponential moving average of the parameters, e.g. 0.999: after each step `step.ema` becomes
        ema * step.ema + (1 - ema) * params. It begins as the parameters.
      name: what messages call the step; by default the loss's name.

    Returns:
      A `Step`: call it with rows.

    Raises:
      ImportError: optax is not installed.
      TypeError, ValueError: an argument is of a wrong kind or value, or `shard_optimizer` is used with an optimizer
        that mixes numbers.

    Example:
      >>> import jax.numpy as jnp, numpy as np, optax, synk, synk.train
      >>> def loss(params, x, y):
      ...     return jnp.mean((params["w"] * x - y) ** 2)
      >>> step = synk.train.step(loss, {"w": np.float32(0)}, optax.sgd(0.1))
      >>> x = np.arange(7, dtype=np.float32)
      >>> print(f"{step(x, 3 * x):.1f} {step.params.value['w']:.1f}")
      117.0 7.8
    """
    model = TrainingModel(
        "synk.train.step", loss, params, optimizer,
        state=state, inputs=inputs, aux=aux, clip=clip, donate=donate, name=name, nan=nan, wire=wire,
        blocks=blocks, shard_optimizer=shard_optimizer,
    )  # fmt: skip

    # Variables in cells of `on_part` and `then` are expected by tracing, which saves a second trace.
    held, opt_state, running, average, decay = model.params, model.opt_state, model.state, None, 0.0
    if ema is not None:
        wanted = "give its decay, a number >= 0 and < 1, such as 0.999"
        decay = checked_number(ema, "synk.train.step: ema", wanted, lambda decay: 0 <= decay < 1)
        average = model.variables["ema"] = shared(map_value(held, lambda params: params), "ema")

    def on_part(*args: Any, **kwargs: Any) -> PyTree:
        value, weight, grads, state, aux = model.value_and_grad(held.value, running, args, kwargs)
        loss_and_grads: Any = (value, grads)
        counted: Any = ()
        if weight is not None:
            # Two values, since the gradient may stay unreduced.
            loss_and_grads = Weighted(value, weight), Weighted(grads, weight)
            if running is not None:
                counted = jnp.asarray(weight) != 0
                state = _weighted_state(running, state, counted)
        return {"loss": loss_and_grads, "state": state, "counted": counted, "aux": aux}

    def then(unreduced: bool, combined: dict[str, Any]) -> PyTree:
        value, grads = combined["loss"]
        new = model.step(held, opt_state, grads, value, unreduced)
        if running is not None:
            new_state, counted = combined["state"], combined["counted"]
            if not isinstance(counted, tuple):
                new_state = jax.tree.map(lambda old, new: jnp.where(counted, new, old), running.value, new_state)
            running.value = new_state
        if average is not None:
            average.value = jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, average.value, new)
        return (value, combined["aux"]) if model.has_aux else value

    state_ops = () if running is None else jax.tree.map(_STATE_OPS.__getitem__, kinds_of(running))
    ops = {"loss": "mean", "state": state_ops, "counted": "any"}
    function = model.function(on_part, ops, partial(then, False), partial(then, True))
    return Step(function, held, opt_state, running, average, model.variables)


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
            return Weighted(new, rows)
        return jnp.where(has_weight, new, old) if kind == "count" else new

    return jax.tree.map(of_leaf, kinds_of(state), new, state.value)
