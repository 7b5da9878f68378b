"""Walk: what expressions of PyTensor are made of."""

from collections.abc import Callable, Iterator, Sequence, Set

from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.scalar.basic import Second
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.shape import Shape, Shape_i


def ancestors(
    expression: Variable, follow: Callable[[Apply], Sequence[Variable]], stops: Set[Variable] = frozenset()
) -> list[Variable]:
    """The expression and all that it is made of, by those inputs of a node that `follow` gives, past no `stops`; in an
    order that is the same in every process."""
    seen: dict[Variable, None] = {}
    left = [expression]
    while left:
        variable = left.pop()
        if variable not in seen:
            seen[variable] = None
            left += follow(variable.owner) if variable.owner is not None and variable not in stops else []
    return list(seen)


def reached(expression: Variable, stops: Set[Variable] = frozenset(), by_value: bool = False) -> set[Variable]:
    """Inputs and `stops` on which an expression depends, past none of these; by value: what only gives a shape does
    not count."""
    found = ancestors(expression, value_inputs if by_value else lambda node: node.inputs, stops)
    return {variable for variable in found if variable in stops or variable.owner is None}


def value_inputs(node: Apply) -> Sequence[Variable]:
    """The inputs of which more than the shape counts: `pt.grad(cost)` begins with ones that are shaped as `cost`."""
    if isinstance(node.op, Shape | Shape_i):
        return []
    is_fill = isinstance(node.op, Elemwise) and isinstance(node.op.scalar_op, Second)
    return node.inputs[1:] if is_fill else node.inputs


def inputs_of(expressions: Sequence[Variable]) -> list[Variable]:
    """What the expressions are made of in the end, constants left out."""
    found: dict[Variable, None] = {}
    for expression in expressions:
        found |= dict.fromkeys(ancestors(expression, lambda node: node.inputs))
    return [variable for variable in found if variable.owner is None and not isinstance(variable, Constant)]


def nodes(expressions: Sequence[Variable]) -> Iterator[Apply]:
    """All nodes, those of inner graphs included."""
    seen: set[Apply] = set()
    left = list(expressions)
    while left:
        node = left.pop().owner
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            left += node.inputs
            left += getattr(getattr(node.op, "fgraph", None), "outputs", [])


def called(expression: Variable) -> str:
    """What messages call it."""
    return expression.name or f"{expression.owner.op if expression.owner else expression}"
