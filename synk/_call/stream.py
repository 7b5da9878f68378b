"""Stream: a function over what a loader gives, the next items placed while the current one runs."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import count
from typing import Any

from .._base.errors import shown
from .._base.pytree import PyTree
from .._data.prefetch import Prefetch
from .._data.sources import copied
from .._runtime.group import Group
from .binding import ArgumentBinder, BoundArguments
from .iterate import Ahead, Batches, Each, arrive
from .row_input import RowRequest
from .spec import FunctionSpec


def stream(
    function: FunctionSpec,
    binder: ArgumentBinder,
    source: Iterable[Any],
    request: RowRequest,
    group: Group,
    *,
    size: int,
    call: Callable[[BoundArguments, RowRequest], PyTree],
    refuse: Callable[[], None],
) -> Prefetch[Any, PyTree]:
    """Call a function for each item; `refuse` raises where nothing may be launched."""
    name = f"{function.name}.stream"
    if not isinstance(source, Iterable):
        raise TypeError(f"{name}: its source is {shown(source)}; give an iterable of arguments, e.g. a data loader.")

    def ahead(item: Any) -> Ahead:
        args, kwargs = _arguments(item)
        bound = binder.bind(args, kwargs)
        for leaf, argument in zip(bound.leaves, bound.spec.names, strict=True):
            if isinstance(leaf, Each):
                raise ValueError(
                    f"{name}: argument {argument} is synk.each, which gives a value for each batch of iterate or over. "
                    f"Put the value itself into each item."
                )
        # Whoever made them may use their memory again for the next item. Rows are copied as they are picked.
        leaves = list(bound.leaves)
        for i in bound.spec.broadcast:
            leaves[i] = copied(leaves[i])
        return Batches(function, bound._replace(leaves=leaves), request, group, "stream").ahead(None)

    return Prefetch(source, size, ahead, partial(arrive, call, count()), f"{name}: prefetch", refuse)


def _arguments(item: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """By position: a tuple, or a list, as torch collates them; by name: a mapping; anything else alone."""
    if isinstance(item, Mapping):
        return (), dict(item)
    return (tuple(item), {}) if isinstance(item, tuple | list) else ((item,), {})
