"""Names: by which a function's lines, and those of functions that these name, reach values."""

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

LookUp = Callable[[], Any]
MOST_FUNCTIONS = 64  # that are followed, the nearest first
MOST_WRAPPED = 64  # in one another; one that wraps itself has no end
_LIBRARIES = ("builtins", "jax", "jaxlib", "numpy", "synk")  # whose functions name nothing of their users'


def follow(fn: Any) -> tuple[list[tuple[LookUp, Any]], dict[str, None]]:
    """What a callable's lines name, and those of functions and methods that these name: what looks it up again, and
    its value now; and all names there are, in the order of the lines, so that processes of a group agree on it.

    Nothing of an object's own is run to look at it, whatever it does about its attributes, length or class.
    """
    waiting, met = deque([fn]), set[Any]()
    found: list[tuple[LookUp, Any]] = []
    names: dict[str, None] = {}
    places, values = set[Any](), set[int]()  # what has been found already
    while waiting and len(met) < MOST_FUNCTIONS:
        function, held = _taken_apart(waiting.popleft())
        which = id(function), *map(id, held)
        if which in met or (met and _is_of_library(function)):
            continue
        met.add(which)
        own = dict.fromkeys(_names_in(function.__code__) if function is not None else ())
        names |= own
        for place, look_up, value in _named(function, held, own):
            if place in places or (place == id(value) and place in values):  # an object whose methods are named
                continue
            places.add(place)
            values.add(id(value))
            found.append((look_up, value))
            waiting.extend(_functions_in(value, own))
    return found, names


def _taken_apart(fn: Any) -> tuple[Any, list[Any]]:
    """The plain function behind a callable, if there is one, and what the callable holds: arguments, its object."""
    held: list[Any] = []
    for _ in range(MOST_WRAPPED):
        kind, own = type(fn), own_attributes(fn)
        if issubclass(kind, functools.partial):
            held += [*fn.args, *fn.keywords.values()]
            fn = fn.func
        elif issubclass(kind, MethodType):
            held.append(fn.__self__)
            fn = fn.__func__
        elif "__wrapped__" in own:  # as functools.wraps, jax.jit and functools.cache have it
            fn = own["__wrapped__"]
        elif issubclass(kind, FunctionType):
            return fn, [*held, *(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
        else:
            call = of_class(fn, "__call__")
            return (call if issubclass(type(call), FunctionType) else None), [*held, fn]
    return None, held


def _named(function: Any, held: Iterable[Any], names: Iterable[str]) -> Iterator[tuple[Any, LookUp, Any]]:
    """What tells the place, what looks it up, and the value: what a callable holds, globals, named parts of modules,
    and cells."""
    for value in held:
        yield id(value), functools.partial(_itself, value), value
    if function is None:
        return
    modules = set[int]()
    for name in names:
        if name in function.__globals__:
            yield from _in(function.__globals__, name, names, modules)
    for cell in function.__closure__ or ():
        value = _content(cell)
        yield ("cell", id(cell)), functools.partial(_content, cell), value
        yield from _parts(value, names, modules)


def _in(space: dict[str, Any], name: str, names: Iterable[str], modules: set[int]) -> Iterator[tuple[Any, LookUp, Any]]:
    """What has a name in a module, and what it has inside."""
    value = space[name]
    yield (id(space), name), functools.partial(space.get, name), value
    yield from _parts(value, names, modules)


def _parts(value: Any, names: Iterable[str], modules: set[int]) -> Iterator[tuple[Any, LookUp, Any]]:
    """Of a module, not yet met, its parts of these names, and so on."""
    if issubclass(type(value), ModuleType) and not _is_of_library(value) and id(value) not in modules:
        modules.add(id(value))
        for part in names:
            if part in vars(value):
                yield from _in(vars(value), part, names, modules)


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _names_in(const)


def _functions_in(value: Any, names: Iterable[str]) -> Iterator[Any]:
    """A value that is a function, however it is wrapped; of an object its methods, and functions that it has, of these
    names."""
    kind, own = type(value), own_attributes(value)
    if issubclass(kind, FunctionType | MethodType | functools.partial) or "__wrapped__" in own:
        yield value
    elif not issubclass(kind, ModuleType | BuiltinFunctionType) and not _is_of_library(
        value if issubclass(kind, type) else kind
    ):
        for name in ("__call__", *names):
            found = own.get(name, of_class(value, name))
            found = found.fget if issubclass(type(found), property) else found
            if issubclass(type(found), staticmethod | classmethod):
                yield found.__func__
            elif issubclass(type(found), FunctionType):
                yield found if name in own or issubclass(kind, type) else MethodType(found, value)
            elif name in own and issubclass(type(found), MethodType | functools.partial):
                yield found


def _is_of_library(value: Any) -> bool:
    return module_of(value) in _LIBRARIES


def module_of(value: Any) -> str:
    """The package of a class, a function or a module."""
    kind = type(value)
    try:
        if issubclass(kind, ModuleType):
            where = own_attributes(value)["__name__"]
        else:
            where = (type if issubclass(kind, type) else object).__getattribute__(value, "__module__")
    except Exception:
        return ""
    return where.partition(".")[0] if isinstance(where, str) else ""


def own_attributes(value: Any) -> dict[str, Any]:
    """The attributes that an object has itself, whatever it does about that."""
    try:
        own = object.__getattribute__(value, "__dict__")
    except Exception:
        return {}
    return own if type(own) is dict else {}


def of_class(value: Any, name: str) -> Any:
    """What an object, or a class, has of its class, as it is written there; None where it has nothing."""
    kind = type(value)
    for each in type.__getattribute__(value if issubclass(kind, type) else kind, "__mro__"):
        if name in type.__getattribute__(each, "__dict__"):
            return type.__getattribute__(each, "__dict__")[name]
    return None


def _itself(value: Any) -> Any:
    return value


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None
