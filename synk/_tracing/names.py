"""Names: by which a function's lines reach values, and by which they can be looked up again."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Iterator
from types import ModuleType
from typing import Any

LookUp = Callable[[], Any]


def values_named_in(fn: Any, depth: int = 2) -> Iterator[tuple[LookUp, Any]]:
    """What a function's lines name, or functions that it names: what looks it up again, and its value now."""
    fn = inspect.unwrap(getattr(fn, "__func__", fn)) if callable(fn) else fn
    code = getattr(fn, "__code__", None)
    if code is None:
        return
    names = (*code.co_names, *(name for const in code.co_consts for name in getattr(const, "co_names", ())))
    in_globals = [functools.partial(fn.__globals__.get, name) for name in names]
    in_cells = [functools.partial(_content, cell) for cell in fn.__closure__ or ()]
    for look_up in (*in_globals, *in_cells):
        value = look_up()
        yield look_up, value
        if depth and inspect.isfunction(value):
            yield from values_named_in(value, depth - 1)


def _content(cell: Any) -> Any:
    with contextlib.suppress(ValueError):  # it is empty
        return cell.cell_contents


def ways_to(fn: Any, wanted: Collection[Any]) -> Iterator[tuple[LookUp, Any]]:
    """Which of these values a function's lines reach: by a name, or as an attribute of an object that has one or of one
    that is an attribute itself, as of the object whose method it is; what looks each up again, and the value."""
    owner = getattr(fn, "__self__", None)
    for look_up, value in (*values_named_in(fn), (lambda: owner, owner)) if wanted else ():
        if any(value is each for each in wanted):
            yield look_up, value
        else:
            yield from _attributes(look_up, value, wanted)


def _attributes(look_up: LookUp, holder: Any, wanted: Collection[Any], depth: int = 2) -> Iterator[tuple[LookUp, Any]]:
    if isinstance(holder, type) or inspect.isroutine(holder) or not isinstance(getattr(holder, "__dict__", None), dict):
        return
    for name, value in tuple(vars(holder).items()):
        attribute = functools.partial(_attribute, look_up, name)
        if any(value is each for each in wanted):
            yield attribute, value
        elif depth > 1 and not isinstance(holder, ModuleType):
            yield from _attributes(attribute, value, wanted, depth - 1)


def _attribute(look_up: LookUp, name: str) -> Any:
    return getattr(look_up(), "__dict__", {}).get(name)
