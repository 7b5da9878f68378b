"""Cuts: where a graph of PyTensor parts into what replicas compute of their rows, and what follows on the combined."""

from collections.abc import Iterator, Sequence, Set
from typing import Any, NamedTuple

from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.replace import clone_replace
from pytensor.graph.rewriting.basic import MergeOptimizer
from pytensor.graph.rewriting.utils import rewrite_graph
from pytensor.scalar.basic import Second
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.random.op import RandomVariable
from pytensor.tensor.random.type import RandomType
from pytensor.tensor.shape import Shape, Shape_i

# Ops after which a value is that of all rows, and no longer than a part's, so that more may follow it.
WHOLE = ("sum", "mean", "avg", "max", "min", "prod", "any", "all")


class Output(NamedTuple):
    """An expression, how its parts combine, and by what weight; of an op that is left out, nothing is said yet."""

    expression: Variable
    op: Any = None
    weight: Variable | None = None
    has_op: bool = True

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes two the same."""
        return self.expression, self.op, self.weight


class Cuts(NamedTuple):
    """A graph in two: what each replica computes of its rows, and what follows on the combined values of that."""

    parts: Sequence[Output]
    combined: Sequence[Variable]  # what stands for the value of each part, once that is combined
    outputs: Sequence[int | Variable]  # which part an output is; or what follows
    updates: Sequence[tuple[SharedVariable, Variable]]  # of what is combined


class Graph(NamedTuple):
    """A function of PyTensor as its user gave it: clones, in which equal expressions are one."""

    name: str
    rows: Sequence[Variable]  # the inputs that are dealt out
    broadcast: Sequence[Variable]  # the other ones
    combine: Sequence[Output]
    outputs: Sequence[Output]
    updates: Sequence[tuple[SharedVariable, Variable]]

    @property
    def expressions(self) -> list[Variable]:
        """All of them, weights included."""
        named = [*self.combine, *self.outputs]
        weights = [output.weight for output in named if output.weight is not None]
        return [*[output.expression for output in named], *weights, *[new for _, new in self.updates]]

    def of(self, expressions: Sequence[Variable]) -> "Graph":
        """The same of other expressions, in the order of `expressions`."""
        given = iter(expressions)
        combine = [output._replace(expression=next(given)) for output in self.combine]
        outputs = [output._replace(expression=next(given)) for output in self.outputs]
        combine, outputs = (
            [output if output.weight is None else output._replace(weight=next(given)) for output in each]
            for each in (combine, outputs)
        )
        return self._replace(combine=combine, outputs=outputs, updates=[(v, next(given)) for v, _ in self.updates])


def merged(graph: Graph) -> Graph:
    """The same where equal expressions are one: a gradient that is taken twice is cut in both places."""
    shared = [v for v in inputs_of(graph.expressions) if isinstance(v, SharedVariable)]
    whole = FunctionGraph([*graph.rows, *graph.broadcast, *shared], graph.expressions, clone=False)
    MergeOptimizer().rewrite(whole)
    return graph.of(whole.outputs)


def check_inputs(graph: Graph) -> None:
    """Refuse inputs that are not used or are missing, and PyTensor's random numbers."""
    inputs = {*graph.rows, *graph.broadcast}
    used = set(inputs_of(graph.expressions))
    if unused := [v for v in (*graph.rows, *graph.broadcast) if v not in used]:
        raise ValueError(f"{graph.name}: nothing that it computes depends on its input {unused[0]}. Leave it out.")
    missing = [v for v in used if not isinstance(v, Constant | SharedVariable) and v not in inputs]
    if missing:
        raise ValueError(f"{graph.name}: what it computes depends on {missing[0]}, which is none of its inputs.")
    for node in _nodes(graph.expressions):
        if isinstance(node.op, RandomVariable) or any(isinstance(v.type, RandomType) for v in node.inputs):
            raise ValueError(
                f"{graph.name}: it draws random numbers ({node.op}), which would be the same on every replica. Make "
                f"them an input with one draw a row: jax.vmap(draw)(synk.row_keys(key, rows))."
            )


def cut(graph: Graph) -> Cuts:
    """Part the graph: what `combine` names, and outputs of rows, are combined; all that follows them comes after."""
    rows = set(graph.rows)
    holds_rows = not rows  # variables may, which are scattered then; an op says so
    combine = _once(graph)
    named = {output.expression for output in combine}
    for output in combine:
        others = named - {output.expression}
        if found := _reached(output.expression, others, by_value=True) & others:
            raise ValueError(
                f"{graph.name}: combine names {_called(output.expression)}, and {_called(found.pop())} of which it is "
                f"made. Each replica has the latter of its own rows alone when it computes the former. Name what "
                f"depends on rows first, and let the rest follow from it."
            )
    outputs = [_with_op(output, rows, graph.name) for output in graph.outputs]
    # An output of a whole is a place to cut too, for what follows from it.
    whole = [o for o in outputs if o.op in WHOLE and o.weight is None and not _reached(o.expression, named) & named]
    parts, places = list(combine), []
    for output in outputs:
        stops = named | {o.expression for o in whole if o.expression is not output.expression}
        found = _reached(output.expression, stops)
        if output.expression in named:
            places.append([o.expression for o in parts].index(output.expression))
        elif not found & rows and not (holds_rows and output.has_op):
            places.append(output.expression)
        elif found & named:
            raise ValueError(
                f"{graph.name}: its output {_called(output.expression)} depends on what combine names, and on the "
                f"rows of {_names(found & rows)} beside. Name in combine all that it needs of the rows."
            )
        else:
            same = [i for i, part in enumerate(parts) if part.key == output.key]
            places.append(same[0] if same else len(parts))
            parts += [] if same else [output]
    return _follow(graph, parts, places)


def _follow(graph: Graph, parts: list[Output], places: Sequence[int | Variable]) -> Cuts:
    """Stand-ins for what is combined, put into what follows."""
    combined = [part.expression.type(name=part.expression.name) for part in parts]
    ends = [part.op in WHOLE for part in parts[len(graph.combine) :]]
    stops = [True] * (len(parts) - len(ends)) + ends
    stand_ins = {part.expression: value for part, value, stop in zip(parts, combined, stops, strict=True) if stop}
    after = [place for place in places if isinstance(place, Variable)] + [new for _, new in graph.updates]
    following = iter(clone_replace(after, replace=stand_ins) if after else [])
    outputs = [next(following) if isinstance(place, Variable) else place for place in places]
    updates = [(variable, next(following)) for variable, _ in graph.updates]
    for variable, new in updates:
        if found := set(inputs_of([new])) & set(graph.rows):
            raise ValueError(
                f"{graph.name}: the update of {variable} depends on the rows of {_names(found)} by another way than "
                f'combine. Name there what is combined over rows, e.g. combine=[(g, "mean") for g in gradients].'
            )
    return Cuts(parts, combined, outputs, updates)


def _once(graph: Graph) -> list[Output]:
    """What `combine` names, each once."""
    found: dict[Variable, Output] = {}
    for output in graph.combine:
        before = found.setdefault(output.expression, output)
        if before.key != output.key:
            raise ValueError(
                f"{graph.name}: combine names {_called(output.expression)} twice, as {before.op!r} and {output.op!r}."
            )
    return list(found.values())


def _with_op(output: Output, rows: Set[Variable], name: str) -> Output:
    """An output whose op was left out: "concat" of an entry a row, "mean" of a shape that does not depend on rows."""
    if output.has_op:
        return output
    by_rows = [_is_of_rows(length, rows) for length in _lengths(output.expression)]
    if not any(by_rows):
        return output._replace(op="mean")
    if by_rows[0] and not any(by_rows[1:]):
        return output._replace(op="concat")
    raise ValueError(
        f"{name}: the shape of its output {_called(output.expression)} depends on the number of rows by another way "
        f'than an entry for each. Say how parts of it combine: (expression, "sum"), or the like.'
    )


def _lengths(expression: Any) -> Sequence[Variable]:
    """Its shape, by the shapes of inputs as far as that goes."""
    lengths: Any = [expression.shape[i] for i in range(expression.type.ndim)]
    found: Any = rewrite_graph(lengths, include=("ShapeOpt", "canonicalize")) if lengths else []
    return found


def _is_of_rows(length: Variable, rows: Set[Variable]) -> bool:
    """Does the length depend on how many rows there are?"""
    left = [length]
    while left:
        variable = left.pop()
        if variable in rows:
            return True
        node = variable.owner
        if node is None or (isinstance(node.op, Shape_i) and node.inputs[0] in rows and node.op.i > 0):
            continue
        left += node.inputs
    return False


def _reached(expression: Variable, stops: Set[Variable], by_value: bool = False) -> set[Variable]:
    """Inputs and `stops` on which an expression depends, past none of these; by value: what only gives a shape does
    not count."""
    found: set[Variable] = set()
    seen: set[Variable] = set()
    left = [expression]
    while left:
        variable = left.pop()
        if variable in seen:
            continue
        seen.add(variable)
        if variable in stops or variable.owner is None:
            found.add(variable)
        else:
            left += _value_inputs(variable.owner) if by_value else variable.owner.inputs
    return found


def _value_inputs(node: Apply) -> Sequence[Variable]:
    """The inputs of which more than the shape counts: `pt.grad(cost)` begins with ones that are shaped as `cost`."""
    if isinstance(node.op, Shape | Shape_i):
        return []
    is_fill = isinstance(node.op, Elemwise) and isinstance(node.op.scalar_op, Second)
    return node.inputs[1:] if is_fill else node.inputs


def _nodes(expressions: Sequence[Variable]) -> Iterator[Apply]:
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


def inputs_of(expressions: Sequence[Variable]) -> list[Variable]:
    """What the expressions are made of in the end, constants left out."""
    found: dict[Variable, None] = {}
    for expression in expressions:
        found |= dict.fromkeys(_reached(expression, set()))
    return [variable for variable in found if not isinstance(variable, Constant)]


def _names(variables: Set[Variable]) -> str:
    return ", ".join(sorted(map(str, variables)))


def _called(expression: Variable) -> str:
    return expression.name or f"{expression.owner.op if expression.owner else expression}"
