"""Data: an array of rows that functions pick from, in host memory, on disk, or resident on the replicas."""

from __future__ import annotations

import itertools
from typing import Any, Literal, TypeAlias

import jax
import numpy as np

from . import _flight, _sources, _trace
from ._engine import lie, once, sent, shards
from ._errors import SynkError, entry
from ._group import Group
from ._leaves import refuse_traced
from ._sources import Reader, Rows, Source, as_source, is_in_memory, is_number, narrow
from ._split import Part, cut
from ._staging import fresh

Place: TypeAlias = Literal["host", "scatter", "broadcast"]
PLACES = ("host", "scatter", "broadcast")
_config: Any = jax.config
_names = (f"data_{i}" for i in itertools.count())


class Data:
    """Rows for the inputs of functions; made by `synk.data`.

    It holds the array given, without a copy: `x[i]` reads from it and `x[i] = rows` writes to it. What lies on devices
    follows: a write marks it stale, and the next call that reads it sends what is stale. (Write through the `Data`: a
    write past it is not seen by devices that have a copy.)

    Attributes:
      name: what messages call it.
      is_minibatch: whether it has one row for each row selected.

    Example:
      >>> import numpy as np, synk
      >>> x = synk.data(np.zeros((5, 2), np.float32), name="x")
      >>> x[3] = 1.0
      >>> x, len(x), x.size, float(x[2:].sum())
      (Data(x: float32[5, 2], place="host"), 5, 10, 2.0)
    """

    def __init__(self, value: Any, place: Place, minibatch: bool, dtype: Any, name: str, key: Any = None) -> None:
        self.name = name
        self.version = 0  # counts changes
        self.key = key  # the PRNG implementation, where it holds raw data of typed keys
        self.is_minibatch = minibatch
        self._place: Place = place
        self._source: Source | None = _checked(value, self.name)
        self._row_shape = self._source.shape[1:]
        self._dtype = self._source.dtype if dtype is None else _dtype(dtype, name)
        self._length = len(self._source)
        self._form: Any = None  # kept until it changes
        self._group: Group | None = None
        self._copy: jax.Array | None = None  # on devices, as `_place` says
        self._is_wide = False  # whether JAX had 64 bits when it was last looked at
        self._stale: Part | None = None  # rows of it that were written since

    def __repr__(self) -> str:
        return f'Data({self.name}: {self.dtype.name}{list(self.shape)}, place="{self.place}")'

    @property
    def place(self) -> Place:
        """Where its rows live: "host", "scatter" or "broadcast"."""
        return self._place

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows first."""
        return (self._length, *self._row_shape)

    @property
    def dtype(self) -> np.dtype:
        """Of its rows; functions see it as JAX narrows it."""
        return self._dtype

    @property
    def ndim(self) -> int:
        """How many axes it has, rows included."""
        return 1 + len(self._row_shape)

    @property
    def size(self) -> int:
        """How many elements it has."""
        return int(np.prod(self.shape))

    def __len__(self) -> int:
        return self._length

    @entry
    def __getitem__(self, index: Any) -> Any:
        source = self.source
        if isinstance(source, Reader):
            is_all = self._length == len(source)
            rows = np.asarray(source.of[index]) if is_all else source.read(slice(0, self._length))[index]
        else:
            rows = np.asarray(source)[: self._length][index]
        return rows if rows.dtype == self._dtype else rows.astype(self._dtype)

    @entry
    def __setitem__(self, index: Any, rows: Any) -> None:
        source = self.source
        if isinstance(source, jax.Array) or (isinstance(source, np.ndarray) and not source.flags.writeable):
            raise ValueError(
                f"{self.name}: the array it holds is read-only. Give synk.data one that can be written, e.g. a copy."
            )
        if isinstance(source, Reader):
            source.of[index] = rows
        else:
            source[: self._length][index] = rows
        self.version += 1
        self._mark(_rows_at(index, self._length))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self[:], dtype) if copy else np.asarray(self[:], dtype)

    @entry
    def set_value(self, value: Any) -> None:
        """Hold another array instead, without a copy; rows may be more or fewer.

        Args:
          value: as for `synk.data`; its rows have the shape that they had, its dtype becomes this one's where read.

        Raises:
          ValueError: its rows have another shape.

        Example:
          >>> import numpy as np, synk
          >>> x = synk.data(np.zeros((5, 2), np.float32))
          >>> x.set_value(np.ones((3, 2), np.float32))
          >>> x.shape
          (3, 2)
        """
        source = _checked(value, self.name)
        if source.shape[1:] != self._row_shape:
            raise ValueError(
                f"{self.name}.set_value: the new rows have shape {source.shape[1:]}, but its rows have "
                f"{self._row_shape}. Only their number may change."
            )
        self._source, self._length = source, len(source)
        self._drop()

    @entry
    def set_length(self, rows: int) -> None:
        """Let only the first rows count, from none to all that the array held has.

        Args:
          rows: how many.

        Raises:
          ValueError: the array has fewer.

        Example:
          >>> import numpy as np, synk
          >>> x = synk.data(np.zeros((5, 2), np.float32))
          >>> x.set_length(4)
          >>> x.shape
          (4, 2)
        """
        if isinstance(rows, bool) or not isinstance(rows, int | np.integer):
            raise TypeError(f"{self.name}.set_length: rows is {rows!r}; give an integer.")
        if not 0 <= rows <= len(self.source):
            raise ValueError(
                f"{self.name}.set_length: it holds an array of {len(self.source)} rows, so there are not {rows}. "
                f"set_value gives it another array."
            )
        if rows != self._length:
            self._length = int(rows)
            self._drop()

    @entry
    def to(self, place: Place) -> Data:
        """Let its rows live elsewhere from now on; they move when next read, once.

        Args:
          place: "host" (copies on devices are freed), "scatter" or "broadcast".

        Returns:
          Itself.

        Raises:
          ValueError: `place` is none of these.

        Example:
          >>> import numpy as np, synk
          >>> synk.data(np.zeros(5)).to("scatter").place
          'scatter'
        """
        if place not in PLACES:
            raise ValueError(f"{self.name}.to: place is {place!r}; use {', '.join(map(repr, PLACES))}.")
        if place != self._place:
            self._place = place
            self._drop()
        return self

    @entry
    def free(self) -> None:
        """Let go of the array held and of all copies on devices; `set_value` gives it another.

        Example:
          >>> import numpy as np, synk
          >>> x = synk.data(np.zeros(5), name="x")
          >>> x.free()
          >>> x
          Data(x: float64[0], place="host")
        """
        self._source, self._length = None, 0
        self._drop()

    # What follows serves the other modules. Callers hold the lock.

    @property
    def source(self) -> Source:
        """The array held; its rows beyond the length do not count."""
        if self._source is None:
            raise SynkError(f"{self.name}: it was freed. Give it an array with {self.name}.set_value(...).")
        return self._source

    @property
    def form(self) -> Any:
        """What a call's program and the way of its rows depend on; None where it goes a way of its own."""
        if self._form is None and not (self._source is None or self.is_minibatch or self.key is not None):
            self._form = self._place, self._length, self._row_shape, self._dtype, is_in_memory(self._source)
        return self._form

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of one row."""
        return self._row_shape

    def parts(self, group: Group) -> list[Part]:
        """The rows that each replica holds, where they are scattered."""
        return cut(self._length, group.size)

    def resident(self, group: Group) -> jax.Array:
        """Its rows on the devices: all everywhere, or stacked, each replica's filled up to as many with real ones."""
        if (
            self._copy is not None
            and self._group is group
            and self._stale is None
            and self._is_wide == _config.jax_enable_x64
        ):
            return self._copy
        if self._length >= 2**31:
            raise ValueError(
                f'{self.name}: devices hold at most {2**31 - 1} rows; this one has more. Use place="host".'
            )
        stale, self._stale = self._stale, None  # what is written from here on is sent next time
        try:
            if self._copy is None or self._group is not group or self._copy.dtype != narrow(self._dtype):
                self._copy = None  # the old one goes first
                self._copy = self._send(group, None, None)
            elif stale is not None:
                self._copy = self._send(group, self._copy, stale)
        except BaseException:
            self._mark(stale)
            raise
        self._group, self._is_wide = group, _config.jax_enable_x64
        return self._copy

    def _mark(self, written: Part | None) -> None:
        """Note rows that devices do not have yet."""
        if written is not None:
            self._stale = written if self._stale is None else _joined(self._stale, written)

    def _drop(self) -> None:
        with _flight.LOCK:
            self._copy = self._group = self._stale = self._form = None
            self.version += 1

    def _send(self, group: Group, old: jax.Array | None, written: Part | None) -> jax.Array:
        """Bring rows to the devices: all, or where there is an old copy, those that are stale."""
        dtype = narrow(self._dtype)
        source = self.source
        if isinstance(source, jax.Array):
            source = np.asarray(source)
        stale = Part(0, self._length) if old is None or written is None else written
        if self._place == "scatter":
            return self._send_parts(group, source, dtype, old, stale)
        size = min(1 << (stale.rows - 1).bit_length(), self._length)  # few sizes: each is a program
        if (
            old is not None
            and 4 * size <= self._length
            and not (group.platform == "cpu" and len(set(group.devices)) > 1)
        ):
            first = min(stale.start, self._length - size)
            buffer = fresh((size, *self._row_shape), dtype)
            _sources.copy([Rows(buffer, source, None, first)])
            rows, start = (sent(group, each, "everywhere") for each in (buffer, np.array([first], np.int32)))
            return once(group, _with_rows, lie("everywhere", 3), lie("everywhere", 1), [old, rows, start])[0]
        buffer = fresh(self.shape, dtype)
        _sources.copy([Rows(buffer, source, None, 0)])
        # CPU devices all read this one copy, which is nobody else's.
        return jax.make_array_from_callback(self.shape, group.everywhere, lambda index: buffer)

    def _send_parts(
        self, group: Group, source: np.ndarray | Reader, dtype: np.dtype, old: jax.Array | None, stale: Part
    ) -> jax.Array:
        parts = self.parts(group)
        tall = parts[0].rows
        ranks = [r for r in group.mine if old is None or _overlap(parts[r], stale) or group.is_simulated]
        whole = fresh((len(ranks), tall, *self._row_shape), dtype)
        copies: list[Rows] = []
        for buffer, part in zip(whole, (parts[rank] for rank in ranks), strict=True):
            copies.append(Rows(buffer[: part.rows], source, None, part.start))
            copies.append(Rows(buffer[part.rows :], source, None, 0))  # one row at most; any real one will do
        _sources.copy(copies)
        shape = (group.size, tall, *self._row_shape)
        if group.is_simulated:
            return jax.make_array_from_callback(shape, group.stacked, lambda index: whole)
        placed = dict(zip(group.mine, shards(group, old), strict=True)) if old is not None else {}
        placed |= {r: jax.device_put(buffer[None], group.devices[r]) for r, buffer in zip(ranks, whole, strict=True)}
        arrays = [placed[rank] for rank in group.mine]
        return jax.make_array_from_single_device_arrays(shape, group.stacked, arrays)


def _with_rows(*values: jax.Array) -> list[jax.Array]:
    array, rows, start = values
    return [jax.lax.dynamic_update_slice_in_dim(array, rows, start[0], 0)]


def _overlap(one: Part, other: Part) -> bool:
    return one.start < other.start + other.rows and other.start < one.start + one.rows


def _rows_at(index: Any, length: int) -> Part:
    """The rows that an index of NumPy's may touch, from the first to the last."""
    first = (index[0] if index else ...) if isinstance(index, tuple) else index
    if isinstance(first, slice):
        touched = np.array(range(*first.indices(length))[:: max(1, len(range(*first.indices(length))) - 1)])
    elif first is None or first is ... or np.asarray(first).dtype.kind not in "iub":
        return Part(0, length)
    elif np.asarray(first).dtype == bool:
        touched = np.flatnonzero(first) if np.ndim(first) == 1 else np.array([0, length - 1])
    else:
        touched = np.asarray(first, np.int64).ravel() % max(length, 1)
    return Part(int(touched.min()), int(np.ptp(touched)) + 1) if touched.size else Part(0, 0)


def _joined(one: Part, other: Part) -> Part:
    if not one.rows or not other.rows:
        return one if one.rows else other
    start = min(one.start, other.start)
    return Part(start, max(one.start + one.rows, other.start + other.rows) - start)


def _checked(value: Any, name: str) -> Source:
    """What a `Data` may hold: one array with rows."""
    if isinstance(value, Data):
        is_whole = len(value) == len(value.source) and value.dtype == value.source.dtype
        value = value.source if is_whole else value[:]
    refuse_traced(value, f"{name}: its value")
    if isinstance(value, list):
        try:
            value = np.asarray(value)
        except ValueError as error:
            raise ValueError(f"{name}: its value is a list that makes no array: {error}") from None
    if isinstance(value, jax.Array) and _trace.key_of(value) is not None:
        raise TypeError(f"{name}: it is an array of typed PRNG keys; give jax.random.key_data of it.")
    source = as_source(value, f"{name}: its value", "give one array; for a tree of them, jax.tree.map(synk.data, tree)")
    if source.ndim == 0:
        raise ValueError(f"{name}: its value is a scalar and has no rows. Pass numbers as they are, as broadcast ones.")
    return source


def _dtype(dtype: Any, name: str) -> np.dtype:
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not is_number(found):
        raise TypeError(f"{name}: dtype is {dtype!r}; give one of numbers or booleans.")
    return found


@entry
def data(
    value: Any,
    *,
    place: Place = "host",
    minibatch: bool = False,
    dtype: Any = None,
    name: str | None = None,
) -> Data:
    """Hold an array of rows for the inputs of functions, which `batch` and `batch_s` pick from.

    Args:
      value: an array of shape (rows, ...), held without a copy: NumPy's, memory-mapped, of jax, or any that gives rows
        by position (h5py, zarr), which is read in parts. Inside `jax.jit` it is a constant, as any such array is.
      place: where the rows live. "host": in memory or on disk, picked by threads and sent as needed. "scatter": on the
        replicas, each its part; `batch_s` picks from it without communication. "broadcast": every replica holds all.
        Rows move when a function first reads them.
      minibatch: whether it has one row for each row that a call selects, and is not picked from itself.
      dtype: what rows are converted to when they are read; None keeps what `value` has.
      name: what messages call it.

    Returns:
      A `Data`.

    Raises:
      TypeError: `value` is no array of numbers.
      ValueError: it has no rows, or `place` is none of these.

    Example:
      >>> import jax.numpy as jnp, numpy as np, synk
      >>> x = synk.data(np.arange(10.0), place="broadcast")
      >>> total = synk.function(jnp.sum)
      >>> float(total(x, batch=[1, 3, 5])), float(total(x))
      (9.0, 45.0)
    """
    name = name or next(_names)
    if place not in PLACES:
        raise ValueError(f"{name}: place is {place!r}; use {', '.join(map(repr, PLACES))}.")
    return Data(value, place, minibatch, dtype, name)
