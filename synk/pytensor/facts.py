"""Facts: what is known of a value in a graph, of how it depends on the rows that are dealt out."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Free:
    """Neither rows nor how many there are change it, nor its shape."""


@dataclass(frozen=True)
class Mixed:
    """Nothing is known: it may depend on any row, in any way."""


@dataclass(frozen=True)
class Rows:
    """Rows lie along one axis, in order, and each depends on its own row alone."""

    axis: int
    is_one_each: bool = False  # that axis is as long as there are rows; else it may be so many times as long


@dataclass(frozen=True)
class Numbers:
    """0, 1, ..., as many as there are rows."""


@dataclass(frozen=True)
class Count:
    """What no row changes, times a power of how many rows there are."""

    power: int
    is_exact: bool = False  # how many there are, and nothing else


@dataclass(frozen=True)
class Total:
    """A sum over rows of what depends on each, times a power of how many there are: -1 for means."""

    power: int


@dataclass(frozen=True)
class Lengths:
    """A vector of numbers, each with a fact of its own: the shape of something."""

    each: tuple["Fact", ...]


Fact: TypeAlias = Free | Mixed | Rows | Numbers | Count | Total | Lengths
FREE, MIXED, MEAN = Free(), Mixed(), Total(-1)


def lengths_of(fact: Fact, ndim: int) -> Fact:
    """Of the shape of what the fact is about."""
    if isinstance(fact, Rows):
        return vector([Count(1, fact.is_one_each) if i == fact.axis else FREE for i in range(ndim)])
    if isinstance(fact, Numbers):
        return Lengths((Count(1, True),))
    return vector([MIXED] * ndim) if fact == MIXED else FREE


def vector(each: Iterable[Fact]) -> Fact:
    """Of a vector that is made of these numbers."""
    each = tuple(each)
    if all(fact == FREE for fact in each):
        return FREE
    if any(isinstance(fact, Total) for fact in each):
        return MEAN if all(fact in (FREE, MEAN) for fact in each) else MIXED
    return Lengths(each) if all(isinstance(fact, Free | Count | Mixed) for fact in each) else MIXED


def shaped(lengths: Sequence[Fact]) -> Fact:
    """Of an array of these lengths, filled with what no row changes."""
    axes = [i for i, fact in enumerate(lengths) if fact != FREE]
    if not axes:
        return FREE
    length = lengths[axes[0]]
    is_of_rows = len(axes) == 1 and isinstance(length, Count) and length.power == 1
    return Rows(axes[0], length.is_exact) if is_of_rows and isinstance(length, Count) else MIXED


def product(above: Sequence[Fact], below: Sequence[Fact] = ()) -> Fact:
    """Of a product of these, divided by those."""
    totals = [fact for fact in above if isinstance(fact, Total)]
    if len(totals) > 1 or any(isinstance(fact, Total) for fact in below):
        return MIXED
    power = 0
    for sign, facts in ((1, above), (-1, below)):
        for fact in facts:
            if isinstance(fact, Count | Total):
                power += sign * fact.power
            elif fact != FREE:
                return MIXED
    return Total(power) if totals else Count(power) if power else FREE


def side_by_side(arrays: Iterable[tuple[Fact, Sequence[bool]]]) -> Fact:
    """Of arrays that are broadcast against each other; each comes with its axes, and which of these have one entry.

    Rows lie along the same axis of all of them, or there is none of it.
    """
    arrays = list(arrays)
    ndim = max(len(axes) for _, axes in arrays)
    places = {fact.axis + ndim - len(axes) for fact, axes in arrays if isinstance(fact, Rows)}
    if not all(isinstance(fact, Free | Rows) for fact, _ in arrays) or len(places) > 1:
        return MIXED
    for place in places:
        others = [axes[place - ndim] for fact, axes in arrays if fact == FREE and len(axes) >= ndim - place]
        return Rows(place, any(_is_one_each(fact) for fact, _ in arrays)) if all(others) else MIXED
    return FREE


def _is_one_each(fact: Fact) -> bool:
    return isinstance(fact, Rows) and fact.is_one_each
