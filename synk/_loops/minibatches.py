"""Minibatches: the order in which a training loop sees rows."""

from collections.abc import Iterator
from dataclasses import dataclass
from operator import length_hint
from typing import Any
from weakref import ref

import numpy as np

from .._base.errors import checked_integer, public_api
from .._base.units import counted


@dataclass(frozen=True)
class Minibatches:
    """An iterable of row indexes, one array a batch; made by `synk.minibatches`."""

    rows: int
    batch_size: int
    shuffle: bool
    seed: int
    drop_last: bool
    epochs: int
    start: int

    @property
    def per_epoch(self) -> int:
        """Return the number of batches of an epoch."""
        return self.rows // self.batch_size if self.drop_last else -(-self.rows // self.batch_size)

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
        # The order of rows in the last epoch that was asked for, and its number.
        self._order, self._epoch = np.arange(0), -1

    def __length_hint__(self) -> int:
        return max(0, self._batches.epochs * self._batches.per_epoch - self._at)

    def __next__(self) -> np.ndarray:
        batches = self._batches
        epoch, i = divmod(self._at, batches.per_epoch)
        if epoch >= batches.epochs:
            raise StopIteration
        if epoch != self._epoch:
            # NumPy keeps the stream of RandomState for good. Streams of newer generators may change with a release:
            # https://numpy.org/neps/nep-0019-rng-policy.html
            shuffled = np.random.RandomState([batches.seed, epoch]).permutation if batches.shuffle else np.arange
            self._order, self._epoch = shuffled(batches.rows), epoch
        self._at += 1
        batch = self._order[i * batches.batch_size : (i + 1) * batches.batch_size]
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
    rows: int, batch_size: int, *,
    shuffle: bool = True, seed: int = 0, drop_last: bool = False, epochs: int = 1, start: int = 0,
) -> Minibatches:  # fmt: skip
    """Deal rows out into batches, for `batch=`: every row once an epoch, the last batch as short as it comes.

    Args:
      rows: how many there are, >= 1.
      batch_size: rows of a batch (global), >= 1.
      shuffle: whether each epoch has an order of its own, which depends on `seed` and the epoch alone.
      seed: from 0 to 2**32 - 1; the same on every platform and in every process.
      drop_last: whether to leave out a last batch that is shorter.
      epochs: how often to go through the rows, >= 1.
      start: how many batches to leave out at the start: a resumed run sees what the first would have seen. Their values
        of `synk.each` are left out too.

    Returns:
      An iterable of integer arrays of shape (batch_size,), the last of an epoch shorter; `len` says how many, so that
      a progress bar shows. It can be gone through again.

    Raises:
      ValueError: a number is out of its range, or no batch is left.

    Example:
      >>> import synk
      >>> batches = synk.minibatches(5, 2, seed=1)
      >>> rows = sorted(int(i) for batch in batches for i in batch)
      >>> len(batches), [len(batch) for batch in batches], rows
      (3, [2, 2, 1], [0, 1, 2, 3, 4])
    """
    numbers = {"rows": rows, "batch_size": batch_size, "seed": seed, "epochs": epochs, "start": start}
    for name, value in numbers.items():
        checked_integer(value, f"synk.minibatches: {name}", 0 if name in ("seed", "start") else 1)
    if seed >= 2**32:
        raise ValueError(f"synk.minibatches: seed is {seed}; give one below 2**32.")
    batches = Minibatches(int(rows), int(batch_size), shuffle, int(seed), drop_last, int(epochs), int(start))
    if batches.per_epoch == 0:
        raise ValueError(
            f"synk.minibatches: {rows} rows make no batch of {batch_size} with drop_last=True. Make batches smaller."
        )
    if (total := epochs * batches.per_epoch) < start:
        there = f"{total} batches of {counted(epochs, 'epoch')}"
        raise ValueError(f"synk.minibatches: start={start} is beyond the {there}.")
    return batches
