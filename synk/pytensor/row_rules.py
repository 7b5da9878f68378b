"""Row rules: what each of PyTensor's ops makes of rows. Ops that no rule is about may do anything with them."""

from collections.abc import Sequence
from functools import singledispatch
from typing import Any

from pytensor.compile.ops import ViewOp
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.raise_op import CheckAndRaise
from pytensor.scalar.basic import Add, Cast, Identity, Mul, Neg, Second, Sub, TrueDiv
from pytensor.tensor.basic import Alloc, AllocEmpty, ARange, Join, MakeVector, ScalarFromTensor, TensorFromScalar
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.extra_ops import CumOp
from pytensor.tensor.math import Argmax, Dot, Prod, Sum
from pytensor.tensor.shape import Reshape, Shape, Shape_i, SpecifyShape
from pytensor.tensor.sort import ArgSortOp, SortOp
from pytensor.tensor.special import LogSoftmax, Softmax

from .facts import (
    FREE,
    MEAN,
    MIXED,
    Count,
    Fact,
    Lengths,
    Numbers,
    Rows,
    Total,
    lengths_of,
    product,
    shaped,
    side_by_side,
    vector,
)

Facts = Sequence[Fact]
NUMBERS = ("int32", "int64", "uint32", "uint64", "float32", "float64")  # that hold how many rows there are


@singledispatch
def rule(op: Any, node: Apply, given: Facts) -> Fact | list[Fact]:
    """What is known of the outputs of a node, by what is known of its inputs: a fact of each, or one of all."""
    return MIXED


@rule.register(CheckAndRaise)
@rule.register(SpecifyShape)
@rule.register(TensorFromScalar)
@rule.register(ScalarFromTensor)
@rule.register(ViewOp)
def _same(op: Any, node: Apply, given: Facts) -> Fact:
    return given[0]


@rule.register
def _elemwise(op: Elemwise, node: Apply, given: Facts) -> Fact:
    if isinstance(op.scalar_op, Second):  # of the first only the shape counts
        lengths = lengths_of(given[0], node.inputs[0].type.ndim)
        given = [shaped(lengths.each) if isinstance(lengths, Lengths) else FREE, given[1]]
        if given[0] == FREE and not isinstance(given[1], Rows):
            return given[1]
    if any(isinstance(fact, Rows) for fact in given):
        return side_by_side(zip(given, [each.type.broadcastable for each in node.inputs], strict=True))
    return _arithmetic(op.scalar_op, node.outputs[0].type.dtype, given)


def _arithmetic(op: Any, dtype: str, given: Facts) -> Fact:
    """Of sums over rows, and of how many there are."""
    first = given[0]
    if isinstance(op, Cast | Neg | Identity):
        if isinstance(first, Total):
            return first if not isinstance(op, Cast) or dtype.startswith(("float", "complex")) else MIXED
        if isinstance(first, Count | Lengths) and not isinstance(op, Neg):
            return first if dtype in NUMBERS else MIXED
        return product(given) if isinstance(first, Count) else MIXED
    if isinstance(op, Add | Sub):
        is_mean = all(fact in (FREE, MEAN) for fact in given)
        return MEAN if is_mean else Total(0) if all(fact == Total(0) for fact in given) else MIXED
    if isinstance(op, Mul):
        return product(given)
    return product(given[:1], given[1:]) if isinstance(op, TrueDiv) else MIXED


@rule.register
def _reduced(op: CAReduce, node: Apply, given: Facts) -> Fact:
    found = _without(given[0], op.axis, node.inputs[0].type.ndim)
    if isinstance(found, Rows):
        return found
    if isinstance(op, Sum):
        return Total(0) if isinstance(given[0], Rows) else given[0] if isinstance(given[0], Total) else MIXED
    return product(given[0].each) if isinstance(op, Prod) and isinstance(given[0], Lengths) else MIXED


@rule.register
def _argmax(op: Argmax, node: Apply, given: Facts) -> Fact:
    return _without(given[0], op.axis, node.inputs[0].type.ndim)


def _without(fact: Fact, axes: Sequence[int] | None, ndim: int) -> Fact:
    """Of what is left of rows when these axes are gone, or all."""
    gone = range(ndim) if axes is None else [axis % ndim for axis in axes]
    if not isinstance(fact, Rows) or fact.axis in gone:
        return MIXED
    return Rows(fact.axis - sum(axis < fact.axis for axis in gone), fact.is_one_each)


@rule.register(Softmax)
@rule.register(LogSoftmax)
@rule.register(CumOp)
@rule.register(SortOp)
@rule.register(ArgSortOp)
def _along(op: Any, node: Apply, given: Facts) -> Fact:
    """Entries are mixed along some axes; rows stay where they lie along another one."""
    axis = getattr(op, "axis", node.inputs[-1])  # where earlier versions have it
    axis = axis.data if isinstance(axis, Constant) else axis
    if axis is None or isinstance(axis, Variable):
        return MIXED
    mixed = [int(each) % node.inputs[0].type.ndim for each in (axis if isinstance(axis, tuple) else (axis,))]
    return given[0] if isinstance(given[0], Rows) and given[0].axis not in mixed else MIXED


@rule.register
def _transposed(op: DimShuffle, node: Apply, given: Facts) -> Fact:
    (fact,) = given
    if isinstance(fact, Rows) and fact.axis in op.new_order:
        return Rows(op.new_order.index(fact.axis), fact.is_one_each)
    return fact if isinstance(fact, Total | Count) else MIXED


@rule.register
def _dot(op: Dot, node: Apply, given: Facts) -> Fact:
    return _contracted(given, [each.type.ndim for each in node.inputs], 0)


def _contracted(given: Facts, ndims: Sequence[int], batch: int) -> Fact:
    """Of a product of vectors or matrices, which lie behind so many axes of batches."""
    (left, right), (rows, columns) = given, [ndim - batch for ndim in ndims]
    inner = batch + rows - 1, batch + max(columns - 2, 0)
    axes = [fact.axis if isinstance(fact, Rows) else None for fact in given]
    if axes == list(inner):
        return Total(0)
    if isinstance(left, Rows) and right == FREE and axes[0] != inner[0]:
        return left
    if isinstance(right, Rows) and left == FREE and axes[1] != inner[1]:
        return Rows(batch + rows - 1, right.is_one_each) if right.axis >= batch else MIXED
    return left if isinstance(left, Total) and right == FREE else MIXED


@rule.register
def _blockwise(op: Blockwise, node: Apply, given: Facts) -> Fact:
    batch = node.inputs[0].type.ndim - len(op.inputs_sig[0])
    if all(fact.axis < batch for fact in given if isinstance(fact, Rows)):
        return side_by_side(zip(given, [each.type.broadcastable[:batch] for each in node.inputs], strict=True))
    if isinstance(op.core_op, Dot):
        return _contracted(given, [each.type.ndim for each in node.inputs], batch)
    return MIXED


@rule.register
def _shape(op: Shape, node: Apply, given: Facts) -> Fact:
    return lengths_of(given[0], node.inputs[0].type.ndim)


@rule.register
def _length(op: Shape_i, node: Apply, given: Facts) -> Fact:
    found = lengths_of(given[0], node.inputs[0].type.ndim)
    return found.each[op.i] if isinstance(found, Lengths) else found


@rule.register
def _vector(op: MakeVector, node: Apply, given: Facts) -> Fact:
    return vector(given)


@rule.register
def _filled(op: Alloc, node: Apply, given: Facts) -> Fact:
    value, shape = given[0], shaped(given[1:])
    if shape == FREE:
        return value if isinstance(value, Total | Count) else MIXED
    return side_by_side([(shape, [False] * (len(given) - 1)), (value, node.inputs[0].type.broadcastable)])


@rule.register
def _empty(op: AllocEmpty, node: Apply, given: Facts) -> Fact:
    return shaped(given)


@rule.register
def _counted_up(op: ARange, node: Apply, given: Facts) -> Fact:
    start, _, step = node.inputs
    is_plain = all(isinstance(v, Constant) and v.data == value for v, value in ((start, 0), (step, 1)))
    return Numbers() if is_plain and given[1] == Count(1, True) else MIXED


@rule.register
def _reshaped(op: Reshape, node: Apply, given: Facts) -> Fact:
    """Rows on the first axis stay in order where the new first axis is as many times as long as there are rows."""
    fact, shape = given
    if isinstance(fact, Total) and shape == FREE:
        return fact
    if not isinstance(fact, Rows) or fact.axis != 0:
        return MIXED
    if shape == FREE:
        return Rows(0) if _is_the_rest(node.inputs[1]) else MIXED
    found = shaped(shape.each) if isinstance(shape, Lengths) else MIXED
    return found if isinstance(found, Rows) and found.axis == 0 else MIXED


def _is_the_rest(shape: Variable) -> bool:
    """Is the first length -1?"""
    node = shape.owner
    first = node.inputs[0] if node is not None and isinstance(node.op, MakeVector) else shape
    return isinstance(first, Constant) and first.data.size > 0 and int(first.data.ravel()[0]) == -1


@rule.register
def _joined(op: Join, node: Apply, given: Facts) -> Fact:
    axis = getattr(op, "axis", node.inputs[0])  # earlier versions have it before the arrays
    arrays = given[axis is node.inputs[0] :]
    axis = axis.data if isinstance(axis, Constant) else axis
    if all(fact in (FREE, MEAN) for fact in given):
        return MEAN
    places = {fact.axis if isinstance(fact, Rows) else None for fact in arrays}
    is_apart = not isinstance(axis, Variable) and places.isdisjoint({int(axis) % node.outputs[0].type.ndim, None})
    return arrays[0] if is_apart and len(places) == 1 else MIXED
