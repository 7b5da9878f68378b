"""Prefetch: bring the next batches from a thread while the current one is computed."""

from __future__ import annotations

import atexit
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from contextlib import suppress
from inspect import isgenerator
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, Generic, TypeVar

import jax
import numpy as np

from .._base.errors import SynkError, checked_integer, public_api
from .._base.jax_context import is_traced, options_of_thread, transfers_on_purpose, with_options
from .._base.pytree import SCALARS, PyTree, narrow
from .._base.turns import take_turns, turns_of_thread
from .._runtime.dispatch import uninterrupted
from .._runtime.group import Group, current_group
from .selection import Selection
from .sources import as_source
from .transfer import can_go_ahead, place_rows_ahead

T = TypeVar("T")
R = TypeVar("R")
_PATIENCE = 2.0  # seconds that the end of a program waits for all threads
_MOMENT = 0.1  # seconds that a thread may take to end where there are no more items


class _Worker:
    """A thread that takes items from an iterator, one each time that it is asked.

    A daemon, and no executor's thread: the end of a program waits for those even while a source blocks for good. It
    shares nothing but queues that a destructor may use, since the last reference may go on any line of any thread.
    """

    def __init__(self, items: Iterator[Any], size: int, options: dict[str, Any], source: Iterator[Any] | None) -> None:
        self.is_stopped = False
        self._source = source  # kept while it may be asked for, so that no other one gets its id
        self._asked: SimpleQueue[None] = SimpleQueue()
        self._waiting: SimpleQueue[None] = SimpleQueue()  # one for each item that the loop has come to wait for
        self._ready: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._behind = 0  # items begun, less those that the loop has come to wait for
        self._wait_outside = turns_of_thread()  # of a loop in what works ahead of another one
        self.cut_short: SynkError | None = None  # what the source got, where the loop was left while it waited
        for _ in range(size):
            self._asked.put(None)
        self.thread = threading.Thread(target=self._work, args=(items, options), name="synk-prefetch", daemon=True)
        _workers.add(self)

    def _work(self, items: Iterator[Any], options: dict[str, Any]) -> None:
        take_turns(self._wait_for_turn)
        try:
            with with_options(options), transfers_on_purpose():
                while True:
                    self._asked.get()
                    if self.is_stopped:
                        return
                    self._behind += 1
                    with suppress(Empty):
                        while True:
                            self._waiting.get_nowait()
                            self._behind -= 1
                    self._ready.put((next(items), None))
        except BaseException as error:  # StopIteration too
            self._ready.put((None, error))
        finally:
            if self.cut_short is None:
                self._source = None

    def _wait_for_turn(self) -> None:
        """Until the loop waits for the item under way, and so has done with all before it."""
        while self._behind > 0 and not self.is_stopped:
            self._waiting.get()
            self._behind -= 1
        if self.is_stopped:
            self.cut_short = SynkError(
                "A loop was left while a thread that worked ahead of it was to call, read or write what belongs to the "
                "loop (a shared variable, synk.data): what gives the items ends here. Make it anew, or use prefetch=0."
            )
            raise self.cut_short
        if self._wait_outside is not None:
            self._wait_outside()

    def take(self) -> Any:
        """Wait for the next item, and ask for one more; StopIteration after the last one, and where it is stopped."""
        self._waiting.put(None)
        item, error = self._ready.get()
        try:
            if isinstance(error, SystemExit):
                sys.exit(error.code)  # by the main thread, if that is the loop's: with this code the program ends
            if error is not None:
                raise error
        finally:
            del error  # or it, its traceback and this frame would keep one another, and what the caller holds
        self._asked.put(None)
        return item

    def stop(self) -> None:
        """Take no further item, let go of those that are ready, and wake whoever waits for one."""
        self.is_stopped = True
        self._asked.put(None)
        self._waiting.put(None)
        with suppress(Empty):
            while True:
                self._ready.get_nowait()
        self._ready.put((None, StopIteration()))


_workers: weakref.WeakSet[_Worker] = weakref.WeakSet()
# The last thread inside an iterator: of a generator as long as that lives; of others, to which weak references may not
# exist, by id as long as the thread does.
_last_of: weakref.WeakKeyDictionary[Any, _Worker] = weakref.WeakKeyDictionary()
_last_of_id: weakref.WeakValueDictionary[int, _Worker] = weakref.WeakValueDictionary()


@atexit.register
def _stop_all() -> None:
    """A thread that works on would find JAX gone, and one that comes back from it into an ended Python aborts."""
    workers = list(_workers)
    for worker in workers:
        worker.stop()
    until = monotonic() + _PATIENCE
    for worker in workers:
        if worker.thread.is_alive():
            worker.thread.join(max(0.0, until - monotonic()))


class Prefetch(Iterator[R], Generic[T, R]):
    """An iterator that a thread works ahead of; made by `synk.prefetch` and `f.iterate`.

    An error comes up where its item would have come. Leaving the loop, `close()` or the end of a `with` block stops
    the thread, and drops what it has taken ahead. A source that calls functions of synk, that reads or sets shared
    variables or `synk.data`, waits with that until the loop comes to its item. `len` says how many items
    there are, where the source says so.

    Example:
      >>> import numpy as np, synk
      >>> with synk.prefetch([np.zeros(4), np.ones(4)]) as batches:
      ...     len(batches), [float(batch.sum()) for batch in batches]
      (2, [0.0, 4.0])
    """

    def __init__(
        self, source: Iterable[T], size: int, ahead: Callable[[T], Any], arrive: Callable[[Any], R], name: str,
        refuse: Callable[[], None],
    ) -> None:  # fmt: skip
        wanted = "give an integer >= 0, where 0 works ahead of nothing"
        self._size, self._refuse = checked_integer(size, name, wanted=wanted), refuse
        self._steps: tuple[Iterator[Any], Callable[[Any], R]] | None = _prepare(source, ahead), arrive
        self._worker: _Worker | None = None
        self._first = threading.Lock()  # for the making of it
        self._source = source if isinstance(source, Iterator) else None  # which another loop may go on with
        self._length = None
        if isinstance(source, Sized):
            with suppress(TypeError, NotImplementedError):  # a loader may have a len() that says it has none
                self._length = len(source)
        self._options = options_of_thread()
        self._unused = name.removesuffix(": prefetch")  # what it was made by, until a loop asks

    def __del__(self, warn: Callable[..., None] = warnings.warn) -> None:  # an argument, which outlives globals
        call = getattr(self, "_unused", "")
        if call.endswith((".iterate", ".stream")):
            warn(f"{call}: no loop asked for its results, so it ran nothing.", RuntimeWarning, 2)

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("The number of items is not known: what gives them has no len().")
        return self._length

    @public_api
    def __next__(self) -> R:
        self._unused = ""
        self._refuse()
        steps = self._steps
        if steps is None:
            raise StopIteration
        items, arrive = steps
        try:
            with jax.enable_x64(self._options["enable_x64"]):
                if self._size == 0:
                    self._wait_for_last()
                    return arrive(next(items))
                with self._first:
                    worker = self._worker or self._start(items)
                return arrive(worker.take())
        except BaseException:  # the end, an error, or Ctrl-C
            self.close()
            raise

    def _wait_for_last(self) -> None:
        """The thread of another loop over the same iterator, that was left, may be in it still."""
        source = self._source
        last = _last_of.get(source) if isgenerator(source) else _last_of_id.get(id(source))
        if last is None or last is self._worker:
            return
        if last.is_stopped:
            last.thread.join()
            if last.cut_short is not None:
                raise last.cut_short
            return
        last.thread.join(_MOMENT)  # at the end of the iterator it is gone soon
        if last.thread.is_alive():
            raise SynkError(
                "Another loop over this iterator has not ended, and a thread works ahead of it: what that has taken "
                "would be missing here. Let that loop end, or close() it; give each its own; or use prefetch=0 in both."
            )

    def _start(self, items: Iterator[Any]) -> _Worker:
        self._wait_for_last()
        source = self._source
        held = None if isgenerator(source) else source
        self._worker = worker = _Worker(items, self._size, self._options, held)
        if isgenerator(source):
            _last_of[source] = worker
        elif held is not None:
            _last_of_id[id(held)] = worker
        weakref.finalize(self, worker.stop)  # it does not refer to self, so leaving the loop ends it
        with uninterrupted():  # or threading has half of a thread
            worker.thread.start()
        return worker

    def close(self) -> None:
        """Stop the thread; nothing more comes."""
        self._unused = ""
        self._steps = self._source = None  # a generator closes, and arguments are let go of
        if self._worker is not None:
            self._worker.stop()

    def __enter__(self) -> Prefetch[T, R]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _prepare(source: Iterable[T], ahead: Callable[[T], Any]) -> Generator[Any]:
    """What `ahead` makes of each item, when it is asked for; items that have gone on are not held."""

    def work(value: T) -> Any:
        try:
            return ahead(value)
        except StopIteration as error:  # the end of another iterator inside is not the end of this one
            raise RuntimeError("StopIteration in what works ahead of the loop: an iterator in it has ended.") from error

    yield from map(work, source)


@public_api
def prefetch(
    iterator: Iterable[PyTree], size: int = 2, transform: Callable[[PyTree], PyTree] | None = None
) -> Prefetch[PyTree, PyTree]:
    """Bring the batches of an iterator to the devices ahead of the loop that uses them.

    Args:
      iterator: gives pytrees of arrays that share their number of rows, axis 0; numbers in them pass as they are.
      size: how many batches to hold ready, >= 0; with 0 they are brought when asked for.
      transform: takes a tree and returns one; runs on the thread (augmentation).

    Returns:
      An iterator of trees of `jax.Array`s, cut over the replicas; where rows do not divide, NumPy arrays.

    Raises:
      ValueError: arrays of one tree differ in rows, or have none; when that batch is reached.
      SynkError: a batch is asked for inside a transformation of JAX's.

    Example:
      >>> import jax.numpy as jnp, numpy as np, synk
      >>> total = synk.function(lambda x, y: jnp.sum(x * y))
      >>> pairs = ((np.full(4, i), np.arange(4)) for i in range(3))
      >>> [int(total(x, y)) for x, y in synk.prefetch(pairs)]
      [0, 6, 12]
    """
    group = current_group()

    def ahead(tree: PyTree) -> PyTree:
        return _place_batch(group, tree if transform is None else transform(tree))

    return Prefetch(iterator, size, ahead, lambda tree: tree, "synk.prefetch: size", _refuse_trace)


def _refuse_trace() -> None:
    if is_traced():
        raise SynkError(
            "synk.prefetch: a batch is asked for inside jit, grad, vmap or the like, which would run again with that "
            "one batch. Take it outside, and pass it as an argument."
        )


def _place_batch(group: Group, tree: PyTree) -> PyTree:
    """A tree of rows on the devices."""
    first: tuple[str, int] | None = None

    def place(path: Any, leaf: Any) -> Any:
        nonlocal first
        if isinstance(leaf, SCALARS):
            return leaf
        name = f"batch{jax.tree_util.keystr(path)}"
        source = as_source(leaf, f"synk.prefetch: {name}", "give arrays and numbers")
        if source.ndim == 0 or not isinstance(source.dtype, np.dtype):  # typed keys stay where they are
            return np.array(leaf) if isinstance(leaf, np.ndarray) else leaf  # who made it may use it again
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
        return place_rows_ahead(group, source, Selection(None, 0, rows), narrow(source.dtype))

    return jax.tree_util.tree_map_with_path(place, tree)
