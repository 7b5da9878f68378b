"""Prefetch: ask an iterator for its next items early, while what was launched for the last one runs."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from types import GeneratorType
from typing import Any, Generic, TypeVar

import jax
import numpy as np

from .._base.errors import SynkError, checked_integer, public_api, shown
from .._base.jax_context import is_traced
from .._base.pytree import SCALARS, PyTree, named, narrow
from .._data.selection import Selection
from .._data.sources import as_source
from .._data.transfer import PickedRows, can_go_ahead, place_rows_ahead
from .._runtime.group import Group, current_group
from .._runtime.layout import put
from .minibatches import behind_bar

T = TypeVar("T")
R = TypeVar("R")


class Stopped(Exception):
    """An error behind results, perhaps none, that the loop is to see before it."""

    def __init__(self, results: list[Any], error: BaseException) -> None:
        self.results, self.error = results, error


class Prefetch(Iterator[R], Generic[T, R]):
    """An iterator of results that takes items of its source early; made by `synk.prefetch` and `f.iterate`.

    `next` launches the call of one item. While the call runs, `next` takes the following items from the source and
    sends their rows. An item that is due as soon as it is taken is launched as it is. The source is asked on the thread
    of the loop. An error of the source is raised when the loop comes to its item. Leaving the loop, `close()` or the
    end of a `with` block drops the items taken early. `len` gives the number of items, if the source has a `len`.

    Attributes:
      waiting: the items that were taken early.
      gives_lists: whether an item is a list of results.

    Example:
      >>> import numpy as np, synk
      >>> with synk.prefetch([np.zeros(4), np.ones(4)]) as batches:
      ...     len(batches), [float(batch.sum()) for batch in batches]
      (2, [0.0, 4.0])
    """

    def __init__(
        self,
        source: Iterable[Any],
        items: Iterable[T],
        launch: Callable[[T], R],
        size: int,
        name: str,
        refuse: Callable[[], None],
        *,
        take_early: Callable[[T], T] | None = None,
    ) -> None:
        """Give what `launch` returns for each item, and take up to `size` of them early."""
        # `source` is what the items are made of, and has their number. `name` is what messages call the option `size`.
        # `refuse` raises where no item may be asked for, as in a trace. `take_early` makes an item ready to wait until
        # it is due.
        self.waiting = deque[T]()
        self._size = checked_integer(size, name, wanted="give an integer >= 0, where 0 takes nothing early")
        self._launch, self._refuse, self._early = launch, refuse, take_early
        self._items: Iterator[T] | None = iter(items)
        # Whether items are lists of calls, of which those that are left out are counted one by one.
        self.gives_lists = hasattr(items, "leave_out")
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
            try:
                result = self._launch(waiting.popleft())
            except Stopped as stopped:
                if not stopped.results:
                    raise stopped.error from None
                self.close()
                self._error = stopped.error
                return stopped.results  # type: ignore[return-value]  # what `launch` would have returned
            # After the launch, so that the rows of the next items are sent while this call runs.
            for _ in range(self._size - len(waiting)):
                self._take_item(early=True)
            return result
        except BaseException:
            # Ctrl-C too: a loop that went on would miss the item that was under way.
            self.close()
            raise

    def _take_item(self, early: bool = False) -> None:
        """Take one more item; keep an error until the loop comes to its item."""
        if self._items is None:
            return
        try:
            item = next(self._items)
            if early and self._early is not None:
                item = self._early(item)
            self.waiting.append(item)
        # At once: an error that is kept would come an item later, or never.
        except KeyboardInterrupt:
            raise
        except StopIteration:
            self._items = None
        except BaseException as error:
            self._items, self._error = None, error

    def leave_out(self, n: int) -> tuple[int, int]:
        """Leave out the first n results. Return how many of them there were, and how many items they make."""
        if not self._unused_call or self._items is None:
            raise SynkError("synk.resume: this loop has begun, so it cannot leave out its first items. Give a new one.")
        left: Any = self._items
        there, items = left.leave_out(n) if self.gives_lists else (sum(1 for _ in islice(left, n)),) * 2
        self._unused_call = ""
        if self._length is not None:
            self._length = len(left) if self.gives_lists else self._length - items
        return there, items

    def close(self) -> None:
        """Drop the items that were taken early, and let go of the source; nothing more comes."""
        self._unused_call = ""
        self._items = self._early = self._error = None
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
    return Prefetch(iterator, map(prepare, iterator), lambda tree: tree, size, "synk.prefetch: size", _refuse_trace)


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
            placed = place_rows_ahead(group, source, Selection(None, 0, rows), narrow(source.dtype))
            return put(group, placed, "rows") if isinstance(placed, PickedRows) else placed

    return jax.tree_util.tree_map_with_path(place, tree)
