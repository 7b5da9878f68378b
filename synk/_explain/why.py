"""Why: what differs between a call and the most similar call that was compiled before."""

from collections.abc import Sequence
from textwrap import shorten
from typing import Any

from .._base.jax_context import TRACE_OPTIONS
from .._call.binding import constant_of
from .._call.plan import CallPlan, Compiled

# Fields of the key of a plan that are told by argument, and so not by their names.
_BY_ARGUMENT = ("arguments", "options", "rows", "feeds", "broadcast", "keys", "asked")
# Fields of the key of a plan in the words of users.
_WORDS = {
    "held_index": "batch_s on rows of variables", "donate": "overwrites old values",
    "part_sizes": "rows of parts, by launch", "lengths": "rows of each replica",
    "is_even": "as many rows on all replicas", "is_composed": "under jit or grad",
    "is_over": "a batch of over", "block": "rows of a block",
}  # fmt: skip
_ABSENT = "absent"


def why_compiled(compiled: Sequence[Compiled], plan: CallPlan) -> list[str]:
    """Say what made a plan necessary, from the plans that were compiled, oldest first."""
    # Plans are held weakly there: a plan that is gone from the cache must not live on for a report.
    number = next((i for i, (kept, *_) in enumerate(compiled) if kept() is plan), None)
    if number is None:
        return ["it was compiled long ago"]
    if number == 0:
        return ["the first call"]
    new = _parts(compiled[number])
    # Of calls that are equally near, the newest is the one that a user thinks of.
    nearest = min((_differences(_parts(old), new) for old in reversed(compiled[:number])), key=len)
    return nearest or ["the program of an earlier call like it is no longer kept"]


def _differences(old: dict[Any, str], new: dict[Any, str]) -> list[str]:
    changed = [part for part in {**new, **old} if new.get(part, _ABSENT) != old.get(part, _ABSENT)]
    # Another argument may change the tree of arguments too, so the tree is named only where nothing else differs.
    named = [part for part in changed if part != "arguments"] or changed
    return [
        f"{getattr(part, 'name', part)}: {_short(new.get(part, _ABSENT))}, was {_short(old.get(part, _ABSENT))}"
        for part in named
    ]


def _short(text: str) -> str:
    # The shapes of a model would fill a screen.
    return shorten(text, 160, placeholder=" ...")


def _parts(compiled: Compiled) -> dict[Any, str]:
    _, group, call, states = compiled
    spec = call.arguments
    broadcast = [spec.names[place] for place in spec.broadcast]
    # Names of arguments come last, so that they win over fields of the same name.
    return {
        "group": group,
        **{_WORDS.get(name, name): str(value) for name, value in call._asdict().items() if name not in _BY_ARGUMENT},
        **{option: str(value) for option, value in call.asked._asdict().items() if option not in call._fields},
        **dict(zip(TRACE_OPTIONS, map(repr, call.options), strict=False)),
        **{f"rows of {name}": _array(*row) for name, row in zip(spec.scattered_names, call.rows, strict=True)},
        **{f"feed of {name}": _record(feed) for name, feed in zip(spec.scattered_names, call.feeds, strict=True)},
        **{name: _array(*leaf) for name, leaf in zip(broadcast, call.broadcast, strict=True)},
        **{f"PRNG key of {name}": str(key) for name, key in zip(spec.names, call.keys, strict=True)},
        # A parameter that is left out has its default.
        **{name: repr(constant_of(value)) for name, value in spec.constants.items()},
        **{variable: _state(variable_states[0]) for variable, variable_states in list(states.items())},
        "arguments": str(spec.treedef),
    }


def _array(shape: tuple[int, ...], dtype: Any, is_weak: bool = False) -> str:
    if is_weak and not shape:
        return f"a Python number ({dtype.name})"
    return f"{dtype.name}{list(shape)}" + (" (weak)" if is_weak else "")


def _record(feed: Any) -> str:
    """Name the fields of a named tuple that have not their defaults."""
    fields = {name: value for name, value in feed._asdict().items() if value != feed._field_defaults[name]}
    return ", ".join(f"{name}={value}" for name, value in fields.items()) or "rows from the host"


def _state(state: Any) -> str:
    shapes = ", ".join(_array(shape.shape, shape.dtype) for shape in state.shapes)
    held = "" if state.rows_per_replica is None else f", rows of replicas {list(state.rows_per_replica)}"
    return f"{'' if state.layout == 'replicated' else 'a value each replica, '}{shapes}{held}"
