"""Seen ops: how an output that says no op combines, where its graph shows that."""

from collections.abc import Set

from pytensor.compile.builders import OpFromGraph
from pytensor.graph.basic import Apply, Variable
from pytensor.scalar.basic import Add, Cast, Mul, Neg, Sub, TrueDiv
from pytensor.scan.op import Scan
from pytensor.tensor import subtensor
from pytensor.tensor.basic import ARange
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.extra_ops import CumOp
from pytensor.tensor.math import Sum
from pytensor.tensor.sort import ArgSortOp, SortOp
from pytensor.tensor.special import LogSoftmax, Softmax
from pytensor.tensor.subtensor import Subtensor
from pytensor.tensor.type import TensorType

from .walk import ancestors, is_known, is_of_rows, lengths_of, reached, simplified, value_inputs

# What picks entries by arrays of indexes: one class, or in earlier versions a second one of one index.
PICKS = tuple(
    getattr(subtensor, name) for name in ("AdvancedSubtensor", "AdvancedSubtensor1") if hasattr(subtensor, name)
)


def seen_op(expression: Variable, rows: Set[Variable]) -> str | None:
    """Of an entry a row "concat", of a mean over rows "mean"; None of what is seen to be neither."""
    by_rows = [is_of_rows(length, rows) for length in lengths_of([expression])[0]]
    if by_rows and by_rows[0] and not any(by_rows[1:]) and _keeps_rows(expression, rows):
        return "concat"
    return "mean" if not any(by_rows) and _is_mean(expression, rows) else None


def _is_mean(expression: Variable, rows: Set[Variable]) -> bool:
    """Is it a sum of means over rows, scaled by what no row changes, and of terms that no row changes?"""
    if not reached(expression) & rows:
        return True
    node = expression.owner
    if node is None or not expression.type.dtype.startswith(("float", "complex")):
        return False
    if isinstance(node.op, DimShuffle | Sum):  # of a part's mean, over other axes
        return _is_mean(node.inputs[0], rows)
    op = node.op.scalar_op if isinstance(node.op, Elemwise) else None
    if isinstance(op, Add | Sub | Neg | Cast):
        return all(_is_mean(each, rows) for each in node.inputs)
    if isinstance(op, Mul):
        changed = [each for each in node.inputs if reached(each) & rows]
        return len(changed) == 1 and _is_mean(changed[0], rows)
    return isinstance(op, TrueDiv) and _is_quotient(expression, rows)


def _is_quotient(expression: Variable, rows: Set[Variable]) -> bool:
    """Is it a sum over rows divided by how many there are, or a mean by what no row changes?"""
    divisors: list[Variable] = []
    total = expression
    while (node := total.owner) is not None:
        if isinstance(node.op, Elemwise) and isinstance(node.op.scalar_op, TrueDiv):
            divisors.append(node.inputs[1])
        elif not isinstance(node.op, DimShuffle):
            break
        total = node.inputs[0]
    if any(reached(divisor, by_value=True) & rows for divisor in divisors):
        return False
    counts = [divisor for divisor in simplified(divisors) if is_of_rows(divisor, rows)]
    if not counts:
        return _is_mean(total, rows)
    if len(counts) > 1 or node is None or not isinstance(node.op, Sum):
        return False
    (lengths,) = lengths_of(node.inputs)
    return sum(is_of_rows(length, rows) for length in lengths) == 1 and _keeps_rows(node.inputs[0], rows)


def _keeps_rows(expression: Variable, rows: Set[Variable]) -> bool:
    """Does all of rows that it is made of have an axis of them, and does no op that may mix them make any of it?"""
    made = [v for v in ancestors(expression, _but_picked) if v.owner and reached(v) & rows]
    if any(isinstance(v.owner.op, ARange) for v in made):
        return False
    made = [v for v in made if isinstance(v.type, TensorType) and reached(v, by_value=True) & rows]
    for lengths in lengths_of(made):
        axes = sum(is_of_rows(length, rows) for length in lengths)
        if axes == 0 or (axes > 1 and all(is_known(length) for length in lengths)):  # none, or rows beside rows
            return False
    loops = simplified([v.owner.inputs[0] for v in made if isinstance(v.owner.op, Scan)])  # how many steps each takes
    mixed = lengths_of([v.owner.inputs[0] for v in made if _may_mix(v.owner)])
    if any(_may_mix_inside(v.owner.op) for v in made if isinstance(v.owner.op, Scan)):
        return False
    return not any(is_of_rows(length, rows) for length in (*loops, *[lengths[0] for lengths in mixed if lengths]))


def _may_mix(node: Apply) -> bool:
    """May it mix entries along axis 0 of its first input?"""
    op = node.op
    if isinstance(op, PICKS):
        index = node.inputs[1].owner
        return index is None or not isinstance(index.op, ARange)
    if isinstance(op, Softmax | LogSoftmax):
        return op.axis is None or 0 in op.axis
    if isinstance(op, Subtensor):
        return bool(op.idx_list) and op.idx_list[0] != slice(None)
    return isinstance(op, SortOp | ArgSortOp | CumOp | OpFromGraph)


def _may_mix_inside(op: Scan) -> bool:
    """May a step of it, which sees rows on axis 0?"""
    steps = list(op.fgraph.apply_nodes)
    reductions = [node.op.axis for node in steps if isinstance(node.op, CAReduce)]
    return any(axes is None or 0 in axes for axes in reductions) or any(_may_mix(node) for node in steps)


def _but_picked(node: Apply) -> list[Variable]:
    """The inputs of a node by value; `arange` as an index of rows does not count."""
    is_pick = isinstance(node.op, PICKS)
    return [v for v in value_inputs(node) if not (is_pick and v.owner and isinstance(v.owner.op, ARange))]
