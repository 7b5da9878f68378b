"""Stream: make the calls of a loop over a loader, whose items bring the arguments."""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import count
from operator import is_
from time import perf_counter
from typing import Any

from .._base.pytree import is_prng_key
from .._call.binding import ArgumentBinder, BoundArguments, CallOptions
from .._call.spec import FunctionSpec
from .iterate import PerBatch, warn_of_keys
from .prefetch import check_iterable
from .waiting import Waiting


class Items:
    """Maker of the calls of a loop over a source, whose items bring the arguments; `name` is for messages."""

    has_values = False

    def __init__(self, function: FunctionSpec, binder: ArgumentBinder, name: str) -> None:
        self._function, self._binder, self._name, self._last_keys = function, binder, name, list[Any]()

    def calls(self, source: Iterable[Any], options: CallOptions) -> Iterator[Waiting]:
        """Yield the call of each item, when it is asked for."""
        check_iterable(source, f"{self._name}: its source", "arguments, e.g. a data loader")
        return map(partial(self._call, iter(source), options), count())

    def _call(self, items: Iterator[Any], options: CallOptions, turn: int) -> Waiting:
        begun = perf_counter()
        try:
            item = next(items)
        finally:
            self._function.stats.loading += perf_counter() - begun
        bound, name = _bind(self._binder, item), self._name
        keys = [leaf for leaf in bound.leaves if is_prng_key(leaf)]
        # The same object, not an equal one: a loader that draws keys may draw equal ones by a seed of its own choice.
        if keys and len(keys) == len(self._last_keys) and all(map(is_, keys, self._last_keys)):
            warn_of_keys(name, bound, "split the key as the loader goes on, as synk.each does for iterate")
        self._last_keys = keys
        for leaf, argument in zip(bound.leaves, bound.spec.names, strict=True):
            if isinstance(leaf, PerBatch):
                raise ValueError(
                    f"{name}: argument {argument} is synk.each, which gives a value for each batch of iterate or over. "
                    f"Put the value itself into each item."
                )
        return Waiting(bound, options._replace(turn=turn), range(len(bound.leaves)))

    def own(self, bound: BoundArguments) -> tuple[int, ...]:
        """Return the broadcast arguments of which each call has a value of its own, by number."""
        return tuple(range(len(bound.spec.broadcast)))


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
