"""Seen ops: how an output that says no op combines, where rules show that, node by node and in inner graphs."""

from collections.abc import Mapping, Sequence, Set

from pytensor.compile.builders import OpFromGraph
from pytensor.graph.basic import Apply, Variable
from pytensor.link.jax.ops import JAXOp
from pytensor.scan.op import Scan

from . import index_rules as index_rules  # which adds its rules
from .facts import FREE, MEAN, MIXED, Fact, Rows
from .row_rules import Facts, rule


def seen_op(expression: Variable, rows: Set[Variable]) -> str | None:
    """Of an entry a row "concat", of a mean over rows "mean"; None of what is not seen to be either."""
    (fact,) = facts_of([expression], dict.fromkeys(rows, Rows(0, True)))
    if isinstance(fact, Rows):
        return "concat" if fact.axis == 0 else None
    is_number = expression.type.dtype.startswith(("float", "complex"))  # of integers means are none
    return "mean" if is_number and fact in (FREE, MEAN) else None


def facts_of(expressions: Sequence[Variable], known: Mapping[Variable, Fact]) -> list[Fact]:
    """What is known of each expression; of inputs that are not in `known`, that they are free."""
    facts, left = dict(known), list(expressions)
    while left:
        variable = left[-1]
        node = variable.owner
        if variable in facts or node is None:
            facts.setdefault(variable, FREE)
            left.pop()
        elif missing := [each for each in node.inputs if each not in facts]:
            left += missing
        else:
            facts.update(zip(node.outputs, _of_node(node, [facts[each] for each in node.inputs]), strict=True))
    return [facts[expression] for expression in expressions]


def _of_node(node: Apply, given: Facts) -> Facts:
    if all(fact == FREE for fact in given):
        return [FREE] * len(node.outputs)
    found = rule(node.op, node, given)
    return found if isinstance(found, list) else [found] * len(node.outputs)


@rule.register
def _inner(op: OpFromGraph, node: Apply, given: Facts) -> list[Fact]:
    return facts_of(op.inner_outputs, dict(zip(op.inner_inputs, given, strict=True)))


@rule.register
def _scanned(op: Scan, node: Apply, given: Facts) -> Fact | list[Fact]:
    """Rows lie on an axis behind that of the steps; a step leaves those of its state as it finds them."""
    info, inputs, outputs = op.info, op.inner_inputs, op.inner_outputs
    steps = [given[0], *op.outer_nitsot(given)]
    if info.as_while or info.mit_mot_in_slices or info.n_untraced_sit_sot or any(fact != FREE for fact in steps):
        return MIXED
    states = [_inside(fact) for fact in (*op.outer_mitsot(given), *op.outer_sitsot(given))]
    seen = [*op.inner_mitsot_grouped(inputs), *([each] for each in op.inner_sitsot(inputs))]
    known = dict(zip(op.inner_seqs(inputs), map(_inside, op.outer_seqs(given)), strict=True))
    known |= dict(zip(op.inner_non_seqs(inputs), op.outer_non_seqs(given), strict=True))
    known |= {each: fact for group, fact in zip(seen, states, strict=True) for each in group}
    after = facts_of([*op.inner_mitsot_outs(outputs), *op.inner_sitsot_outs(outputs)], known)
    if any(_outside(new) != _outside(old) or old == MIXED for new, old in zip(after, states, strict=True)):
        return MIXED
    return [_outside(fact) for fact in (*states, *facts_of(op.inner_nitsot_outs(outputs), known))]


def _inside(fact: Fact) -> Fact:
    """Of what a step has, by what is known of that for all steps."""
    if isinstance(fact, Rows) and fact.axis > 0:
        return Rows(fact.axis - 1, fact.is_one_each)
    return fact if fact == FREE else MIXED


def _outside(fact: Fact) -> Fact:
    """Of what all steps have."""
    return Rows(fact.axis + 1) if isinstance(fact, Rows) else fact if fact == FREE else MIXED


@rule.register
def _by_jax(op: JAXOp, node: Apply, given: Facts) -> list[Fact]:
    """Functions of JAX are made for rows, on the first axis of what they take and of what they give."""
    is_of_rows = all(fact == FREE or (isinstance(fact, Rows) and fact.axis == 0) for fact in given)
    return [Rows(0, True) if is_of_rows and each.type.ndim else MIXED for each in node.outputs]
