"""Data: an array of rows that functions pick from, in host memory, on disk or on the replicas."""

from __future__ import annotations

from itertools import count
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import jax
import numpy as np

from .._base.errors import SynkError, checked_integer, public_api, refuse_use
from .._base.pytree import as_keys, fitting, key_of, named, narrow
from .._runtime.dispatch import LOCK, uninterrupted
from .._runtime.executable import relayout, replica_to_host
from .._runtime.group import Group, current_group
from .._runtime.way import Layout
from .places import PLACES, Place, PlaceName, ReplicaRows
from .sources import Reader, Source, as_number_dtype, as_rows, index_within, read_within, share_rows

T = TypeVar("T")

# Names of data that was given none: messages tell one from another.
_numbers = count()
# Numbers of writes.
_writes = count(1)
# Each `Data` by its id, since a write through one may change rows that others hold.
_alive: WeakValueDictionary[int, Data] = WeakValueDictionary()


class Data:
    """Rows for the inputs of functions; made by `synk.data`.

    A `Data` holds the given array, without a copy: `x[i]` reads from it and `x[i] = rows` writes to it. The next call
    that reads copies on devices, of this `Data` or of another one that shares the memory, sends them anew. A write to
    the array itself goes unseen; `f.check` finds it.

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

    # Copies are made by it alone.
    def __new__(cls, *_: Any, **__: Any) -> Data:
        made = super().__new__(cls)
        _alive[id(made)] = made
        return made

    def __init__(
        self,
        value: Any,
        name: str,
        place: PlaceName = "host",
        minibatch: bool = False,
        dtype: Any = None,
        key: Any = None,
    ) -> None:
        source = _as_source(value, name)
        self.name = name
        self.is_minibatch = minibatch
        self._place: PlaceName = place
        self._length = len(source)
        self._row_shape = source.shape[1:]
        self._dtype = source.dtype if dtype is None else as_number_dtype(dtype, name)
        # The implementation of typed PRNG keys, which are held as raw data.
        self._key = key or _key_of(value)
        # The number of the last write, of all writes to any data, by which loops and kinds of calls notice it.
        self._version = next(_writes)
        # A copy on the devices of a group, and the version of the rows in it.
        self._group: Group | None = None
        self._copy: jax.Array | None = None
        self._copied_version = 0
        # What calls are recognised by, made by `spec_of_data`, and the version of which that is right.
        self._spec: Any = None
        self._spec_version = 0
        # Last: writes by other threads reach a `Data` that has one.
        self._source: Source | None = source

    def __repr__(self) -> str:
        return f'Data({self.name}: {self.dtype.name}{list(self.shape)}, place="{self.place}")'

    @property
    def place(self) -> PlaceName:
        """Return where the rows live: "host", "scatter" or "broadcast"."""
        return self._place

    @property
    def _home(self) -> Place:
        return PLACES[self._place]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape, rows first."""
        return (self._length, *self._row_shape)

    @property
    def dtype(self) -> np.dtype:
        """Return the dtype of the rows. Functions see 32 bits for 64, unless JAX has those enabled."""
        return self._dtype

    @property
    def ndim(self) -> int:
        """Return the number of axes, rows included."""
        return 1 + len(self._row_shape)

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return int(np.prod(self.shape))

    def __len__(self) -> int:
        return self._length

    @property
    @public_api
    def array(self) -> jax.Array:
        """Return the rows on the devices as one array of JAX, without communication; a copy, which may be donated.

        Rows of "scatter" are cut over the replicas on axis 0, as a result of the op "scatter" lies there already; those
        of "broadcast" lie on each of them. Rows that are not there yet are sent first.

        Raises:
          ValueError: the rows do not divide over the replicas, or they live on the host. `np.asarray(x)` reads any.

        Example:
          >>> import numpy as np, synk
          >>> with synk.simulate(2):
          ...     doubled = synk.function(lambda x: 2 * x, reduce="scatter")(np.arange(4.0))
          ...     print(doubled.array, doubled.array.shape)
          [0. 2. 4. 6.] (4,)
        """
        group, rows = current_group(), len(self)
        if self._home.layout is None:
            raise ValueError(
                f'{self.name}.array: its rows live on the host. Use np.asarray({self.name}), or to("scatter").'
            )
        if self._home.layout == "stacked" and (rows == 0 or rows % group.size):
            raise ValueError(
                f"{self.name}.array: its {rows} rows do not divide over {group.size} replicas, as those of one array "
                f"of JAX must. Use np.asarray({self.name})."
            )
        with LOCK:
            layout: Layout = "rows" if self._home.layout == "stacked" else "replicated"
            array = relayout(group, [resident(self, group)], self._home.layout, layout)[0]
        return array if self._key is None else as_keys(array, self._key)

    def block_until_ready(self) -> Data:
        """Wait until the rows that are on the devices are made, as `jax.block_until_ready` does, and return the data.

        Example:
          >>> import jax, numpy as np, synk
          >>> f = synk.function(lambda x: 2 * x, reduce="scatter")
          >>> len(jax.block_until_ready(f(np.arange(4.0))))
          4
        """
        # A result of another thread's call may replace the copy meanwhile.
        copy = self._copy
        if copy is not None:
            copy.block_until_ready()
        return self

    @public_api
    def __getitem__(self, index: Any) -> Any:
        source = source_of(self)
        if isinstance(source, Reader):
            rows = source[index] if self._length == len(source) else read_within(source, self._length, index)
        else:
            rows = np.asarray(source)[: self._length][index]
        if rows.dtype != self._dtype:
            with named(self.name):
                rows = fitting(rows, self._dtype).astype(self._dtype)
        return rows

    @public_api
    def __setitem__(self, index: Any, rows: Any) -> None:
        source = source_of(self)
        is_read_only = isinstance(source, np.ndarray) and not source.flags.writeable
        if isinstance(source, jax.Array) or is_result(source) or is_read_only:
            raise ValueError(
                f"{self.name}: the array it holds is read-only. Give synk.data one that can be written, e.g. a copy."
            )
        # Marked before and after: a write that fails midway, or ends by Ctrl-C, has changed some rows, and another
        # thread may have sent them in between.
        _note_write(source)
        try:
            if isinstance(source, Reader):
                source[index_within(index, self._length)] = rows
            else:
                source[: self._length][index] = rows
        finally:
            _note_write(source)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self[:], dtype) if copy else np.asarray(self[:], dtype)

    @public_api
    def set_value(self, value: Any) -> None:
        """Hold another array instead, without a copy, of any number of rows of the shape that it has; else ValueError.

        Args:
          value: as for `synk.data`; its rows get the dtype of this data when they are read.

        Example:
          >>> import numpy as np, synk
          >>> x = synk.data(np.zeros((5, 2), np.float32))
          >>> x.set_value(np.ones((3, 2), np.float32))
          >>> x.shape
          (3, 2)
        """
        source = _as_source(value, self.name)
        if _key_of(value) not in (None, self._key):
            raise TypeError(f"{self.name}.set_value: these are PRNG keys, but its rows are {self._key or 'none'}.")
        if source.shape[1:] != self._row_shape:
            raise ValueError(
                f"{self.name}.set_value: the new rows have shape {source.shape[1:]}, but its rows have "
                f"{self._row_shape}. Only their number may change."
            )
        self._become(_source=source, _length=len(source))

    @public_api
    def set_length(self, rows: int) -> None:
        """Let only so many first rows count, from none to all of the array held; ValueError where it has fewer.

        Example:
          >>> import numpy as np, synk
          >>> x = synk.data(np.zeros((5, 2), np.float32))
          >>> x.set_length(4)
          >>> x.shape
          (4, 2)
        """
        rows, held = checked_integer(rows, f"{self.name}.set_length: rows"), len(source_of(self))
        if rows > held:
            raise ValueError(
                f"{self.name}.set_length: it holds an array of {held} rows, so there are not {rows}. "
                f"set_value gives it another array."
            )
        if rows != self._length:
            self._become(_length=rows)

    @public_api
    def to(self, place: PlaceName) -> Data:
        """Let its rows live elsewhere from now on, and return itself; they move when next read, once.

        Args:
          place: "host" (copies on devices are freed), "scatter" or "broadcast"; ValueError where it is none of these.

        Example:
          >>> import numpy as np, synk
          >>> synk.data(np.zeros(5)).to("scatter").place
          'scatter'
        """
        _check_place(place, f"{self.name}.to")
        if place != self._place:
            self._become(_place=place)
        return self

    @public_api
    def free(self) -> None:
        """Let go of the array held and of all copies on devices; `set_value` gives it another.

        Example:
          >>> import numpy as np, synk
          >>> x = synk.data(np.zeros(5), name="x")
          >>> x.free()
          >>> x
          Data(x: float64[0], place="host")
        """
        self._become(_source=None, _length=0)

    def _become(self, **changes: Any) -> None:
        # Array, length and place change together: another thread, or a handler of a signal, sees all or nothing.
        with LOCK, uninterrupted():
            self._copy = self._group = None
            for name, value in changes.items():
                setattr(self, name, value)
            # Last: a spec that another thread has made meanwhile is of the version before.
            self._version = next(_writes)


refuse_use(
    Data,
    lambda self, how: (
        f"{self.name} is a synk.typing.Data, {how}: its rows lie on the "
        f"{'host' if self.place == 'host' else 'replicas'}. "
        f"Pass it to a synk function; its .array is an array of JAX, np.asarray of it one of NumPy."
    ),
)


def _living(objects: WeakValueDictionary[int, T]) -> list[T]:
    """Return the objects that are alive, also while other threads make some."""
    # `list(dictionary.values())` may raise where another thread adds an object meanwhile; a list of references does
    # not.
    return [alive for reference in objects.valuerefs() if (alive := reference()) is not None]


def _holders(source: Source) -> list[Data]:
    return [data for data in _living(_alive) if share_rows(source, getattr(data, "_source", None))]


def writes_so_far() -> int:
    """Return a number that is larger than the versions of all data, and smaller than those after later writes."""
    return next(_writes)


# Copies on devices are sent whole at the next read: a range of stale rows would have to follow every kind of index.
def _note_write(source: Source) -> None:
    """Note that rows of a source are written, which copies on devices do not have yet."""
    for data in _holders(source):
        data._version = next(_writes)


def _check_place(place: str, name: str) -> None:
    if place not in PLACES:
        raise ValueError(f"{name}: place is {place!r}; use {', '.join(map(repr, PLACES))}.")


def _key_of(value: Any) -> Any:
    return value._key if isinstance(value, Data) else key_of(value)


def _as_source(value: Any, name: str) -> Source:
    if not isinstance(value, Data):
        return as_rows(value, name)
    source = source_of(value)
    is_whole = len(value) == len(source) and value.dtype == source.dtype
    return source if is_whole else as_rows(value[:], name)


def source_of(data: Data) -> Source:
    """Return the array held, of which only the first rows count. Raise SynkError if it was freed."""
    if data._source is None:
        raise SynkError(f"{data.name}: it was freed. Give it an array with {data.name}.set_value(...).")
    return data._source


def resident(data: Data, group: Group) -> jax.Array:
    """Return the rows on the devices of a group. Send them if they are not there, or were written since.

    Callers hold the lock.
    """
    copy, dtype = data._copy, narrow(data._dtype)
    is_same = data._group is group and data._copied_version == data._version
    if copy is not None and is_same and copy.dtype == dtype:
        return copy
    if data._length >= 2**31:
        raise ValueError(f'{data.name}: devices hold at most {2**31 - 1} rows; this one has more. Use place="host".')
    source = source_of(data)
    host = np.asarray(source) if isinstance(source, jax.Array) else source
    # Free the old copy before the new one takes memory.
    data._copy = None
    # Rows that another thread writes from here on are sent next time.
    data._copied_version = data._version
    with named(data.name):
        data._copy = data._home.bring(group, host, data._length, dtype)
    data._group = group
    return data._copy


def abstract_rows(data: Data, group: Group) -> jax.ShapeDtypeStruct:
    return data._home.abstract(group, data.shape, narrow(data._dtype))


def is_written_behind(data: Data, group: Group) -> bool:
    """Tell whether the array held was written to, but not by `data[i] = rows`, since its rows were sent to devices."""
    if data._copy is None or data._group is not group or is_result(source_of(data)):
        return False
    copy, is_stacked = resident(data, group), data._home.layout == "stacked"
    rows = ReplicaRows(group, copy, len(data))[:] if is_stacked else replica_to_host(group, copy, "replicated", 0, None)
    return rows.tobytes() != np.asarray(data).astype(rows.dtype).tobytes()


def is_result(source: Source) -> bool:
    # The rows were made on the replicas, so the array on the host is a copy and a write to it would reach no device.
    return isinstance(source, Reader) and isinstance(source.of, ReplicaRows)


def data_of_replicas(group: Group, array: jax.Array, rows: int, key: Any, name: str) -> Data:
    made = Data(ReplicaRows(group, array, rows), name, "scatter", key=key)
    # The rows lie on the devices already, stacked and dealt out evenly. The host gets a copy at the first read there.
    made._copy, made._group, made._copied_version = array, group, made._version
    return made


@public_api
def data(
    value: Any, *, place: PlaceName = "host", minibatch: bool = False, dtype: Any = None, name: str | None = None
) -> Data:
    """Hold an array of rows for the inputs of functions, which `batch` and `batch_s` pick from.

    Args:
      value: an array of shape (rows, ...), held without a copy: NumPy's, memory-mapped, of jax, or any that gives rows
        by position (h5py, zarr), which is read in parts. Inside `jax.jit` it is a constant. Typed PRNG keys, which
        functions see, are held as raw data.
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
    name = name or f"data_{next(_numbers)}"
    _check_place(place, name)
    return Data(value, name, place=place, minibatch=minibatch, dtype=dtype)
