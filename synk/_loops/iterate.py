"""Iterate: pick the rows of each batch, send them while the call before runs, and call a function with them."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from copy import deepcopy
from itertools import islice
from time import perf_counter
from typing import Any, NamedTuple, NoReturn, TypeVar

import jax

from .._base.errors import public_api, shown, warn
from .._base.pytree import PyTree, as_data, as_keys, is_prng_key, narrow, too_large
from .._call.binding import BoundArguments, CallOptions
from .._call.leaves import check_leaves, recognise_leaves, spec_of_part
from .._call.rows import common_rows
from .._call.spec import FunctionSpec, Stats
from .._data.dataset import Data, Hold, source_of
from .._data.process_rows import ProcessLocalRows
from .._data.selection import Selection, select
from .._data.sources import copied, is_in_memory
from .._data.transfer import can_go_ahead, gather_rows, place_rows_ahead
from .._runtime.group import Group
from .._variables.variable import Shared
from .minibatches import Minibatches, behind_bar
from .prefetch import check_iterable

T = TypeVar("T")

_END = object()
# Batches that a loop keeps as they are.
_NEVER_CHANGE = (slice, int, range, type(None))

# Threads in which `synk.resume` asks for an item that is not synk's to make, for which nothing may be computed.
ASKS: set[int] = set()


class PerBatch:
    """Values of which each batch gets the next; made by `synk.each`.

    Attributes:
      deal: deals the rows of a batch by cost, where this stands for their order. Returns the batch of dealt rows, its
        number of slices, and the value.
    """

    def __init__(self, values: Iterable[Any], deal: Callable[[Any], tuple[Any, Any, Any]] | None = None) -> None:
        self.values, self.deal = values, deal

    def __repr__(self) -> str:
        return f"synk.each({self.values!r})"

    # A static argument must have a hash. All batches would share it, so there is none.
    def __hash__(self) -> int:
        raise TypeError("synk.each gives each batch a value of its own")

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("synk.each gives a value to each batch of iterate or over; give a call one value.")


@public_api
def each(values: Iterable[Any]) -> Any:
    """Give each batch of `f.iterate` or `f.over` its own value, for an input that is broadcast.

    Args:
      values: an iterable with as many values as there are batches, or more: learning rates, PRNG keys. Beside
        `synk.minibatches(..., start=n)`, where a run continues, the values of all batches, of which the first n are
        left out, or those of the batches that are left. `synk.each(synk.row_keys(key, number_of_all_batches))` gives a
        batch the same key whatever `start` and the number of epochs are.

    Returns:
      What to pass as the argument.

    Raises:
      TypeError: it is not iterable.
      ValueError: there are fewer values than batches; when the loop comes to that batch. Beside `start=n`, if there are
        neither as many values as batches in all, nor as many as are left.

    Example:
      >>> import jax.numpy as jnp, numpy as np, synk
      >>> scaled = synk.function(lambda x, rate: rate * jnp.sum(x), inputs=["x"])
      >>> x, rates = np.ones(6), [1.0, 0.5, 0.25]
      >>> [float(y) for y in scaled.iterate(x, synk.each(rates), batches=synk.minibatches(6, 2))]
      [2.0, 1.0, 0.5]
    """
    if not isinstance(values, Iterable):
        raise TypeError(f"synk.each: {shown(values)} is no iterable; give one value for each batch.")
    return PerBatch(values)


class LoopCall(NamedTuple):
    """One call of a loop: its arguments, and the rows that it picks from them, as in a call.

    Attributes:
      num_slices: the slices of a call whose rows were dealt by cost; None for those that the loop has.
    """

    arguments: BoundArguments
    batch: Any = None
    num_slices: Any = None

    @property
    def leaves(self) -> list[Any]:
        return self.arguments.leaves


class Picker:
    """Picker of the rows of calls that are taken early, whose arguments differ in values alone."""

    def __init__(self, function: FunctionSpec, bound: BoundArguments, options: CallOptions, group: Group) -> None:
        self._function, self._group, self._spec = function, group, bound.spec
        leaves, parts = recognise_leaves(bound, function.name, group)
        specs = [spec_of_part(part) for part in parts]
        check_leaves(bound.spec, specs, function.name)
        scattered, sources = [specs[at] for at in bound.spec.scattered], [leaves[at] for at in bound.spec.scattered]
        self._keys, self._dtypes = [leaf.key for leaf in scattered], [narrow(leaf.raw.dtype) for leaf in scattered]
        self._of_variables = {at: leaves[at] for at in bound.spec.scattered if specs[at].is_variable}
        self.picked = [i for i, leaf in enumerate(scattered) if not leaf.is_minibatch]
        # Rows on the host are picked early, as the call would pick them. Rows on the devices are picked by the call,
        # which gets the batch.
        self._early = [i for i in self.picked if not _is_on_devices(sources[i], group)]
        self._has_all = len(self._early) == len(self.picked)
        # Parts of slices, and parts with neighbours, begin elsewhere than the equal parts in which rows are sent early.
        self._is_cut = [options.num_slices == 1 and overlap is None for overlap in bound.spec.overlaps]
        # Each process brings its own rows. A process without rows, or with a wrong batch, must not leave the others.
        self._meets_others = group._is_multi_process and any(leaf.kind == "local" for leaf in scattered)
        common_rows(function.name, bound.spec.scattered_names, sources, self.picked, self._meets_others)

    def take_early(self, call: LoopCall) -> LoopCall:
        """Pick the rows of a call that is not due yet. Keep its batch: the source may write the next one there."""
        if self._early:
            try:
                return self._pick(call)
            except Exception:
                # The call tells the other processes.
                if not self._meets_others:
                    raise
        return call if type(call.batch) in _NEVER_CHANGE else call._replace(batch=_kept(call.batch))

    def keep(self, call: LoopCall, is_alone: bool) -> LoopCall:
        """Keep a call of a list while the next one is asked for. `is_alone`: no code of the user's runs then."""
        # The rows of a list are sent together, as one block for each argument. They are picked now if they may be
        # written to, or come from a file.
        self._is_cut = [False for _ in self._is_cut]
        leaves = [call.arguments.leaves[self._spec.scattered[i]] for i in self._early]
        is_there = all(is_in_memory(source_of(x) if isinstance(x, Data) else x) for x in leaves if hasattr(x, "shape"))
        return call._replace(batch=_kept(call.batch)) if is_alone and is_there else self.take_early(call)

    def _pick(self, call: LoopCall) -> LoopCall:
        start, name, at, batch = perf_counter(), self._function.name, 0, call.batch
        scattered, names, leaves = self._spec.scattered, self._spec.scattered_names, [*call.leaves]
        sources = [self._of_variables.get(at, leaves[at]) for at in scattered]
        rows = common_rows(name, names, sources, self.picked, self._meets_others)
        selection = self._select(batch, rows, self.picked[0])
        try:
            for at in self._early:
                leaves[scattered[at]] = self._rows_of(sources[at], at, batch, selection)
        except OverflowError as error:
            raise too_large(f"{name}: argument {names[at]}", error) from None
        self._function.stats.sending += perf_counter() - start
        if self._has_all:
            of_rows = BoundArguments(self._spec, leaves, selection.with_copied_indexes())
            return call._replace(arguments=of_rows, batch=None)
        return call._replace(arguments=BoundArguments(self._spec, leaves), batch=_kept(batch))

    def _select(self, batch: Any, rows: int, i: int) -> Selection:
        if batch is None or not rows:
            return Selection(None, 0, rows)
        return select(batch, rows, self._function.name, self._spec.scattered_names[i], is_part=self._meets_others)

    def _rows_of(self, leaf: Any, i: int, batch: Any, selection: Selection) -> Any:
        key, dtype = self._keys[i], self._dtypes[i]
        if isinstance(leaf, ProcessLocalRows):
            return ProcessLocalRows(gather_rows(leaf.source, self._select(batch, leaf.shape[0], i), dtype))
        source = source_of(leaf) if isinstance(leaf, Data) else leaf if key is None else as_data(leaf)
        rows = place_rows_ahead(self._group, source, selection, dtype, is_cut=self._is_cut[i])
        # The call gets the batch for the rows on the devices, and must not pick from these rows again.
        if not self._has_all:
            return Data(rows, self._spec.scattered_names[i], minibatch=True, key=key)
        return rows if key is None else as_keys(rows, key)


def recognised(bound: BoundArguments, name: str, group: Group) -> tuple[BoundArguments, list[Any]]:
    """Recognise the arguments of all calls of a loop at once. Return also what calls of one kind have in common."""
    leaves, parts = recognise_leaves(bound, name, group)
    if leaves is bound.leaves:
        return bound, parts
    # A variable stays in its place: each call takes the rows that it has then.
    leaves = [old if isinstance(old, Shared) else new for old, new in zip(bound.leaves, leaves, strict=True)]
    return BoundArguments(bound.spec, leaves), parts


def _kept(batch: Any) -> Any:
    """Copy a batch, unless it never changes."""
    return batch if type(batch) in _NEVER_CHANGE else deepcopy(batch)


def _is_on_devices(source: Any, group: Group) -> bool:
    if isinstance(source, Data):
        return source._home.layout is not None or not can_go_ahead(group, source_of(source))
    return not can_go_ahead(group, source)


class Batches:
    """The arguments of a loop, from which each batch picks rows.

    Attributes:
      picker: what picks the rows of calls that are taken early.
      hold: what refuses writes to data that waiting calls read.
      note_order: what is told each batch.
    """

    note_order: Callable[[Any], None]

    def __init__(
        self, function: FunctionSpec, bound: BoundArguments, options: CallOptions, group: Group, name: str
    ) -> None:
        self._name, self._stats = name, function.stats
        self._values = {i: iter(leaf.values) for i, leaf in enumerate(bound.leaves) if isinstance(leaf, PerBatch)}
        self._deals = {i: bound.leaves[i].deal for i in self._values if bound.leaves[i].deal is not None}
        with_numbers = _with_values(bound, dict.fromkeys(self._values, 0))
        self._bound, _ = recognised(with_numbers, function.name, group)
        self.picker = Picker(function, with_numbers, options, group)
        self.hold = Hold(name, [leaf for leaf in bound.leaves if isinstance(leaf, Data)])

    def calls(self, batches: Iterable[Any]) -> Generator[LoopCall]:
        """Yield the call of each batch, when it is asked for."""
        hold = self.hold
        try:
            for batch in Timed(batches, self._stats):
                self.note_order(batch)
                arguments, num_slices = self._bound, None
                if self._values:
                    values = {i: self._next_value(i, iterator) for i, iterator in self._values.items()}
                    for i, deal in self._deals.items():
                        batch, num_slices, values[i] = deal(batch)
                    arguments = _with_values(arguments, values)
                hold.is_source_asked = False
                yield LoopCall(arguments, batch, num_slices)
                # The source may write to rows that are picked already.
                hold.is_source_asked = True
        finally:
            hold.is_source_asked = False

    def take_early(self, call: LoopCall) -> LoopCall:
        """Pick the rows of a call that is not due yet, as far as they lie on the host."""
        return self.picker.take_early(self._with_own_values(call) if self._values else call)

    def keep(self, call: LoopCall, is_alone: bool) -> LoopCall:
        """Keep a call of a list while the next one is asked for; `is_alone` tells that no code of the user's runs."""
        return self.picker.keep(self._with_own_values(call) if self._values else call, is_alone)

    def _with_own_values(self, call: LoopCall) -> LoopCall:
        # The owner of a value of `synk.each` may write the following one there.
        values = {i: copied(call.arguments.leaves[i]) for i in self._values}
        return call._replace(arguments=_with_values(call.arguments, values))

    def own(self, bound: BoundArguments) -> tuple[int, ...]:
        """Return the broadcast arguments of which each call has a value of its own, by number."""
        return tuple([number for number, i in enumerate(bound.spec.broadcast) if i in self._values])

    def _next_value(self, i: int, iterator: Iterator[Any]) -> Any:
        """Take the next value of `synk.each`."""
        argument = self._bound.spec.names[i]
        value = next(iterator, _END)
        if value is _END:
            raise ValueError(f"{self._name}: synk.each of argument {argument} has fewer values than there are batches.")
        if isinstance(value, Shared):
            raise TypeError(
                f"{self._name}: synk.each gives values, not shared variables. For these call the function in a loop."
            )
        if not jax.tree_util.all_leaves([value]):
            raise TypeError(
                f"{self._name}: synk.each gives argument {argument} a {type(value).__name__}. Give it a tree of "
                f"synk.each instead, one for each array."
            )
        # A Data would be dealt out by rows, and this value goes whole to every replica.
        return as_keys(value[:], value._key) if isinstance(value, Data) else value


class Timed(Iterator[T]):
    """An iterator over a source that counts the time until it gives each item."""

    def __init__(self, source: Iterable[T], stats: Stats) -> None:
        self._items, self._stats = iter(source), stats

    def __next__(self) -> T:
        start = perf_counter()
        try:
            return next(self._items)
        finally:
            self._stats.loading += perf_counter() - start


def check_batches(
    function: FunctionSpec, bound: BoundArguments, options: CallOptions, group: Group, name: str, batches: Any
) -> Batches:
    check_iterable(batches, f"{name}: batches", "batches, e.g. synk.minibatches")
    bound = bound._replace(leaves=_values_left(batches, bound, name))
    rows = Batches(function, bound, options, group, name)
    if not rows.picker.picked:
        raise ValueError(f"{name}: batches pick rows of scattered inputs, but this call has none.")
    return rows


def _values_left(batches: Any, bound: BoundArguments, name: str) -> list[Any]:
    """Return the leaves, with the values of `synk.each` for batches that are not left out at the start."""
    order, leaves = behind_bar(batches), list(bound.leaves)
    start, left = (order.start, len(order)) if isinstance(order, Minibatches) else (0, 0)
    for i in [i for i, leaf in enumerate(leaves) if isinstance(leaf, PerBatch) and leaf.deal is None]:
        values, argument = leaves[i].values, bound.spec.names[i]
        have = len(values) if isinstance(values, Sized) else "unknown"
        if i in bound.spec.scattered:
            raise ValueError(
                f"{name}: argument {argument} is scattered, and synk.each gives each batch a value that is "
                f'broadcast. Make the input "broadcast"; rows of each batch come by stream.'
            )
        if start and have not in (left, start + left):
            raise ValueError(
                f"{name}: synk.each of argument {argument}: its number of values is {have}, and batches have "
                f"start={start}. Give the values of all {start + left} batches, or of the {left} that are left."
            )
        if start and have == start + left:
            leaves[i] = PerBatch(islice(leaves[i].values, start, None))
    return leaves


# `numbers` gives a call its number in the loop, which messages name.
def launch(
    run: Callable[[BoundArguments, CallOptions], PyTree], options: CallOptions, numbers: Iterator[int], call: LoopCall
) -> PyTree:
    """Run a call of a loop that is due. `numbers` gives its number in the loop, for messages."""
    return run(*due_call(options, numbers, call))


def due_call(options: CallOptions, numbers: Iterator[int], call: LoopCall) -> tuple[BoundArguments, CallOptions]:
    num_slices = call.num_slices or options.num_slices
    return call.arguments, CallOptions(call.batch, None, num_slices, options.output_subset, next(numbers))


def warn_of_keys(name: str, bound: BoundArguments, cure: str) -> None:
    """Warn of a PRNG key that is the same for every batch."""
    for i in bound.spec.broadcast:
        if is_prng_key(bound.leaves[i]):
            warn(
                f"{name}: {bound.spec.names[i]} is one PRNG key for all batches, so each of them draws the same noise. "
                f"Give each batch its own: {cure}."
            )


def _with_values(bound: BoundArguments, values: dict[int, Any]) -> BoundArguments:
    return bound._replace(leaves=[values.get(i, leaf) for i, leaf in enumerate(bound.leaves)])
