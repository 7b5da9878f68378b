"""Stream: take the arguments of each call from a loader, and send their rows while the call before runs."""

from collections.abc import Iterable, Iterator, Mapping
from operator import is_
from typing import Any

from .._base.pytree import is_prng_key
from .._call.binding import ArgumentBinder, BoundArguments, CallOptions
from .._call.spec import FunctionSpec
from .._data.dataset import Hold
from .._data.prefetch import check_iterable
from .._data.sources import copied
from .._runtime.group import Group
from .iterate import LoopCall, PerBatch, Picker, recognised, rows_picked, warn_of_keys


class Items:
    """Maker of the calls of a loop over a source, whose items bring the arguments; `name` is for messages."""

    def __init__(
        self, function: FunctionSpec, binder: ArgumentBinder, options: CallOptions, group: Group, name: str
    ) -> None:
        self._function, self._binder, self._options, self._group, self._name = function, binder, options, group, name
        self.hold, self._last_keys = Hold(name), list[Any]()
        # What picks the rows of the last item, and what the items have in common for which it does.
        self._picker: tuple[Picker | None, tuple[Any, ...]] = None, ()

    def calls(self, source: Iterable[Any]) -> Iterator[LoopCall]:
        """Return an iterator of the call of each item, which comes when it is asked for."""
        check_iterable(source, f"{self._name}: its source", "arguments, e.g. a data loader")
        return map(self._call, source)

    def _call(self, item: Any) -> LoopCall:
        bound, name = _bind(self._binder, item), self._name
        keys = [leaf for leaf in bound.leaves if is_prng_key(leaf)]
        if keys and len(keys) == len(self._last_keys) and all(map(is_, keys, self._last_keys)):
            warn_of_keys(name, bound, "split the key as the loader goes on, as synk.each does for iterate")
        self._last_keys = keys
        for leaf, argument in zip(bound.leaves, bound.spec.names, strict=True):
            if isinstance(leaf, PerBatch):
                raise ValueError(
                    f"{name}: argument {argument} is synk.each, which gives a value for each batch of iterate or over. "
                    f"Put the value itself into each item."
                )
        return LoopCall(bound)

    def rows_of(self, call: LoopCall) -> int | None:
        """Return how many rows an item brings, unchecked."""
        return rows_picked(None, [call.arguments.leaves[i] for i in call.arguments.spec.scattered])

    def own(self, bound: BoundArguments) -> tuple[int, ...]:
        """Return the broadcast arguments of which each call has a value of its own, by number."""
        return tuple(range(len(bound.spec.broadcast)))

    def keep(self, call: LoopCall, is_alone: bool) -> LoopCall:
        """Copy the arguments of a call of a list: the loader may write its next item where this one lies."""
        bound = call.arguments
        return LoopCall(bound._replace(leaves=[copied(leaf) for leaf in bound.leaves]))

    def take_early(self, call: LoopCall) -> LoopCall:
        """Copy the arguments of a call that is not due yet: the loader may write its next item where this one lies."""
        spec, group = call.arguments.spec, self._group
        # Rows are copied when they are picked.
        leaves = list(call.arguments.leaves)
        for i in spec.broadcast:
            leaves[i] = copied(leaves[i])
        given = BoundArguments(spec, leaves)
        bound, parts = recognised(given, self._function.name, group)
        picker, kind = self._picker
        if picker is None or kind != (spec, *parts) or group._is_multi_process:
            picker = Picker(self._function, given, self._options, group)
            self._picker = picker, (spec, *parts)
        return picker.take_early(LoopCall(bound))


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
