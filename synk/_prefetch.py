"""Prefetch: bring the next batches from a thread while the current one is computed."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from time import monotonic
from types import TracebackType
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np

from . import _flight
from ._errors import entry
from ._group import Group, PyTree, group
from ._rows import Selection, gather_rows, on_host, place
from ._sources import Source, as_source, narrow

_END = object()
T = TypeVar("T")
R = TypeVar("R")


class _Item(NamedTuple):
    value: Any
    error: BaseException | None = None


class _Line:
    """What waits between the thread and its reader: so many items, and whether either has gone."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.items: deque[_Item] = deque()
        self.closed = False
        self.changed = threading.Condition()

    def has_room(self) -> bool:
        """Wait until there is room for one more; False once the reader has gone."""
        with self.changed:
            self.changed.wait_for(lambda: self.closed or len(self.items) < self.size)
            return not self.closed

    def put(self, item: _Item) -> None:
        with self.changed:
            if not self.closed:
                self.items.append(item)
                self.changed.notify_all()

    def get(self) -> _Item:
        with self.changed:
            self.changed.wait_for(lambda: self.items or self.closed)
            item = self.items.popleft() if self.items else _Item(_END)
            self.changed.notify_all()
            return item

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.items.clear()
            self.changed.notify_all()


_lines: weakref.WeakKeyDictionary[_Line, threading.Thread] = weakref.WeakKeyDictionary()
_PATIENCE = 2.0  # seconds that the end of a program waits for all of them


@atexit.register
def _close_all() -> None:
    """Threads that still wait would find JAX gone; one that comes back from it into an ended Python aborts."""
    threads = list(_lines.items())
    for line, _ in threads:
        line.close()
    until = monotonic() + _PATIENCE
    for _, thread in threads:
        thread.join(max(0.0, until - monotonic()))


class Prefetch(Iterator[R], Generic[T, R]):
    """An iterator that a thread works ahead of; made by `synk.prefetch` and `f.iterate`.

    An error comes up where its item would have come. Leaving the loop, `close()` or the end of a `with` block stops
    the thread. `len` says how many items there are, where the source says so.

    Example:
      >>> import numpy as np, synk
      >>> with synk.prefetch([np.zeros(4), np.ones(4)]) as batches:
      ...     len(batches), [float(batch.sum()) for batch in batches]
      (2, [0.0, 4.0])
    """

    def __init__(
        self, source: Iterable[T], size: int, ahead: Callable[[T], Any], arrive: Callable[[Any], R], name: str
    ) -> None:
        if isinstance(size, bool) or not isinstance(size, int | np.integer):
            raise TypeError(f"{name} is {size!r}; give an integer >= 0.")
        if size < 0:
            raise ValueError(f"{name} is {size}; give an integer >= 0, where 0 works ahead of nothing.")
        self._source, self._size, self._ahead, self._arrive = source, int(size), ahead, arrive
        self._line: _Line | None = None
        self._own: Iterator[T] | None = None
        self._is_done = False
        self._length = len(source) if isinstance(source, Sized) else None

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("The number of items is not known: what gives them has no len().")
        return self._length

    def __iter__(self) -> Prefetch[T, R]:
        return self

    @entry
    def __next__(self) -> R:
        if self._is_done:
            raise StopIteration
        try:
            return self._arrive(self._get())
        except BaseException:  # the end, an error, or Ctrl-C
            self.close()
            raise

    def _get(self) -> Any:
        if self._size == 0:
            self._own = iter(self._source) if self._own is None else self._own
            return _safely(self._ahead, next(self._own))
        if self._line is None:
            self._start()
        assert self._line is not None
        value, error = self._line.get()
        if error is not None:
            raise error
        if value is _END:
            raise StopIteration
        return value

    def _start(self) -> None:
        line = _Line(self._size)
        # The thread does not hold the iterator itself, so that leaving the loop collects it.
        args = (line, self._source, self._ahead, jax.config.jax_enable_x64)  # type: ignore[attr-defined]  # an option
        thread = threading.Thread(target=_work, args=args, name="synk-prefetch", daemon=True)
        thread.start()
        self._line = line
        _lines[line] = thread

    def close(self) -> None:
        """Stop the thread; nothing more comes."""
        self._is_done = True
        self._source, self._own = (), None  # a generator closes, and arguments are let go of
        self._ahead = self._arrive = _nothing
        if self._line is not None:
            self._line.close()

    def __enter__(self) -> Prefetch[T, R]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_line", None) is not None:
            self.close()


def _nothing(item: Any) -> Any:
    """What is closed does no more."""
    raise StopIteration


def _safely(ahead: Callable[[T], Any], value: T) -> Any:
    """The end of another iterator inside is an error, and not the end of this one."""
    try:
        return ahead(value)
    except StopIteration as error:
        raise RuntimeError("StopIteration in what works ahead of the loop: an iterator in it has ended.") from error


def _work(line: _Line, source: Iterable[T], ahead: Callable[[T], Any], is_x64: bool) -> None:
    """Fill the line until the source or the reader ends."""
    try:
        with jax.enable_x64(is_x64):  # the option is a thread's own
            each = iter(source)
            while line.has_room():
                value = next(each, _END)
                line.put(_Item(_END if value is _END else _safely(ahead, value)))  # type: ignore[arg-type]  # not the end
                if value is _END:
                    return
    except BaseException as error:
        line.put(_Item(None, error))


@entry
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

    Example:
      >>> import jax.numpy as jnp, numpy as np, synk
      >>> total = synk.function(lambda x, y: jnp.sum(x * y))
      >>> pairs = ((np.full(4, i), np.arange(4)) for i in range(3))
      >>> [int(total(x, y)) for x, y in synk.prefetch(pairs)]
      [0, 6, 12]
    """
    current = group()

    def ahead(tree: PyTree) -> PyTree:
        return _placed(current, tree if transform is None else transform(tree))

    return Prefetch(iterator, size, ahead, lambda tree: tree, "synk.prefetch: size")


def _placed(current: Group, tree: PyTree) -> PyTree:
    """A tree of rows on the devices."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    placed: list[Any] = []
    rows: int | None = None
    first = ""
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path)
        if isinstance(leaf, bool | int | float | complex):
            placed.append(leaf)
            continue
        source = as_source(leaf, f"synk.prefetch: batch{name}", "give arrays and numbers")
        if source.ndim == 0 or not isinstance(source.dtype, np.dtype):  # typed keys stay where they are
            placed.append(np.array(leaf) if isinstance(leaf, np.ndarray) else leaf)  # who made it may use it again
            continue
        if rows is None:
            rows, first = source.shape[0], name
        if source.shape[0] != rows or rows == 0:
            raise ValueError(
                f"synk.prefetch: batch{name} has {source.shape[0]} rows, batch{first} has {rows}. Arrays of a batch "
                f"share their rows, at least one."
            )
        placed.append(sent(current, source, Selection(None, 0, source.shape[0]), narrow(source.dtype)))
    return treedef.unflatten(placed)


def sent(current: Group, source: Source, selection: Selection, dtype: np.dtype, is_cut: bool = True) -> Any:
    """Rows cut over the replicas; where they do not divide, or shall not be cut, in memory of their own."""
    host = on_host(current, source)
    if is_cut and selection.rows % current.size == 0:
        rows = selection.rows // current.size
        starts = [rank * rows for rank in range(current.size)]
        if host is not None:
            return place(current, source, selection, starts, rows, dtype)
        with _flight.LOCK:  # programs pick rows on devices
            return place(current, source, selection, starts, rows, dtype)
    if host is not None:
        return gather_rows(host, selection, dtype)
    with _flight.LOCK:
        return source[selection.positions(0, selection.rows)].astype(dtype)  # type: ignore[index]  # on devices
