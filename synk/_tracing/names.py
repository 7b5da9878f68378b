"""Names: the objects under a function's global names and in its closure cells, to notice other objects there."""

import dis
import functools
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any
from weakref import ref


def named_objects(functions: Iterable[Any]) -> list[tuple[Callable[[], Any], Any]]:
    """List a look-up of each global name and cell of these functions, with the object that it finds now."""
    look_ups: list[Callable[[], Any]] = []
    for fn in [link for function in functions for link in links(function) if isinstance(link, FunctionType)]:
        look_ups += [functools.partial(fn.__globals__.get, name) for name in dict.fromkeys(_global_names(fn.__code__))]
        look_ups += [functools.partial(content, cell) for cell in fn.__closure__ or ()]
    return [(look_up, look_up()) for look_up in look_ups]


class _Reference(ref[Any]):
    """A weak reference to an object under a name, which is told from a weak reference that a user has there."""


class Names:
    """The objects under a function's global names and cells. They stay alive only if they take no weak reference."""

    def __init__(self, functions: Iterable[Any]) -> None:
        self._known = [(look_up, _reference(value)) for look_up, value in named_objects(functions)]

    def are_same(self) -> bool:
        """Check whether all names and cells still have the same objects."""
        for look_up, known in self._known:
            value = known() if type(known) is _Reference else known
            # A reference whose object is gone gives None, which may be under the name now.
            if look_up() is not value or (value is None and known is not None):
                return False
        return True


def links(fn: Any) -> Iterator[Any]:
    """Yield a callable and the functions behind it: each partial, method or wrapper, and then what it calls."""
    while fn is not None:
        yield fn
        fn = next((inner for name in ("func", "__func__", "__wrapped__") if (inner := _attribute(fn, name))), None)


def _attribute(fn: Any, name: str) -> Any:
    try:
        return object.__getattribute__(fn, name)
    except AttributeError:
        return None


def _global_names(code: CodeType) -> Iterator[str]:
    """Yield the global names in code and in the functions inside, in the order of the lines."""
    # `co_names` has attributes too, and a global of an attribute's name may change in each call.
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            yield instruction.argval
        elif isinstance(instruction.argval, CodeType):
            yield from _global_names(instruction.argval)


def content(cell: Any) -> Any:
    """Return the object in a closure cell, None if the cell is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _reference(value: Any) -> Any:
    """Return a weak reference to an object; a number, string, tuple, list or dictionary itself, which takes none."""
    try:
        return _Reference(value)
    except TypeError:
        return value
