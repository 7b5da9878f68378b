"""Map: a function of one row, run for all rows on all replicas."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import repeat
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.tree_util import all_leaves

from .._base.errors import public_api
from .._base.pytree import PyTree
from .._call.binding import OPTIONS
from .._loops.iterate import PerBatch
from .._loops.prefetch import Prefetch
from .._reductions.reduction import ELEMENTWISE
from .by_cost import Dealt, costs_of, deal, in_order, tied, with_order
from .decorator import Inputs, function
from .function import Function

if TYPE_CHECKING:
    from .._explain.report import Explanation

Arguments = tuple[Any, ...]
Options = dict[str, Any]
# Ops of outputs of a row. Others show parts, of which a row knows none.
_OPS = ("concat", "scatter", *ELEMENTWISE, "same")


@public_api
def map(
    fn: Callable[..., PyTree],
    inputs: Inputs = None,
    *,
    outputs: PyTree = "concat",
    axis_name: str | None = None,
    name: str | None = None,
) -> Function:
    """Make a function of one row run for every row: any number of rows, on any number of replicas.

    A replica runs `jax.vmap(fn)` over its rows, or `fn` itself where it has one row. Rows know nothing of one another:
    loops inside (chains of MCMC, solvers of ODEs, root finding) run on each replica until its own rows are done, where
    `jax.jit` over rows cut by a sharding waits for the slowest row of all replicas in every iteration.

    Inside, `synk.row_numbers()` is the row's number among those picked, `synk.row_keys(key)` its key, and a variable
    that holds rows its one row. `synk.part_key` and assigning variables raise, and so do collectives without
    `axis_name`. Keys of JAX's "rbg" draw only with `axis_name`, since their draws would depend on the other rows.

    Calls, `iterate`, `over`, `explain` and `check` take `cost=` too: a number for each row
    of the arguments (steps, a length, a guess), from which a batch picks. Rows are dealt so that each slice holds like
    rows and replicas get as much work, in 1, 2, 4, 8 or 16 slices unless `num_slices` is given. Results come in the
    order of the rows, and row numbers and keys are theirs; numbers are equal to rounding, as for other slices. What
    ties rows to their places raises: "scatter", `axis_name`, `batch_s`, `synk.local`, `synk.Overlap`, minibatch data,
    and variables that hold rows. A parameter of `fn` named `cost` comes by position.

    Args:
      fn: a function of arrays, called with one row of each scattered argument, without axis 0.
      inputs: as for `synk.function`; "broadcast" arguments come whole to every row.
      outputs: an op, or a tree of ops that is a prefix of what `fn` returns: "concat" (one entry a row, in the order of
        the rows), "scatter" (the same, left on the replicas that made them), "sum", "mean", "max", "min", "prod",
        "any", "all" over the rows, or "same" if all rows give the same value. "mean" of a `synk.Weighted` weighs each
        row by its own weight.
      axis_name: a name under which rows communicate inside `fn`, as under `jax.pmap(fn, axis_name)`. Then there are as
        many rows as replicas, and no slices; a single replica takes any number. None for rows that know nothing of one
        another.
      name: the name in messages; None for `fn`'s name.

    Returns:
      A `Function` of all rows; it serves as `chain_method` of numpyro's MCMC.

    Raises:
      TypeError, ValueError: a mode or an op is none of these.

    Example:
      >>> import jax, numpy as np, synk
      >>> @synk.map
      ... def root(x):
      ...     return jax.lax.while_loop(lambda y: abs(y * y - x) > 1e-5, lambda y: (y + x / y) / 2, x)
      >>> [round(float(y), 2) for y in root(np.array([4.0, 9.0, 2.0]))]
      [2.0, 3.0, 1.41]
      >>> [round(float(y), 2) for y in root(np.array([4.0, 9.0, 2.0]), cost=[1, 9, 3])]
      [2.0, 3.0, 1.41]
    """
    made = function(fn, inputs, outputs, axis_name=axis_name or "replica", name=name)
    for op in jax.tree.leaves(made._spec.ops):
        if op.name not in _OPS:
            raise ValueError(
                f"{made.name}: outputs of a row do not combine by {op.name!r}; use one of {', '.join(_OPS)}."
            )
    parameter = made._binder.parameters.get("cost")
    if parameter is not None and parameter.kind == parameter.KEYWORD_ONLY:
        raise ValueError(
            f"{made.name}: its parameter 'cost' comes by keyword alone, but has the name of an option of every map. "
            f"Rename it, or let it come by position."
        )
    # A function of rows whose call knows that `fn` takes one row: vmap is applied when its part is traced, which knows
    # the number of rows.
    spec = replace(made._spec, made_by="synk.map", of_one_row="alone" if axis_name is None else "axis")
    return RowMap(spec, made._binder)


class RowMap(Function):
    """Function of one row, whose members take `cost=`: a number for each row of the arguments."""

    @cached_property
    def _dealt(self) -> tuple[Function, Function]:
        """Return the functions that take the order of dealt rows: of a call, and of a batch of `over`."""
        made = [Function(*with_order(self._spec, self._binder, is_over)) for is_over in (False, True)]
        for each in made:
            # `shared` and `explain` know all programs of the function.
            each._plans = self._plans
        return made[0], made[1]

    def _deal(
        self, args: Arguments, kwargs: Options, others: Sequence[str] = ()
    ) -> tuple[Options, Callable[[Any], Dealt]]:
        """Check the costs of a call, and return its other options, and what deals a batch of its rows."""
        if kwargs.get("batch_s") is not None:
            raise tied(self.name, "batch_s")
        rest = {name: value for name, value in kwargs.items() if name != "cost"}
        own = {name: value for name, value in rest.items() if name not in OPTIONS and name not in others}
        costs = costs_of(self._binder.bind(args, own), kwargs["cost"], self._spec)
        # "same" is for what all replicas make of all their rows, not of slices.
        has_same = any(op.name == "same" for op in jax.tree.leaves(self._spec.ops))
        return rest, partial(deal, costs, num_slices=kwargs.get("num_slices", 1 if has_same else None), name=self.name)

    def _run_dealt(self, member: str, args: Arguments, kwargs: Options, *others: str) -> tuple[Any, Dealt]:
        """Run a member with the rows of its call dealt, if that saves something."""
        rest, deal_batch = self._deal(args, kwargs, others)
        dealt = deal_batch(rest.get("batch"))
        if dealt.is_in_order:
            return getattr(Function, member)(self, *args, **rest), dealt
        rest |= {"batch": dealt.batch, "num_slices": dealt.num_slices}
        order = np.append(0, dealt.order).astype(np.int32)
        return getattr(Function, member)(self._dealt[0], order, *args, **rest), dealt

    @public_api
    def __call__(self, *args: Any, **kwargs: Any) -> PyTree:
        if "cost" not in kwargs:
            return Function.__call__(self, *args, **kwargs)
        result, dealt = self._run_dealt("__call__", args, kwargs)
        self._note(dealt)
        return result

    def _note(self, dealt: Dealt) -> None:
        self.stats.replica_imbalance, self.stats.slice_imbalance = dealt.imbalance

    @public_api
    def check(self, *args: Any, **kwargs: Any) -> None:
        return self._run_dealt("check", args, kwargs)[0] if "cost" in kwargs else Function.check(self, *args, **kwargs)

    @public_api
    def explain(self, *args: Any, **kwargs: Any) -> "Explanation":
        if "cost" not in kwargs:
            return Function.explain(self, *args, **kwargs)
        explanation, dealt = self._run_dealt("explain", args, kwargs, "run")
        return replace(explanation, replica_imbalance=dealt.imbalance[0], slice_imbalance=dealt.imbalance[1])

    @public_api
    def iterate(self, *args: Any, **kwargs: Any) -> Prefetch[Any, Any]:
        if "cost" not in kwargs:
            return Function.iterate(self, *args, **kwargs)
        order, rest = self._deal_batches(args, kwargs, None)
        return Function.iterate(self._dealt[0], order, *args, **rest)

    @public_api
    def over(self, *args: Any, **kwargs: Any) -> PyTree:
        if "cost" not in kwargs:
            return Function.over(self, *args, **kwargs)
        if kwargs.get("source") is not None:
            raise ValueError(f"{self.name}.over: cost= is of the rows that batches= pick. Leave it out with source=.")
        numbers = list[np.ndarray]()
        order, rest = self._deal_batches(args, kwargs, numbers)
        outputs = Function.over(self._dealt[1], order, *args, **rest)
        ops, subset = self._spec.ops, rest.get("output_subset")
        if subset is not None and not all_leaves([ops]):
            ops = tuple([ops[entry] for entry in subset])
        return in_order(self._spec, ops, outputs, np.argsort(np.concatenate(numbers)))

    def _deal_batches(
        self, args: Arguments, kwargs: Options, numbers: list[np.ndarray] | None
    ) -> tuple[PerBatch, Options]:
        """Return what deals the batches of a loop, in the place of their orders. In `numbers`, rows count on."""
        rest, deal_batch = self._deal(args, kwargs, ("per_launch", "source"))
        # Rows that go ahead are cut into the parts of a call only if a loop has one slice, and here batches differ.
        rest["num_slices"] = rest.get("num_slices") or 2

        def next_batch(batch: Any) -> tuple[np.ndarray, Any, np.ndarray]:
            dealt, first = deal_batch(batch), int(numbers[-1].max()) + 1 if numbers else 0
            self._note(dealt)
            if numbers is not None:
                numbers.append(first + dealt.order)
            return dealt.batch, dealt.num_slices, np.append(first, dealt.order).astype(np.int32)

        return PerBatch(repeat(0), next_batch), rest
