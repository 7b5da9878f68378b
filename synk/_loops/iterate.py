"""Iterate: a function over many batches, or what a loader gives; the next ones are sent while the current one runs."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from itertools import count
from operator import is_
from time import perf_counter
from typing import Any, NamedTuple, NoReturn

import jax

from .._base.errors import public_api, shown, warn
from .._base.pytree import PyTree, as_keys, is_prng_key, narrow
from .._call.binding import ArgumentBinder, BoundArguments, CallOptions, check_leaves
from .._call.rows import common_rows, refuse_together
from .._call.spec import FunctionSpec
from .._data.dataset import Data, source_of
from .._data.prefetch import Prefetch
from .._data.process_rows import ProcessLocalRows
from .._data.selection import Selection, select
from .._data.sources import copied
from .._data.transfer import can_go_ahead, gather_rows, place_rows_ahead
from .._runtime.group import Group
from .._variables.variable import Shared

_END = object()  # of values that have ended


class Each:
    """Values of which each batch gets the next one; made by `synk.each`."""

    def __init__(self, values: Iterable[Any]) -> None:
        self.values = values

    def __repr__(self) -> str:
        return f"synk.each({self.values!r})"

    def __hash__(self) -> int:
        raise TypeError("values of batches have no hash")  # so they are no static argument, which all would share

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("synk.each gives a value to each batch of iterate or over; give a call one value.")


@public_api
def each(values: Iterable[Any]) -> Any:
    """Give each batch of `f.iterate` or `f.over` a value of its own, for an input that is broadcast.

    Args:
      values: an iterable with as many values as there are batches, or more: learning rates, PRNG keys.

    Returns:
      What to pass as the argument.

    Raises:
      TypeError: it is not iterable.
      ValueError: there are fewer values than batches; when that batch is reached.

    Example:
      >>> import jax.numpy as jnp, numpy as np, synk
      >>> scaled = synk.function(lambda x, rate: rate * jnp.sum(x), inputs=["x"])
      >>> x, rates = np.ones(6), [1.0, 0.5, 0.25]
      >>> [float(y) for y in scaled.iterate(x, synk.each(rates), batches=synk.minibatches(6, 2))]
      [2.0, 1.0, 0.5]
    """
    if not isinstance(values, Iterable):
        raise TypeError(f"synk.each: {shown(values)} is no iterable; give one value for each batch.")
    return Each(values)


class Ahead(NamedTuple):
    """A call made ready: its arguments, the batch where there is data to pick from, and versions of that."""

    rows: "Batches"
    bound: BoundArguments | Exception  # or why there are none, for the data as it was
    versions: list[int]
    kept: Any
    given: dict[int, Any]  # by leaf: the value of `synk.each` that this batch has
    seconds: float


class Batches:
    """The arguments of a call, of which it picks the rows of each batch."""

    def __init__(
        self, function: FunctionSpec, bound: BoundArguments, options: CallOptions, group: Group, call: str = "iterate"
    ) -> None:
        self.function, self.options, self.group = function, options, group
        self.name = f"{function.name}.{call}"
        self._each = self._values_of_each(bound)
        self._next = self._values_of_batch()
        if call == "iterate":
            warn_of_keys(self.name, bound, "synk.each(jax.random.split(key, number_of_batches))")
        self.bound = bound = self._with_values(bound, self._next)
        looked = check_leaves(bound, function.name, group)
        self.sources, self.keys = looked.scattered, [looked.keys[i] for i in bound.spec.scattered]
        self.names = bound.spec.scattered_names
        sources = self.sources
        self.picked = [i for i, s in enumerate(sources) if not (isinstance(s, Data) and s.is_minibatch)]
        self.resident = [i for i in self.picked if self._stays(sources[i])]
        self.followed = [source for source in sources if isinstance(source, Data)]
        self.rows()
        if not self.picked and call != "stream":
            raise ValueError(f"{self.name}: batches pick rows of scattered inputs, but this call has none.")

    def _stays(self, source: Any) -> bool:
        """Is it picked from where it lies, when the call is made?"""
        if isinstance(source, Data):
            return source._home.layout is not None or not can_go_ahead(self.group, source_of(source))
        return not can_go_ahead(self.group, source)

    def _values_of_each(self, bound: BoundArguments) -> dict[int, Iterator[Any]]:
        """The values of each `synk.each`, by leaf."""
        found = {i: leaf.values for i, leaf in enumerate(bound.leaves) if isinstance(leaf, Each)}
        for i in found:
            if i not in bound.spec.broadcast:
                raise ValueError(
                    f"{self.name}: argument {bound.spec.names[i]} is scattered, and synk.each gives each batch a value "
                    f'that is broadcast. Make the input "broadcast"; rows of each batch come by stream.'
                )
        return {i: iter(values) for i, values in found.items()}

    def _with_values(self, bound: BoundArguments, values: dict[int, Any]) -> BoundArguments:
        """The arguments of a batch that has these."""
        for i, value in values.items():
            argument = bound.spec.names[i]
            if value is _END:
                raise ValueError(
                    f"{self.name}: synk.each of argument {argument} has fewer values than there are batches."
                )
            if not jax.tree_util.all_leaves([value]):
                raise TypeError(
                    f"{self.name}: synk.each gives argument {argument} a {type(value).__name__}. Give it a tree of "
                    f"synk.each instead, one for each array."
                )
        return bound._replace(leaves=[values.get(i, leaf) for i, leaf in enumerate(bound.leaves)])

    def _take_values(self) -> dict[int, Any]:
        """Those of the next batch."""
        values, self._next = self._next, {}
        return values or self._values_of_batch()

    def _values_of_batch(self) -> dict[int, Any]:
        """The next value of each, with memory of its own: who gives it may fill the same array anew."""
        found = {i: next(values, _END) for i, values in self._each.items()}
        if any(isinstance(value, Shared) for value in found.values()):
            raise TypeError(
                f"{self.name}: synk.each gives values, not shared variables. For these call the function in a loop."
            )
        return {i: copied(value) for i, value in found.items()}

    def rows(self) -> int:
        """How many there are to pick from."""
        return common_rows(self.function.name, self.names, self.sources, self.picked, self.meets_others) or 0

    @property
    def meets_others(self) -> bool:
        """Does each process bring rows of its own, so that some may bring none, and all leave a batch that one cannot
        pick?"""
        return self.group._is_multi_process and any(isinstance(source, ProcessLocalRows) for source in self.sources)

    def _select(self, batch: Any, rows: int, i: int) -> Selection:
        if not rows:
            return Selection(None, 0, 0)
        return select(batch, rows, self.function.name, self.names[i], is_part=self.meets_others)

    def versions(self) -> list[int]:
        """Of the data picked from."""
        return [source._version for source in self.followed]

    def ahead(self, batch: Any, values: dict[int, Any] | None = None) -> Ahead:
        """Pick the rows of what is on the host; what is resident is picked from where it is."""
        start, versions = perf_counter(), self.versions()
        values = self._take_values() if values is None else values
        # Whoever made it may use it again for the next one.
        kept = deepcopy(batch) if self.followed or self.resident else None
        try:
            bound = self._bound(batch, values)
        except Exception as error:
            if not (self.followed or self.meets_others):
                raise
            bound = error  # until it is this batch's turn the data may change, or the others wait
        return Ahead(self, bound, versions, kept, values, perf_counter() - start)

    def _bound(self, batch: Any, values: dict[int, Any]) -> BoundArguments:
        """The arguments of a batch."""
        if not self.picked:  # an item of a stream that brings no rows to pick from
            return self._with_values(self.bound, values)
        selection = self._select(batch, self.rows(), self.picked[0])
        given: list[Any] = list(self._with_values(self.bound, values).leaves)
        for i in self.picked:
            if i not in self.resident:
                given[self.bound.spec.scattered[i]] = self._picked(i, batch, selection)
        return self.bound._replace(leaves=given, numbers=None if self.resident else selection.with_copied_indexes())

    def _picked(self, i: int, batch: Any, selection: Selection) -> Any:
        leaf = self.sources[i]
        if isinstance(leaf, ProcessLocalRows):  # of which each process picks its own
            own = self._select(batch, leaf.shape[0], i)
            return ProcessLocalRows(gather_rows(leaf.source, own, narrow(leaf.dtype)))
        source = source_of(leaf) if isinstance(leaf, Data) else leaf
        is_cut = self.options.num_slices == 1 and self.bound.spec.overlaps[i] is None
        there = place_rows_ahead(self.group, source, selection, narrow(leaf.dtype), is_cut=is_cut)
        if self.resident:  # to which the batch still applies
            return Data(there, self.names[i], minibatch=True, key=self.keys[i])
        return as_keys(there, self.keys[i])


def warn_of_keys(name: str, bound: BoundArguments, cure: str) -> None:
    """Warn of a PRNG key that is the same for every batch."""
    for i in bound.spec.broadcast:
        if is_prng_key(bound.leaves[i]):
            warn(
                f"{name}: {bound.spec.names[i]} is one PRNG key for all batches, so each of them draws the same noise. "
                f"Give each batch its own: {cure}."
            )


def iterate(
    rows: Batches,
    batches: Iterable[Any],
    size: int,
    call: Callable[[BoundArguments, CallOptions], PyTree],
    refuse: Callable[[], None],
) -> Prefetch[Any, PyTree]:
    """Call a function for each batch; `refuse` raises where nothing may be launched."""
    name = rows.name
    if not isinstance(batches, Iterable):
        raise TypeError(f"{name}: batches is {shown(batches)}; give an iterable of batches, e.g. synk.minibatches.")

    return Prefetch(batches, size, rows.ahead, partial(_arrive, call, count()), f"{name}: prefetch", refuse)


def stream(
    function: FunctionSpec,
    binder: ArgumentBinder,
    source: Iterable[Any],
    options: CallOptions,
    group: Group,
    *,
    size: int,
    call: Callable[[BoundArguments, CallOptions], PyTree],
    refuse: Callable[[], None],
    name: str,
) -> Prefetch[Any, PyTree]:
    """Call a function for each item; `refuse` raises where nothing may be launched, `name` is for messages."""
    if not isinstance(source, Iterable):
        raise TypeError(f"{name}: its source is {shown(source)}; give an iterable of arguments, e.g. a data loader.")

    before: list[Any] = []

    def ahead(item: Any) -> Ahead:
        args, kwargs = _arguments(item)
        try:
            bound = binder.bind(args, kwargs)
        except TypeError as error:
            if not isinstance(item, Mapping):
                raise
            raise TypeError(
                f"{error} An item that is a mapping gives arguments by name; one that is the only argument comes as "
                f"(item,)."
            ) from None
        keys = [leaf for leaf in bound.leaves if is_prng_key(leaf)]
        if keys and len(keys) == len(before) and all(map(is_, keys, before)):
            warn_of_keys(name, bound, "split the key as the loader goes on, as synk.each does for iterate")
        before[:] = keys
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
        return Batches(function, bound._replace(leaves=leaves), options, group, "stream").ahead(None)

    return Prefetch(source, size, ahead, partial(_arrive, call, count()), f"{name}: prefetch", refuse)


def _arguments(item: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """By position: a tuple, or a list, as torch collates them; by name: a mapping; anything else alone."""
    if isinstance(item, Mapping):
        return (), dict(item)
    return (tuple(item), {}) if isinstance(item, tuple | list) else ((item,), {})


def _arrive(call: Callable[[BoundArguments, CallOptions], PyTree], turns: Iterator[int], item: Ahead) -> PyTree:
    """Call a function with what was made ready."""
    rows, seconds = item.rows, item.seconds
    if item.versions != rows.versions():  # written since: pick again
        item = rows.ahead(item.kept, item.given)
        seconds += item.seconds
    if isinstance(item.bound, Exception):
        if rows.meets_others:
            refuse_together(rows.group, rows.function.name)
        try:
            raise item.bound
        finally:
            del item  # or the error, its traceback and this frame would keep one another
    rows.function.stats.sending += seconds
    return call(item.bound, rows.options._replace(batch=item.kept if rows.resident else None, turn=next(turns)))
