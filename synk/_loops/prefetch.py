"""Prefetch: ask an iterator for its next items early, while what was launched for the last one runs."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from types import GeneratorType
from typing import Any, Generic, TypeVar, cast

import jax
import numpy as np

from .._base.errors import SynkError, checked_integer, public_api, shown
from .._base.jax_context import is_traced
from .._base.pytree import SCALARS, PyTree, named, narrow
from .._data.sources import as_source
from .._data.transfer import can_go_ahead, rows_ahead
from .._runtime.group import Group, current_group
from .minibatches import behind_bar

T = TypeVar("T")
R = TypeVar("R")


class Prefetch(Iterator[R], Generic[T, R]):
    """An iterator of results that takes items of its source early; made by `synk.prefetch` and `f.iterate`.

    `next` launches the call of one item. While the call runs, `next` takes the following items from the source and
    sends their rows. The source is asked on the thread of the loop. An error of the source is raised when the loop
    comes to its item. Leaving the loop, `close()` or the end of a `with` block drops the items taken early. `len` gives
    the number of items, if the source has a `len`.

    Attributes:
      waiting: the items that were taken early.
      gives_lists: whether an item is a list of results.

    Example:
      >>> import numpy as np, synk
      >>> with synk.prefetch([np.zeros(4), np.ones(4)]) as batches:
      ...     len(batches), [float(batch.sum()) for batch in batches]
      (2, [0.0, 4.0])
    """

    gives_lists = False
    # Whether items that wait are to be looked at after each launch.
    _looks_at_waiting = False

    def __init__(
        self, source: Iterable[Any], items: Iterable[Any], size: int, name: str, refuse: Callable[[], None]
    ) -> None:
        """Take up to `size` items early."""
        # `source` is what the items are made of, and has their number. `name` is what messages call the option `size`.
        # `refuse` raises where no item may be asked for, as in a trace.
        self.waiting = deque[T]()
        self._size = checked_integer(size, name, wanted="give an integer >= 0, where 0 takes nothing early")
        self._refuse = refuse
        self._items: Iterator[Any] | None = iter(items)
        self._error: BaseException | None = None
        self._length = length(source)
        # Named until the loop begins: a loop that nobody asks for results has run nothing, which is most often a
        # mistake.
        self._unused_call = name.removesuffix(": prefetch")

    # A global may be gone when Python ends; a default value is not.
    def __del__(self, warn: Callable[..., None] = warnings.warn) -> None:
        call = getattr(self, "_unused_call", "")
        if call.endswith((".iterate", ".stream")):
            warn(f"{call}: no loop asked for its results, so it ran nothing.", RuntimeWarning, 2)

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("The number of items is not known: what gives them has no len().")
        return self._length

    @public_api
    def __next__(self) -> R:
        self._unused_call = ""
        self._refuse()
        try:
            waiting = self.waiting
            if not waiting:
                self._take_item()
            if not waiting:
                error = self._error or StopIteration()
                try:
                    raise error
                finally:
                    # An error refers to this frame. Without this line the frame would refer to the error.
                    del error
            result = self._launch(waiting.popleft())
            if self._looks_at_waiting:
                self._launched()
            # After the launch, so that the rows of the next items are sent while this call runs.
            for _ in range(self._size - len(waiting)):
                self._take_item(is_early=True)
            return result
        except BaseException:
            # Ctrl-C too: a loop that went on would miss the item that was under way.
            self.close()
            raise

    def _take_item(self, is_early: bool = False) -> None:
        """Take one more item; keep an error until the loop comes to its item."""
        if self._items is None:
            return
        try:
            self.waiting.append(self._next(self._items, is_early))
        # At once: an error that is kept would come an item later, or never.
        except KeyboardInterrupt:
            raise
        except StopIteration:
            self._items = None
        except BaseException as error:
            self._items, self._error = None, error

    def _next(self, items: Iterator[Any], is_early: bool) -> T:
        """Ask for an item, which waits until it is due if it is early."""
        return next(items)

    def _launch(self, item: T) -> R:
        """Return the result of an item that is due."""
        return cast(R, item)

    def _launched(self) -> None:
        """Look at the items that wait: an item was launched, and the source is asked next."""

    def leave_out(self, n: int) -> tuple[int, int]:
        """Leave out the first n results. Return how many of them there were, and how many items they make."""
        there = sum(1 for _ in islice(self._before_first(), n))
        self._length = None if self._length is None else self._length - there
        return there, there

    def _before_first(self) -> Iterator[Any]:
        """Return the source of a loop that has not begun, which begins here."""
        if not self._unused_call or self._items is None:
            raise SynkError("synk.resume: this loop has begun, so it cannot leave out its first items. Give a new one.")
        self._unused_call = ""
        return self._items

    def close(self) -> None:
        """Drop the items that were taken early, and let go of the source; nothing more comes."""
        self._unused_call = ""
        self._items = self._error = None
        self.waiting.clear()

    def __enter__(self) -> Prefetch[T, R]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def length(items: Any) -> int | None:
    # The DataLoader of PyTorch has a len() that raises if its dataset has none.
    with suppress(TypeError, NotImplementedError):
        return len(items)
    return None


def check_iterable(value: Any, what: str, wanted: str) -> None:
    """Raise TypeError for what is no iterable, and ValueError for a used-up generator, whose loop would run nothing."""
    if not isinstance(value, Iterable):
        raise TypeError(f"{what} is {shown(value)}; give an iterable of {wanted}.")
    generator = behind_bar(value)
    if isinstance(generator, GeneratorType) and generator.gi_frame is None:
        raise ValueError(f"{what} is a generator that is used up. Make another one for each loop, or give a list.")


@public_api
def prefetch(
    iterator: Iterable[PyTree], size: int = 2, transform: Callable[[PyTree], PyTree] | None = None
) -> Prefetch[PyTree, PyTree]:
    """Send the batches of an iterator to the devices before the loop comes to them.

    The iterator and `transform` run on the thread of the loop, up to `size` batches early.

    Args:
      iterator: gives pytrees of arrays that share their number of rows, axis 0; numbers in them pass as they are.
      size: how many batches to send early, >= 0; with 0 a batch is sent when the loop asks for it.
      transform: takes a tree and returns a tree (augmentation).

    Returns:
      An iterator of trees of `jax.Array`s, cut over the replicas; where rows do not divide, NumPy arrays.

    Raises:
      ValueError: arrays of one tree differ in rows, or have none; when the loop comes to that batch.
      SynkError: a batch is asked for inside a transformation of JAX's.

    Example:
      >>> import jax.numpy as jnp, numpy as np, synk
      >>> total = synk.function(lambda x, y: jnp.sum(x * y))
      >>> pairs = ((np.full(4, i), np.arange(4)) for i in range(3))
      >>> [int(total(x, y)) for x, y in synk.prefetch(pairs)]
      [0, 6, 12]
    """
    group = current_group()
    group._refuse_if_absent("synk.prefetch")

    def prepare(tree: PyTree) -> PyTree:
        try:
            transformed = tree if transform is None else transform(tree)
        except StopIteration as error:
            # The end of an iterator inside of transform would end the loop without a word.
            raise RuntimeError("synk.prefetch: transform raised StopIteration: an iterator in it has ended.") from error
        return _place_batch(group, transformed)

    check_iterable(iterator, "synk.prefetch: iterator", "batches")
    return Prefetch(iterator, map(prepare, iterator), size, "synk.prefetch: size", _refuse_trace)


def _refuse_trace() -> None:
    if is_traced():
        raise SynkError(
            "synk.prefetch: a batch is asked for inside jit, grad, vmap or the like, which would run again with that "
            "one batch. Take it outside, and pass it as an argument."
        )


def _place_batch(group: Group, tree: PyTree) -> PyTree:
    """Send the rows of a tree to the devices."""
    first: tuple[str, int] | None = None

    def place(path: Any, leaf: Any) -> Any:
        nonlocal first
        if isinstance(leaf, SCALARS):
            return leaf
        name = f"batch{jax.tree_util.keystr(path)}"
        source = as_source(leaf, f"synk.prefetch: {name}", "give arrays and numbers")
        # Scalars and typed keys have no rows to cut. A NumPy array is copied: its owner may write the next one there.
        if source.ndim == 0 or not isinstance(source.dtype, np.dtype):
            return np.array(leaf) if isinstance(leaf, np.ndarray) else leaf
        rows = source.shape[0]
        first = first or (name, rows)
        if rows == 0:
            raise ValueError(f"synk.prefetch: {name} has 0 rows. Arrays of a batch have at least one.")
        if rows != first[1]:
            raise ValueError(
                f"synk.prefetch: {name} has {rows} rows, {first[0]} has {first[1]}. Arrays of a batch share their rows."
            )
        if not can_go_ahead(group, source):
            return leaf
        with named(f"synk.prefetch: {name}"):
            return rows_ahead(group, source, narrow(source.dtype))

    return jax.tree_util.tree_map_with_path(place, tree)
