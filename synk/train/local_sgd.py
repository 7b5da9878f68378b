"""Local SGD: each replica trains on its own, and they average now and then."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._base.errors import checked_integer, public_api
from .._base.pytree import PyTree
from .._base.turns import in_turn
from .._call.binding import check_slices
from .._data.prefetch import Prefetch
from .._function import decorator
from .._function.decorator import Inputs
from .._function.function import Function
from .._reductions.collectives import all_sum
from .._reductions.reduction import Weighted
from .._runtime.dispatch import drain, retire_finished
from .._runtime.layout import Layout
from .._variables.variable import Shared, shared
from .model import LeafKind, TrainingModel, kinds_of, rows_of


class LocalSteps:
    """Steps that each replica takes on its own, and their averages; made by `synk.train.local_steps`.

    At the end of `iterate`, or of a `with` block, what was trained since the last average is averaged too; else call
    `finish`, before saving or setting values too (all of `variables` may be saved and loaded at any time). Until then
    the replicas differ: reading `params.value` raises `synk.DivergedError`.

    Attributes:
      function: the `synk.Function` that takes one step on each replica.
      params: a shared variable, the parameters; their tree is `params.value`.
      opt_state: a shared variable, the optimizer's state.
      state: a shared variable, the model's state; None where there is none.
      trained: a shared variable: on how many rows each replica has trained since the last average, and their losses.
      counts: a shared variable: how many steps were taken, and how many since the last average.

    Example:
      >>> import numpy as np, optax, synk.train
      >>> def loss(w, x):
      ...     return ((w - x) ** 2).mean()
      >>> with synk.train.local_steps(loss, np.float32(0), optax.sgd(0.25)) as train:
      ...     print(*[train(np.ones(9)) for _ in range(2)])
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
        self._every, self._report, self._name = every, report, model.name
        self.trained, self.counts = shared(_NOTHING, "trained"), shared(_counted(0), "counts")
        self._steps = self._averaged = 0
        self._next = self._steps_to_take()  # before the next average
        self._read = self.counts._state  # which the numbers above are of
        kept = [self.params, *[self.opt_state] * optimizer_state, *([] if self.state is None else [self.state])]
        self.function, name = _local_function(model, self.trained, self.counts), model.name
        self.opt_state._cures[name] = "Each replica keeps an optimizer state of its own, unless optimizer_state=True"
        for variable in kept:
            variable._cures[name] = "Call finish() of the local steps, which averages them by their rows"
        self._average = _average_function(f"{model.name}.average", kept, self.trained, self.counts, model.donate)

    @property
    def steps(self) -> int:
        """How many steps were taken so far, those before a checkpoint that was loaded included."""
        in_turn()
        self._recount()
        return self._steps

    @property
    def variables(self) -> dict[str, Shared]:
        """All shared variables that steps update, by name: for `synk.save` and `synk.load`, between averages too."""
        found = {"params": self.params, "opt_state": self.opt_state, "state": self.state}
        found |= {"trained": self.trained, "counts": self.counts}
        return {name: variable for name, variable in found.items() if variable is not None}

    @public_api
    def __call__(self, *args: Any, num_slices: int = 1, **options: Any) -> Any:
        """Take one step on each replica, of its own rows; every so often, average after it.

        Args:
          *args: the rows, as the loss takes them.
          num_slices: 1, since a local step takes each replica's rows at once.
          **options: `batch` and the like, as of every synk function.

        Returns:
          The loss of all rows, each by its replica's own parameters before the step; or the pair of it and the aux
          outputs.
        """
        _refuse_slices(num_slices, self.function.name)
        return self._step(lambda: self.function(*args, **options))

    @public_api
    def iterate(self, *args: Any, num_slices: int = 1, **options: Any) -> Iterator[Any]:
        """Take a step for each of `batches`, and at the end average what is left; see `synk.Function.iterate`.

        Returns:
          An iterator of what each call returns; it has as many as there are batches.
        """
        _refuse_slices(num_slices, self.function.name)
        return _Iterating(self, self.function.iterate(*args, **options))

    @public_api
    def stream(self, source: Iterable[Any], *, num_slices: int = 1, **options: Any) -> Iterator[Any]:
        """Take a step for each item of a loader, and at the end average what is left; see `synk.Function.stream`.

        Returns:
          An iterator of what each call returns.
        """
        _refuse_slices(num_slices, self.function.name)
        return _Iterating(self, self.function.stream(source, **options))

    @public_api
    def finish(self) -> None:
        """Average what was trained since the last average; do nothing where that is nothing."""
        in_turn()
        retire_finished()
        self._recount()
        if self._steps > self._averaged:
            loss = self._average()
            self._averaged, self._read = self._steps, self.counts._state
            self._next = self._steps_to_take()
            if self._report is not None:
                self._report(self._steps, loss)

    def __enter__(self) -> LocalSteps:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: Any) -> None:
        if kind is None:
            self.finish()

    def _step(self, take: Callable[[], Any]) -> Any:
        """Take a step, count it, and average where it is time to."""
        retire_finished()
        self._recount()
        result = take()
        self._steps, self._read = self._steps + 1, self.counts._state
        if self._is_time():
            self.finish()
        return result

    def _is_time(self) -> bool:
        return self._steps - self._averaged >= self._next

    def _recount(self) -> None:
        """Where other than a step that was counted has set the counts (a load, or Ctrl-C right after a step), these are
        what they hold; where they were lost, nothing was trained since."""
        if self.counts._state is self._read:
            return
        drain()  # so that what died is known
        if self.counts._state.failure is not None or self.trained._state.failure is not None:
            self.trained.value, self.counts.value = _NOTHING, _counted(self._steps)
        self._read = state = self.counts._state
        leaves = [_of_one_replica(leaf, state.layout) for leaf in state.leaves]
        found = self.counts._spec.treedef.unflatten(leaves)
        self._steps = int(found["steps"])
        self._averaged = self._steps - int(found["since"])
        self._next = self._steps_to_take()

    def _steps_to_take(self) -> int:
        """How many come between the last average and the next."""
        every = self._every(self._averaged) if callable(self._every) else self._every
        return _checked_every(every, f"{self._name}: every({self._averaged})" if callable(self._every) else self._name)


class _Iterating(Iterator[Any]):
    """Results of local steps; at their end, the last average."""

    def __init__(self, steps: LocalSteps, results: Prefetch[Any, Any]) -> None:
        self._steps, self._results = steps, results

    def __len__(self) -> int:
        return len(self._results)

    def __next__(self) -> Any:
        try:
            return self._steps._step(lambda: next(self._results))
        except StopIteration:
            self._steps.finish()
            raise

    def close(self) -> None:
        """Stop the thread; nothing more comes."""
        self._results.close()


_NOTHING = {"weight": np.float32(0), "loss": np.float32(0)}  # trained on since an average


def _counted(steps: int) -> dict[str, Any]:
    """Of an average after so many steps."""
    return {"steps": np.int32(steps), "since": np.int32(0)}


def _of_one_replica(leaf: Any, layout: Layout) -> Any:
    """A number that all replicas have, from one that is here: no other process is asked."""
    if not isinstance(leaf, jax.Array):  # it was not placed yet
        return leaf
    return np.asarray(leaf.addressable_shards[0].data)[0 if layout == "stacked" else ...]


def _checked_every(every: Any, what: str) -> int:
    return checked_integer(every, f"{what}: every", 1, "give an integer >= 1, or a function of the steps so far")


def _refuse_slices(num_slices: int, name: str) -> None:
    check_slices(num_slices, name)
    if num_slices != 1:
        raise ValueError(f"{name}: num_slices goes with synk.train.step; local steps take each replica's rows at once.")


def _local_function(model: TrainingModel, trained: Shared, counts: Shared) -> Function:
    """One step on each replica, of its own rows."""
    # Named, so that tracing expects them; and the loss, of whose names it looks at the variables.
    params, opt_state, state, loss = model.params, model.opt_state, model.state, model.loss

    def on_part(*args: Any, **kwargs: Any) -> PyTree:
        found = model.value_and_grad(loss, params.value, state, args, kwargs)
        weight = found.weight if found.weight is not None else rows_of(function, args, kwargs)
        if weight is None:
            raise ValueError(
                f"{function.name}: averages are weighted by rows, but none of its arguments is scattered. Give it "
                f"rows, or return synk.Weighted(mean, rows)."
            )
        weight = jnp.asarray(weight, jnp.float32)
        before = params.value, opt_state.value
        after = model.apply_updates(*before, found.grads, found.value)
        # A part of weight 0 counts for nothing, whatever its loss is.
        params.value, opt_state.value = jax.tree.map(lambda new, old: jnp.where(weight > 0, new, old), after, before)
        if state is not None:
            old, state.value = state.value, found.state  # which compares their shapes
            state.value = jax.tree.map(lambda new, old: jnp.where(weight > 0, new, old), found.state, old)
        weighted = jnp.where(weight > 0, found.value.astype(jnp.float32) * weight, jnp.float32(0))
        trained.value = {"weight": trained.value["weight"] + weight, "loss": trained.value["loss"] + weighted}
        return {"loss": Weighted(found.value, weight), "aux": found.aux}

    def then(combined: dict[str, Any]) -> PyTree:
        counts.value = {name: count + 1 for name, count in counts.value.items()}
        return (combined["loss"], combined["aux"]) if model.has_aux else combined["loss"]

    function = model.function(on_part, {"loss": "mean"}, then)
    return function


def _average_function(name: str, kept: list[Shared], trained: Shared, counts: Shared, donate: bool) -> Function:
    """Combine what each replica holds, weighted by what it has trained on; return the loss of that."""

    def own() -> PyTree:
        weight = trained.value["weight"]
        leaves: dict[LeafKind, list[Any]] = {"number": [], "count": [], "key": []}
        for variable in kept:
            for kind, leaf in zip(kinds_of(variable), jax.tree.leaves(variable.value), strict=True):
                leaves[kind].append(leaf)
        # Where no replica has trained (all was masked), all hold the same, and all count.
        held = Weighted(leaves["number"], jnp.where(all_sum([weight])[0] > 0, weight, jnp.float32(1)))
        loss = Weighted(trained.value["loss"] / weight, weight)
        return {"loss": loss, "weights": weight, **leaves, "number": held}

    def take(combined: dict[str, Any]) -> jax.Array:
        combined["key"] = [keys[jnp.argmax(combined["weights"] > 0)] for keys in combined["key"]]
        for variable in kept:
            variable.value = variable._spec.treedef.unflatten([combined[kind].pop(0) for kind in kinds_of(variable)])
        trained.value, counts.value = _NOTHING, {**counts.value, "since": np.int32(0)}
        return combined["loss"]

    ops = {"loss": "mean", "weights": "stack", "number": "mean", "count": "max", "key": "stack"}
    return decorator.function(own, None, ops, then=take, donate=donate, name=name)


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
    flat: bool = False,
    donate: bool = True,
    name: str | None = None,
) -> LocalSteps:
    """Make local steps: each replica trains its own copy on its own rows, and now and then all take the average.

    Less communication, and not the serial answer: between averages each copy follows its own rows. The average is
    weighted by the rows that each replica trained on since the last one (by the weights of a `synk.Weighted` loss); one
    that had none counts for nothing. With `every=1` and plain SGD it is the synchronous step, to rounding.

    Args:
      loss, params, inputs, aux, flat, donate, name: as for `synk.train.step`.
      optimizer: one of optax's; it sees each replica's own gradients.
      every: after how many steps to average, >= 1; or a schedule: a function of the steps taken so far, which says how
        many to take before the next average.
      optimizer_state: whether to average the optimizer's state too, of which integers (step counts) take the largest;
        else each replica keeps its own, to be read by `opt_state.get_value(rank)`.
      report: called after each average as `report(steps, loss)`: how many steps were taken so far, and the mean loss of
        all rows trained on since the last average.
      state: as for `synk.train.step`; averaged with the parameters. Of PRNG keys those of the first replica that has
        trained since are kept, of other integers the largest.
      clip: the largest global norm of each replica's own gradient.

    Returns:
      A `LocalSteps`: call it with rows.

    Raises:
      ImportError: optax is not installed.
      TypeError, ValueError: an argument is of a wrong kind or value.

    Example:
      >>> import jax.numpy as jnp, numpy as np, optax, synk, synk.train
      >>> def loss(params, x, y):
      ...     return jnp.mean((params["w"] * x - y) ** 2)
      >>> start = {"w": np.float32(0)}
      >>> with synk.train.local_steps(loss, start, optax.sgd(0.1), every=2) as step:
      ...     print(*[f"{step(np.ones(9), np.full(9, 5.0)):.2f}" for _ in range(3)])
      25.00 16.00 10.24
      >>> print(f"{step.params.value['w']:.2f} after {step.steps} steps")
      2.44 after 3 steps
    """
    call = "synk.train.local_steps"
    if not callable(every):
        _checked_every(every, call)
    model = TrainingModel(
        call, loss, params, optimizer,
        state=state, inputs=inputs, aux=aux, clip=clip, flat=flat, donate=donate, name=name,
    )  # fmt: skip
    return LocalSteps(model, every, optimizer_state, report)
