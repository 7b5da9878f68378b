"""Cuts: part a graph into expressions of a replica's rows, and expressions of their combined values."""

from collections import Counter
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Variable
from pytensor.graph.replace import clone_replace
from pytensor.tensor.random.op import RandomVariable
from pytensor.tensor.random.type import RandomType

from .walk import described, inputs_of, nodes, reached

# The combined value of these ops is that of all rows, and has the shape that each replica's value has. So expressions
# that are made of a replica's value can be computed of the combined value instead.
WHOLE = ("sum", "mean", "avg", "max", "min", "prod", "any", "all")

Updates = Sequence[tuple[SharedVariable, Variable]]


class Output(NamedTuple):
    """An expression and how its values on all replicas combine.

    Attributes:
      expression: the graph.
      op: an op of `synk.function`; None where the user named none.
      weight: a scalar expression, the weight of a replica's value under "mean"; None: its number of rows.
    """

    expression: Variable
    op: Any = None
    weight: Variable | None = None


class Cuts(NamedTuple):
    """A graph in two halves: the parts, which combine, and what follows from their combined values.

    Attributes:
      parts: expressions of a replica's rows, each with an op.
      combined: an input for the combined value of each part, which stands for the part in what follows.
      outputs: for each output of the user, the number of its part, or an expression of `combined`.
      updates: pairs of variable and new expression, of `combined`.
    """

    parts: Sequence[Output]
    combined: Sequence[Variable]
    outputs: Sequence[int | Variable]
    updates: Updates


def check_inputs(name: str, inputs: Sequence[Variable], expressions: Sequence[Variable]) -> None:
    """Refuse inputs that are unused or missing, and random numbers of PyTensor."""
    used = inputs_of(expressions)
    for variable in inputs:
        if variable not in used:
            raise ValueError(f"{name}: nothing that it computes depends on its input {variable}. Leave it out.")
    for variable in used:
        if not isinstance(variable, SharedVariable) and variable not in inputs:
            raise ValueError(f"{name}: what it computes depends on {variable}, which is none of its inputs.")
    for node in nodes(expressions):
        if isinstance(node.op, RandomVariable) or any(isinstance(v.type, RandomType) for v in node.inputs):
            raise ValueError(
                f"{name}: it draws random numbers ({node.op}), which would be the same on every replica. Make "
                f"them an input with one draw a row: jax.vmap(draw)(synk.row_keys(key, rows))."
            )


def cut(name: str, rows: Set[Variable], combine: Sequence[Output], outputs: Sequence[Output], updates: Updates) -> Cuts:
    """Cut a graph at what `combine` names and at outputs that depend on rows, which come by the inputs `rows`."""
    parts = _distinct(name, combine)
    named = {part.expression for part in parts}
    of_rows = {expression for expression in named if reached(expression, by_value=True) & rows}
    _check_order(name, named, of_rows)
    # An output that combines in two ways has no combined value that others could follow from.
    ways = Counter(output.expression for output in set(outputs))
    single = [output for output in outputs if ways[output.expression] == 1]
    followed = named | {output.expression for output in single if output.op in WHOLE}
    _check_updates(name, rows - named, followed, updates)
    # Outputs may follow from means whose op is left out as well. Updates may not: a sum that is taken for a mean would
    # stay in the variable.
    followed |= {output.expression for output in single if output.op is None and _is_mean(output.expression)}
    places: list[int | Variable] = []
    for output in outputs:
        expression = output.expression
        if output.op is None and expression in named:
            places.append([part.expression for part in parts].index(expression))
            continue
        if output.op is None:
            if not reached(expression, followed - {expression}) & (rows - named):
                places.append(expression)
                continue
            output = _with_default_op(name, expression, of_rows)
        elif output not in parts and reached(expression, named, by_value=True) & named:
            raise ValueError(
                f"{name}: its output {described(expression)} follows from what combine names, so it is of all rows "
                f"already. Leave its op out."
            )
        if output not in parts:
            parts.append(output)
        places.append(parts.index(output))
    return _follow(Cuts(parts, [], places, updates), followed)


def _distinct(name: str, combine: Sequence[Output]) -> list[Output]:
    by_expression: dict[Variable, Output] = {}
    for output in combine:
        before = by_expression.setdefault(output.expression, output)
        if before != output:
            raise ValueError(
                f"{name}: combine names {described(output.expression)} twice, as {before.op!r} and {output.op!r}."
            )
    return list(by_expression.values())


def _check_order(name: str, named: Set[Variable], of_rows: Set[Variable]) -> None:
    """Refuse an expression in `combine` that is made of another there whose value depends on rows."""
    for expression in named:
        others = of_rows - {expression}
        if inner := reached(expression, others, by_value=True) & others:
            raise ValueError(
                f"{name}: combine names {described(expression)}, and {described(inner.pop())} of which it is made. "
                f"Each replica has the latter of its own rows alone when it computes the former. Name what depends on "
                f"rows first, and let the rest follow from it."
            )


def _check_updates(name: str, rows: Set[Variable], combined: Set[Variable], updates: Updates) -> None:
    """Refuse an update that depends on rows by another way than combined expressions."""
    for variable, new in updates:
        if others := reached(new, combined) & rows:
            raise ValueError(
                f"{name}: the update of {variable} depends on the rows of {', '.join(sorted(map(str, others)))} by "
                f"another way than combine. Name there what is combined over rows, e.g. "
                f'combine=[(g, "mean") for g in gradients].'
            )


def _is_mean(expression: Variable) -> bool:
    """Check whether an output without an op is a mean: a scalar of floats, such as a cost."""
    return expression.type.ndim == 0 and expression.type.dtype.startswith(("float", "complex"))


def _with_default_op(name: str, expression: Variable, of_rows: Set[Variable]) -> Output:
    """Give an output that depends on rows the op "mean", or refuse it."""
    if inner := reached(expression, of_rows, by_value=True) & of_rows:
        raise ValueError(
            f"{name}: its output {described(expression)} depends on {described(inner.pop())} of all rows, and on rows "
            f"beside, when each replica has the former of its own rows alone. Name in combine all that is needed of "
            f"all rows, and let the rest follow."
        )
    if not _is_mean(expression):
        raise ValueError(
            f"{name}: its output {described(expression)}, a {expression.type}, needs an op. Name it beside the "
            f'expression or in combine: (expression, "concat") for an entry a row; "mean", "sum", "max" and the like '
            f"for values that combine. Only a scalar of floats may leave its op out, as a mean."
        )
    return Output(expression, "mean")


def _follow(cuts: Cuts, followed: Set[Variable]) -> Cuts:
    """Put inputs for the combined values of parts into what follows from them."""
    combined = [part.expression.type(name=part.expression.name) for part in cuts.parts]
    pairs = zip(cuts.parts, combined, strict=True)
    # Only parts whose combined value has the shape of a replica's value stand for it: see `WHOLE`.
    stand_ins: dict[Variable, Variable] = {p.expression: value for p, value in pairs if p.expression in followed}
    following = [place for place in cuts.outputs if isinstance(place, Variable)]
    following += [new for _, new in cuts.updates]
    replaced = iter(clone_replace(following, replace=stand_ins) if following else [])
    outputs = [next(replaced) if isinstance(place, Variable) else place for place in cuts.outputs]
    return Cuts(cuts.parts, combined, outputs, [(variable, next(replaced)) for variable, _ in cuts.updates])
