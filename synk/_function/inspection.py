"""Inspection: what users ask of a function beside calls: the serial answer, the law, what compiles. Nothing is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax

from .._base.errors import SynkError, checked_integer, public_api
from .._base.jax_context import is_traced
from .._base.pytree import PyTree
from .._base.turns import in_turn
from .._call.binding import OPTIONS, ArgumentBinder, BoundArguments, check_slices
from .._call.execute import ReadyCall
from .._call.kinds import Where
from .._call.plan import PlanCache
from .._call.prepare import prepare
from .._call.rows import RowRequest
from .._call.spec import FunctionSpec
from .._check.blame import Blame, blame
from .._check.check import Runner, check, check_blocks, check_wires, refuse_stale, run_serial
from .._check.compare import Tolerance
from .._check.views import view_of_absent
from .._explain.explain import explain
from .._explain.measure import measure
from .._explain.report import Explanation
from .._runtime.dispatch import LOCK, settle
from .._runtime.group import current_group
from .._tracing.context import current_trace


class Inspection:
    """A function whose calls can be looked at."""

    def __init__(self, spec: FunctionSpec, binder: ArgumentBinder) -> None:
        self.fn, self.name, self.stats = spec.fn, spec.name, spec.stats
        self._spec, self._binder = spec, binder
        self._plans, self._probe_plans = PlanCache(), PlanCache()

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any], num_slices: Any, call: str = "") -> BoundArguments:
        """The arguments of a call, none of their leaves looked at; `call` names one that a trace cannot hold."""
        in_turn()
        self._refuse(call)
        check_slices(num_slices, self.name)
        for option in OPTIONS.intersection(kwargs):
            raise TypeError(f"{self.name}: {option} is an option of other ways to call it; this one takes none.")
        return self._binder.bind(args, kwargs)

    def _refuse(self, call: str = "") -> None:
        current = current_trace()
        if current is not None:
            raise SynkError(
                f"{current.name}: it calls the synk function {self.name} inside, where a replica has only its rows. "
                f"{self._spec.inside or f'Call {self.name}.fn there.'}"
            )
        if call and is_traced():
            raise SynkError(
                f"{self.name}.{call}: it runs when called, so not inside jit, grad, vmap or the like. Call it outside."
            )

    @public_api
    def serial(self, *args: Any, batch: Any = None, batch_s: Any = None, update: bool = False, **kwargs: Any) -> PyTree:
        """Run `fn` and `then` once, on one device, over all selected rows: what every other call must equal.

        It runs the function as it is now: it traces it in each call, and compiles only if that makes another program.

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
          >>> float(f.serial(np.arange(5.0)))
          2.0
        """
        bound = self._bind(args, kwargs, 1, "serial")
        return run_serial(self._runner(bound, RowRequest(batch, batch_s)), update)

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

        A group of one replica is checked as two simulated ones. Sums that travel narrowly (`wire=`) are
        compared as if they did not, and what arrives with that, to what its rounding can do. With `blocks=`
        it checks as if there were none, and then the bits.

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
        runner = self._runner(self._bind(args, kwargs, num_slices, "check"), RowRequest(batch, batch_s, num_slices))
        refuse_stale(self._spec, runner)
        narrow, tolerance = replace(runner.function, then=None), Tolerance(rtol, atol)
        exact = replace(runner, function=runner.function.exact())
        check(exact, narrow.exact(), tolerance)
        if narrow.blocks is not None:
            check_blocks(exact, narrow, replace(narrow, blocks=None), tolerance)
        if narrow.wires is not None:
            check_wires(exact, narrow, tolerance)

    def _runner(self, bound: BoundArguments, request: RowRequest) -> Runner:
        group = current_group()
        group._refuse_if_absent(self.name)
        return Runner(self._spec.gathering(), self._plans, bound, request, group)

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
        bound = self._bind(args, kwargs, num_slices, "compile")
        return self._planned(bound, RowRequest(batch, batch_s, num_slices), output_subset).plan.last.compiled

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
          run: how many calls to time, whose results and updates are dropped; 0 for none.

        Returns:
          An `Explanation`: print it, or write it by its `json`, `html` and `png`. In a group of several processes all
          make this call.

        Raises:
          TypeError, ValueError: `run` is no number of calls; others as of a call.

        Example:
          >>> import jax.numpy as jnp, numpy as np, synk
          >>> f = synk.function(lambda x, w: x @ w, inputs=["x"], reduce="concat")
          >>> with synk.simulate(2):
          ...     e = f.explain(np.ones((8, 4), np.float32), np.ones((4, 3), np.float32))
          >>> e.lengths, e.flops, e.inputs[0].sent_bytes
          ((4, 4), 96, 128)
        """
        bound = self._bind(args, kwargs, num_slices, "explain")
        checked_integer(run, f"{self.name}.explain: run", wanted="give a number of calls, 0 for none")
        request, group = RowRequest(batch, batch_s, num_slices), current_group()
        if run:
            group._refuse_if_absent(f"{self.name}.explain(run={run})")
        before = self.stats.compilations
        where = self._where_absent()
        planned = self._planned(bound, request, output_subset)
        found = explain(planned, self._plans, self.stats.compilations == before, where)
        if not run:
            return found
        with LOCK:
            settle()
            ready = partial(prepare, self._spec, self._plans, bound, request, output_subset, Where(group))
            return replace(found, measured=measure(ready, run))

    @public_api
    def blame(
        self, *args: Any, batch: Any = None, num_slices: int | Literal["auto"] = 1, **kwargs: Any
    ) -> Blame | None:
        """Find the first row whose outputs, gradients or updates are not finite; change nothing.

        It runs the function on parts of the rows, at most 2 log2(rows) + 4 times by one program, and of what it finds
        line by line on one device. Shared variables and broadcast arguments that are not finite are told first.

        Args:
          *args, batch, num_slices, **kwargs: as in a call; rows are held in host memory meanwhile.

        Returns:
          A `Blame`, which prints as a sentence; None where all is finite. Rows that are bad only together are said to
          be so.

        Raises:
          ValueError: rows cannot be tried one by one: those with neighbours, those that variables hold, and
            `synk.local` ones; others as of a call.

        Example:
          >>> import jax.numpy as jnp, numpy as np, synk
          >>> x = np.arange(8, dtype=np.float32) - 3
          >>> with synk.simulate(4):
          ...     found = synk.function(lambda x: jnp.log(x).sum()).blame(x, num_slices=2)
          >>> found.row, found.replica, found.slice
          (0, 0, 0)
        """
        return self._blame(self._bind(args, kwargs, num_slices, "blame"), RowRequest(batch, None, num_slices))

    def _blame(self, bound: BoundArguments, request: RowRequest) -> Blame | None:
        group = current_group()
        group._refuse_if_absent(f"{self.name}.blame")
        return blame(self._spec.gathering(), (self._plans, self._probe_plans), bound, request, group)

    def _planned(self, bound: BoundArguments, request: RowRequest, subset: Any) -> ReadyCall:
        """A call made ready from shapes: compiled, nothing placed."""
        with LOCK:
            return prepare(self._spec, self._plans, bound, request, subset, self._where_absent())

    def _where_absent(self) -> Where:
        group = current_group()
        view = None if group.accelerator is None else view_of_absent(group)
        return Where(group, view, is_abstract=True)
