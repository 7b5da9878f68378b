"""Cuts: where a graph of PyTensor parts into what replicas compute of their rows, and what follows on the combined."""

from collections.abc import Sequence, Set
from typing import Any, NamedTuple

from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.replace import clone_replace
from pytensor.graph.rewriting.basic import MergeOptimizer
from pytensor.tensor.random.op import RandomVariable
from pytensor.tensor.random.type import RandomType

from .seen_ops import seen_op
from .walk import called, inputs_of, nodes, reached

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
    for node in nodes(graph.expressions):
        if isinstance(node.op, RandomVariable) or any(isinstance(v.type, RandomType) for v in node.inputs):
            raise ValueError(
                f"{graph.name}: it draws random numbers ({node.op}), which would be the same on every replica. Make "
                f"them an input with one draw a row: jax.vmap(draw)(synk.row_keys(key, rows))."
            )


def cut(graph: Graph) -> Cuts:
    """Part the graph: what `combine` names, and outputs of rows, are combined; all that follows them comes after."""
    rows = set(graph.rows)
    combine = _once(graph)
    named = {output.expression for output in combine}
    for output in combine:
        others = {other for other in named - {output.expression} if reached(other, by_value=True) & rows}
        if found := reached(output.expression, others, by_value=True) & others:
            raise ValueError(
                f"{graph.name}: combine names {called(output.expression)}, and {called(found.pop())} of which it is "
                f"made. Each replica has the latter of its own rows alone when it computes the former. Name what "
                f"depends on rows first, and let the rest follow from it."
            )
    outputs = [o if o.has_op else o._replace(op=seen_op(o.expression, rows)) for o in graph.outputs]
    # What such an output gives is of all rows: outputs that say no op, and updates, may follow from it.
    whole = {output.expression for output in outputs if output.op in WHOLE}
    parts, places = list(combine), []
    for output in outputs:
        expression = output.expression
        stops = named if output.has_op else named | (whole - {expression})
        found, by_value = reached(expression, stops), reached(expression, stops, by_value=True)
        is_repeated = output.key in [part.key for part in combine]
        if expression in named and (is_repeated or not output.has_op):
            places.append([part.expression for part in combine].index(expression))
        elif output.has_op and by_value & named:
            raise ValueError(
                f"{graph.name}: its output {called(expression)} follows from what combine names, so it is of all rows "
                f"already. Leave its op out."
            )
        elif not output.has_op and not found & (rows - named):
            places.append(expression)
        elif not output.op:
            raise ValueError(_no_op(graph.name, expression, by_value & stops))
        else:
            same = [i for i, part in enumerate(parts) if part.key == output.key]
            places.append(same[0] if same else len(parts))
            parts += [] if same else [output]
    return _follow(graph, parts, places)


def _no_op(name: str, expression: Variable, whole: Set[Variable]) -> str:
    if whole:
        return (
            f"{name}: its output {called(expression)} depends on {called(next(iter(whole)))} of all rows, and on rows "
            f"beside, when each replica has the former of its own rows alone. Name in combine all that is needed of "
            f"all rows, and let the rest follow."
        )
    return (
        f"{name}: its output {called(expression)} is not seen to be a mean over rows, nor to have an entry for each. "
        f'Say how what replicas have of it combines: (expression, "mean"), or "sum", "max", "concat" and the like.'
    )


def _follow(graph: Graph, parts: list[Output], places: Sequence[int | Variable]) -> Cuts:
    """Stand-ins for what is combined, put into what follows."""
    combined = [part.expression.type(name=part.expression.name) for part in parts]
    stand_ins: dict[Variable, Variable] = {}
    ops: dict[Variable, list[Any]] = {}
    for i, (part, value) in enumerate(zip(parts, combined, strict=True)):
        if i < len(graph.combine) or part.op in WHOLE:
            stand_ins.setdefault(part.expression, value)
            ops.setdefault(part.expression, []).append(part.op)
    after = [place for place in places if isinstance(place, Variable)] + [new for _, new in graph.updates]
    for expression in after:
        for stop in reached(expression, stand_ins.keys()) & stand_ins.keys():
            if len(ops[stop]) > 1:
                raise ValueError(
                    f"{graph.name}: {called(expression)} follows from {called(stop)}, which is combined as "
                    f"{' and '.join(map(repr, ops[stop]))}. Name one of them in combine, and no other as an output."
                )
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
                f"{graph.name}: combine names {called(output.expression)} twice, as {before.op!r} and {output.op!r}."
            )
    return list(found.values())


def _names(variables: Set[Variable]) -> str:
    return ", ".join(sorted(map(str, variables)))
