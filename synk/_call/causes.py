"""Causes: why a call had to be compiled: what differs from the nearest call that was compiled before."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import numpy as np

from .._base.jax_context import TRACE_OPTIONS
from .._data.feed import InputFeed
from .._runtime.group import Group
from .._variables.state import AbstractState
from .._variables.variable import Shared
from .binding import constant_of
from .spec import CallSpec

_LAYOUTS = {
    "rows": "from the host",
    "replicated": "all rows on every replica",
    "stacked": "rows that lie on the replicas",
}
_KINDS = {None: "whole", "slice": "a run of them picked", "gather": "picked by indexes"}


class Compiled(NamedTuple):
    """What was compiled, for whom."""

    plan: ref[Any]
    group: ref[Group]
    group_name: str
    call: CallSpec
    states: WeakKeyDictionary[Shared, tuple[AbstractState, ...]]


def causes(compiled: Sequence[Compiled], plan: Any) -> list[str]:
    """What made a plan necessary, which is among those compiled, the oldest first."""
    number = next((i for i, each in enumerate(compiled) if each.plan() is plan), None)
    if number is None:
        return ["it was compiled long ago"]
    new, before = compiled[number], compiled[:number]
    if not before:
        return ["the first call"]
    nearest = min((list(_differences(old, new)) for old in reversed(before)), key=len)
    return list(dict.fromkeys(nearest)) or ["an earlier program of it is no longer kept"]


def _differences(old: Compiled, new: Compiled) -> Iterator[str]:
    if old.group() is not new.group():
        yield f"the group is {new.group_name}, was {old.group_name}"
    yield from _of_options(old.call, new.call)
    one, two = old.call.arguments, new.call.arguments
    if one is not two:
        yield from _of_arguments(old.call, new.call)
    if (one.names, one.scattered) == (two.names, two.scattered):
        yield from _of_values(old.call, new.call)
    yield from _of_parts(old.call, new.call)
    if old.call.subset != new.call.subset:
        yield f"output_subset is {_listed(new.call.subset)}, was {_listed(old.call.subset)}"
    if old.call.donate != new.call.donate:
        yield "old values of variables are " + ("overwritten, and were kept" if new.call.donate else "kept")
    for variable, state in list(new.states.items()):
        if (before := old.states.get(variable)) is not None:
            yield from _of_variable(variable, before, state)
        else:
            yield f"it uses the variable {variable.name}, and did not"


def _listed(subset: tuple[Any, ...] | None) -> str:
    return "all" if subset is None else str(list(subset))


def _of_options(old: CallSpec, new: CallSpec) -> Iterator[str]:
    for name, was, now in zip(TRACE_OPTIONS, old.options, new.options, strict=False):
        if was != now:
            yield f"{name} is {now!r}, was {was!r}"


def _of_arguments(old: CallSpec, new: CallSpec) -> Iterator[str]:
    """Of arguments of another tree, or with other static ones."""
    one, two = old.arguments, new.arguments
    # Where one is not given, its default counts.
    old_values, new_values = {**one.constants, **one.statics}, {**two.constants, **two.statics}
    statics = [name for name in new_values if name in old_values and not _is_same(old_values[name], new_values[name])]
    for name in statics:
        new_value, old_value = constant_of(new_values[name]), constant_of(old_values[name])
        yield f"static {name} is {new_value!r}, was {old_value!r}"
    added, gone = sorted(two.parameters.keys() - one.parameters), sorted(one.parameters.keys() - two.parameters)
    for name in added:
        yield f"{name} is given, and was not"
    for name in gone:
        yield f"{name} is not given, and was"
    if two.treedef != one.treedef and not (statics or added or gone):
        yield f"the tree of arguments is {two.treedef}, was {one.treedef}"
    elif not (statics or added or gone):
        yield "an argument is given in another way"


def _is_same(one: Any, other: Any) -> bool:
    """Are these one static value? 1 and 1.0 are two."""
    if one is other or type(one) is not type(other):
        return one is other
    try:
        return bool(np.all(one == other))
    except (TypeError, ValueError):
        return False


def _of_values(old: CallSpec, new: CallSpec) -> Iterator[str]:
    """Of arguments of one tree."""
    spec = new.arguments
    for name, was, now in zip(spec.scattered_names, old.rows, new.rows, strict=True):
        for _ in _changed(was, now):
            yield f"rows of {name}: {_array(*now)}, were {_array(*was)}"
    for name, was, now in zip(spec.scattered_names, old.feeds, new.feeds, strict=True):
        if was != now:
            yield f"{name}: {_fed(now)}, was {_fed(was)}"
    for place, was, now in zip(spec.broadcast, old.broadcast, new.broadcast, strict=True):
        for _ in _changed(was, now):
            yield f"{spec.names[place]}: {_broadcast(*now)}, was {_broadcast(*was)}"
    for name, was, now in zip(spec.names, old.keys, new.keys, strict=True):
        if was != now:
            yield f"{name}: {_key(now)}, was {_key(was)}"


def _changed(was: tuple[Any, ...], now: tuple[Any, ...]) -> list[int]:
    """Which fields differ: each counts for how far calls are apart."""
    return [i for i, (one, other) in enumerate(zip(was, now, strict=True)) if one != other]


def _array(shape: tuple[int, ...], dtype: np.dtype) -> str:
    return f"{dtype.name}{list(shape)}"


def _broadcast(shape: tuple[int, ...], dtype: np.dtype, is_weak: bool) -> str:
    return f"a Python number ({dtype.name})" if is_weak and not shape else _array(shape, dtype)


def _fed(feed: InputFeed) -> str:
    found = _LAYOUTS[feed.layout]
    if feed.layout != "rows":
        found += f" ({_KINDS[feed.index]}, {feed.size} held)"
    return found if feed.overlap is None else f"{found}, with {feed.overlap}"


def _key(impl: Any) -> str:
    return "plain numbers" if impl is None else f"a PRNG key ({impl})"


def _of_parts(old: CallSpec, new: CallSpec) -> Iterator[str]:
    if old.has_rows != new.has_rows:
        yield "it has rows, and had none" if new.has_rows else "it has no rows, and had some"
    elif old.is_sliced != new.is_sliced:
        yield "rows are sliced, and were not" if new.is_sliced else "rows are not sliced, and were"
    elif old.part_sizes != new.part_sizes:
        yield f"rows of a part: {_sizes(new)}, were {_sizes(old)}"
    elif old.lengths != new.lengths:
        was, now = list(old.lengths or ()), list(new.lengths or ())
        yield f"rows of the replicas: {now}, were {was}, on which its ops depend"
    elif old.num_slices != new.num_slices:
        yield f"num_slices is {new.num_slices}, was {old.num_slices}, on which its ops depend"
    if old.held_index != new.held_index:
        yield f"batch_s: {_KINDS[new.held_index]}, was {_KINDS[old.held_index]}"


def _sizes(call: CallSpec) -> str:
    sizes = sorted({size for sizes in call.part_sizes for size in sizes if size is not None}, reverse=True)
    return " or ".join(map(str, sizes))


def _of_variable(variable: Shared, old: tuple[AbstractState, ...], new: tuple[AbstractState, ...]) -> Iterator[str]:
    if set(old) & set(new):
        return
    was, now = old[0], new[0]
    if was.rows_per_replica != now.rows_per_replica:
        yield f"{variable.name} holds {_held(now)}, held {_held(was)}"
    elif was.shapes != now.shapes:
        yield f"{variable.name}: {_shapes(now)}, was {_shapes(was)}"
    else:
        differ = "differs between replicas, and did not before"
        yield f"{variable.name} {differ if now.layout == 'stacked' else 'is one value on all replicas'}"


def _held(state: AbstractState) -> str:
    return "no rows" if state.rows_per_replica is None else f"rows, {list(state.rows_per_replica)}"


def _shapes(state: AbstractState) -> str:
    return ", ".join(_array(shape.shape, shape.dtype) for shape in state.shapes)
