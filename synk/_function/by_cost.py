"""By cost: deal the rows of a map so that slices hold like rows and replicas get as much work."""

from dataclasses import replace
from functools import lru_cache
from inspect import Parameter, Signature, signature
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._base.partition import lengths_of
from .._base.pytree import PyTree
from .._call.binding import AUTO, ArgumentBinder, BoundArguments, check_slices
from .._call.leaves import recognise_leaves, spec_of_part
from .._call.parts import split_into_launches
from .._call.rows import common_rows
from .._call.spec import FunctionSpec
from .._data.costs import checked_costs
from .._data.selection import select
from .._loops.iterate import PerBatch
from .._reductions.outputs import is_whole, match_prefix
from .._runtime.group import current_group
from .._tracing.context import current_trace

# Numbers of slices, each of which makes other programs: few, so that calls of any costs share them.
SLICES = (1, 2, 4, 8, 16)
# The first parameter of the function that takes dealt rows.
ORDER = "order_by_cost"


class Dealt(NamedTuple):
    """Rows of a call in the order in which they run.

    Attributes:
      batch: the rows of the arguments.
      order: the place of each row among the rows of the call, which is also its number there.
      num_slices: in how many slices they run.
      imbalance: the most work of a replica over the mean, and the largest cost of a slice over the mean of its rows.
      is_in_order: whether dealing would save too little.
    """

    batch: np.ndarray
    order: np.ndarray
    num_slices: Any
    imbalance: tuple[float, float]
    is_in_order: bool


def deal(costs: np.ndarray, batch: Any, num_slices: Any, name: str) -> Dealt:
    """Deal the rows that a batch picks so that a slice of a replica has like rows, and replicas as much work."""
    if num_slices is not None:
        check_slices(num_slices, name)
    selection = select(batch, len(costs), name, "cost")
    rows = selection.positions(0, selection.rows)
    lengths, costs = lengths_of(len(rows), current_group().size), costs[rows]
    as_given, dealt = np.arange(len(rows)), np.empty(len(rows), int)
    # The rows of a replica descend, so wherever they are cut, like rows are together.
    dealt[_places(lengths)] = np.argsort(-costs, kind="stable")
    choices = [(as_given, num_slices or 1), *((dealt, n) for n in (SLICES if num_slices is None else (num_slices,)))]
    works = [_work(costs, lengths, num_slices or 1)]
    # No order does better than replicas that are at work all the time.
    if works[0].max() * len(lengths) > 1.1 * costs.sum():
        works += [_work(costs[order], lengths, slices) for order, slices in choices[1:]]
    least = min(work.max() for work in works)
    best = next(i for i, work in enumerate(works) if work.max() <= 1.1 * least)
    (order, slices), work = choices[best], works[best]
    imbalance = (float(work.max() / work.mean()), float(work.sum() / costs.sum())) if least else (1.0, 1.0)
    return Dealt(rows[order], order, slices, imbalance, best == 0)


@lru_cache(maxsize=256)
def _places(lengths: tuple[int, ...]) -> np.ndarray:
    """Return the places of a selection in the order in which rows are dealt out: to each replica in turn, or back."""
    rank, turn = np.repeat(np.arange(len(lengths)), lengths), np.concatenate([*map(np.arange, lengths)])
    # By the parity of the bits of a turn, no replica begins more slices than others do, whatever their length.
    return np.lexsort((np.where(np.bitwise_count(turn) % 2, -rank, rank), turn))


def _work(costs: np.ndarray, lengths: tuple[int, ...], num_slices: Any) -> np.ndarray:
    """Return the work of each replica: the rows of a slice run in lock-step, until the most costly one is done."""
    counts, starts = _cuts(lengths, 1 if num_slices == AUTO else num_slices)
    return (counts * np.maximum.reduceat(costs, starts)).reshape(len(lengths), -1).sum(1)


@lru_cache(maxsize=256)
def _cuts(lengths: tuple[int, ...], num_slices: int) -> tuple[np.ndarray, np.ndarray]:
    """Return how many rows each slice of each replica has, and its first row."""
    launches = split_into_launches(lengths, num_slices)
    counts, starts = [np.array([parts[i] for parts in launches]).T.ravel() for i in (1, 2)]
    # The first row of a part without rows may lie behind the last one.
    return counts, np.minimum(starts, sum(lengths) - 1)


def costs_of(bound: BoundArguments, cost: Any, function: FunctionSpec) -> np.ndarray:
    """Check costs of the rows that these arguments have. Raise ValueError where rows may not change their places."""
    name, spec = function.name, bound.spec
    leaves = [0 if isinstance(leaf, PerBatch) else leaf for leaf in bound.leaves]
    parts = recognise_leaves(bound._replace(leaves=leaves), name, None, True)[1]
    scattered = [spec_of_part(parts[i]) for i in spec.scattered]
    refused = {
        'outputs="scatter"': any(op.name == "scatter" for op in jax.tree.leaves(function.ops)),
        "axis_name": function.of_one_row == "axis",
        "synk.Overlap": any(spec.overlaps),
        "synk.local": any(leaf.kind == "local" for leaf in scattered),
        "minibatch=True": any(leaf.is_minibatch for leaf in scattered),
    }
    for what in [what for what, is_asked in refused.items() if is_asked]:
        raise tied(name, what)
    rows = common_rows(name, spec.scattered_names, scattered, range(len(scattered)))
    return checked_costs(cost, rows, f"{name}: cost")


def tied(name: str, what: str) -> ValueError:
    return ValueError(
        f"{name}: cost= moves rows to other replicas, and {what} ties rows to their places. Leave out one of the two."
    )


def with_order(function: FunctionSpec, binder: ArgumentBinder, is_over: bool) -> tuple[FunctionSpec, ArgumentBinder]:
    """Make the function of dealt rows, which takes the number of the first row and their order before its arguments.

    Its outputs come in the caller's order, unless calls are batches of `over`.
    """

    def run(order_by_cost: Any, /, *args: Any, **kwargs: Any) -> PyTree:
        context = current_trace()
        assert context is not None
        first, order = order_by_cost[0], order_by_cost[1:]
        # Row numbers and keys are those of the caller's rows.
        context.row = first + order[context.first_row + context.row - first] - context.first_row
        outputs = function.fn(*args, **kwargs)
        for variable in context.reads:
            if context.rows_held(variable) is not None:
                raise tied(function.name, f"{variable.name}, which holds rows,")
        # In a list, `then` gets a tuple as one argument.
        return outputs if is_over else [outputs]

    def then(outputs: list[PyTree], order_by_cost: Any, **others: Any) -> PyTree:
        whole = in_order(function, function.ops, outputs[0], jnp.argsort(order_by_cost[1:]))
        if function.then is None:
            return whole
        given = whole if type(whole) is tuple else (whole,)
        return function.then(*given, **{name: others[name] for name in function.then_parameters(len(given))})

    parameters = [Parameter(ORDER, Parameter.POSITIONAL_ONLY), *binder.parameters.values()]
    # By these attributes calls find what the user's functions capture.
    run.__dict__.update(__wrapped__=function.fn, __signature__=Signature(parameters))
    then.__dict__.update(__wrapped__=function.then)
    made = replace(function, fn=run)
    if not is_over:
        # Which of these follow the outputs of the user's function, `then` knows alone.
        others = () if function.then is None else signature(function.then).parameters
        names = [ORDER, *[name for name in others if binder.mode(name) in ("broadcast", "static")]]
        made = replace(
            made,
            ops=[function.ops],
            then=then,
            then_parameters=lambda count: names,
            output_names={"[0]": ("output", True)},
        )
    return made, ArgumentBinder(run, {**binder.modes, ORDER: "broadcast"}, function.name)


def in_order(function: FunctionSpec, ops: PyTree, outputs: PyTree, places: Any) -> PyTree:
    """Take entries of rows from these places."""
    matches = match_prefix(ops, outputs, function.name, "outputs")
    leaves = [leaf[places] if op.name == "concat" else leaf for _, op, leaf in matches]
    return jax.tree.structure(outputs, is_leaf=is_whole).unflatten(leaves)
