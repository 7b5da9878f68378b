"""Seen ops: how an output that says no op combines, where its graph shows that."""

from collections.abc import Iterator, Sequence, Set
from typing import Any

from pytensor.graph.basic import Apply, Constant, Variable, equal_computations
from pytensor.link.jax.ops import JAXOp
from pytensor.raise_op import CheckAndRaise
from pytensor.scalar.basic import Add, Cast, Mul, Neg, Sub, TrueDiv
from pytensor.scan.op import Scan
from pytensor.tensor import subtensor
from pytensor.tensor.basic import Alloc, AllocEmpty, ARange, Join, MakeVector, ScalarFromTensor, TensorFromScalar
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.extra_ops import CumOp
from pytensor.tensor.math import Argmax, Dot, Prod, Sum
from pytensor.tensor.shape import Reshape, Shape_i, SpecifyShape
from pytensor.tensor.sort import ArgSortOp, SortOp
from pytensor.tensor.special import LogSoftmax, Softmax
from pytensor.tensor.subtensor import IncSubtensor, Subtensor
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
    lengths = [length for length in lengths_of(node.inputs)[0] if is_of_rows(length, rows)]
    return len(lengths) == 1 and _is_multiple(counts[0], lengths[0], rows) and _keeps_rows(node.inputs[0], rows)


def _is_multiple(count: Variable, length: Variable, rows: Set[Variable]) -> bool:
    """Is it how many rows there are, which this length says, times what no row changes?"""
    node = count.owner
    if node is None or equal_computations([count], [length]):
        return node is not None
    if isinstance(node.op, Shape_i):
        return node.op.i == 0 and node.inputs[0] in rows
    is_below = isinstance(getattr(node.op, "scalar_op", None), TrueDiv) and is_of_rows(node.inputs[1], rows)
    changed = [factor for factor in map(_entry, _factors(node)) if is_of_rows(factor, rows)]
    return len(changed) == 1 and not is_below and _is_multiple(changed[0], length, rows)


def _factors(node: Apply) -> Sequence[Variable]:
    """Of which numbers it is the product, or the quotient; none of what is neither."""
    op: Any = node.op
    if isinstance(op, Elemwise):
        return node.inputs if isinstance(op.scalar_op, Cast | Mul | TrueDiv) else []
    if isinstance(op, Prod):
        return _made_of(node.inputs[0])
    is_same = isinstance(op, DimShuffle | TensorFromScalar | ScalarFromTensor)
    return node.inputs if is_same or (isinstance(op, MakeVector) and len(node.inputs) == 1) else []


def _entry(variable: Variable) -> Variable:
    """Where it is the length of one axis, picked from those of all: that length."""
    node = variable.owner
    if node is None or not isinstance(node.op, Subtensor) or len(node.inputs) != 2:
        return variable
    lengths, index = _made_of(node.inputs[0]), node.inputs[1]
    return lengths[index.data] if lengths and isinstance(index, Constant) else variable


def _made_of(vector: Variable) -> Sequence[Variable]:
    """The numbers that it holds, where it is made of some."""
    node = vector.owner
    if node is not None and isinstance(node.op, Elemwise) and isinstance(node.op.scalar_op, Cast):
        node = node.inputs[0].owner
    return node.inputs if node is not None and isinstance(node.op, MakeVector) else []


def _keeps_rows(expression: Variable, rows: Set[Variable]) -> bool:
    """Does all of rows that it is made of have an axis of them, in their order, and is nothing made of how many there
    are?"""
    made = [v for v in ancestors(expression, _but_picked) if v.owner and reached(v) & rows]
    if any(isinstance(v.owner.op, ARange) for v in made):
        return False
    made = [v for v in made if isinstance(v.type, TensorType) and reached(v, by_value=True) & rows]
    axes = [_axes_of_rows(lengths, rows) for lengths in lengths_of(made)]
    if any(not each or sum(each.values()) > 1 for each in axes):  # none, or rows beside rows
        return False
    before = lengths_of([_first_array(v.owner) for v in made])
    pairs = zip(made, before, axes, strict=True)
    if not all(_keeps_order(v.owner, _axes_of_rows(lengths, rows), after) for v, lengths, after in pairs):
        return False
    loops = [v.owner.inputs[0] for v in made if isinstance(v.owner.op, Scan)]  # how many steps each takes
    if any(_may_mix_inside(v.owner.op) for v in made if isinstance(v.owner.op, Scan)):
        return False
    numbers = [number for v in made for number in _counts(v.owner, rows)]
    return not any(is_of_rows(number, rows) for number in simplified([*loops, *numbers]))


def _axes_of_rows(lengths: Sequence[Variable], rows: Set[Variable]) -> dict[int, bool]:
    """The axes that are as long as there are rows, or may be; and which of these are known to be."""
    return {i: is_known(length) for i, length in enumerate(lengths) if is_of_rows(length, rows)}


def _keeps_order(node: Apply, before: dict[int, bool], after: dict[int, bool]) -> bool:
    """Do rows stay in order, and apart? `before` and `after` are the axes of them of its first array and its result.

    Ops that are not listed may do anything, but for those of JAX's functions, which their user has made for rows.
    """
    op = node.op
    axes = {i for i, is_sure in before.items() if i == 0 or is_sure}
    if isinstance(
        op, Elemwise | DimShuffle | CAReduce | Dot | Argmax | Alloc | SpecifyShape | CheckAndRaise | Scan | JAXOp
    ):
        return True
    if isinstance(op, Blockwise):
        inner = len(op.inputs_sig[0])
        return isinstance(op.core_op, Dot) or max(axes, default=0) < node.inputs[0].type.ndim - inner
    if isinstance(op, PICKS):
        return 0 not in axes or _is_count_up(node.inputs[1].owner)
    if isinstance(op, Subtensor | IncSubtensor):
        return not any(entry != slice(None) for i, entry in enumerate(op.idx_list) if i in axes)
    if isinstance(op, Reshape):
        return 0 in before and 0 in after
    mixed = _mixed_axes(node)
    return mixed is not None and not axes & mixed


def _mixed_axes(node: Apply) -> set[int] | None:
    """Along which axes of its first array it mixes entries; None where that is not known, or all."""
    op: Any = node.op
    if isinstance(op, Softmax | LogSoftmax):
        return None if op.axis is None else set(op.axis)
    if isinstance(op, CumOp):
        return None if op.axis is None else {op.axis}
    if not isinstance(op, Join | SortOp | ArgSortOp):
        return None
    axis: Any = getattr(op, "axis", node.inputs[0 if isinstance(op, Join) else -1])  # where earlier versions have it
    if isinstance(axis, Variable) and not isinstance(axis, Constant):
        return None
    return {int(axis.data if isinstance(axis, Constant) else axis) % _first_array(node).type.ndim}


def _first_array(node: Apply) -> Any:
    """The first of its inputs that is no axis: earlier versions of `join` have that before the arrays."""
    return node.inputs[isinstance(node.op, Join) and not hasattr(node.op, "axis")]


def _is_count_up(node: Apply | None) -> bool:
    """Is it `arange` from 0, one by one?"""
    if node is None or not isinstance(node.op, ARange):
        return False
    start, _, step = node.inputs
    return all(isinstance(v, Constant) and v.data == value for v, value in ((start, 0), (step, 1)))


def _counts(node: Apply, rows: Set[Variable]) -> Iterator[Variable]:
    """Numbers among the values that go into it that are made of shapes alone; they may be how many rows there are."""
    if not isinstance(node.op, Elemwise | Dot | Blockwise | Scan):
        return
    left: list[Any] = [v for v in value_inputs(node) if not reached(v, by_value=True) & rows]
    while left:
        variable = left.pop()
        if not reached(variable) & rows:
            continue
        owner, op = variable.owner, variable.owner.op  # it is no input, which it would depend on by value
        if variable.type.ndim == 0:
            yield variable
        elif isinstance(op, Alloc | DimShuffle):
            left.append(owner.inputs[0])
        elif isinstance(op, Elemwise):
            left += value_inputs(owner)
        elif isinstance(op, IncSubtensor):
            left += owner.inputs[:2]
        elif not isinstance(op, AllocEmpty):
            yield variable.sum()


def _may_mix_inside(op: Scan) -> bool:
    """May a step of it, which sees rows on axis 0?"""
    at_rows = {0: True}
    for node in op.fgraph.apply_nodes:
        if isinstance(node.op, CAReduce) and (node.op.axis is None or 0 in node.op.axis):
            return True
        if not _keeps_order(node, at_rows, at_rows):
            return True
    return False


def _but_picked(node: Apply) -> list[Variable]:
    """The inputs of a node by value; `arange` as an index of rows does not count."""
    is_pick = isinstance(node.op, PICKS)
    return [v for v in value_inputs(node) if not (is_pick and v.owner and isinstance(v.owner.op, ARange))]
