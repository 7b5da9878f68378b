"""Index rules: what indexing makes of rows, by slices, numbers and arrays of these."""

from collections.abc import Sequence
from typing import Any

from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.tensor import subtensor
from pytensor.tensor.subtensor import IncSubtensor, Subtensor

from .facts import FREE, MIXED, Fact, Lengths, Numbers, Rows, Total, side_by_side, vector
from .row_rules import Facts, rule


@rule.register
def _picked(op: Subtensor, node: Apply, given: Facts) -> Fact:
    fact = given[0]
    if any(index != FREE for index in given[1:]):
        return MIXED
    if isinstance(fact, Rows):
        return _of_slices(op.idx_list, fact)
    if isinstance(fact, Lengths):
        return _of_lengths(op.idx_list[0], fact, node.inputs[1:])
    return fact if isinstance(fact, Total) else MIXED


def _of_slices(entries: Sequence[Any], fact: Rows) -> Fact:
    """Of rows all of which are taken."""
    if fact.axis < len(entries) and entries[fact.axis] != slice(None):
        return MIXED
    return Rows(fact.axis - sum(not isinstance(each, slice) for each in entries[: fact.axis]), fact.is_one_each)


def _of_lengths(entry: Any, fact: Lengths, indexes: Sequence[Variable]) -> Fact:
    """Of one of some lengths, or of several."""
    values = [int(index.data) for index in indexes if isinstance(index, Constant)]
    if len(values) < len(indexes):
        return MIXED
    if not isinstance(entry, slice):
        return fact.each[values[entry]]
    bounds = [None if at is None else values[at] for at in (entry.start, entry.stop, entry.step)]
    return vector(fact.each[slice(*bounds)])


@rule.register
def _set(op: IncSubtensor, node: Apply, given: Facts) -> Fact:
    fact, new, *indexes = given
    place = _of_slices(op.idx_list, fact) if isinstance(fact, Rows) else MIXED
    if place == MIXED or any(index != FREE for index in indexes):
        return MIXED
    picked = node.inputs[0].type.ndim - sum(not isinstance(entry, slice) for entry in op.idx_list)
    found = side_by_side([(place, [False] * picked), (new, node.inputs[1].type.broadcastable)])
    return fact if isinstance(found, Rows) else MIXED


def _taken(op: Any, node: Apply, given: Facts) -> Fact:
    """Rows of a table by numbers of rows, columns of rows by numbers, or an entry of each row by its number."""
    fact, indexes = given[0], node.inputs[1:]
    entries = getattr(op, "idx_list", (0,))
    places = [i for i, entry in enumerate(entries) if not isinstance(entry, slice)]
    is_plain = all(entry == slice(None) for entry in entries if isinstance(entry, slice))
    if not is_plain or places[-1] - places[0] >= len(places) or any(v.type.dtype == "bool" for v in indexes):
        return MIXED
    axes = [v.type.broadcastable for v in indexes]
    numbers = {i: given[1 + entries[i]] for i in places}
    if isinstance(fact, Rows) and fact.axis not in places:
        if any(each != FREE for each in numbers.values()):
            return MIXED
        moved = max(map(len, axes)) - len(places) if fact.axis > places[0] else 0
        return Rows(fact.axis + moved, fact.is_one_each)
    if isinstance(fact, Rows):
        if numbers[fact.axis] != Numbers() or not fact.is_one_each:
            return MIXED
        numbers[fact.axis] = Rows(0, True)  # each row's own
    elif fact != FREE:
        return MIXED
    found = side_by_side([(numbers[i], axes[entries[i]]) for i in places])
    return Rows(places[0] + found.axis, found.is_one_each) if isinstance(found, Rows) else MIXED


# One class, or in earlier versions a second one of one index.
for _name in ("AdvancedSubtensor", "AdvancedSubtensor1"):
    if hasattr(subtensor, _name):
        rule.register(getattr(subtensor, _name), _taken)
