"""Minibatches: the order in which a training loop sees rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import length_hint
from typing import Any, NamedTuple
from weakref import ref

import numpy as np

from .._base.errors import checked_integer, public_api, shown
from .._base.units import counted
from .._data.costs import checked_costs, round_up


class OrderStats(NamedTuple):
    """Counts of one epoch of an order of rows; where rows have no costs, each counts 1.

    Attributes:
      batches: batches of an epoch.
      shapes: numbers of rows and buckets that batches have: programs that a loop compiles.
      real_cost: the sum of the costs of all rows.
      padded_cost: rows of a batch times its bucket, summed over the batches.
    """

    batches: int
    shapes: int
    real_cost: float
    padded_cost: float


class Bucket(NamedTuple):
    """The rows whose costs round up to `cost`: their number, and rows of a batch."""

    rows: int
    size: int
    cost: float = 1.0


@dataclass(frozen=True)
class Minibatches:
    """An iterable of row indexes, one array a batch; made by `synk.minibatches`."""

    rows: int
    # Of the largest batches.
    batch_size: int
    shuffle: bool
    seed: int
    drop_last: bool
    epochs: int
    start: int
    buckets: tuple[Bucket, ...]
    real_cost: float
    # The bucket of each row, in int32; as bytes, whose hash and comparison are quick. Empty where rows have no costs.
    of_rows: bytes = field(default=b"", repr=False)

    @cached_property
    def per_epoch(self) -> int:
        """Return the number of batches of an epoch."""
        return sum(rows // size if self.drop_last else -(-rows // size) for rows, size, _ in self.buckets)

    @property
    def stats(self) -> OrderStats:
        """Return counts of an epoch: batches, shapes, and the costs of its rows, real and padded."""
        shapes, padded = 0, 0.0
        for rows, size, cost in self.buckets:
            rest = 0 if self.drop_last else rows % size
            shapes += (rows >= size) + (rest > 0)
            padded += (rows - rows % size + rest) * cost
        return OrderStats(self.per_epoch, shapes, self.real_cost, padded)

    def longest(self, batch: Any) -> float:
        """Return the bucket of a batch of the order: what to pad its rows to; an int if it is whole.

        Raises:
          ValueError: the rows are no batch of the order, or the order was made without `cost`.
        """
        index, of_rows = np.asarray(batch), np.frombuffer(self.of_rows, np.int32)
        is_index = index.ndim == 1 and index.dtype.kind in "iu" and len(index) and index.min() >= 0
        found = np.unique(of_rows[index]) if is_index and index.max() < len(of_rows) else ()
        if len(found) != 1 or len(index) > self.buckets[found[0]].size:
            raise ValueError(
                f"synk.minibatches: longest({shown(batch)}): these rows are no batch of an order with cost=, whose "
                f"rows share a bucket. Give a batch as the order gives it."
            )
        cost = self.buckets[found[0]].cost
        return int(cost) if cost.is_integer() else cost

    def deal(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the order of rows in an epoch, and where each of its batches begins and ends there."""
        # NumPy keeps the stream of RandomState for good. Streams of newer generators may change with a release:
        # https://numpy.org/neps/nep-0019-rng-policy.html
        shuffled = np.random.RandomState([self.seed, epoch]).permutation if self.shuffle else np.arange
        order, begin, end = shuffled(self.rows), list[np.ndarray](), list[np.ndarray]()
        stop = 0
        for rows, size, _ in self.buckets:
            start, stop = stop, stop + rows
            begin.append(np.arange(start, stop - (size - 1) * self.drop_last, size))
            end.append(np.minimum(begin[-1] + size, stop))
        turns = slice(None)
        if self.of_rows:
            order = order[np.argsort(np.frombuffer(self.of_rows, np.int32)[order], kind="stable")]
            turns = shuffled(self.per_epoch)
        return order, np.concatenate(begin)[turns], np.concatenate(end)[turns]

    def __len__(self) -> int:
        return self.epochs * self.per_epoch - self.start

    def __iter__(self) -> "MinibatchIterator":
        return MinibatchIterator(self)


@dataclass(frozen=True, eq=False)
class Loop:
    """One way through shuffled minibatches, known by its first batch."""

    order: Minibatches
    first: "ref[np.ndarray]"


# The loop that began last: a batch does not say where it comes from.
_newest: Loop | None = None


def loop_begun_by(batch: Any) -> Loop | None:
    """Return the loop whose first batch this is; None if it is no first batch, or another loop has begun since."""
    return _newest if _newest is not None and _newest.first() is batch else None


class MinibatchIterator(Iterator[np.ndarray]):
    """An iterator over minibatches, whose next ones can be left out."""

    def __init__(self, batches: Minibatches) -> None:
        self._batches, self._at, self._has_begun = batches, batches.start, False
        # The rows and the batches of the last epoch that was asked for, and its number.
        self._order = self._begin = self._end = np.arange(0)
        self._epoch = -1

    def __length_hint__(self) -> int:
        return max(0, self._batches.epochs * self._batches.per_epoch - self._at)

    def __next__(self) -> np.ndarray:
        batches = self._batches
        epoch, i = divmod(self._at, batches.per_epoch)
        if epoch >= batches.epochs:
            raise StopIteration
        if epoch != self._epoch:
            (self._order, self._begin, self._end), self._epoch = batches.deal(epoch), epoch
        self._at += 1
        batch = self._order[self._begin[i] : self._end[i]]
        if not self._has_begun and batches.shuffle:
            global _newest
            # Weakly, since the batch is an array of the user's, which must not live as long as the program.
            self._has_begun, _newest = True, Loop(batches, ref(batch))
        return batch

    def leave_out(self, n: int) -> int:
        there = min(n, length_hint(self))
        self._at += there
        return there


def behind_bar(batches: Any) -> Any:
    """Return the iterable that a progress bar such as tqdm's goes through; other iterables as they are."""
    # tqdm keeps what it wraps under this name.
    return getattr(batches, "iterable", batches)


@public_api
def minibatches(
    rows: int, batch_size: int | None = None, *,
    shuffle: bool = True, seed: int = 0, drop_last: bool = False, epochs: int = 1, start: int = 0,
    cost: Any = None, budget: float | None = None, buckets: Sequence[float] | None = None,
) -> Minibatches:  # fmt: skip
    """Deal rows out into batches, for `batch=`: every row once an epoch, the last batch as short as it comes.

    With `cost` a batch holds rows of like cost: costs are rounded up to buckets, and rows of one bucket are shuffled
    among themselves, as are the batches. All batches of a bucket have as many rows but one, its short rest. Batches by
    length correlate the length with the step, so weigh means by tokens (`synk.Weighted`).

    Args:
      rows: how many there are, >= 1.
      batch_size: rows of a batch (global), >= 1; left out with `budget`.
      shuffle: whether each epoch has an order of its own, which depends on `seed` and the epoch alone.
      seed: from 0 to 2**32 - 1; the same on every platform and in every process.
      drop_last: whether to leave out a last batch that is shorter; with `cost` that of each bucket.
      epochs: how often to go through the rows, >= 1.
      start: how many batches to leave out at the start: a resumed run sees what the first would have seen. Their values
        of `synk.each` are left out too.
      cost: a number for each row, such as its length, in NumPy or a list.
      budget: instead of `batch_size`, how much a batch may cost: its rows times its bucket, as tokens of padded texts.
      buckets: the costs to round up to; by default powers of two, and `budget` where that is less.

    Returns:
      An iterable of integer arrays of shape (batch_size,), the last of an epoch shorter; `len` says how many, so that
      a progress bar shows. It can be gone through again. Its `longest(batch)` is the bucket of a batch, to which to
      pad; its `stats` has the batches, shapes, real and padded cost of an epoch.

    Raises:
      TypeError: a number is none, or `batch_size` and `budget` are given both.
      ValueError: a number is out of its range, a cost is above the budget or the largest bucket, or no batch is left.

    Example:
      >>> import synk
      >>> batches = synk.minibatches(5, 2, seed=1)
      >>> rows = sorted(int(i) for batch in batches for i in batch)
      >>> len(batches), [len(batch) for batch in batches], rows
      (3, [2, 2, 1], [0, 1, 2, 3, 4])
      >>> order = synk.minibatches(5, cost=[3, 8, 4, 7, 3], budget=16, shuffle=False)
      >>> [(batch.tolist(), order.longest(batch)) for batch in order]
      [([0, 2, 4], 4), ([1, 3], 8)]
    """
    numbers = {"rows": rows, "seed": seed, "epochs": epochs, "start": start}
    numbers |= {"batch_size": batch_size} if cost is None or batch_size is not None else {}
    for name, value in numbers.items():
        checked_integer(value, f"synk.minibatches: {name}", 0 if name in ("seed", "start") else 1)
    if seed >= 2**32:
        raise ValueError(f"synk.minibatches: seed is {seed}; give one below 2**32.")
    options = shuffle, int(seed), drop_last, int(epochs), int(start)
    of_cost = _buckets(int(rows), batch_size, cost, budget, buckets)
    batches = Minibatches(int(rows), max(bucket.size for bucket in of_cost[0]), *options, *of_cost)
    if batches.per_epoch == 0:
        raise ValueError(
            f"synk.minibatches: {rows} rows make no batch of {batches.batch_size} with drop_last=True. Make batches "
            f"smaller."
        )
    if (total := epochs * batches.per_epoch) < start:
        there = f"{total} batches of {counted(epochs, 'epoch')}"
        raise ValueError(f"synk.minibatches: start={start} is beyond the {there}.")
    return batches


def _buckets(
    rows: int, batch_size: int | None, cost: Any, budget: float | None, bounds: Sequence[float] | None
) -> tuple[tuple[Bucket, ...], float, bytes]:
    """Return buckets, the costs of all rows together, and the bucket of each row."""
    if (budget is not None and batch_size is not None) or (cost is None and (budget, bounds) != (None, None)):
        raise TypeError(
            "synk.minibatches: budget= is given in place of batch_size, beside cost=, a number for each row; buckets= "
            "goes with cost= too."
        )
    if cost is None:
        return (Bucket(rows, int(batch_size or 0)),), rows, b""
    if batch_size is None and not (isinstance(budget, int | float | np.number) and 0 < budget < np.inf):
        raise ValueError(
            f"synk.minibatches: budget is {shown(budget)}; give what the rows of a batch may cost, above 0, such as "
            f"16_384, or batch_size."
        )
    costs = checked_costs(cost, rows, "synk.minibatches: cost")
    found, of_rows = round_up(costs, bounds, np.inf if budget is None else budget, "synk.minibatches")
    sizes = [int(batch_size or budget // bound) for bound in found]
    buckets = map(Bucket, np.bincount(of_rows, minlength=len(found)).tolist(), sizes, found.tolist())
    return tuple(buckets), float(costs.sum()), of_rows.astype(np.int32).tobytes()
