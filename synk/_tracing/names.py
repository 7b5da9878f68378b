"""Names: the objects under a function's global names and in its closure cells, to notice other objects there."""

import dis
import functools
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any
from weakref import ref


def named_objects(functions: Iterable[Any]) -> list[tuple[Callable[[], Any], Any]]:
    """List a look-up of each global name and cell of these functions, with the object that it finds now."""
    plain = [link for fn in functions for link in links(fn) if isinstance(link, FunctionType)]
    look_ups = [look_up for fn in plain for look_up in _look_ups(fn)]
    return [(look_up, look_up()) for look_up in look_ups]


_GONE = object()


class Names:
    """The objects under a function's global names and cells. They stay alive only if they take no weak reference."""

    def __init__(self, functions: Iterable[Any]) -> None:
        self._known = [(look_up, _reference(value)) for look_up, value in named_objects(functions)]

    def are_same(self) -> bool:
        """Check whether all names and cells still have the same objects."""
        return all([look_up() is reference() for look_up, reference in self._known])


def links(fn: Any) -> Iterator[Any]:
    """Yield a callable and the functions behind it: each partial, method or wrapper, and then what it calls."""
    # A function that wraps itself would have no end.
    for _ in range(64):
        if fn is None:
            return
        yield fn
        fn = next((inner for name in ("func", "__func__", "__wrapped__") if (inner := _attribute(fn, name))), None)


def _attribute(fn: Any, name: str) -> Any:
    try:
        return object.__getattribute__(fn, name)
    except AttributeError:
        return None


def _look_ups(fn: FunctionType) -> Iterator[Callable[[], Any]]:
    for name in dict.fromkeys(_global_names(fn.__code__)):
        yield functools.partial(fn.__globals__.get, name)
    for cell in fn.__closure__ or ():
        yield functools.partial(_content, cell)


def _global_names(code: CodeType) -> Iterator[str]:
    """Yield the global names in code and in the functions inside, in the order of the lines."""
    # `co_names` has attributes too, and a global of an attribute's name may change in each call.
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            yield instruction.argval
        elif isinstance(instruction.argval, CodeType):
            yield from _global_names(instruction.argval)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        # The cell is empty.
        return None


def _reference(value: Any) -> Callable[[], Any]:
    try:
        reference = ref(value)
    except TypeError:
        # Numbers, strings, tuples, lists and dictionaries take no weak reference.
        return lambda: value
    return lambda: _GONE if (target := reference()) is None else target
