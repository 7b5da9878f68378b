"""Local SGD: each replica trains its own copy, and now and then all replicas take the average.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", 2017
(https://arxiv.org/abs/1602.05629); Stich, "Local SGD Converges Fast and Communicates Little", 2019
(https://arxiv.org/abs/1805.09767).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import Weighted, function, shared
from .._base.errors import checked_integer, public_api
from .._base.pytree import PyTree
from .._function.decorator import Inputs
from .._loops.prefetch import Prefetch
from .._reductions.collectives import all_sum
from .._reductions.reduction import Op
from .._runtime.dispatch import drain, retire_finished
from .._tracing.context import current_trace
from ..train.model import LeafKind, StepOptions, TrainingModel, kinds_of
from ..typing import Function, Shared


class LocalSteps:
    """Steps that each replica takes on its own, and their averages; made by `synk.contrib.local_steps`.

    The end of `iterate`, of `stream` and of a `with` block averages the steps since the last average. Elsewhere call
    `finish` before you read or set values; all of `variables` may be saved and loaded at any time. Between averages the
    replicas differ, and reading `params.value` raises `synk.errors.DivergedError`.

    Attributes:
      function: the `synk.typing.Function` that takes one step on each replica.
      params: the shared variable that holds the parameters; their tree is `params.value`.
      opt_state: the shared variable that holds the optimizer's state.
      state: the shared variable that holds the model's state; None if there is none.
      variables: all shared variables that steps update by name, as `synk.save` and `synk.load` take them: beside
        these "trained", the number of rows that each replica has trained on since the last average and the sum of their
        losses, and "counts", the number of steps so far and that number at the last average.

    Example:
      >>> import numpy as np, optax, synk.contrib
      >>> def loss(w, x):
      ...     return ((w - x) ** 2).mean()
      >>> with synk.contrib.local_steps(loss, np.float32(0), optax.sgd(0.25)) as train:
      ...     print(*[train(np.ones(8)) for _ in range(2)])
      1.0 0.25
      >>> print(train.params.value)
      0.75
    """

    def __init__(
        self,
        model: TrainingModel,
        every: int | Callable[[int], int],
        optimizer_state: bool,
        report: Callable[[int, jax.Array], Any] | None,
    ) -> None:
        self.params, self.opt_state, self.state = model.params, model.opt_state, model.state
        self._trained, self._counts = shared(_NOTHING, "trained"), shared(_counts(0), "counts")
        self.variables = {**model.variables, "trained": self._trained, "counts": self._counts}
        self._every, self._report, self._name = every, report, model.name
        # Moments of an optimizer belong to the steps of their replica, so they are averaged only on request.
        averaged = [v for name, v in model.variables.items() if name != "opt_state" or optimizer_state]
        self.function = _local_function(model, self._trained, self._counts)
        self._average = _average_function(model, averaged, self._trained, self._counts)
        cure = "Each replica keeps an optimizer state of its own, unless optimizer_state=True"
        self.opt_state._cures[model.name] = cure
        for variable in averaged:
            variable._cures[model.name] = "Call finish() of the local steps, which averages them by their rows"
            variable._is_averaged = True
        self._set_counts(0, 0)
        # Loops with `per_launch` ask here how many steps may run in a row, so that a list ends where an average is due.
        self.function._pace = self._pace

    def __repr__(self) -> str:
        return f"synk.contrib.local_steps({', '.join([self._name, *map(repr, self.variables.values())])})"

    @property
    def steps(self) -> int:
        """Return the number of steps so far, including the steps before a loaded checkpoint."""
        self._recount()
        return self._steps

    @public_api
    def __call__(self, *args: Any, **options: Any) -> Any:
        """Take one step on each replica with its own rows, and average if it is time to.

        Args:
          *args: the rows, as the loss takes them.
          **options: `batch` and other options of a call of a synk function, but for `num_slices`: a local step takes
            each replica's rows at once.

        Returns:
          The mean loss of all rows. The loss of a row is computed with its replica's parameters before the step. With
          `aux` the pair of the loss and the aux outputs.
        """
        return self._step(lambda: self.function(*args, **options))

    @public_api
    def iterate(self, *args: Any, **options: Any) -> Iterator[Any]:
        """Take a step for each of `batches`, and average at the end; see `synk.typing.Function.iterate`.

        Returns:
          An iterator of the result of each step; its length is the number of batches.
        """
        return _Iterating(self, self.function.iterate(*args, **options))

    @public_api
    def stream(self, source: Iterable[Any], **options: Any) -> Iterator[Any]:
        """Take a step for each item of a loader, and average at the end; see `synk.typing.Function.stream`.

        Returns:
          An iterator of the result of each step.
        """
        return _Iterating(self, self.function.stream(source, **options))

    @public_api
    def finish(self) -> None:
        """Average the steps since the last average; do nothing if there are none."""
        self._recount()
        if self._steps > self._averaged:
            loss = self._average()
            self._set_counts(self._steps, self._steps)
            if self._report is not None:
                self._report(self._steps, loss)

    def __enter__(self) -> LocalSteps:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: Any) -> None:
        # After an error the user decides: an average of some steps may not be what a checkpoint should have.
        if kind is None:
            self.finish()

    def _step(self, run: Callable[[], Any]) -> Any:
        """Take a step by calling `run`, count it, and average if it is time to."""
        self._recount()
        result = run()
        self._pace(1)
        return result

    def _pace(self, ran: int) -> int:
        """Count steps that have run, average if it is time to, and return how many may run before the next average."""
        # A loader that was asked for the next item, and has read `steps`, has counted these steps already.
        if ran and self._counts._state is not self._read:
            self._steps, self._read = self._steps + ran, self._counts._state
        self._recount()
        if self._steps >= self._next:
            self.finish()
        return self._next - self._steps

    def _recount(self) -> None:
        """Read the counts if anything but a counted step has set them: a load, or a step that Ctrl-C has cut short."""
        retire_finished()
        if self._counts._state is self._read:
            return
        # A program that has died makes the counts lost. Then nothing was trained since the last average.
        drain()
        if self._counts._state.failure is not None or self._trained._state.failure is not None:
            self._trained.value, self._counts.value = _NOTHING, _counts(self._steps)
        self._set_counts(**{name: int(count) for name, count in self._counts.value.items()})

    def _set_counts(self, steps: int, averaged: int) -> None:
        """Set the steps so far and at the last average. The next average follows from them."""
        every, call = self._every, self._name
        if callable(every):
            every, call = every(averaged), f"{call}: every({averaged})"
        wanted = "give an integer >= 1, or a function of the steps so far"
        self._next = averaged + checked_integer(every, f"{call}: every", 1, wanted)
        # Ctrl-C may come between any two lines. The counts are read again unless the last line has run.
        self._steps, self._averaged, self._read = steps, averaged, self._counts._state


class _Iterating(Iterator[Any]):
    """Iterator over the results of local steps, which averages at its end."""

    def __init__(self, steps: LocalSteps, results: Prefetch[Any, Any]) -> None:
        self._steps, self._results = steps, results

    def __len__(self) -> int:
        return len(self._results)

    def __next__(self) -> Any:
        try:
            # Steps of a list are counted as they run.
            return next(self._results) if self.gives_lists else self._steps._step(lambda: next(self._results))
        except StopIteration:
            self._steps.finish()
            raise

    @property
    def gives_lists(self) -> bool:
        return self._results.gives_lists

    def leave_out(self, n: int) -> tuple[int, int]:
        return self._results.leave_out(n)


# How each kind of leaf of the replicas combines. Of stacked keys those of the first replica that has trained are taken.
_AVERAGES: dict[LeafKind, Op] = {"number": "mean", "count": "max", "key": "stack"}

# The value of `trained` right after an average.
_NOTHING = {"weight": np.float32(0), "loss": np.float32(0)}


def _counts(steps: int) -> dict[str, np.int32]:
    """Return the value of `counts` right after an average."""
    return {"steps": np.int32(steps), "averaged": np.int32(steps)}


def _local_function(model: TrainingModel, trained: Shared, counts: Shared) -> Function:
    # Variables in cells of `on_part` and `then` are expected by tracing, which saves a second trace.
    params, opt_state, state = model.params, model.opt_state, model.state

    def on_part(*args: Any, **kwargs: Any) -> PyTree:
        context = current_trace()
        assert context is not None
        if context.is_sliced:
            raise ValueError(
                f"{model.name}: num_slices goes with synk.train.step; local steps take each replica's rows at once."
            )
        value, weight, grads, new_state, aux = model.value_and_grad(params.value, state, args, kwargs)
        weight = context.rows if weight is None else weight
        if weight is None:
            raise ValueError(
                f"{model.name}: averages are weighted by rows, but none of its arguments is scattered. Give it rows, "
                f"or return synk.Weighted(mean, rows)."
            )
        weight = jnp.asarray(weight, jnp.float32)
        before = params.value, opt_state.value, () if state is None else state.value
        new_params, new_opt_state, _ = model.apply_updates(params.value, opt_state.value, grads, value)
        after = new_params, new_opt_state, new_state
        # A part of weight 0 changes nothing, whatever its loss is.
        after = jax.tree.map(lambda old, new: jnp.where(weight > 0, new, old), before, after)
        params.value, opt_state.value, new_state = after
        if state is not None:
            state.value = new_state
        # A part of weight 0 may have a loss that is NaN, and NaN * 0 is NaN.
        weighted = jnp.where(weight > 0, value.astype(jnp.float32) * weight, jnp.float32(0))
        trained.value = {"weight": trained.value["weight"] + weight, "loss": trained.value["loss"] + weighted}
        return {"loss": Weighted(value, weight), "aux": aux}

    def then(combined: dict[str, Any]) -> PyTree:
        # Counted by the step's own program, so that a checkpoint, or a step that dies, never has one without the other.
        counts.value = {**counts.value, "steps": counts.value["steps"] + 1}
        return (combined["loss"], combined["aux"]) if model.has_aux else combined["loss"]

    return model.function(model.options, on_part, {"loss": "mean"}, then)


def _average_function(model: TrainingModel, averaged: list[Shared], trained: Shared, counts: Shared) -> Function:
    kinds = [kinds_of(variable) for variable in averaged]

    def on_replica() -> PyTree:
        weight = trained.value["weight"]
        # If all rows were masked, no replica has trained. Then all hold the same values, and each counts.
        share = jnp.where(all_sum([weight])[0] > 0, weight, jnp.float32(1))
        values = jax.tree.map(
            lambda kind, leaf: Weighted(leaf, share) if kind == "number" else leaf,
            kinds,
            [variable.value for variable in averaged],
        )
        return {"loss": Weighted(trained.value["loss"] / weight, weight), "weights": weight, "values": values}

    def then(combined: dict[str, Any]) -> jax.Array:
        first = jnp.argmax(combined["weights"] > 0)
        values = jax.tree.map(lambda kind, leaf: leaf[first] if kind == "key" else leaf, kinds, combined["values"])
        for variable, value in zip(averaged, values, strict=True):
            variable.value = value
        trained.value, counts.value = _NOTHING, {**counts.value, "averaged": counts.value["steps"]}
        return combined["loss"]

    ops = {"loss": "mean", "weights": "stack", "values": jax.tree.map(_AVERAGES.__getitem__, kinds)}
    return function(on_replica, None, ops, then=then, donate=model.options.donate, name=f"{model.name}.average")


@public_api
def local_steps(
    loss: Callable[..., Any],
    params: PyTree,
    optimizer: Any,
    *,
    every: int | Callable[[int], int] = 3,
    optimizer_state: bool = True,
    report: Callable[[int, jax.Array], Any] | None = None,
    state: PyTree = None,
    inputs: Inputs = None,
    aux: PyTree = None,
    clip: float | None = None,
    donate: bool = True,
    axis_name: str = "replica",
    name: str | None = None,
) -> LocalSteps:
    """Make local steps: each replica trains its own copy on its own rows, and now and then all take the average.

    This needs less communication than `synk.train.step`, and is not the serial answer: between averages each copy
    follows its own rows. The average is weighted by the rows that each replica has trained on since the last average,
    or by the weights of a `synk.Weighted` loss; a replica without rows counts for nothing. With `every=1` and plain SGD
    it is the synchronous step, to rounding.

    Args:
      loss, params, inputs, aux, donate, axis_name, name: as for `synk.train.step`.
      optimizer: an optimizer of optax's; it sees each replica's own gradients.
      every: the number of steps between averages, >= 1; or a schedule: a function of the number of steps so far that
        returns the number of steps before the next average.
      optimizer_state: whether to average the optimizer's state too; of its integers (step counts) the largest is kept.
        If False, each replica keeps its own state; read it by `opt_state.get_value(rank)`.
      report: called after each average as `report(steps, loss)` with the number of steps so far, and the mean loss of
        all rows since the last average.
      state: as for `synk.train.step`; averaged with the parameters. PRNG keys are taken from the first replica that
        has trained since the last average; of other integers the largest is kept.
      clip: the largest global norm of each replica's own gradient.

    Returns:
      A `LocalSteps`: call it with rows.

    Raises:
      ImportError: optax is not installed.
      TypeError, ValueError: an argument is of a wrong kind or value.

    Example:
      >>> import jax.numpy as jnp, numpy as np, optax, synk.contrib
      >>> def loss(params, x, y):
      ...     return jnp.mean((params["w"] * x - y) ** 2)
      >>> start = {"w": np.float32(0)}
      >>> with synk.contrib.local_steps(loss, start, optax.sgd(0.1), every=2) as step:
      ...     print(*[f"{step(np.ones(9), np.full(9, 5.0)):.2f}" for _ in range(3)])
      25.00 16.00 10.24
      >>> print(f"{step.params.value['w']:.2f} after {step.steps} steps")
      2.44 after 3 steps
    """
    options: Any = {option: value for option, value in locals().items() if option in StepOptions._fields}
    model = TrainingModel("synk.contrib.local_steps", StepOptions(**options))
    model.params._spec.storage.refuse(model.params.name, "synk.contrib.local_steps")
    return LocalSteps(model, every, optimizer_state, report)
