"""Function: the serial-looking call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter
from typing import Any, Literal, overload

import jax
import numpy as np

from . import _check, _compose, _flight, _iterate, _trace
from ._arguments import Scalars, arrays, check_slices, checked_subset
from ._bind import Binder, Layout
from ._context import is_disturbed, undisturbed
from ._errors import SynkError, entry, shorten
from ._feed import Feed
from ._group import Group, PyTree, group
from ._inputs import inputs, picked_from
from ._local import Local
from ._ops import Op
from ._outputs import check_ops
from ._plan import Call, Plan, plan
from ._prefetch import Prefetch
from ._program import Signature
from ._route import Arguments, Form, Route, form, route, specs
from ._rows import How, how_picked
from ._run import Prepared, finish, prepare
from ._shared import Shared, named_in
from ._task import Stats, Task, View

ENGINES = ("shard_map", "pmap")
ROUTES = 1024  # kept at most, of one function


class Function:
    """What `synk.function` makes: call it as the serial function.

    Attributes:
      fn: the user's function.
      name: what messages call it.
      stats: calls, compilations, rows and seconds so far (`synk.Stats`).

    Example:
      >>> import jax.numpy as jnp, numpy as np, synk
      >>> f = synk.function(jnp.sum)
      >>> isinstance(f, synk.Function), float(f(np.arange(5.0))), f.stats.rows
      (True, 10.0, 5)
    """

    def __init__(
        self,
        fn: Callable[..., PyTree],
        inputs: Any,
        outputs: PyTree,
        reduce: Op,
        then: Callable[..., PyTree] | None,
        engine: str,
        donate: bool,
        name: str | None,
    ) -> None:
        self.fn = fn
        self.name = name or getattr(fn, "__name__", type(fn).__name__)
        if not callable(fn):
            raise TypeError(f"synk.function: fn is {fn!r}; give a function of arrays.")
        if engine not in ENGINES:
            raise ValueError(f"{self.name}: engine={engine!r}; use {' or '.join(map(repr, ENGINES))}.")
        self.stats = Stats()
        self._binder = Binder(fn, inputs, self.name)
        self._ops = check_ops(reduce if outputs is None else outputs, self.name)
        self._engine, self._donate, self._is_raw = engine, donate, False
        self._then: Callable[..., PyTree] | None = None
        self._then_parameters: list[inspect.Parameter] = []
        self._known: dict[Shared, None] = {}
        self._splits: set[Any] = set()
        self._signatures: dict[Any, Signature] = {}
        self._scalars = Scalars()
        self._routes: dict[Form, Route] = {}
        self._last: Route | None = None  # of calls whose arguments are leaves, all by position
        self._mappings: dict[bool, Function] = {}
        self.composed: dict[Any, Any] = {}
        functools.update_wrapper(self, fn, updated=())
        if then is not None:
            self._set_then(then)

    def __repr__(self) -> str:
        return f"synk.function({self.name})"

    @entry
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
        if self.stats.calls or self._signatures:
            raise SynkError(f"{self.name}: then comes before the first call; define both, and call after.")
        self._set_then(then)
        return self

    def _set_then(self, then: Callable[..., PyTree]) -> None:
        if not callable(then):
            raise TypeError(f"{self.name}: then is {then!r}; give a function of the combined outputs.")
        if self._then is not None:
            raise SynkError(f"{self.name}: it has a then already.")
        self._then = then
        self._then_parameters = list(inspect.signature(then).parameters.values())

    def _then_extra(self, outputs: int) -> list[str]:
        """Names of the parameters that `then` has after the outputs."""
        parameters = self._then_parameters
        if any(p.kind == p.VAR_POSITIONAL for p in parameters):
            return []
        if len(parameters) < outputs:
            raise TypeError(
                f"{self.name}.then: it takes {len(parameters)} argument(s), but {self.name} has {outputs} output(s). "
                f"Give it one parameter for each."
            )
        names = []
        for parameter in parameters[outputs:]:
            mode = self._binder.mode(parameter.name)
            if parameter.name in self._binder.parameters and mode in ("broadcast", "static"):
                names.append(parameter.name)
            elif parameter.default is parameter.empty:
                raise TypeError(
                    f"{self.name}.then: its parameter {parameter.name!r} follows the {outputs} output(s), so it must "
                    f'be a "broadcast" or "static" parameter of {self.name}, which it is not.'
                )
        return names

    @property
    def shared(self) -> tuple[Shared, ...]:
        """The shared variables that it reads and writes, as far as its calls have shown."""
        return tuple(self._known)

    def __call__(
        self,
        *args: Any,
        batch: Any = None,
        batch_s: Any = None,
        num_slices: int = 1,
        output_subset: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> PyTree:
        """Run on all replicas and return the combined outputs, without waiting for them.

        Args:
          *args: as `fn` takes them; scattered ones share their number of rows, axis 0 (global shapes).
          batch: which rows: an int n (the first n), a slice, a boolean mask, or integer indexes; None for all.
          num_slices: run each replica's rows in so many parts, one at a time, for the memory of one.
          output_subset: which entries of the top level of the outputs to return, as a tuple in that order.
          **kwargs: as `fn` takes them.

        Returns:
          What `fn` returns, combined by its ops, or what `then` returns: `jax.Array`s that lie on every replica
          ("first": on the first alone).

        Raises:
          TypeError: an argument is no array, or a batch holds no integers.
          ValueError: rows differ, nothing is selected, or the ops do not fit the outputs.
          IndexError: the batch names rows that are not there.
        """
        try:
            way = self._last
            if way is not None and not kwargs and output_subset is None and type(num_slices) is int and num_slices == 1:
                with _flight.LOCK:
                    start, sending = perf_counter(), self.stats.sending
                    ready = way.take(args, batch, batch_s)
                    if ready is not None:
                        return self._finish(way.signature, ready, way.rows, start, sending)
            if is_disturbed():
                with undisturbed():
                    return self._call(args, kwargs, batch, batch_s, num_slices, output_subset)
            return self._call(args, kwargs, batch, batch_s, num_slices, output_subset)
        except Exception as error:
            shorten(error)
            raise

    def _call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], batch: Any, batch_s: Any, num_slices: int, subset: Any
    ) -> PyTree:
        self._refuse_inside()
        leaves, layout = self._binder.flatten(args, kwargs)
        if type(num_slices) is not int or num_slices != 1:
            check_slices(num_slices, self.name)
        if _trace.is_traced():
            return _compose.call(self, layout, leaves, batch, batch_s, num_slices, subset)
        return self.launch(leaves, layout, batch, batch_s, num_slices, subset)

    @entry
    def iterate(
        self,
        *args: Any,
        batches: Iterable[Any],
        prefetch: int = 2,
        num_slices: int = 1,
        output_subset: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> Prefetch[Any, PyTree]:
        """Call the function for each batch; the next ones are picked and sent while the current one runs.

        Args:
          *args: as in a call.
          batches: an iterable of batches, each as `batch` in a call, e.g. `synk.minibatches`.
          prefetch: how many batches a thread works ahead; 0 for none.
          num_slices: as in a call.
          output_subset: as in a call.
          **kwargs: as in a call.

        Returns:
          An iterator of the results, in order; it has as many as there are batches. Leaving the loop stops the thread.

        Raises:
          As a call, when that batch is reached.

        Example:
          >>> import jax.numpy as jnp, numpy as np, synk
          >>> total = synk.function(jnp.sum)
          >>> x = np.arange(6)
          >>> [int(t) for t in total.iterate(x, batches=synk.minibatches(len(x), 4, shuffle=False))]
          [6, 9]
        """
        self._eagerly("iterate")
        leaves, layout = self._binder.flatten(args, kwargs)
        return _iterate.iterate(self, leaves, layout, batches, prefetch, num_slices, output_subset)

    def _refuse_inside(self) -> None:
        current = _trace.frame()
        if current is not None:
            raise SynkError(
                f"{current.name}: it calls the synk function {self.name} inside, where a replica has only its rows. "
                f"Call {self.name}.fn there."
            )

    def _eagerly(self, call: str) -> None:
        """What runs at once cannot be part of a function, or of a transformation."""
        self._refuse_inside()
        if _trace.is_traced():
            raise SynkError(
                f"{self.name}.{call}: it runs when called, so not inside jit, grad, vmap or the like. Call it outside."
            )

    # What follows serves calls, serial, check and compile.

    def launch(
        self, leaves: Sequence[Any], layout: Layout, batch: Any, batch_s: Any, num_slices: int, subset: Any
    ) -> PyTree:
        """Start one call."""
        given, stats = Arguments(layout, leaves, batch, batch_s), self.stats
        with _flight.LOCK:
            start, sending, current = perf_counter(), stats.sending, group()
            the_form = form(current, given, self._known) if num_slices == 1 and subset is None else None
            way = None if the_form is None else self._routes.get(the_form)
            ready = None if way is None else way.prepare(leaves, batch, batch_s)
            if way is not None and ready is not None:
                self._last = way
                return self._finish(way.signature, ready, way.rows, start, sending)
            call, signature = self._bind(current, layout, leaves, batch, batch_s, num_slices > 1, subset, None)
            the_plan = plan(signature, call, num_slices)
            stats.selecting += perf_counter() - start
            start, sending = perf_counter(), stats.sending
            ready = prepare(signature, call, the_plan)
            stats.dispatching += perf_counter() - start - (stats.sending - sending)
            self.remember(signature)
            if the_form is not None:
                self._note_route(the_form._replace(specs=specs(self._known)), signature, ready, call, the_plan, given)
            return self._finish(signature, ready, sum(the_plan.lengths or ()), perf_counter(), stats.sending)

    def _note_route(
        self, the_form: Form, signature: Signature, ready: Prepared, call: Call, the_plan: Plan, given: Arguments
    ) -> None:
        way = route(the_form, signature, ready, call, the_plan, given, self._known, self._scalars)
        if way is not None:
            if len(self._routes) >= ROUTES:  # data that grows with every call
                self._routes.clear()
            self._routes[the_form] = self._last = way

    def _finish(self, signature: Signature, ready: Prepared, rows: int, start: float, sending: float) -> PyTree:
        """Run the last program; since `start` the call has only been looked at, and `sending` was the time for that."""
        stats = self.stats
        begun = perf_counter()
        result = finish(signature, ready)
        stats.calls += 1
        stats.rows += rows
        stats.selecting += begun - start - (stats.sending - sending)
        stats.dispatching += perf_counter() - begun
        return result

    def variables_named(self) -> list[Shared]:
        """Shared variables that the functions' own lines name."""
        return [variable for fn in (self.fn, self._then) if fn is not None for variable in named_in(fn)]

    @property
    def has_then(self) -> bool:
        """Does anything follow the combined outputs?"""
        return self._then is not None

    def mapping(self, raw: bool = False) -> Function:
        """The function without then; `raw`, with every output's parts as they come."""
        if not raw and self._then is None:
            return self
        if raw not in self._mappings:
            f = Function(self.fn, None, self._ops, None, None, self._engine, False, self.name)
            f._ops, f._binder, f._is_raw, f.stats = self._ops, self._binder, raw, self.stats
            self._mappings[raw] = f
        return self._mappings[raw]

    def bind(
        self,
        current: Group,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        batch: Any,
        batch_s: Any,
        is_sliced: bool,
        subset: Sequence[Any] | None,
        view: Callable[[Shared], View] | None,
        donate: bool,
        home: Group | None,
    ) -> tuple[Call, Signature]:
        """Check a call's arguments and find its programs, for a group and view of one's own."""
        leaves, layout = self._binder.flatten(args, kwargs)
        return self._bind(current, layout, leaves, batch, batch_s, is_sliced, subset, view, donate, home)

    def traced_arrays(
        self, layout: Layout, leaves: Sequence[Any], batch: Any, batch_s: Any
    ) -> tuple[list[Any], list[Any], tuple[Any, ...]]:
        """Scattered and broadcast leaves as arrays of jax.numpy's, traced ones among them."""
        if batch_s is not None:
            raise ValueError(f"{self.name}: batch_s picks rows on the replicas, which a traced call cannot. Use batch.")
        if any(isinstance(leaf, Local) for leaf in leaves):
            raise ValueError(f"{self.name}: synk.local rows cannot enter jit, grad, vmap or the like. Call it outside.")
        sources, keys = arrays(self.name, layout, leaves, layout.scattered)
        sources = picked_from(self.name, layout.scattered_names, sources, batch)
        others, other_keys = arrays(self.name, layout, leaves, layout.broadcast)
        return sources, list(map(jax.numpy.asarray, others)), (*keys, *other_keys)

    def signature(
        self, current: Group, layout: Layout, sources: Any, broadcast: Any, keys: Any, is_sliced: bool, subset: Any
    ) -> Signature:
        """A new set of programs, for arguments that are traced."""
        subset = None if subset is None else checked_subset(subset, self.name)
        rows = [(s.shape[1:], s.dtype, Feed()) for s in sources]
        return self._signature(None, current, layout, rows, broadcast, keys, is_sliced, None, subset, False)

    def _bind(
        self,
        current: Group,
        layout: Layout,
        leaves: Sequence[Any],
        batch: Any,
        batch_s: Any,
        is_sliced: bool,
        subset: Sequence[Any] | None,
        view: Callable[[Shared], View] | None,
        donate: bool | None = None,
        home: Group | None = None,
    ) -> tuple[Call, Signature]:
        """Check a call's arguments; find or make what it compiles to.

        Another group than the `home` of data takes all rows from the host, and its view has variables' rows picked.
        """
        sources, keys = arrays(self.name, layout, leaves, layout.scattered)
        given = inputs(self.name, layout.scattered_names, sources, batch, batch_s, current, home)
        others, other_keys = arrays(self.name, layout, leaves, layout.broadcast)
        broadcast = [self._scalars.everywhere(current, leaf, home) for leaf in others]
        donate = self._donate if donate is None else donate
        subset = None if subset is None else checked_subset(subset, self.name)
        batch_s = None if home else batch_s
        rows = [(each.shape, each.dtype, each.feed) for each in given.each]
        local = None if batch_s is None else how_picked(batch_s)
        key = (
            current,
            layout,
            _trace.settings(),
            tuple(rows),
            tuple([(b.shape, b.dtype, b.weak_type) for b in broadcast]),
            (*keys, *other_keys),
            is_sliced,
            local,
            subset,
            donate,
        )
        signature = self._signatures.get((key, specs(self._known)))
        if signature is None:
            keys = [*keys, *other_keys]
            signature = self._signature(key, current, layout, rows, broadcast, keys, is_sliced, local, subset, donate)
        signature.view = view
        return Call(given, broadcast, batch_s), signature

    def remember(self, signature: Signature) -> None:
        """Keep it for calls that find its variables as this one did; the first call has only now met them."""
        key = (signature.key, specs(self._known))
        if key not in self._signatures:
            self._signatures[key] = signature

    def _signature(
        self,
        key: Any,
        current: Group,
        layout: Layout,
        rows: Sequence[tuple[tuple[int, ...], np.dtype, Feed]],
        broadcast: Sequence[jax.Array],
        keys: Sequence[Any],
        is_sliced: bool,
        local: How | None,
        subset: tuple[Any, ...] | None,
        donate: bool,
    ) -> Signature:
        task = Task(self.name, self.fn, self._ops, self._then, self._then_extra, self._engine, self.stats, self._is_raw)
        row_shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, _ in rows]
        shapes = [jax.ShapeDtypeStruct(b.shape, b.dtype, weak_type=b.weak_type) for b in broadcast]
        return Signature(
            key, task, current, layout, tuple(row_shapes), tuple(feed for _, _, feed in rows), local, tuple(shapes),
            tuple(keys), is_sliced, None, self._known, subset, donate, self._splits,
        )  # fmt: skip

    @entry
    def serial(self, *args: Any, batch: Any = None, batch_s: Any = None, update: bool = False, **kwargs: Any) -> PyTree:
        """Run `fn` and `then` once, on one device, over all selected rows: what every other call must equal.

        Args:
          *args: as in a call.
          batch: as in a call.
          update: whether shared variables take their new values; by default they stay as they are.
          **kwargs: as in a call.

        Returns:
          As a call; all arrays lie on every replica.

        Raises:
          DivergedError: a shared variable holds different values on the replicas.

        Example:
          >>> import jax.numpy as jnp, numpy as np, synk
          >>> f = synk.function(jnp.mean, reduce="mean")
          >>> float(f.serial(np.arange(5.0)))
          2.0
        """
        self._eagerly("serial")
        return _check.serial(self, args, kwargs, batch, batch_s, update)

    @entry
    def check(
        self,
        *args: Any,
        rtol: float | None = None,
        atol: float | None = None,
        batch: Any = None,
        batch_s: Any = None,
        num_slices: int = 1,
        **kwargs: Any,
    ) -> None:
        """Run both ways from one state, compare outputs and updates, and leave every variable as it was.

        A group of one replica is checked as two simulated ones.

        Args:
          *args: as in a call.
          rtol: relative tolerance; None chooses by dtype (2e-4 for float32).
          atol: absolute tolerance; None chooses by dtype (2e-5 for float32).
          batch: as in a call.
          num_slices: as in a call.
          **kwargs: as in a call.

        Raises:
          LawError: something differs; the message names it, and the ops that would have matched.

        Example:
          >>> import jax.numpy as jnp, numpy as np, synk
          >>> synk.function(jnp.mean, reduce="mean").check(np.arange(7.0))
        """
        self._eagerly("check")
        _check.check(self, args, kwargs, batch, batch_s, num_slices, rtol, atol)

    @entry
    def compile(
        self,
        *args: Any,
        batch: Any = None,
        batch_s: Any = None,
        num_slices: int = 1,
        output_subset: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> jax.stages.Compiled:
        """Compile ahead what a call with such arguments runs, and change nothing.

        Args:
          As in a call; only trees, shapes and dtypes matter.

        Returns:
          JAX's `Compiled` of the program that runs `fn` (of the last one of several, where rows do not divide or are
          sliced, it is the one that combines).

        Example:
          >>> import jax.numpy as jnp, numpy as np, synk
          >>> f = synk.function(jnp.sum)
          >>> "HloModule" in f.compile(np.ones(8)).as_text()
          True
        """
        self._eagerly("compile")
        leaves, layout = self._binder.flatten(args, kwargs)
        check_slices(num_slices, self.name)
        with _flight.LOCK:
            current = group()
            call, signature = self._bind(current, layout, leaves, batch, batch_s, num_slices > 1, output_subset, None)
            the_plan = plan(signature, call, num_slices)
            compiled = _check.compiled(signature, call, the_plan)
            self.remember(signature)
            return compiled


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
@entry
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
    if fn is None:
        return lambda fn: Function(fn, inputs, outputs, reduce, then, engine, donate, name)
    return Function(fn, inputs, outputs, reduce, then, engine, donate, name)
