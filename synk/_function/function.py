"""Function: the serial-looking call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial, reduce, update_wrapper
from typing import Any, Literal

import jax

from .._base.errors import SynkError, public_api
from .._base.jax_context import is_traced
from .._base.old_names import refuse_member
from .._base.pytree import PyTree
from .._call.auto_slices import execute_fitting
from .._call.binding import ArgumentBinder, BoundArguments, check_slices
from .._call.compose import compose
from .._call.execute import NotFinite
from .._call.kinds import Where
from .._call.prepare import prepare, start
from .._call.rows import RowRequest
from .._call.spec import FunctionSpec, with_then
from .._data.prefetch import Prefetch
from .._loops.iterate import Batches, iterate, stream
from .._loops.over import Accumulation
from .._runtime.dispatch import LOCK
from .._runtime.group import current_group
from .._variables.variable import Shared
from .inspection import Inspection


class Function(Inspection):
    """What `synk.function` makes: call it as the serial function.

    Attributes:
      fn: the user's function.
      name: what messages call it.
      stats: calls, compilations, rows and seconds so far (`synk.typing.Stats`).

    Example:
      >>> import jax.numpy as jnp, numpy as np, synk
      >>> f = synk.function(jnp.sum)
      >>> isinstance(f, synk.Function), float(f(np.arange(5.0))), f.stats.rows
      (True, 10.0, 5)
    """

    def __init__(self, spec: FunctionSpec, binder: ArgumentBinder) -> None:
        super().__init__(spec, binder)
        update_wrapper(self, spec.fn, updated=())

    def __repr__(self) -> str:
        return f"synk.function({self.name})"

    def __copy__(self) -> Function:
        """Itself, as of Python's functions."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Function:
        return self

    def __reduce__(self) -> str:
        """By name, as of Python's functions."""
        path = getattr(self.fn, "__qualname__", self.name)
        if reduce(lambda at, name: getattr(at, name, None), path.split("."), sys.modules.get(self.__module__)) is self:
            return path
        raise TypeError(
            f"{self.name}: a synk function is pickled by its name, as others are, and its module has none of that name "
            f"that is this one. Make it at the top of a module, or pickle what makes it."
        )

    def __get__(self, instance: Any, owner: type | None = None) -> Function:
        if instance is None:
            return self
        raise TypeError(
            f"{self.name}: synk.function decorates a method, but has no way to hand it {type(instance).__name__}. "
            f"Make the function in __init__: self.{self.name} = synk.function(self._{self.name})."
        )

    def __getattr__(self, member: str) -> Any:
        raise refuse_member("function", member)

    @public_api
    def then(self, then: Callable[..., PyTree]) -> Function:
        """Set what runs on every replica after the outputs are combined; for use as a decorator.

        A tuple of outputs is spread over its parameters; after them it may name any broadcast or static parameter of
        the function. What it returns is the call's result.

        Args:
          then: takes the combined outputs.

        Returns:
          The function itself.

        Raises:
          SynkError: the function has one already, or was called before.

        Example:
          >>> import jax.numpy as jnp, numpy as np, synk
          >>> total = synk.shared(np.float32(0.0))
          >>> @synk.function
          ... def add(x):
          ...     return jnp.sum(x)
          >>> @add.then
          ... def add(part):
          ...     total.value = total.value + part
          >>> add(np.ones(5, np.float32))
          >>> float(total.value)
          5.0
        """
        if self.stats.calls or self.stats.compilations:
            raise SynkError(f"{self.name}: then comes before the first call; define both, and call after.")
        if self._spec.then is not None:
            raise SynkError(f"{self.name}: it has a then already.")
        self._spec = with_then(self._spec, self._binder, then)
        return self

    @property
    def shared(self) -> tuple[Shared, ...]:
        """The shared variables that it reads and writes, as far as its calls have shown."""
        return self._plans.variables()

    @public_api
    def __call__(
        self,
        *args: Any,
        batch: Any = None,
        batch_s: Any = None,
        num_slices: int | Literal["auto"] = 1,
        output_subset: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> PyTree:
        """Run on all replicas and return the combined outputs, without waiting for them.

        Args:
          *args: as `fn` takes them; scattered ones share their number of rows, axis 0 (global shapes).
          batch: which rows: an int n (the first n), a slice, a boolean mask, or integer indexes; None for all.
          batch_s: which of the rows that live on the replicas, counted on each: one such batch for all or a list of one
            for each.
          num_slices: run each replica's rows in so many parts, one at a time, for the memory of one; "auto": in the
            fewest whose compiled programs fit into a device's memory (`synk.init(memory=)`), found by at most four more
            compilations and remembered; should memory not do when they first run, in twice as many, with nothing lost.
          output_subset: which entries of the top level of the outputs to return, as a tuple in that order.
          **kwargs: as `fn` takes them.

        Returns:
          What `fn` returns, combined by its ops, or what `then` returns: `jax.Array`s that lie on every replica
          ("first": on the first alone; "scatter": a `synk.Data` whose rows stay where they were made).

        Raises:
          TypeError: an argument is no array, or a batch holds no integers.
          ValueError: rows differ, nothing is selected, or the ops do not fit the outputs.
          IndexError: the batch names rows that are not there.
          MemoryError: memory does not do.
        """
        bound = self._bind(args, kwargs, num_slices)
        request = RowRequest(batch, batch_s, num_slices)
        if is_traced() or bound.has_tracers:
            return compose(self._spec, self._plans, bound, request, output_subset, current_group())
        return self._launch(bound, request, output_subset)

    def _launch(self, bound: BoundArguments, request: RowRequest, subset: Any) -> PyTree:
        """Start one call."""
        current_group()._refuse_if_absent(self.name)
        with LOCK:
            where = Where(current_group())
            ready = partial(prepare, self._spec, self._plans, bound, request, subset, where)
            try:
                result = start(self._spec, ready, lambda first: execute_fitting(first, ready))
            except NotFinite as error:
                raise FloatingPointError(self._not_finite(bound, request)) from error.__cause__
            self.stats.calls += 1
            return result

    def _not_finite(self, bound: BoundArguments, request: RowRequest) -> str:
        """Who is to blame for it, in words."""
        said = f"{self.name}: its outputs or updates are not finite"
        if request.batch_s is not None:
            said += "; rows that batch_s picks are not tried one by one"
        else:
            with suppress(SynkError, ValueError), jax.debug_nans(False), jax.debug_infs(False):
                found = self._blame(bound, request)
                said = str(found) if found is not None else said
        return f"{said.rstrip('.')}. Nothing was updated."

    @public_api
    def iterate(
        self,
        *args: Any,
        batches: Iterable[Any],
        prefetch: int = 2,
        num_slices: int | Literal["auto"] = 1,
        output_subset: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> Prefetch[Any, PyTree]:
        """Call the function for each batch; the next ones are picked and sent while the current one runs.

        A PRNG key given whole draws the same noise in every batch, which a warning says: give each batch its own by
        `synk.each(jax.random.split(key, number_of_batches))`.

        Args:
          *args: as in a call.
          batches: an iterable of batches, each as `batch` in a call, e.g. `synk.minibatches`.
          prefetch: how many batches a thread works ahead; 0 for none.
          num_slices: as in a call.
          output_subset: as in a call.
          **kwargs: as in a call.

        Returns:
          An iterator of the results, in order; it has as many as there are batches. Leaving the loop stops the thread.

        Errors are those of a call, when that batch is reached.

        Example:
          >>> import jax.numpy as jnp, numpy as np, synk
          >>> total = synk.function(jnp.sum)
          >>> x = np.arange(6)
          >>> [int(t) for t in total.iterate(x, batches=synk.minibatches(len(x), 4, shuffle=False))]
          [6, 9]
        """
        return self._each_batch("iterate", (args, kwargs), batches, prefetch, num_slices, self._caller(output_subset))

    def _caller(self, subset: Any) -> Callable[[BoundArguments, RowRequest], PyTree]:
        return partial(self._launch, subset=subset)

    def _each_batch(
        self,
        name: Literal["iterate", "over"],
        given: tuple[tuple[Any, ...], dict[str, Any]],
        batches: Iterable[Any],
        prefetch: int,
        num_slices: Any,
        call: Callable[[BoundArguments, RowRequest], PyTree],
    ) -> Prefetch[Any, PyTree]:
        """Give `call` the arguments of each batch; positional and keyword ones are given."""
        if not any(given) and any(p.default is p.empty for p in self._binder.parameters.values()):
            instead = "stream(loader)" if name == "iterate" else "over(source=loader)"
            raise TypeError(
                f"{self.name}.{name}: batches pick rows of its arguments, but there is none. If each item of a loader "
                f"brings its own, write {self.name}.{instead}."
            )
        bound, group = self._bind(*given, num_slices, name), current_group()
        group._refuse_if_absent(f"{self.name}.{name}")
        rows = Batches(self._spec, bound, RowRequest(num_slices=num_slices), group, name)
        return iterate(rows, batches, prefetch, call, lambda: self._refuse(name))

    @public_api
    def stream(
        self,
        source: Iterable[Any],
        *,
        prefetch: int = 2,
        num_slices: int | Literal["auto"] = 1,
        output_subset: Sequence[Any] | None = None,
    ) -> Prefetch[Any, PyTree]:
        """Call the function for each item of a loader; the next ones are taken and sent while the current one runs.

        What the loader calls of synk, and what it reads or sets of shared variables and `synk.data`, waits
        until the loop comes to that item, so that results are those of `prefetch=0`.

        Args:
          source: gives the arguments of each call: a tuple or list by position, a mapping by name, anything else as the
            only one. Any iterable: a `torch.utils.data.DataLoader`, Grain, `tf.data`'s `as_numpy_iterator()`, a
            generator. Items may have any numbers of rows, and their memory may be used again for the next one.
          prefetch: how many items a thread works ahead; 0 for none.
          num_slices: as in a call.
          output_subset: as in a call.

        Returns:
          An iterator of the results, in order; it has as many as the source says. Leaving the loop stops the thread
          and drops the items that it has taken ahead: for n items of a longer source, `itertools.islice(source, n)`.

        Raises:
          TypeError: the source is not iterable.

        Others are those of a call, and of the source, when that item is reached.

        Example:
          >>> import jax.numpy as jnp, numpy as np, synk
          >>> dot = synk.function(lambda x, y: jnp.sum(x * y))
          >>> loader = [(np.arange(float(rows)), np.ones(rows)) for rows in (4, 4, 3)]
          >>> [float(y) for y in dot.stream(loader)]
          [6.0, 6.0, 3.0]
        """
        return self._each_item("stream", source, prefetch, num_slices, self._caller(output_subset))

    def _each_item(
        self,
        name: Literal["stream", "over"],
        source: Iterable[Any],
        prefetch: int,
        num_slices: Any,
        call: Callable[[BoundArguments, RowRequest], PyTree],
    ) -> Prefetch[Any, PyTree]:
        """Give `call` the arguments that each item of a loader brings."""
        check_slices(num_slices, self.name)
        self._refuse(name)
        group = current_group()
        group._refuse_if_absent(f"{self.name}.{name}")
        return stream(
            self._spec,
            self._binder,
            source,
            RowRequest(num_slices=num_slices),
            group,
            size=prefetch,
            call=call,
            refuse=lambda: self._refuse(name),
            name=f"{self.name}.{name}",
        )

    @public_api
    def over(
        self,
        *args: Any,
        batches: Iterable[Any] | None = None,
        source: Iterable[Any] | None = None,
        prefetch: int = 2,
        num_slices: int | Literal["auto"] = 1,
        output_subset: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> PyTree:
        """Return the answer of one call over all rows of all batches, whatever their sizes.

        Partial results add up on each replica, and replicas combine once, at the end: as many collectives as one call,
        and the memory of one batch (of rows or parts that an op keeps, of all of them). So an evaluation over a loader
        whose last batch is short is exact, where a mean of batch means is not. Wrap `batches` or `source` in tqdm for a
        bar.

        Args:
          *args: as for `iterate`, as all others; the rows are those of the batches, one after another.
          batches: an iterable of batches, each as `batch` in a call, e.g. `synk.minibatches`.
          source: instead of arguments and batches, an iterable of the arguments of each batch, as `stream` takes them:
            a `torch.utils.data.DataLoader`, a generator.
          prefetch: how many batches are taken ahead; 0 for none.

        Returns:
          As a call.

        Raises:
          TypeError: neither `batches` nor `source` is given, or arguments beside `source`.
          ValueError: there is no batch; the function has a then or updates shared variables; or outputs of two batches
            have different shapes.

        Others are those of a call, when that batch is reached.

        Example:
          >>> import jax.numpy as jnp, numpy as np, synk
          >>> mean = synk.function(jnp.mean, reduce="mean")
          >>> x = np.arange(7.0)
          >>> float(mean.over(x, batches=synk.minibatches(len(x), 3)))  # 3, 3 and 1
          3.0
          >>> float(mean.over(source=(x[i : i + 3] for i in range(0, 7, 3))))
          3.0
        """
        if (batches is None) == (source is None):
            raise TypeError(
                f"{self.name}.over: give batches=, which pick rows of its arguments, or source=, a loader of arguments."
            )
        total = Accumulation(self._spec, self._plans, Where(current_group()), output_subset)
        if batches is not None:
            loop = self._each_batch("over", (args, kwargs), batches, prefetch, num_slices, total.add)
        elif args or kwargs:
            raise TypeError(f"{self.name}.over: source= brings all arguments of each batch, so give none beside it.")
        else:
            loop = self._each_item("over", source or (), prefetch, num_slices, total.add)
        for _ in loop:
            pass
        return total.finish()
