"""Stream: take the arguments of each call from a loader, and send their rows while the call before runs."""

from collections.abc import Iterable, Iterator, Mapping
from operator import is_
from typing import Any

from .._base.errors import shown
from .._base.pytree import is_prng_key
from .._call.binding import ArgumentBinder, BoundArguments, CallOptions
from .._call.spec import FunctionSpec
from .._data.sources import copied
from .._runtime.group import Group
from .iterate import Batches, PerBatch, Prepared, warn_of_keys


def prepare_items(
    function: FunctionSpec, binder: ArgumentBinder, options: CallOptions, group: Group, name: str, source: Iterable[Any]
) -> Iterator[Prepared]:
    """Make a call ready for each item of a source, when it is asked for; `name` is for messages."""
    if not isinstance(source, Iterable):
        raise TypeError(f"{name}: its source is {shown(source)}; give an iterable of arguments, e.g. a data loader.")
    last_keys: list[Any] = []

    def prepare(item: Any) -> Prepared:
        bound = _bind(binder, item)
        keys = [leaf for leaf in bound.leaves if is_prng_key(leaf)]
        if keys and len(keys) == len(last_keys) and all(map(is_, keys, last_keys)):
            warn_of_keys(name, bound, "split the key as the loader goes on, as synk.each does for iterate")
        last_keys[:] = keys
        for leaf, argument in zip(bound.leaves, bound.spec.names, strict=True):
            if isinstance(leaf, PerBatch):
                raise ValueError(
                    f"{name}: argument {argument} is synk.each, which gives a value for each batch of iterate or over. "
                    f"Put the value itself into each item."
                )
        # The loader may write its next item where this one lies. Rows are copied when they are picked.
        leaves = list(bound.leaves)
        for i in bound.spec.broadcast:
            leaves[i] = copied(leaves[i])
        rows = Batches(function, bound._replace(leaves=leaves), options, group, name, is_item=True)
        return rows.prepare(None, {})

    return map(prepare, source)


def _bind(binder: ArgumentBinder, item: Any) -> BoundArguments:
    """Bind an item: a tuple or list (as PyTorch collates) by position, a mapping by name, anything else alone."""
    if isinstance(item, tuple | list):
        return binder.bind(tuple(item), {})
    if not isinstance(item, Mapping):
        return binder.bind((item,), {})
    try:
        return binder.bind((), dict(item))
    except TypeError as error:
        raise TypeError(
            f"{error} An item that is a mapping gives arguments by name; one that is the only argument comes as "
            f"(item,)."
        ) from None
