"""Training steps on optax: synchronous ones, and local ones that average now and then. `synk` does not import it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import _trace
from ._arguments import check_slices
from ._bind import Binder
from ._errors import entry
from ._flat import shared
from ._function import Function, Inputs
from ._group import PyTree
from ._ops import Weighted, widened
from ._outputs import check_ops
from ._prefetch import Prefetch
from ._shared import Shared

__all__ = ["LocalSteps", "Step", "local_steps", "step"]


class _Found(NamedTuple):
    """What a loss gives for one part of the rows; `()` stands for what it does not return."""

    value: jax.Array
    weight: Any  # of a Weighted loss, else None
    grads: PyTree
    state: PyTree
    aux: PyTree


class _Model:
    """A loss, the variables that it trains, and the step that they take."""

    def __init__(
        self, call: str, loss: Callable[..., Any], params: PyTree, optimizer: Any, state: PyTree, inputs: Inputs,
        aux: PyTree, clip: float | None, flat: bool, donate: bool, name: str | None,
    ) -> None:  # fmt: skip
        self.optax = _optax()
        if not callable(loss):
            raise TypeError(f"{call}: loss is {loss!r}; give a function of the parameters and rows.")
        if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
            raise TypeError(f"{call}: optimizer is {optimizer!r}; give one of optax's, e.g. optax.sgd(0.1).")
        if clip is not None and not clip > 0:
            raise ValueError(f"{call}: clip is {clip!r}; give the largest global norm of a gradient, a number > 0.")
        self.name = name or getattr(loss, "__name__", type(loss).__name__)
        self.loss, self.clip, self.donate, self.inputs = loss, clip, donate, inputs
        self.optimizer = self.optax.with_extra_args_support(optimizer)
        self.has_aux, self.aux_ops = aux is not None, () if aux is None else check_ops(aux, self.name)
        self.params = params if isinstance(params, Shared) else shared(params, "params", flat=flat)
        self.opt_state = shared(optimizer.init(self.params.value), "opt_state", flat=flat)
        self.state = state if isinstance(state, Shared) or state is None else shared(state, "state")
        self.signature = self._of_rows(call)

    def _of_rows(self, call: str) -> inspect.Signature:
        """The loss's signature without parameters and state."""
        signature = inspect.signature(self.loss)
        parameters = list(signature.parameters.values())
        taken = 1 if self.state is None else 2
        first = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:taken]
        if len(first) < taken:
            what = "the parameters" if taken == 1 else "the parameters and the state"
            raise TypeError(f"{call}: the loss {self.name}{signature} must take {what} first, and after them rows.")
        bound = self.loss.keywords if isinstance(self.loss, functools.partial) else ()
        return signature.replace(parameters=[p for p in parameters if p not in first and p.name not in bound])

    def function(self, fn: Callable[..., PyTree], outputs: dict[str, PyTree], then: Callable[..., PyTree]) -> Function:
        """A function of rows that looks like the loss, in messages and to `inputs`."""
        fn.__name__, fn.__signature__ = self.name, self.signature  # type: ignore[attr-defined]  # inspect reads it
        ops = {**outputs, "aux": self.aux_ops}
        return Function(fn, self.inputs, ops, "mean", then, "shard_map", self.donate, self.name)

    def differentiate(self, params: PyTree, state: Shared | None, args: Any, kwargs: dict[str, Any]) -> _Found:
        """The loss of these rows, and its gradient."""
        before = () if state is None else (state.value,)

        def value(params: PyTree) -> tuple[Any, Any]:
            value, *rest = self._unpacked(self.loss(params, *before, *args, **kwargs))
            value, weight = (value.value, value.weight) if isinstance(value, Weighted) else (value, None)
            if jnp.shape(value) or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
                raise TypeError(
                    f"{self.name}: it returned a loss of {jnp.result_type(value).name}{list(jnp.shape(value))}; "
                    f"return the mean over the rows, one floating number, or synk.Weighted(mean, weight)."
                )
            return value, (weight, rest)

        (loss, (weight, rest)), grads = jax.value_and_grad(value, has_aux=True)(params)
        return _Found(loss, weight, grads, () if state is None else rest[0], rest[-1] if self.has_aux else ())

    def _unpacked(self, out: Any) -> tuple[Any, ...]:
        names = ["the loss", *["the new state"] * (self.state is not None), *["aux outputs"] * self.has_aux]
        if len(names) == 1 and not isinstance(out, tuple | list):
            return (out,)
        if isinstance(out, tuple) and len(out) == len(names) > 1:
            return out
        got = f"{len(out)} values" if isinstance(out, tuple | list) else f"one {type(out).__name__}"
        want = f"{' and '.join(names)}, as a tuple" if len(names) > 1 else "the loss alone"
        raise TypeError(f"{self.name}: it returned {got}; with the state= and aux= that were given, return {want}.")

    def stepped(self, params: PyTree, opt_state: PyTree, grads: PyTree, loss: jax.Array) -> tuple[PyTree, PyTree]:
        """Parameters and optimizer state after a step."""
        if self.clip is not None:
            grads, _ = self.optax.clip_by_global_norm(self.clip).update(grads, self.optax.EmptyState())
        updates, opt_state = self.optimizer.update(grads, opt_state, params, value=loss)
        return self.optax.apply_updates(params, updates), opt_state


def _optax() -> Any:
    try:
        import optax  # type: ignore[import-untyped]  # it has no stubs
    except ImportError as error:
        raise ImportError(
            "synk.train: it needs optax, which is not installed. Get it by: pip install 'synk-jax[examples]'"
        ) from error
    return optax


def _ops(variable: Shared) -> list[str]:
    """How each leaf's values combine: floats by mean; counts, which are equal or behind, by the largest."""
    like = variable.seen
    return [
        "first" if key is not None else "mean" if jnp.issubdtype(shape.dtype, jnp.inexact) else "max"
        for shape, key in zip(like.shapes, like.keys, strict=True)
    ]


# Synchronous steps.


@dataclass(frozen=True, eq=False)
class Step:
    """A training step; made by `synk.train.step`.

    Attributes:
      function: the `synk.Function` that it calls, with `serial`, `stats`, `compile` and the rest.
      params: the parameters, a shared variable; `params.value` is their tree.
      opt_state: the optimizer's state, a shared variable.
      state: the model's state, a shared variable; None where there is none.

    Example:
      >>> import numpy as np, optax, synk.train
      >>> step = synk.train.step(lambda w, x: ((w - x) ** 2).mean(), np.float32(0), optax.sgd(0.5))
      >>> for loss in step.iterate(np.ones(10), batches=[4, slice(4, 10)]):
      ...     print(loss)
      1.0
      0.0
      >>> print(step.params.value, step.function.stats.rows)
      1.0 10
    """

    function: Function
    params: Shared
    opt_state: Shared
    state: Shared | None

    @entry
    def __call__(self, *args: Any, **options: Any) -> Any:
        """Take one step.

        Args:
          *args: the rows, as the loss takes them.
          **options: `batch`, `num_slices` and the like, as of every synk function.

        Returns:
          The loss of all rows before the step; or the pair of it and the aux outputs.
        """
        return self.function(*args, **options)

    @entry
    def iterate(self, *args: Any, **options: Any) -> Prefetch[Any, Any]:
        """Take a step for each batch; see `synk.Function.iterate`.

        Args:
          *args: the rows, as the loss takes them.
          **options: `batches`, `prefetch`, `num_slices` and the like.

        Returns:
          An iterator of what each call returns.
        """
        return self.function.iterate(*args, **options)

    @entry
    def check(self, *args: Any, **options: Any) -> None:
        """Compare a step with the serial one, and take none; see `synk.Function.check`.

        Raises:
          LawError: they differ, as BatchNorm's statistics do.
        """
        self.function.check(*args, **options)


@entry
def step(
    loss: Callable[..., Any],
    params: PyTree,
    optimizer: Any,
    *,
    state: PyTree = None,
    inputs: Inputs = None,
    aux: PyTree = None,
    clip: float | None = None,
    flat: bool = False,
    donate: bool = True,
    name: str | None = None,
) -> Step:
    """Make a training step: gradients of each replica's rows, their mean, and the optimizer's update on every replica.

    It is the serial step for any rows, replicas and slices. One thing is not, unless asked for: what the loss computes
    *across* rows, as BatchNorm does. Its statistics are then each part's own, and the running averages are combined
    weighted by rows. Where all parts have as many rows, `flax.linen.BatchNorm(axis_name="replica")`, or
    `jax.lax.pmean(x, "replica")` in the loss, takes them over the whole batch, and the step is serial again; other
    numbers of rows then raise.

    Args:
      loss: `loss(params, *rows)` returns the mean loss of the rows that it is given (per replica): a scalar, or
        `synk.Weighted(mean, weight)`, e.g. by tokens, whose weight must not depend on the parameters. With `state` it
        is `loss(params, state, *rows)`. With a state or aux outputs it returns `(loss, new_state)`, `(loss, aux)` or
        `(loss, new_state, aux)`.
      params: a pytree of arrays, or a shared variable that holds one.
      optimizer: one of optax's; it sees the combined gradient, and the loss as `value`.
      state: what the model keeps beside its parameters, such as BatchNorm's running averages: a pytree, or a shared
        variable. Floats are averaged weighted by rows; of integers the largest is kept.
      inputs: how the parameters of `loss` after those are dealt out, as for `synk.function`; scattered if left out.
      aux: the op, or tree of ops, by which aux outputs combine; None where the loss has none.
      clip: the largest global norm of the combined gradient; a larger one is scaled down to it before the update.
      flat: whether parameters and optimizer state keep one buffer a dtype, as `synk.shared(..., flat=True)`.
      donate: as for `synk.function`.
      name: what messages call it; the loss's name.

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
    model = _Model("synk.train.step", loss, params, optimizer, state, inputs, aux, clip, flat, donate, name)
    held, opt_state, running = model.params, model.opt_state, model.state

    def on_part(*args: Any, **kwargs: Any) -> PyTree:
        found = model.differentiate(held.value, running, args, kwargs)
        both = (found.value, found.grads)
        return {
            "loss": both if found.weight is None else Weighted(both, found.weight),
            "state": found.state,
            "aux": found.aux,
        }

    def then(combined: dict[str, Any]) -> PyTree:
        value, grads = combined["loss"]
        held.value, opt_state.value = model.stepped(held.value, opt_state.value, grads, value)
        if running is not None:
            running.value = combined["state"]
        return (value, combined["aux"]) if model.has_aux else value

    state_ops = () if running is None else running.seen.treedef.unflatten(_ops(running))
    function = model.function(on_part, {"loss": "mean", "state": state_ops}, then)
    return Step(function, held, opt_state, running)


# Local steps.


class LocalSteps:
    """Steps that each replica takes on its own, and their averages; made by `synk.train.local_steps`.

    At the end of `iterate`, or of a `with` block, what was trained since the last average is averaged too; else call
    `finish`, before saving too. Until then the replicas differ: reading `params.value` raises `synk.DivergedError`.

    Attributes:
      function: the `synk.Function` that takes one step on each replica.
      params: the parameters, a shared variable; `params.value` is their tree.
      opt_state: the optimizer's state, a shared variable.
      state: the model's state, a shared variable; None where there is none.
      steps: how many steps were taken so far.

    Example:
      >>> import numpy as np, optax, synk.train
      >>> with synk.train.local_steps(lambda w, x: ((w - x) ** 2).mean(), np.float32(0), optax.sgd(0.25)) as train:
      ...     print(*[train(np.ones(9)) for _ in range(2)])
      1.0 0.25
      >>> print(train.params.value)
      0.75
    """

    def __init__(
        self, model: _Model, every: int, optimizer_state: bool, report: Callable[[int, jax.Array], Any] | None
    ) -> None:
        self.params, self.opt_state, self.state = model.params, model.opt_state, model.state
        self.steps = self._averaged = 0
        self._every, self._report = every, report
        trained = _sums("trained", [np.float32(0)])  # since the last average
        kept = [self.params, *[self.opt_state] * optimizer_state, *([] if self.state is None else [self.state])]
        self._slices = _Slices(model)
        self.function = _local(model, self._slices, trained)
        self._average = _averaging(f"{model.name}.average", kept, trained, model.donate)

    @entry
    def __call__(self, *args: Any, num_slices: int = 1, **options: Any) -> Any:
        """Take one step on each replica, of its own rows; every so often, average after it.

        Args:
          *args: the rows, as the loss takes them.
          num_slices: as of every synk function.
          **options: `batch` and the like, as of every synk function.

        Returns:
          The loss of all rows, each by its replica's own parameters before the step; or the pair of it and the aux
          outputs.
        """
        self._slices.prepare(num_slices)
        result = self.function(*args, num_slices=num_slices, **options)
        self.after_step(num_slices)
        return result

    @entry
    def iterate(self, *args: Any, num_slices: int = 1, **options: Any) -> Iterator[Any]:
        """Take a step for each batch, and at the end average what is left; see `synk.Function.iterate`.

        Args:
          *args: the rows, as the loss takes them.
          num_slices: as of every synk function.
          **options: `batches`, `prefetch` and the like.

        Returns:
          An iterator of what each call returns; it has as many as there are batches.
        """
        self._slices.prepare(num_slices)
        return _Iterating(self, self.function.iterate(*args, num_slices=num_slices, **options), num_slices)

    @entry
    def finish(self) -> None:
        """Average what was trained since the last average; do nothing where that is nothing."""
        if self.steps > self._averaged:
            loss = self._average()
            self._averaged = self.steps
            if self._report is not None:
                self._report(self.steps, loss)

    def __enter__(self) -> LocalSteps:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()

    def after_step(self, num_slices: int) -> None:
        """End a step that was started (serves `iterate`): average where it is time to."""
        if num_slices > 1:
            self._slices.end()
        self.steps += 1
        if self.steps - self._averaged >= self._every:
            self.finish()


class _Iterating(Iterator[Any]):
    """Results of local steps; at their end, the last average."""

    def __init__(self, steps: LocalSteps, results: Prefetch[Any, Any], num_slices: int) -> None:
        self._steps, self._results, self._num_slices = steps, results, num_slices

    def __len__(self) -> int:
        return len(self._results)

    def __next__(self) -> Any:
        try:
            result = next(self._results)
        except StopIteration:
            self._steps.finish()
            raise
        self._steps.after_step(self._num_slices)
        return result

    def close(self) -> None:
        """Stop the thread; nothing more comes."""
        self._results.close()


def _sums(name: str, values: PyTree) -> Shared:
    """A variable for the sums of weights, and of values times weights."""
    zeros = jax.tree.map(lambda v: np.zeros(v.shape, widened(v.dtype, "weighted")), values)
    return Shared({"weight": np.float32(0), "values": zeros}, name, False)


def _added(sums: PyTree, weight: jax.Array, values: PyTree) -> PyTree:
    """With another part's value; one of weight 0 counts for nothing, whatever it is."""

    def add(total: jax.Array, value: jax.Array) -> jax.Array:
        scaled = value.astype(total.dtype) * weight.astype(total.dtype)
        return total + jnp.where(weight > 0, scaled, jnp.zeros((), total.dtype))

    return {"weight": sums["weight"] + weight, "values": jax.tree.map(add, sums["values"], values)}


def _where(condition: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


class _Slices:
    """What the slices of one local step add up to; the step is taken when all have run."""

    def __init__(self, model: _Model) -> None:
        self._model = model
        self._sums: Shared | None = None
        self._end: Function | None = None

    def prepare(self, num_slices: int) -> None:
        """Make what a step of several slices needs, before it is traced."""
        model = self._model
        check_slices(num_slices, model.name)
        if num_slices > 1 and self._sums is None:
            grads = model.params.seen.treedef.unflatten(model.params.seen.shapes)
            self._sums = _sums("slices", [np.float32(0), grads])
            fn = _ending(model, self._sums)
            self._end = Function(fn, None, None, "sum", None, "shard_map", model.donate, f"{model.name}.end")

    def add(self, weight: jax.Array, values: PyTree) -> None:
        """Note what one slice gives."""
        assert self._sums is not None
        self._sums.update(_added(self._sums.value, weight, values), slices="add")

    def end(self) -> None:
        """Take the step, on each replica."""
        assert self._end is not None
        self._end()


def _ending(model: _Model, sums: Shared) -> Callable[[], None]:
    params, opt_state = model.params, model.opt_state

    def end() -> None:
        weight, values = sums.value["weight"], sums.value["values"]
        before = params.value, opt_state.value
        loss, grads = jax.tree.map(lambda total: total / weight.astype(total.dtype), values)
        grads = jax.tree.map(lambda grad, param: grad.astype(param.dtype), grads, before[0])
        params.value, opt_state.value = _where(weight > 0, model.stepped(*before, grads, loss), before)
        sums.value = jax.tree.map(jnp.zeros_like, sums.value)

    return end


def _local(model: _Model, slices: _Slices, trained: Shared) -> Function:
    """One step on each replica, of its own rows."""
    params, opt_state, state = model.params, model.opt_state, model.state

    def on_part(*args: Any, **kwargs: Any) -> PyTree:
        found = model.differentiate(params.value, state, args, kwargs)
        counted = _rows(function._binder, args, kwargs) if found.weight is None else found.weight
        weight = jnp.asarray(counted).astype(jnp.float32)
        current = _trace.frame()
        if current is not None and current.slices > 1:
            slices.add(weight, [found.value, found.grads])
        else:
            before = params.value, opt_state.value
            new = model.stepped(*before, found.grads, found.value)
            params.value, opt_state.value = _where(weight > 0, new, before)
        if state is not None:
            state.update(found.state, slices="mean")
        trained.update(_added(trained.value, weight, [found.value]), slices="add")
        return {"loss": Weighted(found.value, weight), "aux": found.aux}

    def then(combined: dict[str, Any]) -> PyTree:
        return (combined["loss"], combined["aux"]) if model.has_aux else combined["loss"]

    function = model.function(on_part, {"loss": "mean"}, then)
    return function


def _rows(binder: Binder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """How many rows this part has."""
    scattered: list[Any] = []
    for parameter, given in binder.signature.bind(*args, **kwargs).arguments.items():
        is_variadic = binder.parameters[parameter].kind in (
            inspect.Parameter.VAR_POSITIONAL,
            inspect.Parameter.VAR_KEYWORD,
        )
        several = (given.values() if isinstance(given, dict) else given) if is_variadic else (given,)
        for tree in several:
            jax.tree.map(
                lambda mode, sub: scattered.extend(jax.tree.leaves(sub) if mode == "scatter" else ()),
                binder.mode(parameter),
                tree,
            )
    if not scattered:
        raise ValueError(
            f"{binder.name}: averages are weighted by rows, but none of its arguments is scattered. Give it rows, or "
            f"return synk.Weighted(mean, rows)."
        )
    return scattered[0].shape[0]


def _averaging(name: str, kept: list[Shared], trained: Shared, donate: bool) -> Function:
    """Combine what each replica holds, weighted by what it has trained on; return the loss of that."""

    def own() -> PyTree:
        weight, (loss,) = trained.value["weight"], trained.value["values"]
        leaves: dict[str, list[Any]] = {"mean": [], "max": [], "first": []}
        for variable in kept:
            for op, leaf in zip(_ops(variable), jax.tree.leaves(variable.value), strict=True):
                leaves[op].append(leaf)
        # Where no replica has trained (all was masked), all hold the same, and any weights will do.
        held = Weighted(leaves["mean"], jnp.maximum(weight, jnp.float32(1e-30)))
        return {"loss": Weighted(loss / weight, weight), **leaves, "mean": held}

    def take(combined: dict[str, Any]) -> jax.Array:
        for variable in kept:
            variable.value = variable.seen.treedef.unflatten([combined[op].pop(0) for op in _ops(variable)])
        trained.value = {"weight": jnp.float32(0), "values": [jnp.float32(0)]}
        return combined["loss"]

    ops = {"loss": "mean", "mean": "mean", "max": "max", "first": "first"}
    return Function(own, None, ops, "mean", take, "shard_map", donate, name)


@entry
def local_steps(
    loss: Callable[..., Any],
    params: PyTree,
    optimizer: Any,
    *,
    every: int = 3,
    optimizer_state: bool = True,
    report: Callable[[int, jax.Array], Any] | None = None,
    state: PyTree = None,
    inputs: Inputs = None,
    aux: PyTree = None,
    clip: float | None = None,
    flat: bool = False,
    donate: bool = True,
    name: str | None = None,
) -> LocalSteps:
    """Make local steps: each replica trains its own copy on its own rows, and now and then all take the average.

    Less communication, and not the serial answer: between averages each copy follows its own rows. The average is
    weighted by the rows that each replica trained on since the last one (by the weights of a `synk.Weighted` loss); one
    that had none counts for nothing. With `every=1` and plain SGD it is the synchronous step, to rounding.

    Args:
      loss: as for `synk.train.step`.
      params: as for `synk.train.step`.
      optimizer: one of optax's; it sees each replica's own gradients.
      every: after how many steps to average, >= 1.
      optimizer_state: whether to average the optimizer's state too, of which integers (step counts) take the largest;
        else each replica keeps its own, to be read by `opt_state.get_value(rank)`.
      report: called after each average as `report(steps, loss)`: how many steps were taken so far, and the mean loss of
        all rows trained on since the last average.
      state: as for `synk.train.step`; averaged with the parameters.
      inputs: as for `synk.train.step`.
      aux: as for `synk.train.step`.
      clip: the largest global norm of each replica's own gradient.
      flat: as for `synk.train.step`.
      donate: as for `synk.function`.
      name: what messages call it; the loss's name.

    Returns:
      A `LocalSteps`: call it with rows.

    Raises:
      ImportError: optax is not installed.
      TypeError, ValueError: an argument is of a wrong kind or value.

    Example:
      >>> import jax.numpy as jnp, numpy as np, optax, synk, synk.train
      >>> def loss(params, x, y):
      ...     return jnp.mean((params["w"] * x - y) ** 2)
      >>> with synk.train.local_steps(loss, {"w": np.float32(0)}, optax.sgd(0.1), every=2) as step:
      ...     print(*[f"{step(np.ones(9), np.full(9, 5.0)):.2f}" for _ in range(3)])
      25.00 16.00 10.24
      >>> print(f"{step.params.value['w']:.2f} after {step.steps} steps")
      2.44 after 3 steps
    """
    call = "synk.train.local_steps"
    if isinstance(every, bool) or not isinstance(every, int | np.integer):
        raise TypeError(f"{call}: every is {every!r}; give an integer >= 1.")
    if every < 1:
        raise ValueError(f"{call}: every is {every}; average after so many steps, >= 1.")
    model = _Model(call, loss, params, optimizer, state, inputs, aux, clip, flat, donate, name)
    return LocalSteps(model, int(every), optimizer_state, report)
