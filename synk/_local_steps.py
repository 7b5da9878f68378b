"""Local steps: each replica trains on its own, and they average now and then."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _trace
from ._arguments import check_slices
from ._bind import Binder
from ._errors import entry
from ._function import Function, Inputs
from ._group import PyTree
from ._model import Model, ops_of
from ._ops import Weighted, widened
from ._prefetch import Prefetch
from ._shared import Shared


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
        self, model: Model, every: int, optimizer_state: bool, report: Callable[[int, jax.Array], Any] | None
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

    def __init__(self, model: Model) -> None:
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


def _ending(model: Model, sums: Shared) -> Callable[[], None]:
    params, opt_state = model.params, model.opt_state

    def end() -> None:
        weight, values = sums.value["weight"], sums.value["values"]
        before = params.value, opt_state.value
        loss, grads = jax.tree.map(lambda total: total / weight.astype(total.dtype), values)
        grads = jax.tree.map(lambda grad, param: grad.astype(param.dtype), grads, before[0])
        params.value, opt_state.value = _where(weight > 0, model.stepped(*before, grads, loss), before)
        sums.value = jax.tree.map(jnp.zeros_like, sums.value)

    return end


def _local(model: Model, slices: _Slices, trained: Shared) -> Function:
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
            for op, leaf in zip(ops_of(variable), jax.tree.leaves(variable.value), strict=True):
                leaves[op].append(leaf)
        # Where no replica has trained (all was masked), all hold the same, and any weights will do.
        held = Weighted(leaves["mean"], jnp.maximum(weight, jnp.float32(1e-30)))
        return {"loss": Weighted(loss / weight, weight), **leaves, "mean": held}

    def take(combined: dict[str, Any]) -> jax.Array:
        for variable in kept:
            variable.value = variable.seen.treedef.unflatten([combined[op].pop(0) for op in ops_of(variable)])
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
    model = Model(call, loss, params, optimizer, state, inputs, aux, clip, flat, donate, name)
    return LocalSteps(model, int(every), optimizer_state, report)
