"""Names: the objects under a function's global names and in its closure cells, to notice other objects there."""

import dis
import functools
from collections.abc import Callable, Iterable, Iterator
from types import CellType, CodeType, FunctionType, MethodWrapperType, WrapperDescriptorType
from typing import Any
from weakref import ref

import jax
import numpy as np

from .._base.pytree import SCALARS

_NUMBERS = (*SCALARS, np.generic, np.ndarray, jax.Array)


def named_objects(functions: Iterable[Any]) -> list[tuple[tuple[Any, str], Any]]:
    """List the places of these functions' names, and the object that is now in each.

    The place of a global name is its dictionary and the name; that of a closure cell is the cell and the name.
    """
    places: dict[Any, tuple[Any, str]] = {}
    # Keyed by identity, since dictionaries and cells have no hash; two functions of one module share their globals.
    for fn in [link for function in functions for link in links(function) if isinstance(link, FunctionType)]:
        places.update({(id(fn.__globals__), name): (fn.__globals__, name) for name in _global_names(fn.__code__)})
        cells = zip(fn.__closure__ or (), fn.__code__.co_freevars, strict=True)
        places.update({id(cell): (cell, name) for cell, name in cells})
    return [((at, name), _object_at(at, name)) for at, name in places.values()]


def _object_at(at: Any, name: str) -> Any:
    return content(at) if isinstance(at, CellType) else at.get(name)


class Names:
    """The objects under a function's global names and cells."""

    __slots__ = ("_cells", "_globals")

    def __init__(self, functions: Iterable[Any]) -> None:
        # An object is known by a weak reference, or by itself.
        # Warm calls compare all names. A weak reference keeps no model of the user's alive; numbers and lists take
        # none, so these are kept alive, and their ids cannot be reused.
        self._globals: list[tuple[Callable[[str], Any], str, ref[Any] | None, Any]] = []
        self._cells: list[tuple[Any, str, ref[Any] | None, Any]] = []
        for (at, name), value in named_objects(functions):
            known = _known(value)
            if isinstance(at, CellType):
                self._cells.append((at, name, *known))
            else:
                self._globals.append((at.get, name, *known))

    def are_same(self) -> bool:
        """Check whether all names and cells still have the same objects."""
        # Compared by identity: equality of arrays is an array, and of users' objects may run their code.
        for look_up, name, reference, value in self._globals:
            if reference is not None and (value := reference()) is None:
                return False
            if look_up(name) is not value:
                return False
        for cell, _, reference, value in self._cells:
            if reference is not None and (value := reference()) is None:
                return False
            try:
                if cell.cell_contents is not value:
                    return False
            except ValueError:
                if value is not None:
                    return False
        return True

    def new_numbers(self) -> list[str]:
        """Return the names that have another number or array now."""
        places = [(name, content(cell), *known) for cell, name, *known in self._cells]
        places += [(name, look_up(name), *known) for look_up, name, *known in self._globals]
        return [
            name
            for name, new, reference, old in places
            if isinstance(new, _NUMBERS) and new is not (old if reference is None else reference())
        ]


def links(fn: Any) -> Iterator[Any]:
    """Yield a callable and the functions behind it: each partial, method, wrapper or object with `__call__`, and then
    what it calls."""
    while fn is not None:
        yield fn
        names = ("func",) if isinstance(fn, functools.partial) else ("__func__", "__wrapped__")
        fn = next((inner for name in names if (inner := _attribute(fn, name))), None) or _call_method(fn)


def _call_method(fn: Any) -> Any:
    """Return the method that runs when an object is called; None for functions, and for what C implements."""
    method = getattr(type(fn), "__call__", None)  # noqa: B004  # what it is matters, not whether
    return None if isinstance(method, WrapperDescriptorType | MethodWrapperType) else method


def _attribute(fn: Any, name: str) -> Any:
    try:
        # getattr would run `__getattr__` of the user's class, which may do or return anything.
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
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _known(value: Any) -> tuple[ref[Any] | None, Any]:
    """Return a weak reference to an object; a number, string, tuple, list or dictionary itself, which takes none."""
    try:
        return ref(value), None
    except TypeError:
        return None, value
