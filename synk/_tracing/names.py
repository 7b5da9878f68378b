"""Names: by which a function's lines reach values, and by which they can be looked up again."""

import functools
import inspect
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType, ModuleType
from typing import Any

LookUp = Callable[[], Any]
Way = tuple[LookUp, int]  # what looks a value up, and its id, so that nothing is held for its sake
MOST_FUNCTIONS = 64  # that are followed, the nearest first
MOST_HELD = 2048  # values in objects and containers that are looked at
LONGEST = 64  # of the containers that are looked into
DEPTH = 3  # of attributes and items: net.layers[0].w
_LIBRARIES = ("builtins", "jax", "jaxlib", "numpy", "synk")  # whose functions name nothing of their users'


def values_named_in(fn: Any) -> Iterator[tuple[LookUp, Any]]:
    """What a callable's lines name, and those of functions and methods that these name: what looks it up again, and
    its value now."""
    waiting, met = deque([fn]), set[Any]()
    while waiting and len(met) < MOST_FUNCTIONS:
        function, held = _taken_apart(waiting.popleft())
        which = id(function), *map(id, held)
        if which in met or (met and _is_of_library(function)):
            continue
        met.add(which)
        for names, look_up, value in _named(function, held):
            yield look_up, value
            waiting.extend(_functions_in(value, names))


def _taken_apart(fn: Any) -> tuple[Any, list[Any]]:
    """The plain function behind a callable, if there is one, and what the callable holds: arguments, its object."""
    held: list[Any] = []
    while not inspect.isfunction(fn):
        if isinstance(fn, functools.partial):
            held += [*fn.args, *fn.keywords.values()]
            fn = fn.func
        elif inspect.ismethod(fn):
            held.append(fn.__self__)
            fn = fn.__func__
        elif "__wrapped__" in _own(fn):  # as jax.jit and functools.cache have it
            fn = fn.__wrapped__
        else:
            held.append(fn)
            call = inspect.getattr_static(type(fn), "__call__", None)
            return (call if inspect.isfunction(call) else None), held
    return inspect.unwrap(fn), held


def _named(function: Any, held: list[Any]) -> Iterator[tuple[Collection[str], LookUp, Any]]:
    """With all names of the lines: what a callable holds, globals, of modules the parts that are named, and cells."""
    # In the order of the lines, and not a set's: processes of a group must name variables in one order.
    names = dict.fromkeys(_names_in(function.__code__) if hasattr(function, "__code__") else ())
    for value in held:
        yield names, functools.partial(_itself, value), value
    for name in names:
        if name in function.__globals__:
            look_up = functools.partial(function.__globals__.get, name)
            yield names, look_up, look_up()
            if isinstance(look_up(), ModuleType) and not _is_of_library(look_up()):
                for part in filter(vars(look_up()).__contains__, names):
                    yield names, functools.partial(_attribute, part, look_up), vars(look_up())[part]
    for cell in getattr(function, "__closure__", None) or ():
        yield names, functools.partial(_content, cell), _content(cell)


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _names_in(const)


def _functions_in(value: Any, names: Collection[str]) -> Iterator[Any]:
    """A value that is a function, however it is wrapped, and the methods of these names that it has."""
    if inspect.isroutine(value) or isinstance(value, functools.partial) or "__wrapped__" in _own(value):
        yield value
    elif not isinstance(value, type | ModuleType) and not _is_of_library(type(value)):
        for name, method in {n: m for each in reversed(type(value).__mro__) for n, m in vars(each).items()}.items():
            if (name in names or name == "__call__") and inspect.isfunction(method):
                yield method.__get__(value)


def _is_of_library(value: Any) -> bool:
    where = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return isinstance(where, str) and where.partition(".")[0] in _LIBRARIES


def ways_to(functions: Iterable[Any], wanted: Collection[Any]) -> tuple[list[Way], list[tuple[LookUp, int]]]:
    """How lines of functions reach these values: by a name, or as attributes and items of what has one, or of what is
    called itself. And how they reach the containers on these ways, with their lengths."""
    search = _Search(frozenset(map(id, wanted)))
    for fn in functions if wanted else ():
        for look_up, value in values_named_in(fn):
            search.look(look_up, value, DEPTH)
    return search.ways, search.lengths


@dataclass
class _Search:
    """For values of these ids."""

    ids: Collection[int]
    left: int = MOST_HELD
    ways: list[Way] = field(default_factory=list)
    lengths: list[tuple[LookUp, int]] = field(default_factory=list)

    def look(self, look_up: LookUp, value: Any, depth: int) -> None:
        """At a value, and at what it holds."""
        if id(value) in self.ids:
            self.ways.append((look_up, id(value)))
            return
        before = len(self.ways)
        for step, inner in self._inside(value) if depth else ():
            if self.left == 0:
                break
            self.left -= 1
            self.look(functools.partial(step, look_up), inner, depth - 1)
        if isinstance(value, list | dict) and len(self.ways) > before:
            self.lengths.append((functools.partial(_length, look_up), len(value)))

    def _inside(self, value: Any) -> Iterator[tuple[Callable[[LookUp], Any], Any]]:
        """What an object or a container holds; of classes what is wanted alone."""
        if isinstance(value, list | tuple | dict) and len(value) <= LONGEST:
            for key, inner in list(value.items()) if isinstance(value, dict) else enumerate(tuple(value)):
                yield functools.partial(_item, key), inner
        if inspect.isroutine(value) or isinstance(value, ModuleType):
            return
        for name, inner in list(_own(value).items()):
            yield functools.partial(_attribute, name), inner
        classes = inspect.getmro(value if isinstance(value, type) else type(value))
        for each in classes if not _is_of_library(classes[0]) else ():
            for name, inner in list(vars(each).items()):
                if inspect.ismemberdescriptor(inner):  # of __slots__
                    yield functools.partial(_attribute, name), getattr(value, name, None)
                elif id(inner) in self.ids:
                    yield functools.partial(_attribute, name), inner


def _own(value: Any) -> dict[str, Any]:
    """The attributes that an object has itself; whatever `__getattr__` would do is not done."""
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return own if type(own) is dict else {}


# These are asked at each call, where `contextlib.suppress` would take most of the time.


def _itself(value: Any) -> Any:
    return value


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _attribute(name: str, look_up: LookUp) -> Any:
    holder = look_up()
    own = _own(holder)
    return own[name] if name in own else getattr(holder, name, None)


def _item(key: Any, look_up: LookUp) -> Any:
    try:
        return look_up()[key]
    except (LookupError, TypeError):
        return None


def _length(look_up: LookUp) -> int | None:
    try:
        return len(look_up())
    except TypeError:
        return None
