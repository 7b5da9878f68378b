"""Stream: take the arguments of each call from a loader, and send their rows while the call before runs."""

from collections.abc import Iterable, Iterator, Mapping
from operator import is_
from typing import Any

from .._base.pytree import is_prng_key
from .._call.binding import ArgumentBinder, BoundArguments, CallOptions
from .._call.spec import FunctionSpec
from .._data.dataset import Hold
from .._data.sources import copied
from .._runtime.group import Group
from .iterate import LoopCall, PerBatch, Picker, Timed, recognised, warn_of_keys
from .prefetch import check_iterable


class Items:
    """Maker of the calls of a loop over a source, whose items bring the arguments; `name` is for messages."""

    def __init__(
        self, function: FunctionSpec, binder: ArgumentBinder, options: CallOptions, group: Group, name: str
    ) -> None:
        self._function, self._binder, self._options, self._group, self._name = function, binder, options, group, name
        self.hold, self._last_keys = Hold(name), list[Any]()
        # The picker of the last item, for items of the same kind.
        self._picker: Picker | None = None
        self._kind: Any = None

    def calls(self, source: Iterable[Any]) -> Iterator[LoopCall]:
        check_iterable(source, f"{self._name}: its source", "arguments, e.g. a data loader")
        return map(self._call, Timed(source, self._function.stats))

    def _call(self, item: Any) -> LoopCall:
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
        return LoopCall(bound)

    def own(self, bound: BoundArguments) -> tuple[int, ...]:
        """Return the broadcast arguments of which each call has a value of its own, by number."""
        return tuple(range(len(bound.spec.broadcast)))

    def keep(self, call: LoopCall, is_alone: bool) -> LoopCall:
        """Copy the arguments of a call of a list: the loader may write its next item where this one lies."""
        bound = call.arguments
        return LoopCall(bound._replace(leaves=[copied(leaf) for leaf in bound.leaves]))

    def take_early(self, call: LoopCall) -> LoopCall:
        """Copy the arguments of a call that is not due yet: the loader may write its next item where this one lies."""
        given, group = call.arguments, self._group
        # Rows are copied when they are picked.
        for i in given.spec.broadcast:
            given.leaves[i] = copied(given.leaves[i])
        bound, parts = recognised(given, self._function.name, group)
        kind = bound.spec, parts
        if self._picker is None or kind != self._kind or group._is_multi_process:
            self._picker, self._kind = Picker(self._function, given, self._options, group), kind
        return self._picker.take_early(LoopCall(bound))


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
