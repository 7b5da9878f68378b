"""Iterate: make the calls of a loop over batches, which pick rows of its arguments."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from itertools import count, islice
from time import perf_counter
from typing import Any, NoReturn

import jax

from .._base.errors import public_api, shown, warn
from .._base.pytree import as_keys, is_prng_key
from .._call.binding import BoundArguments, CallOptions
from .._call.leaves import check_leaves, recognise_leaves, spec_of_part
from .._call.rows import common_rows
from .._call.spec import FunctionSpec
from .._data.dataset import Data
from .._runtime.group import Group
from .._variables.variable import Shared
from .minibatches import Minibatches, behind_bar
from .prefetch import check_iterable
from .waiting import Waiting, data_among

_END = object()


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


class Batches:
    """The arguments of a loop, from which each batch picks rows.

    Attributes:
      note_order: what is told each batch.
      has_values: whether `synk.each` gives batches values.
    """

    note_order: Callable[[Any], None]

    def __init__(
        self, function: FunctionSpec, bound: BoundArguments, options: CallOptions, group: Group, name: str
    ) -> None:
        self._name, self._stats = name, function.stats
        self._values = {i: iter(leaf.values) for i, leaf in enumerate(bound.leaves) if isinstance(leaf, PerBatch)}
        self._deals = {i: bound.leaves[i].deal for i in self._values if bound.leaves[i].deal is not None}
        self.has_values = bool(self._values)
        with_numbers = _with_values(bound, dict.fromkeys(self._values, 0))
        leaves, parts = recognise_leaves(with_numbers, function.name, group)
        specs = [spec_of_part(part) for part in parts]
        check_leaves(bound.spec, specs, function.name)
        sources = [leaves[at] for at in bound.spec.scattered]
        picked = [i for i, at in enumerate(bound.spec.scattered) if not specs[at].is_minibatch]
        # Each process brings its own rows. A process without rows must not leave the others.
        meets_others = group._is_multi_process and any(specs[at].kind == "local" for at in bound.spec.scattered)
        common_rows(function.name, bound.spec.scattered_names, sources, picked, meets_others)
        if not picked:
            raise ValueError(f"{name}: batches pick rows of scattered inputs, but this call has none.")
        # A variable stays in its place: each call takes the rows that it has then.
        pairs = zip(with_numbers.leaves, leaves, strict=True)
        self._bound = bound._replace(leaves=[old if isinstance(old, Shared) else new for old, new in pairs])

    def calls(self, batches: Iterable[Any], options: CallOptions) -> Generator[Waiting]:
        """Yield the call of each batch, when it is asked for."""
        lent, subset, data = tuple(self._values), options.output_subset, None
        if not self._values:
            data = data_among(self._bound)
        items, stats = iter(batches), self._stats
        for turn in count():
            begun = perf_counter()
            try:
                batch = next(items)
            except StopIteration:
                return
            finally:
                stats.loading += perf_counter() - begun
            self.note_order(batch)
            bound, slices = self._bound, options.num_slices
            if self._values:
                values = {i: self._next_value(i, iterator) for i, iterator in self._values.items()}
                for i, deal in self._deals.items():
                    batch, slices, values[i] = deal(batch)
                bound = _with_values(bound, values)
            yield Waiting(bound, CallOptions(batch, None, slices, subset, turn), lent, data)

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


def check_batches(
    function: FunctionSpec, bound: BoundArguments, options: CallOptions, group: Group, name: str, batches: Any
) -> Batches:
    check_iterable(batches, f"{name}: batches", "batches, e.g. synk.minibatches")
    bound = bound._replace(leaves=_values_left(batches, bound, name))
    return Batches(function, bound, options, group, name)


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
