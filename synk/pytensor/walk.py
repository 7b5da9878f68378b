"""Walk: what expressions of PyTensor are made of, and how long they are."""

from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.rewriting.utils import rewrite_graph
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


def lengths_of(expressions: Sequence[Any]) -> list[list[Variable]]:
    """The shape of each, by the shapes of inputs as far as that goes."""
    in_order = iter(simplified([each.shape[i] for each in expressions for i in range(each.type.ndim)]))
    return [[next(in_order) for _ in range(each.type.ndim)] for each in expressions]


def simplified(scalars: list[Any]) -> list[Variable]:
    """The same, without what only asks for shapes."""
    found: Any = rewrite_graph(scalars, include=("ShapeOpt", "canonicalize")) if scalars else []
    return found


def is_of_rows(length: Variable, rows: Set[Variable]) -> bool:
    """Does the length depend on how many rows there are?"""
    left = [length]
    seen: set[Variable] = set()
    while left:
        variable = left.pop()
        if variable in rows:
            return True
        node = variable.owner
        is_seen = variable in seen
        seen.add(variable)
        if is_seen or node is None or (isinstance(node.op, Shape_i) and node.inputs[0] in rows and node.op.i > 0):
            continue
        left += node.inputs
    return False


def is_known(length: Variable) -> bool:
    """Is it said by lengths of inputs alone? Ops that do not tell their shapes leave others."""
    return not any(isinstance(node.op, Shape | Shape_i) and node.inputs[0].owner for node in nodes([length]))


def called(expression: Variable) -> str:
    """What messages call it."""
    return expression.name or f"{expression.owner.op if expression.owner else expression}"
