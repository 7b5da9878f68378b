"""Iterate: pick the rows of each batch, send them while the call before runs, and call a function with them."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Sized
from copy import deepcopy
from itertools import islice
from time import perf_counter
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np

from .._base.errors import public_api, shown, warn
from .._base.pytree import PyTree, as_data, as_keys, is_prng_key, named, narrow
from .._call.binding import BoundArguments, CallOptions
from .._call.leaves import check_leaves, recognise_leaves, spec_of_part
from .._call.rows import common_rows, refuse_together
from .._call.spec import FunctionSpec
from .._data.dataset import Data, Hold, source_of
from .._data.minibatches import Minibatches, behind_bar
from .._data.prefetch import check_iterable
from .._data.process_rows import ProcessLocalRows
from .._data.selection import Selection, select
from .._data.sources import copied
from .._data.transfer import can_go_ahead, gather_rows, place_rows_ahead
from .._runtime.group import Group
from .._variables.variable import Shared

_END = object()

# Threads that leave out items of a loop, for which nothing may be computed. `synk.resume` adds them.
LEAVES_OUT: set[int] = set()


class PerBatch:
    """Values of which each batch gets the next; made by `synk.each`."""

    def __init__(self, values: Iterable[Any]) -> None:
        self.values = values

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
        `synk.minibatches(..., start=n)`, where a run goes on, the values of all batches, of which the first n are left
        out, or those of the batches that are left. `synk.each(synk.row_keys(key, number_of_all_batches))` gives a batch
        the same key whatever `start` and the number of epochs are.

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
    """One call of a loop.

    Attributes:
      arguments: its arguments.
      batch: the rows that it picks from them, as in a call.
      early: what was done for it before it is due, if it was taken early.
    """

    arguments: BoundArguments
    batch: Any = None
    early: "TakenEarly | None" = None


class TakenEarly(NamedTuple):
    """Rows of a call that were picked before it is due.

    Attributes:
      batches: the arguments of the loop.
      picked: the arguments with the rows of the batch; None if picking failed, which other processes hear in the call.
    """

    batches: "Batches"
    picked: BoundArguments | None


class Batches:
    """The arguments of a loop, from which each batch picks rows.

    A call that is due picks its rows itself. For one that is taken early, rows of arrays and of data in host memory are
    picked at once, and rows of data on the devices by the call. An item of a stream is a loop of one batch, whose
    arguments came from the source.
    """

    def __init__(
        self,
        function: FunctionSpec,
        bound: BoundArguments,
        options: CallOptions,
        group: Group,
        name: str,
        is_item: bool = False,
    ) -> None:
        self.function, self.bound, self.options, self.group, self.name = function, bound, options, group, name
        self._values = {i: iter(leaf.values) for i, leaf in enumerate(bound.leaves) if isinstance(leaf, PerBatch)}
        with_numbers = _with_values(bound, dict.fromkeys(self._values, 0))
        leaves, parts = recognise_leaves(with_numbers, function.name, group)
        specs = [spec_of_part(part) for part in parts]
        check_leaves(bound.spec, specs, function.name)
        self._keys = [specs[i].key for i in bound.spec.scattered]
        self._sources = [as_data(leaves[i]) for i in bound.spec.scattered]
        self.picked = [i for i, s in enumerate(self._sources) if not (isinstance(s, Data) and s.is_minibatch)]
        self.on_devices = [i for i in self.picked if self._is_on_devices(self._sources[i])]
        is_process_local = any(isinstance(source, ProcessLocalRows) for source in self._sources)
        # Each process brings its own rows. A process without rows, or with a wrong batch, must not leave the others.
        self.meets_others = group._is_multi_process and is_process_local
        early = {bound.spec.scattered[i] for i in self.picked if i not in self.on_devices}
        data = {i: leaf for i, leaf in enumerate(bound.leaves) if isinstance(leaf, Data)}
        self._data_of_call = [leaf for i, leaf in data.items() if i not in early]
        self._data = self._data_of_call if is_item else list(data.values())
        self._hold, self._num_early = Hold(name), 0
        self._count_rows()

    def calls(self, batches: Iterable[Any]) -> Generator[LoopCall]:
        """Yield the call of each batch, when it is asked for."""
        try:
            for batch in batches:
                arguments = self.bound
                if self._values:
                    values = {i: self._next_value(i, iterator) for i, iterator in self._values.items()}
                    arguments = _with_values(arguments, values)
                self._protect(self._data)
                yield LoopCall(arguments, batch)
                # The source may write to rows that are picked already.
                self._protect(self._data_of_call)
        finally:
            self._protect(self._data)

    def rows_of(self, call: LoopCall) -> int | None:
        """Return how many rows a call picks, unchecked."""
        return rows_picked(call.batch, [self._sources[i] for i in self.picked])

    def own(self, bound: BoundArguments) -> tuple[int, ...]:
        """Return the broadcast arguments of which each call has a value of its own, by number."""
        return tuple([number for number, i in enumerate(bound.spec.broadcast) if i in self._values])

    def take_early(self, call: LoopCall) -> LoopCall:
        """Pick the rows of a batch that lie on the host, for a call that is not due yet."""
        batch, arguments, picked = call.batch, call.arguments, None
        if self._values:
            # The owner of a value of `synk.each` may write the following one there.
            arguments = _with_values(arguments, {i: copied(arguments.leaves[i]) for i in self._values})
        # The source may write its next batch where this one lies.
        kept = deepcopy(batch) if self.on_devices or self.meets_others else None
        try:
            picked = self._pick(batch, arguments)
        except Exception:
            if not self.meets_others:
                raise
        self._num_early += 1
        self._protect(self._data)
        return LoopCall(arguments, kept, TakenEarly(self, picked))

    keep = take_early

    def current(self, call: LoopCall, early: TakenEarly) -> BoundArguments:
        """Return the arguments of a call that was taken early and is due."""
        self._num_early -= 1
        self._protect(self._data)
        if early.picked is not None:
            return early.picked
        try:
            return self._pick(call.batch, call.arguments)
        except Exception:
            refuse_together(self.group, self.function.name)
            raise

    def _protect(self, data: list[Data]) -> None:
        """Refuse writes to data, and to no other data of the loop, as long as an item waits."""
        self._hold.data = data if self._num_early else []

    def _next_value(self, i: int, iterator: Iterator[Any]) -> Any:
        """Take the next value of `synk.each`."""
        argument = self.bound.spec.names[i]
        value = next(iterator, _END)
        if value is _END:
            raise ValueError(f"{self.name}: synk.each of argument {argument} has fewer values than there are batches.")
        if isinstance(value, Shared):
            raise TypeError(
                f"{self.name}: synk.each gives values, not shared variables. For these call the function in a loop."
            )
        if not jax.tree_util.all_leaves([value]):
            raise TypeError(
                f"{self.name}: synk.each gives argument {argument} a {type(value).__name__}. Give it a tree of "
                f"synk.each instead, one for each array."
            )
        return as_keys(value[:], value._key) if isinstance(value, Data) else value

    def _is_on_devices(self, source: Any) -> bool:
        """Check whether the call itself picks the rows of a source."""
        if isinstance(source, Data):
            return source._home.layout is not None or not can_go_ahead(self.group, source_of(source))
        return not can_go_ahead(self.group, source)

    def _count_rows(self) -> int:
        """Return how many rows there are to pick from."""
        names = self.bound.spec.scattered_names
        return common_rows(self.function.name, names, self._sources, self.picked, self.meets_others)

    def _select(self, batch: Any, rows: int, i: int) -> Selection:
        if not rows:
            return Selection(None, 0, 0)
        return select(batch, rows, self.function.name, self.bound.spec.scattered_names[i], is_part=self.meets_others)

    def _pick(self, batch: Any, arguments: BoundArguments) -> BoundArguments:
        """Put the rows of a batch in the place of the arguments that they are picked from."""
        # An item of a stream may bring no rows to pick from.
        if not self.picked:
            return arguments
        start = perf_counter()
        selection = self._select(batch, self._count_rows(), self.picked[0])
        leaves = list(arguments.leaves)
        for i in self.picked:
            if i not in self.on_devices:
                with named(f"{self.function.name}: argument {self.bound.spec.scattered_names[i]}"):
                    leaves[self.bound.spec.scattered[i]] = self._rows_of(i, batch, selection)
        self.function.stats.sending += perf_counter() - start
        return arguments._replace(leaves=leaves, numbers=None if self.on_devices else selection.with_copied_indexes())

    def _rows_of(self, i: int, batch: Any, selection: Selection) -> Any:
        leaf = self._sources[i]
        if isinstance(leaf, ProcessLocalRows):
            selection_here = self._select(batch, leaf.shape[0], i)
            return ProcessLocalRows(gather_rows(leaf.source, selection_here, narrow(leaf.dtype)))
        source = source_of(leaf) if isinstance(leaf, Data) else leaf
        is_cut = self.options.num_slices == 1 and self.bound.spec.overlaps[i] is None
        rows = place_rows_ahead(self.group, source, selection, narrow(leaf.dtype), is_cut=is_cut)
        # The call gets the batch for the rows on the devices, and must not pick from these rows again.
        if self.on_devices:
            return Data(rows, self.bound.spec.scattered_names[i], minibatch=True, key=self._keys[i])
        return as_keys(rows, self._keys[i])


def check_batches(
    function: FunctionSpec, bound: BoundArguments, options: CallOptions, group: Group, name: str, batches: Any
) -> Batches:
    """Check the arguments of a loop over batches, and return what makes its calls."""
    check_iterable(batches, f"{name}: batches", "batches, e.g. synk.minibatches")
    bound = bound._replace(leaves=_values_left(batches, bound, name))
    rows = Batches(function, bound, options, group, name)
    if not rows.picked:
        raise ValueError(f"{name}: batches pick rows of scattered inputs, but this call has none.")
    return rows


def _values_left(batches: Any, bound: BoundArguments, name: str) -> list[Any]:
    """Return the leaves, with the values of `synk.each` for batches that are not left out at the start."""
    order, leaves = behind_bar(batches), list(bound.leaves)
    start, left = (order.start, len(order)) if isinstance(order, Minibatches) else (0, 0)
    for i in [i for i, leaf in enumerate(leaves) if isinstance(leaf, PerBatch)]:
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


def launch(
    run: Callable[[BoundArguments, CallOptions], PyTree], options: CallOptions, numbers: Iterator[int], call: LoopCall
) -> PyTree:
    """Run a call of a loop that is due. `numbers` gives its number in the loop, for messages."""
    return run(*due_call(options, numbers, call))


def due_call(options: CallOptions, numbers: Iterator[int], call: LoopCall) -> tuple[BoundArguments, CallOptions]:
    """Return arguments and options of a call that is due."""
    bound, batch, early = call
    if early is not None:
        bound = early.batches.current(call, early)
        batch = batch if early.batches.on_devices else None
    return bound, options._replace(batch=batch, turn=next(numbers))


def rows_picked(batch: Any, leaves: Sequence[Any]) -> int | None:
    """Return how many rows a batch picks from leaves, unchecked; 0 for rows of this process alone, since all processes
    cut the same lists, and None for what the call refuses."""
    if any(isinstance(leaf, ProcessLocalRows) for leaf in leaves):
        return 0
    try:
        if batch is None:
            return len(leaves[0]) if leaves else 0
        if isinstance(batch, slice):
            return len(range(*batch.indices(len(leaves[0]))))
        index = np.asarray(batch)
        return int(index) if index.ndim == 0 else np.count_nonzero(index) if index.dtype == bool else len(index)
    except (TypeError, ValueError):
        return None


def warn_of_keys(name: str, bound: BoundArguments, cure: str) -> None:
    """Warn of a PRNG key that is the same for every batch."""
    for i in bound.spec.broadcast:
        if is_prng_key(bound.leaves[i]):
            warn(
                f"{name}: {bound.spec.names[i]} is one PRNG key for all batches, so each of them draws the same noise. "
                f"Give each batch its own: {cure}."
            )


def _with_values(bound: BoundArguments, values: dict[int, Any]) -> BoundArguments:
    """Put values in the place of leaves."""
    return bound._replace(leaves=[values.get(i, leaf) for i, leaf in enumerate(bound.leaves)])
