"""Ways: how a function's lines reach its variables, to ask before a call whether these are still the ones."""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import lru_cache
from types import MemberDescriptorType
from typing import Any, NamedTuple

from .names import LookUp, follow, module_of, of_class, own_attributes

MOST_HELD = 2048  # objects and containers that are looked into, the nearest first
LONGEST = 64  # of the containers that are looked into
DEPTH = 3  # of attributes and items: net.layers[0].w
MOST_OPEN = 64  # places without anything that are watched
_PLAIN = ("builtins", "jax", "jaxlib", "numpy")  # whose objects hold no variables, but for containers and classes
Step = Callable[[Any, Any], Any]  # from an object, by a key, to what it holds


class Ways(NamedTuple):
    """Places from which lines reach values, each by a look-up or from a place before it.

    No value is held: ids tell those that something else keeps alive for as long as these are asked.
    """

    roots: list[LookUp]
    steps: list[tuple[int, Step, Any]]  # from which place, how, and by which key
    wanted: list[tuple[int, int]]  # the places of the values, and their ids
    nothing: list[int]  # the places of None, which may come to hold one
    counts: list[tuple[int, int]]  # the places of containers, and how many of their items are no plain data

    def are_intact(self) -> bool:
        """Do they lead where they led?"""
        values = self._values()
        return (
            all([id(values[place]) == which for place, which in self.wanted])
            and all([values[place] is None for place in self.nothing])
            and all([_count(values[place]) == count for place, count in self.counts])
        )

    def lost(self) -> set[int]:
        """The ids of values to which there was a way, and is none any more."""
        values = self._values()
        return {which for _, which in self.wanted} - {id(values[place]) for place, _ in self.wanted}

    def lead_to(self, which: int) -> bool:
        """Is there one to the value of this id?"""
        return any([each == which for _, each in self.wanted])

    def _values(self) -> list[Any]:
        values = [look_up() for look_up in self.roots]
        for place, step, key in self.steps:
            values.append(step(values[place], key))
        return values


class _Place(NamedTuple):
    """Where a value is: by a name, or a step from another place."""

    value: Any
    look_up: LookUp | None
    before: int
    step: tuple[Step, Any] | None
    depth: int


def ways_to(functions: Iterable[Any], wanted: Collection[Any], kind: type) -> Ways:
    """How lines of functions reach these values, all of a kind: by a name, or as attributes and items of what has one,
    or of what is called itself."""
    ids, names, places = frozenset(map(id, wanted)), set[str](), list[_Place]()
    for fn in functions:
        found, named = follow(fn)
        places += [_Place(value, look_up, -1, None, 0) for look_up, value in found]
        names |= named.keys()
    waiting, left, ends, is_open = deque(range(len(places))), MOST_HELD, list[int](), list[int]()
    while waiting and left:
        at = waiting.popleft()
        value, _, _, step, depth = places[at]
        if id(value) in ids:
            ends.append(at)
            continue
        if depth == 0 or (depth == 1 and step is not None and step[1] in names):
            is_open += [at] * (value is None or _size(value) == 0)
        if depth == DEPTH or not _may_hold(type(value)) or issubclass(type(value), kind):
            continue
        left -= 1
        for step, key, inner in _inside(value, ids):
            if id(inner) in ids or _may_hold(type(inner)) or (inner is None and depth == 0):
                waiting.append(len(places))
                places.append(_Place(inner, None, at, (step, key), depth + 1))
    return _ways_over(places, [*ends, *is_open[:MOST_OPEN]], ids)


def _ways_over(places: list[_Place], ends: list[int], ids: Collection[int]) -> Ways:
    """Over those places alone that are on the ways to these."""
    needed = set[int]()
    for at in ends:
        while at >= 0 and at not in needed:
            needed.add(at)
            at = places[at].before
    order = sorted(needed, key=lambda at: (places[at].before >= 0, at))  # roots, then each after what it comes from
    number = {at: i for i, at in enumerate(order)}
    values = [(number[at], places[at].value) for at in order]
    return Ways(
        roots=[look_up for at in order if (look_up := places[at].look_up) is not None],
        steps=[(number[places[at].before], *step) for at in order if (step := places[at].step) is not None],
        wanted=[(i, id(value)) for i, value in values if id(value) in ids],
        nothing=[i for i, value in values if value is None],
        counts=[(i, _count(value)) for i, value in values if _size(value) >= 0],
    )


@lru_cache(maxsize=256)
def _may_hold(kind: type) -> bool:
    """May there be variables in one of this class? Nor is a variable plain data."""
    return issubclass(kind, dict | list | tuple | type) or module_of(kind) not in _PLAIN


def _inside(value: Any, ids: Collection[int]) -> Iterator[tuple[Step, Any, Any]]:
    """How to come to what an object or a container holds; of classes to what is wanted alone."""
    kind = type(value)
    if 0 < _size(value) <= LONGEST:
        items: Any = dict.items(value) if issubclass(kind, dict) else enumerate(_values(value))
        for key, inner in list(items):
            yield _item, key, inner
    for name, inner in list(own_attributes(value).items()):
        yield _attribute, name, inner
    classes = type.__getattribute__(value if issubclass(kind, type) else kind, "__mro__")
    for each in [one for one in classes if module_of(one) not in _PLAIN]:
        for name, inner in list(type.__getattribute__(each, "__dict__").items()):
            if issubclass(type(inner), MemberDescriptorType) and not issubclass(kind, type):
                yield _slot, inner, _slot(value, inner)
            elif id(inner) in ids:
                yield _attribute, name, inner


# These are asked at each call. An object's own ways to give attributes and items are not: they might do anything.


def _size(value: Any) -> int:
    """Of a container; -1 of anything else."""
    kind = type(value)
    of: Any = dict if issubclass(kind, dict) else list if issubclass(kind, list) else tuple
    return of.__len__(value) if issubclass(kind, of) else -1


def _values(value: Any) -> list[Any]:
    """Of a container, which another thread may be changing."""
    kind = type(value)
    if issubclass(kind, dict):
        return list(dict.values(value))
    return list(list.__iter__(value) if issubclass(kind, list) else tuple.__iter__(value))


def _count(value: Any) -> int:
    size = _size(value)
    return sum(map(_may_hold, map(type, _values(value)))) if 0 < size <= LONGEST else min(size, 0)


def _attribute(holder: Any, name: str) -> Any:
    try:
        return object.__getattribute__(holder, "__dict__")[name]
    except Exception:
        return of_class(holder, name)


def _slot(holder: Any, descriptor: Any) -> Any:
    try:
        return descriptor.__get__(holder)
    except (AttributeError, TypeError):
        return None


def _item(holder: Any, key: Any) -> Any:
    kind = type(holder)
    try:
        if issubclass(kind, dict):
            return dict.get(holder, key)
        of: Any = list if issubclass(kind, list) else tuple
        return of.__getitem__(holder, key)
    except (LookupError, TypeError):
        return None
