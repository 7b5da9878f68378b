"""Function: the serial-looking call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial, reduce, update_wrapper
from typing import TYPE_CHECKING, Any, Literal

import jax

from .._base.errors import SynkError, checked_integer, public_api, warn
from .._base.jax_context import is_traced
from .._base.old_names import instead_of
from .._base.pytree import PyTree
from .._call.binding import OPTIONS, ArgumentBinder, BoundArguments, CallOptions, check_slices
from .._call.compose import compose
from .._call.execute import execute_fitting, launch
from .._call.feed import Fed, feed, prepare
from .._call.leaves import is_tracer_type
from .._call.plan import PlanCache, Purpose, Site, site_of
from .._call.spec import FunctionSpec, Repeat, with_then
from .._loops.iterate import Batches, check_batches, warn_of_keys
from .._loops.loop import Launcher, Loop
from .._loops.minibatches import Loop as OrderBegun
from .._loops.minibatches import Minibatches, loop_begun_by
from .._loops.per_launch import launch_several, small_lists
from .._loops.prefetch import Prefetch
from .._loops.stream import Items
from .._runtime.dispatch import LOCK, drain
from .._runtime.executable import NotFinite
from .._runtime.group import Group, current_group
from .._tracing.context import ItemAsked, surroundings
from .._variables.variable import Shared

# Modules of members that most programs never call are imported at their first call, so that `import synk` is quick.
if TYPE_CHECKING:
    from .._check.blame import Blame
    from .._check.serial import Runner
    from .._explain.report import Explanation


class Function:
    """Function that runs on every replica, as `synk.function` makes it. Call it like the serial function.

    Attributes:
      fn: the user's function.
      name: the name in messages.
      stats: calls, compilations, rows and seconds so far (`synk.typing.Stats`).

    Example:
      >>> import jax.numpy as jnp, numpy as np, synk
      >>> f = synk.function(jnp.sum)
      >>> isinstance(f, synk.typing.Function), float(f(np.arange(5.0))), f.stats.rows
      (True, 10.0, 5)
    """

    def __init__(self, spec: FunctionSpec, binder: ArgumentBinder) -> None:
        self.fn, self.name, self.stats = spec.fn, spec.name, spec.stats
        self._spec, self._binder = spec, binder
        # Probes of blame have plans of their own: they would push the plans of the user's calls out of the cache.
        self._plans, self._probe_plans = PlanCache(), PlanCache()
        # The newest loop in each order of rows.
        self._orders: dict[Minibatches, OrderBegun] = {}
        # Told how many calls of a loop have run, it returns how many may run now before something else must.
        self._pace: Callable[[int], int] = lambda ran: sys.maxsize
        # Without the attributes of `fn`, which would cover members of this class.
        update_wrapper(self, spec.fn, updated=())

    def __repr__(self) -> str:
        dealt = ", ".join(f"{name}: {self._binder.mode(name)}" for name in self._binder.parameters)
        ops = ", ".join(dict.fromkeys(op.name for op in jax.tree.leaves(self._spec.ops)))
        return f"synk.function({self.name}({dealt}) -> {ops}{', then' * (self._spec.then is not None)})"

    def __copy__(self) -> Function:
        """Return the function itself, as Python does for its functions."""
        return self

    # Programs are kept by the function's identity. A copy would compile anew, and its variables are not copied with it.
    def __deepcopy__(self, memo: dict[int, Any]) -> Function:
        return self

    def __reduce__(self) -> str:
        """Pickle by name, as Python does for its functions."""
        # Another process finds the function by importing its module, so its name must lead to this very object.
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
        # Python comes here only for a name that is missing, so it costs calls nothing.
        raise AttributeError(f"a synk function has no {member!r}{instead_of(member)}")

    @public_api
    def then(self, then: Callable[..., PyTree]) -> Function:
        """Set what runs on every replica after the outputs are combined; for use as a decorator.

        A tuple of outputs is spread over the parameters of `then`. Behind them `then` may name any broadcast or static
        parameter of the function. A call returns what `then` returns.

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
        """Return the shared variables that the function reads and writes, as far as its calls have shown."""
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
          num_slices: run each replica's rows in so many parts, one at a time, for the memory of one; "auto": 1,
            doubled until the compiled programs fit into a device's memory (`synk.init(memory=)`), and remembered;
            should memory not do when they first run, in twice as many, with nothing lost.
          output_subset: which entries of the top level of the outputs to return, as a tuple in that order.
          **kwargs: as `fn` takes them.

        Returns:
          What `fn` returns, combined by its ops, or what `then` returns: `jax.Array`s that lie on every replica
          ("scatter": a `synk.typing.Data` whose rows stay where they were made).

        Raises:
          TypeError: an argument is no array, or a batch holds no integers.
          ValueError: rows differ, nothing is selected, or the ops do not fit the outputs.
          IndexError: the batch names rows that are not there.
          MemoryError: memory does not do.
        """
        options = CallOptions(batch, batch_s, num_slices, output_subset)
        # A batch may begin a loop of the user's own, in whose order an earlier loop has trained.
        if batch is not None:
            self._note_order(batch)
        bound = self._bind(args, kwargs, options)
        # A tracer may come from an outer trace that is not the current one, as under jax.ensure_compile_time_eval.
        if is_traced() or any(map(is_tracer_type, map(type, bound.leaves))):
            return compose(self._site_in(current_group()), bound, options)
        site = self._site()
        with LOCK:
            return self._run(feed(site, bound, options))

    def _run(self, fed: Fed) -> PyTree:
        """Launch a call that is fed. Callers hold the lock."""
        try:
            # "auto" tries the call in 1, 2, 4... slices. With blocks slices change nothing, so one try is enough.
            result = launch(fed) if fed.choice is None else launch(fed, execute_fitting)
        except NotFinite as error:
            raise FloatingPointError(self._not_finite(fed)) from error.__cause__
        self.stats.calls += 1
        return result

    def _not_finite(self, fed: Fed) -> str:
        message = f"{self.name}: its outputs or updates are not finite"
        if fed.given is not None and fed.given[1].batch_s is not None:
            message += "; rows that batch_s picks are not tried one by one"
        elif fed.given is not None:
            # Rows that cannot be tried one by one raise ValueError.
            with suppress(SynkError, ValueError), jax.debug_nans(False), jax.debug_infs(False):
                message = str(self._blame(*fed.given) or message)
        return f"{message.rstrip('.')}. Nothing was updated."

    @public_api
    def iterate(
        self,
        *args: Any,
        batches: Iterable[Any],
        prefetch: int = 2,
        num_slices: int | Literal["auto"] = 1,
        output_subset: Sequence[Any] | None = None,
        per_launch: int | None = None,
        **kwargs: Any,
    ) -> Prefetch[Any, Any]:
        """Call the function for each batch; the next batches are picked and sent while a call runs.

        `batches` and the values of `synk.each` are asked for on the thread of the loop, right after a call is launched.
        What the body of the loop writes to a `synk.data` is seen by the next result; plain arrays are read early. If
        `batches` and the body both write to the data of a batch that was taken early, the loop raises there.

        A PRNG key given whole draws the same noise in every batch, which a warning says: give each batch its own by
        `synk.each(jax.random.split(key, number_of_all_batches))`.

        Args:
          *args: as in a call.
          batches: an iterable of batches, each as `batch` in a call, e.g. `synk.minibatches`.
          prefetch: how many batches to take early; with `per_launch`, how many lists of them. With 0, a batch is taken
            when the loop comes to it.
          num_slices: as in a call.
          output_subset: as in a call.
          per_launch: how many results a list has; by default the iterator gives results. The loop's body runs once a
            list, which is shorter where an epoch of `synk.minibatches` or `batches` end, and before an error. In a list
            3 or more batches of one size, one after the other, run in one program, with the bits of single calls. For
            small steps, whose launch takes longer than their arithmetic; 16 is plenty, and a program of more takes
            longer to compile. All batches of a list are asked for before it runs, also with `prefetch=0`, so what gives
            them sees variables as they were before the list. What a program cannot repeat is launched call by call, in
            the same lists: `f.explain(...).per_launch` says why.
          **kwargs: as in a call.

        Returns:
          An iterator of the results, or of lists of them, in order, with a `len` if `batches` has one. Leaving the loop
          drops the batches that were taken early.

        Errors are those of a call, raised when the loop reaches that batch.

        Example:
          >>> import jax.numpy as jnp, numpy as np, synk
          >>> total = synk.function(jnp.sum)
          >>> x = np.arange(6)
          >>> [int(t) for t in total.iterate(x, batches=synk.minibatches(len(x), 4, shuffle=False))]
          [6, 9]
          >>> batches = synk.minibatches(len(x), 2, shuffle=False)
          >>> [[int(t) for t in totals] for totals in total.iterate(x, batches=batches, per_launch=2)]
          [[1, 5], [9]]
        """
        options = CallOptions(num_slices=num_slices, output_subset=output_subset)
        rows = self._batches("iterate", (args, kwargs), batches, options)
        return self._loop("iterate", batches, rows, options, prefetch, per_launch)

    def _batches(
        self,
        member: Literal["iterate", "over"],
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        batches: Any,
        options: CallOptions,
    ) -> Batches:
        name, group = f"{self.name}.{member}", current_group()
        # Most often the arguments come from a loader, and the user has taken the wrong member.
        if not any(arguments) and any(p.default is p.empty for p in self._binder.parameters.values()):
            instead = "stream(loader)" if member == "iterate" else "over(source=loader)"
            raise TypeError(
                f"{name}: batches pick rows of its arguments, but there is none. If each item of a loader brings its "
                f"own, write {self.name}.{instead}."
            )
        bound = self._bind(*arguments, options, member)
        group._refuse_if_absent(name)
        if member == "iterate":
            warn_of_keys(name, bound, "synk.each(jax.random.split(key, number_of_all_batches))")
        loop = check_batches(self._spec, bound, options, group, name, batches)
        loop.note_order = self._note_order
        return loop

    def _items(self, member: Literal["stream", "over"], options: CallOptions) -> Items:
        name, group = f"{self.name}.{member}", current_group()
        check_slices(options.num_slices, self.name)
        self._refuse(member)
        group._refuse_if_absent(name)
        return Items(self._spec, self._binder, name)

    def _loop(
        self,
        member: str,
        source: Iterable[Any],
        items: Batches | Items,
        options: CallOptions,
        prefetch: int,
        per_launch: int | None,
    ) -> Prefetch[Any, Any]:
        launcher = Launcher(partial(self._refuse, member), self._site, self._run, self._run_several, self._pace)
        return Loop(launcher, source, items, options, (prefetch, per_launch), f"{self.name}.{member}")

    def _run_several(
        self, calls: Iterable[Fed], count: int, repeat: Repeat
    ) -> tuple[list[PyTree], FloatingPointError | None]:
        """Launch several calls by one program. Return their results, and the error of the next call."""
        these, results, is_refused = list[Fed](), list[PyTree](), True
        noted = (these.append(fed) or fed for fed in calls)
        with suppress(NotFinite):
            results, is_refused = launch_several(noted, count, repeat)
        self.stats.calls += len(results)
        if not is_refused:
            return results, None
        return results, FloatingPointError(self._not_finite(these[len(results)]))

    def _note_order(self, batch: Any) -> None:
        """Warn when a loop begins whose calls update variables in the order of rows of an earlier loop."""
        loop = loop_begun_by(batch)
        if loop is None or self._orders.get(loop.order) is loop:
            return
        # Only a function that updates variables trains, and only for training does the order matter.
        plans = [made() for made, *_ in [*self._plans.compiled]]
        if loop.order in self._orders and any(plan.updates for plan in plans if plan is not None):
            warn(
                f"{self.name}: this loop has the batches of an earlier one, in the same order. For each epoch give "
                f"synk.minibatches another seed (seed=epoch), or let one loop go through all (epochs=)."
            )
        self._orders[loop.order] = loop

    @public_api
    def stream(
        self,
        source: Iterable[Any],
        *,
        prefetch: int = 2,
        num_slices: int | Literal["auto"] = 1,
        output_subset: Sequence[Any] | None = None,
        per_launch: int | None = None,
    ) -> Prefetch[Any, Any]:
        """Call the function for each item of a loader; the next items are taken and sent while a call runs.

        The loader is asked on the thread of the loop, right after a call is launched. It is up to `prefetch` items
        early, so what it reads of shared variables is that much older. What it writes to them is that much earlier.

        Args:
          source: gives the arguments of each call: a tuple or list by position, a mapping by name, anything else as the
            only one. Any iterable: a `torch.utils.data.DataLoader`, Grain, `tf.data`'s `as_numpy_iterator()`, a
            generator. Items may have any numbers of rows. The memory of their arrays may be used again for the next
            item, and so may a `synk.data`.
          prefetch: how many items to take early. With 0, an item is taken when the loop comes to it.
          num_slices: as in a call.
          output_subset: as in a call.
          per_launch: as of `iterate`.

        Returns:
          An iterator of the results, or of lists of them, in order, with a `len` if the source has one. Leaving the
          loop drops the items that were taken early: for n items of a longer source, `itertools.islice(source, n)`.

        Raises:
          TypeError: the source is not iterable.

        Other errors are those of a call and of the source, raised when the loop reaches that item.

        Example:
          >>> import jax.numpy as jnp, numpy as np, synk
          >>> dot = synk.function(lambda x, y: jnp.sum(x * y))
          >>> loader = [(np.arange(float(rows)), np.ones(rows)) for rows in (4, 4, 3)]
          >>> [float(y) for y in dot.stream(loader)]
          [6.0, 6.0, 3.0]
        """
        options = CallOptions(num_slices=num_slices, output_subset=output_subset)
        return self._loop("stream", source, self._items("stream", options), options, prefetch, per_launch)

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

        Partial results accumulate on each replica, and replicas combine once, at the end. So it takes as many
        collectives as one call, and the memory of one batch. Entries of rows and parts are joined in host memory, batch
        by batch. An evaluation over a loader whose last batch is short is exact, where a mean of batch means is not.
        Wrap `batches` or `source` in tqdm for a progress bar.

        Args:
          *args, **kwargs, num_slices, output_subset: as for `iterate`.
          batches: an iterable of batches, each as `batch` in a call, e.g. `synk.minibatches`.
          source: instead of arguments and batches, an iterable of the arguments of each batch, as `stream` takes them:
            a `torch.utils.data.DataLoader`, a generator.
          prefetch: as for `iterate`, without effect: each batch is launched as soon as it is taken, and the next one is
            taken while it runs.

        Returns:
          As a call. Outputs with an entry a row or a part ("concat", "stack", callables, Monoids whose order counts)
          are NumPy arrays, in the order of the batches, whole in every process; PRNG keys are `jax.Array`s.

        Raises:
          TypeError: neither `batches` nor `source` is given, or arguments beside `source`.
          ValueError: there is no batch; the function has a `then` or updates shared variables; or outputs of two
            batches have different shapes.

        Other errors are those of a call, raised when the loop reaches that batch.

        Example:
          >>> import jax.numpy as jnp, numpy as np, synk
          >>> mean = synk.function(jnp.mean, reduce="mean")
          >>> x = np.arange(7.0)
          >>> round(float(mean.over(x, batches=synk.minibatches(len(x), 3))), 4)  # 3, 3 and 1
          3.0
          >>> round(float(mean.over(source=(x[i : i + 3] for i in range(0, 7, 3)))), 4)
          3.0
        """
        from .._loops.over import Accumulation

        if (batches is None) == (source is None):
            raise TypeError(
                f"{self.name}.over: give batches=, which pick rows of its arguments, or source=, a loader of arguments."
            )
        options = CallOptions(num_slices=num_slices, output_subset=output_subset)
        total = Accumulation(self._site_in(current_group()))
        loop: Any = source if batches is None else batches
        items: Batches | Items
        if batches is not None:
            items = self._batches("over", (args, kwargs), batches, options)
        elif args or kwargs:
            raise TypeError(f"{self.name}.over: source= brings all arguments of each batch, so give none beside it.")
        else:
            items = self._items("over", options)
        checked_integer(prefetch, f"{self.name}.over: prefetch", wanted="give an integer >= 0, or leave it out")
        most, lists = small_lists(items, loop, options)
        for calls in lists:
            total.add(calls, Repeat(most, ()))
            # While the source makes the next batch, memory need not hold this one.
            del calls
        return total.result()

    def _bind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions, call: str = ""
    ) -> BoundArguments:
        """Bind the arguments of a call without looking at a leaf; `call` names a member that runs in no trace."""
        # Three cheap questions: a plain call outside of any trace has nothing to refuse.
        if call or surroundings() is not None:
            self._refuse(call)
        if type(options.num_slices) is not int or options.num_slices < 1:
            check_slices(options.num_slices, self.name)
        # Named here: else the user's function would be said to lack such a parameter.
        for option in OPTIONS.intersection(kwargs) if kwargs else ():
            raise TypeError(f"{self.name}: {option} is an option of other ways to call it; this one takes none.")
        return self._binder.bind(args, kwargs)

    def _refuse(self, call: str = "") -> None:
        inside = surroundings()
        if isinstance(inside, ItemAsked):
            raise SynkError(
                f"{self.name}: it is called while synk.resume asks for an item. A start after a fault asks for the "
                f"first items again, and their calls would train again. Put synk.resume inside: `for batch in "
                f"tqdm(synk.resume(batches, ...)): {self.name}(...)`."
            )
        if inside is not None:
            raise SynkError(
                f"{inside.name}: it calls the synk function {self.name} inside, where a replica has only its rows. "
                f"{self._spec.inside or f'Call {self.name}.fn there.'}"
            )
        # A plain call composes with transformations of JAX. A loop, a check or a report has effects, which a trace
        # would lose.
        if call and is_traced():
            raise SynkError(
                f"{self.name}.{call}: it runs when called, so not inside jit, grad, vmap or the like. Call it outside."
            )

    @public_api
    def serial(self, *args: Any, batch: Any = None, batch_s: Any = None, update: bool = False, **kwargs: Any) -> PyTree:
        """Run `fn` and `then` once, on one device, over all selected rows. Every other call must give this answer.

        The function is traced in each call, so it runs as it is now. It is compiled only if the trace has changed.

        Args:
          *args: as in a call.
          batch, batch_s: as in a call.
          update: whether shared variables take their new values; by default they stay as they are.
          **kwargs: as in a call.

        Returns:
          As a call; all arrays lie on every replica.

        Raises:
          DivergedError: a shared variable holds different values on the replicas.

        Example:
          >>> import jax.numpy as jnp, numpy as np, synk
          >>> f = synk.function(jnp.mean, reduce="mean")
          >>> round(float(f.serial(np.arange(5.0))), 4)
          2.0
        """
        from .._check.serial import run_serial

        options = CallOptions(batch, batch_s)
        return run_serial(self._runner(self._bind(args, kwargs, options, "serial"), options), update)

    @public_api
    def check(
        self,
        *args: Any,
        rtol: float | None = None,
        atol: float | None = None,
        batch: Any = None,
        batch_s: Any = None,
        num_slices: int | Literal["auto"] = 1,
        **kwargs: Any,
    ) -> None:
        """Run both ways from one state, compare outputs and updates, and leave every variable as it was.

        A group of one replica is checked as two simulated ones. With `wire=`, exact sums are compared with the serial
        answer, and rounded sums with exact ones, to the format's rounding. With `blocks=`, the answer is checked
        without blocks first, and then bit for bit.

        Args:
          *args: as in a call.
          rtol: relative tolerance; None chooses by dtype (2e-4 for float32).
          atol: absolute tolerance; None chooses by dtype (2e-5 for float32).
          batch, batch_s: as in a call.
          num_slices: as in a call.
          **kwargs: as in a call.

        Raises:
          LawError: something differs; the message names it, and the ops that would have matched.

        Example:
          >>> import jax.numpy as jnp, numpy as np, synk
          >>> synk.function(jnp.mean, reduce="mean").check(np.arange(7.0))
        """
        from .._check.check import check
        from .._check.compare import Tolerance

        options = CallOptions(batch, batch_s, num_slices)
        runner = self._runner(self._bind(args, kwargs, options, "check"), options)
        check(self._spec, runner, Tolerance(rtol, atol))

    def _runner(self, bound: BoundArguments, options: CallOptions) -> Runner:
        from .._check.serial import Runner

        # For its error in a group of absent devices.
        self._site()
        return Runner(self._spec.gathering(), self._plans, bound, options, current_group())

    def _site(self, call: str = "") -> Site:
        group = current_group()
        if group.accelerator is not None:
            group._refuse_if_absent(f"{self.name}.{call}" if call else self.name)
        site = Site(self._spec, self._plans, group)
        return site.as_one() if self._spec.engine == "jit" else site

    def _site_in(self, group: Group, purpose: Purpose = "live") -> Site:
        return site_of(self._spec, self._plans, group, purpose)

    @public_api
    def compile(
        self,
        *args: Any,
        batch: Any = None,
        batch_s: Any = None,
        num_slices: int | Literal["auto"] = 1,
        output_subset: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> jax.stages.Compiled:
        """Compile ahead what a call with such arguments runs, and change nothing.

        Args:
          As in a call; only trees, shapes and dtypes matter, and `jax.ShapeDtypeStruct`s may stand for arrays.

        Returns:
          JAX's `Compiled` of the program that runs `fn`, or where rows are sliced of the one that combines.

        Example:
          >>> import jax.numpy as jnp, numpy as np, synk
          >>> f = synk.function(jnp.sum)
          >>> "HloModule" in f.compile(np.ones(8)).as_text()
          True
        """
        options = CallOptions(batch, batch_s, num_slices, output_subset)
        bound = self._bind(args, kwargs, options, "compile")
        with LOCK:
            return prepare(self._absent_site(), bound, options).plan.last.compiled

    @public_api
    def explain(
        self,
        *args: Any,
        batch: Any = None,
        batch_s: Any = None,
        num_slices: int | Literal["auto"] = 1,
        output_subset: Sequence[Any] | None = None,
        run: int = 0,
        **kwargs: Any,
    ) -> Explanation:
        """Compile what a call with such arguments runs, and say what it would do; change nothing.

        Args:
          *args, batch, batch_s, num_slices, output_subset, **kwargs: as in a call; `jax.ShapeDtypeStruct`s may stand
            for arrays.
          run: how many calls to time under JAX's profiler, whose results and updates are dropped; 0 for none.

        Returns:
          An `Explanation`: print it, or write it by its `json` and `html`. In a group of several processes all
          make this call.

        Raises:
          TypeError, ValueError: `run` is no number of calls; others as of a call.
          RuntimeError: `run` asks for calls while another profile of JAX runs.

        Example:
          >>> import jax.numpy as jnp, numpy as np, synk
          >>> f = synk.function(lambda x, w: x @ w, inputs=["x"], reduce="concat")
          >>> with synk.simulate(2):
          ...     e = f.explain(np.ones((8, 4), np.float32), np.ones((4, 3), np.float32))
          >>> e.lengths, e.flops, e.inputs[0].sent_bytes
          ((4, 4), 96, 128)
        """
        from .._explain.explain import explain, measure

        options = CallOptions(batch, batch_s, num_slices, output_subset)
        bound = self._bind(args, kwargs, options, "explain")
        checked_integer(run, f"{self.name}.explain: run", wanted="give a number of calls, 0 for none")
        # Asked for before anything compiles, since it raises in a group of absent devices.
        site = self._site(f"explain(run={run})") if run else None
        before = self.stats.compilations
        with LOCK:
            absent = self._absent_site()
            ready = prepare(absent, bound, options)
        explanation = explain(ready, bound, self._plans, self.stats.compilations == before)
        if site is None:
            return explanation
        with LOCK:
            # What runs now would share the devices with the calls that are timed.
            drain()
            return replace(explanation, measured=measure(partial(prepare, site, bound, options), run))

    @public_api
    def blame(
        self, *args: Any, batch: Any = None, num_slices: int | Literal["auto"] = 1, **kwargs: Any
    ) -> Blame | None:
        """Find the first row whose outputs, gradients or updates are not finite; change nothing.

        It runs the function on parts of the rows, at most 2 log2(rows) + 4 times by one program. Then it runs the row,
        or the rows that are bad only together, line by line on one device. Shared variables and broadcast arguments
        that are not finite come first.

        Args:
          *args, batch, num_slices, **kwargs: as in a call.

        Returns:
          A `Blame`, which prints as a sentence; None if all numbers are finite. It tells if rows are bad only together.

        Raises:
          ValueError: rows cannot be tried one by one: rows with neighbours, rows that variables hold, and `synk.local`
            rows. Other errors are those of a call.

        Example:
          >>> import jax.numpy as jnp, numpy as np, synk
          >>> x = np.arange(8, dtype=np.float32) - 3
          >>> with synk.simulate(4):
          ...     found = synk.function(lambda x: jnp.log(x).sum()).blame(x, num_slices=2)
          >>> found.row, found.replica, found.slice
          (0, 0, 0)
        """
        options = CallOptions(batch, num_slices=num_slices)
        return self._blame(self._bind(args, kwargs, options, "blame"), options)

    def _blame(self, bound: BoundArguments, options: CallOptions) -> Blame | None:
        from .._check.blame import blame

        site = self._site("blame")._replace(function=self._spec.gathering())
        return blame(site, self._probe_plans, bound, options)

    def _absent_site(self) -> Site:
        """Return where calls are compiled and not run: devices may be absent, and shapes are enough."""
        site = self._site_in(current_group(), "absent")
        if site.group.accelerator is None or site.view is not None:
            return site
        from .._variables.views import ShapesAlone

        # Variables have their values in another group, on devices of this machine. Their shapes do to compile.
        return site._replace(view=ShapesAlone(site.group))
