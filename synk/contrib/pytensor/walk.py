"""Walk: find what expressions of PyTensor are made of."""

from collections.abc import Iterator, Sequence, Set

from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.op import HasInnerGraph
from pytensor.graph.traversal import apply_ancestors, graph_inputs, walk
from pytensor.scalar.basic import Second
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.shape import Shape, Shape_i


def inputs_of(expressions: Sequence[Variable]) -> list[Variable]:
    """List the variables without an owner of which the expressions are made, constants left out."""
    roots = dict.fromkeys(graph_inputs(expressions))
    return [variable for variable in roots if not isinstance(variable, Constant)]


def reached(expression: Variable, stops: Set[Variable] = frozenset(), by_value: bool = False) -> set[Variable]:
    """Collect the inputs and `stops` on which an expression depends, without looking past `stops`."""

    def expand(variable: Variable) -> Sequence[Variable]:
        if variable.owner is None or variable in stops:
            return []
        # By value, inputs that only give a shape do not count: shapes are known before any rows are combined.
        return _value_inputs(variable.owner) if by_value else variable.owner.inputs

    visited = walk([expression], expand, bfs=False)
    return {variable for variable in visited if variable in stops or variable.owner is None}


def _value_inputs(node: Apply) -> Sequence[Variable]:
    """Select the inputs of a node of which more than the shape counts."""
    if isinstance(node.op, Shape | Shape_i):
        return []
    # `pt.grad(cost)` begins with ones in the shape of `cost`, made by `Second(cost, 1)`.
    is_fill = isinstance(node.op, Elemwise) and isinstance(node.op.scalar_op, Second)
    return node.inputs[1:] if is_fill else node.inputs


def nodes(expressions: Sequence[Variable]) -> Iterator[Apply]:
    """Iterate over all nodes, those of inner graphs (scans, `OpFromGraph`) included."""
    for node in apply_ancestors(expressions):
        yield node
        if isinstance(node.op, HasInnerGraph):
            yield from nodes(node.op.inner_outputs)


def described(expression: Variable) -> str:
    return expression.name or f"{expression.owner.op if expression.owner else expression}"
