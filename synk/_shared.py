"""Shared: a value of which each replica keeps its own copy between calls."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from . import _agree, _engine, _flight, _trace
from ._engine import Lies
from ._errors import DivergedError, PeerError, SharedLostError, SynkError, entry
from ._group import Group, PyTree, group
from ._leaves import conform, own, refuse_traced, struct
from ._trace import Value, as_data, key_of

_names = (f"shared_{i}" for i in itertools.count())
_specs: dict[Any, int] = {}
SLICES = ("mean", "max", "min", "last", "add")


def new_name() -> str:
    """A name for a variable that was given none."""
    return next(_names)


class Shared:
    """A shared variable: made by `synk.shared`, read and assigned through `value`.

    Attributes:
      name: what messages call it.

    Example:
      >>> import numpy as np, synk
      >>> w = synk.shared(np.zeros(3, np.float32), name="w")
      >>> w.value = np.ones(3, np.float32)
      >>> w, w.value.tolist()
      (Shared(w: float32[3]), [1.0, 1.0, 1.0])
    """

    slots: Any = None  # where leaves lie in buffers, of a flat one

    def __init__(self, value: PyTree, name: str | None, borrow: bool) -> None:
        self.name = name or new_name()
        leaves, self._treedef = jax.tree_util.tree_flatten_with_path(value)
        self._paths = tuple(keystr(path) for path, _ in leaves)
        for path, leaf in leaves:
            refuse_traced(leaf, f"{self.name}{keystr(path)}: its value")
        held = [own(leaf, f"{self.name}{keystr(path)}", borrow) for path, leaf in leaves]
        self._keys = tuple(key_of(leaf) for leaf in held)
        self._pending: list[Any] | None = [as_data(leaf) for leaf in held]
        self._shapes = tuple(struct(leaf) for leaf in self._pending)
        self._group: Group | None = None
        self._leaves: list[jax.Array] = []
        self.version = 0  # counts the values it has had
        self._lies: Lies = "everywhere"  # or stacked, from when replicas may hold different values
        self._lengths: tuple[int, ...] | None = None
        self._is_equal = True
        self._culprit = ""
        self._lost: tuple[str, Exception] | None = None
        self._dead: dict[int, tuple[list[jax.Array], list[jax.Array], bool]] = {}
        self._refresh()

    def __repr__(self) -> str:
        shapes = ", ".join(f"{s.dtype.name}{list(s.shape)}" for s in self._shapes[:4])
        more = ", ..." if len(self._shapes) > 4 else ""
        return f"Shared({self.name}: {shapes}{more})"

    @property
    @entry
    def value(self) -> PyTree:
        """Inside a function, this replica's value when the call began; outside, a copy of the value all share.

        Assigning inside takes effect when the call ends; outside it is `synk.broadcast(w, new)`. A new value keeps
        tree, shapes and dtypes.

        Raises:
          DivergedError: read outside while replicas hold different values.
          SharedLostError: its value was donated to a program that died.
        """
        current = _trace.frame()
        if current is not None:
            return current.read(self)
        with _trace.eager():
            return self.common()

    @value.setter
    @entry
    def value(self, new: PyTree) -> None:
        current = _trace.frame()
        if current is not None:
            current.write(self, new, None)
            return
        with _trace.eager():
            self.place_copies(new, call=f"{self.name}.value", any_rows=False)

    @entry
    def update(self, new: PyTree, slices: str | None = None) -> None:
        """Assign inside a function, naming how the slices of one call combine.

        Args:
          new: the new value (per replica), of the same tree, shapes and dtypes.
          slices: "mean" (by rows; floats), "max", "min", "last" (the last slice's) or "add" (the old value plus the
            sum of each slice's change).

        Raises:
          ValueError: `slices` is none of these.
          SynkError: called outside a function, or inside a transformation within one.

        Example:
          >>> import numpy as np, synk
          >>> with synk.simulate(2):
          ...     seen = synk.shared(np.int32(0))
          ...     @synk.function(reduce="sum")
          ...     def count(x):
          ...         seen.update(seen.value + len(x), slices="add")
          ...     count(np.zeros(5), num_slices=2)
          ...     seen.get_value(0).item(), seen.get_value(1).item()
          (3, 2)
        """
        current = _trace.frame()
        if current is None:
            raise SynkError(f"{self.name}.update: it is for use inside a function; outside, assign {self.name}.value.")
        if slices is not None and slices not in SLICES:
            raise ValueError(f"{self.name}.update: slices={slices!r} is none of {', '.join(SLICES)}.")
        current.write(self, new, slices)

    @entry
    def get_value(self, rank: int = 0, borrow: bool = False) -> PyTree:
        """Return a copy of the value of one replica.

        Args:
          rank: whose.
          borrow: whether the result may share memory with the variable: then it is a NumPy view where that costs no
            copy, and not to be read after the variable has changed.

        Returns:
          The value; arrays that lie on every replica (NumPy arrays with `borrow`).

        Raises:
          IndexError: there is no such rank.

        Example:
          >>> import numpy as np, synk
          >>> with synk.simulate(2):
          ...     synk.shared(np.arange(3)).get_value(1).tolist()
          [0, 1, 2]
        """
        outside(self, "get_value")
        with _trace.eager():
            return self._of_rank(rank, borrow)

    @entry
    def set_value(self, new: PyTree, rank: int | None = None, borrow: bool = False) -> None:
        """Set the value on every replica, or on one.

        Args:
          new: of the same tree and dtypes; its number of rows may differ.
          rank: whose value, or None for all.
          borrow: whether memory may be shared with `new` where that saves a copy.

        Raises:
          ValueError: the tree, dtypes or shapes beyond the rows differ.
          IndexError: there is no such rank.

        Example:
          >>> import numpy as np, synk
          >>> with synk.simulate(2):
          ...     w = synk.shared(np.zeros(2, np.float32))
          ...     w.set_value(np.ones(2, np.float32))
          ...     w.value.tolist()
          [1.0, 1.0]
        """
        outside(self, "set_value")
        with _trace.eager():
            if rank is None:
                self.place_copies(new, borrow=borrow)
            else:
                self.set_rank(rank, new)

    # What follows serves the other modules. Callers hold the lock.

    def conform(self, new: PyTree, like: Value, call: str, any_rows: bool = False) -> list[Any]:
        """Check a new value's tree, shapes and dtypes; return its leaves, keys as raw data."""
        paths, treedef = jax.tree_util.tree_flatten_with_path(new)
        if treedef != self._treedef:
            raise ValueError(
                f"{call}: the new value of {self.name} has the tree {treedef}, but {self.name} has {self._treedef}. "
                f"A new value keeps tree, shapes and dtypes."
            )
        rows = None if any_rows else True
        return [
            conform(leaf, shape, key, f"{self.name}{path}", call, rows)
            for (_, leaf), shape, key, path in zip(paths, like.shapes, like.keys, self._paths, strict=True)
        ]

    def describe(self, rows: int | None = None) -> Value:
        """Say what a replica's value looks like; one that holds rows, with so many."""
        shapes = self._shapes
        if self._lengths is not None and rows is not None:
            shapes = tuple(jax.ShapeDtypeStruct((rows, *s.shape[1:]), s.dtype) for s in shapes)
        return Value(self._treedef, shapes, self._keys)

    @property
    def is_flat(self) -> bool:
        """Does it keep one buffer a dtype behind its tree?"""
        return self.slots is not None

    @property
    def seen(self) -> Value:
        """What the user sees of its value: tree, shapes and keys."""
        return self.describe()

    @property
    def seen_paths(self) -> tuple[str, ...]:
        """Of the leaves that the user sees."""
        return self._paths

    def seen_leaves(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves that the user sees, keys as raw data, from those that it keeps."""
        return list(leaves)

    def kept_leaves(self, leaves: Sequence[Any]) -> list[Any]:
        """The reverse."""
        return list(leaves)

    def place(self, current: Group) -> None:
        """Place the value on first use, in the group that it then lives in."""
        if self._pending is not None:
            self._group = current
            self._leaves = _engine.copies(current, self._pending, self._lies)
            self._pending = None
        if self._group is not current:
            raise SynkError(
                f"{self.name}: it lives in {self._group}, but the current group is {current}. Use it in its own group "
                f"(`with group:`), or make a new one from {self.name}.get_value()."
            )

    def bind(self, current: Group) -> list[jax.Array]:
        """Return its leaves in this group, which lie as `lies` says."""
        if self._group is not current or self._pending is not None:
            self.place(current)
        if self._lost is not None:
            name, cause = self._lost
            if isinstance(cause, PeerError):  # nothing that is set now would help
                raise cause
            raise SharedLostError(
                f"{self.name}: its value was donated to a program of {name} that died ({_in_a_line(cause)}). "
                f"Set or load it again; donate=False in {name} keeps old values."
            ) from cause
        return self._leaves

    def stacked(self, current: Group) -> list[jax.Array]:
        """Its leaves, one entry a replica on axis 0; copies, where they lie everywhere."""
        if self._lies == "stacked":
            return self.bind(current)
        self.bind(current)
        return self.read(lambda leaves: _engine.laid(current, leaves, "everywhere", "stacked"))

    def stack(self, current: Group) -> None:
        """Let each replica have a value of its own from now on."""
        if self._lies != "stacked":
            leaves = self._leaves if self._pending is not None else self.stacked(current)
            with _flight.uninterrupted():
                self._leaves, self._lies = leaves, "stacked"
                self.version += 1
                self._refresh()

    def commit(
        self,
        leaves: list[jax.Array],
        lies: Lies,
        lengths: tuple[int, ...] | None = None,
        equal: bool = True,
        culprit: str = "",
    ) -> None:
        """Take new leaves, which lie so, of any rows."""
        axes = 1 if lies == "stacked" else 0
        shapes = tuple(jax.ShapeDtypeStruct(leaf.shape[axes:], leaf.dtype) for leaf in leaves)
        with _flight.uninterrupted():
            self.advance(leaves, equal, culprit)
            self._lies, self._lengths, self._shapes = lies, lengths, shapes
            self._refresh()

    def commit_copies(self, current: Group, leaves: Sequence[Any]) -> None:
        """Give every replica a copy of new leaves, of any rows."""
        placed = _engine.copies(current, leaves, self._lies)
        with _flight.uninterrupted():
            self._group, self._pending = current, None
            self.commit(placed, self._lies)

    def advance(self, leaves: list[jax.Array], equal: bool, culprit: str) -> None:
        """Take new leaves of the same shapes and lengths."""
        self._leaves, self._is_equal, self._culprit, self._lost = leaves, equal, culprit, None
        self.version += 1

    def lose(self, name: str, cause: Exception, version: int | None = None) -> None:
        """Note that the value (of this version) is gone."""
        if version is None or version == self.version:
            self._lost = (name, cause)

    def restore(self, leaves: list[jax.Array], old: list[jax.Array], equal: bool) -> None:
        """The program that gave `leaves` died; go back to the `old` ones, or to what they went back to."""
        while id(old) in self._dead:
            old, equal = self._dead[id(old)][1:]
        if self._leaves is leaves:
            self._leaves, self._is_equal = old, equal
        else:  # a later program has taken these; it dies too, and then goes back further
            self._dead[id(leaves)] = (leaves, old, equal)

    def _refresh(self) -> None:
        """Give equal trees, shapes and lengths equal numbers: cheap keys for compiled programs."""
        shapes = tuple((s.shape, s.dtype) for s in self._shapes)
        spec = (self._treedef, shapes, tuple(map(str, self._keys)), self._lengths, self._lies)
        self.spec = _specs.setdefault(spec, len(_specs))

    @property
    def home(self) -> Group:
        """The group it lives in, or will."""
        return self._group or group()

    @property
    def lengths(self) -> tuple[int, ...] | None:
        """Rows on each replica, where the variable holds rows."""
        return self._lengths

    @property
    def lies(self) -> Lies:
        """How its leaves lie: everywhere as long as nothing has made replicas differ, then stacked."""
        return self._lies

    @property
    def is_equal(self) -> bool:
        """Do all replicas hold one value, as far as synk knows?"""
        return self._is_equal and self._lengths is None

    @property
    def treedef(self) -> Any:
        """The tree of the value."""
        return self._treedef

    def unflatten(self, leaves: Sequence[Any]) -> PyTree:
        """Leaves as the user's tree, raw key data as keys."""
        return self._treedef.unflatten(map(_trace.as_keys, leaves, self._keys))

    def rows_of(self, rank: int) -> int | None:
        """Axis 0 of the value on one replica; None where the leaves share no axis 0."""
        if self._lengths is not None:
            return self._lengths[rank]
        rows = {s.shape[0] if s.shape else None for s in self._shapes}
        return rows.pop() if len(rows) == 1 else None

    def common(self) -> PyTree:
        """A copy of the value that all replicas share, lying on each of them."""
        home = self.home
        self.bind(home)
        if not self.is_equal:
            raise DivergedError(self.divergence())
        return self.unflatten(self.read(lambda leaves: _engine.laid(home, leaves, self._lies, "everywhere")))

    def read(self, copy: Callable[[list[jax.Array]], list[Any]]) -> list[Any]:
        """Copy the leaves and wait: a program that died shows here, and the old value, if it is back, is read."""
        while True:
            leaves = self.bind(self.home)
            try:
                jax.block_until_ready(leaves)
            except Exception as error:
                gone = _agree.as_peer_error(error)
                if gone is not None:
                    raise gone from error
                _flight.drain()  # which notes whose program it was
                if self._leaves is leaves and self._lost is None:
                    self.lose("a function", error)
            else:
                self._dead.clear()  # whatever came before has ended
                return jax.block_until_ready(copy(leaves))

    def divergence(self) -> str:
        """Why there is no one value, and what to do."""
        if self._lengths is not None:
            return (
                f"{self.name}: its replicas hold different rows, {list(self._lengths)} of them. Read them all with "
                f"synk.gather({self.name}, nd_up=0), one replica's with {self.name}.get_value(rank)."
            )
        return (
            f"{self.name}: its replicas hold different values, since {self._culprit} updated it on each from its own "
            f"rows. Update it in then, from combined outputs; or combine it with synk.all_reduce({self.name}); "
            f"{self.name}.get_value(rank) reads one replica's."
        )

    def _of_rank(self, rank: int, borrow: bool) -> PyTree:
        home = self.home
        self.bind(home)
        self._check_rank(rank, home)
        rows = None if self._lengths is None else self._lengths[rank]

        def view(leaves: list[jax.Array]) -> list[Any]:
            return [_engine.host_entry(home, leaf, self._lies, rank, rows) for leaf in leaves]

        def copies(leaves: list[jax.Array]) -> list[Any]:
            if _trace.is_traced():  # around this line: a program with ranks of its own would mix with it
                return [jnp.array(leaf) for leaf in view(leaves)]
            if self._lies == "everywhere":
                return list(_engine.laid(home, leaves, "everywhere", "everywhere"))
            everywhere = _engine.from_rank(home, leaves, rank, "everywhere")
            return [leaf if rows is None else leaf[:rows] for leaf in everywhere]

        return self.unflatten(self.read(view if borrow else copies))

    def _check_rank(self, rank: int, current: Group) -> None:
        if isinstance(rank, bool) or not isinstance(rank, int | np.integer):
            raise TypeError(f"{self.name}: rank is {rank!r}; give an integer from 0 to {current.size - 1}.")
        if not 0 <= rank < current.size:
            raise IndexError(f"{self.name}: there is no rank {rank}; ranks are 0 to {current.size - 1}.")

    def place_copies(
        self, new: PyTree, *, borrow: bool = False, call: str = "set_value", any_rows: bool = True
    ) -> None:
        """Give every replica a copy of `new`."""
        current = self.home
        leaves = self.conform(new, self.describe(), call, any_rows or self._lengths is not None)
        held = leaves if borrow else [own(leaf, self.name, borrow=False) for leaf in leaves]
        self.commit_copies(current, held)

    def set_rank(self, rank: int, new: PyTree) -> None:
        """Give one replica `new`; the others keep theirs."""
        current = self.home
        self.bind(current)
        self._check_rank(rank, current)
        leaves = [own(leaf, self.name, False) for leaf in self.conform(new, self.describe(), "set_value", True)]
        rows = {leaf.shape[0] if leaf.ndim else None for leaf in leaves}
        before = [self.rows_of(other) for other in range(current.size)]
        if self._lengths is not None or any(a.shape != b.shape for a, b in zip(leaves, self._shapes, strict=True)):
            if len(rows) != 1 or None in before:
                raise ValueError(f"set_value: {self.name} changes its number of rows, so all leaves need as many.")
            held = [self._of_rank_data(other) for other in range(current.size)]
            held[rank] = leaves
            self.place_rows(held)
        else:
            held = zip(self.stacked(current), leaves, strict=True)
            stacked = [_engine.replace_entry(current, old, leaf, rank) for old, leaf in held]
            with _flight.uninterrupted():
                self.commit(stacked, "stacked", equal=current.size == 1, culprit=f"set_value(rank={rank})")

    @property
    def paths(self) -> tuple[str, ...]:
        """Of its leaves."""
        return self._paths

    def all_rows(self) -> list[np.ndarray]:
        """All replicas' rows in rank order, of each leaf."""
        assert self._group is not None
        parts = [self._of_rank_data(rank) for rank in range(self._group.size)]
        return [np.concatenate([part[i] for part in parts]) for i in range(len(self._leaves))]

    def _of_rank_data(self, rank: int) -> list[Any]:
        assert self._group is not None
        rows = self.rows_of(rank)
        return [_engine.host_entry(self._group, leaf, self._lies, rank, rows) for leaf in self._leaves]

    def take(self, leaves: list[jax.Array], lengths: Sequence[int] | None, is_equal: bool, culprit: str) -> None:
        """Take leaves that lie in their places, whatever was there before."""
        with _flight.uninterrupted():
            self._group, self._pending = self.home, None
            lies = self._lies if is_equal else "stacked"
            self.commit(leaves, lies, None if lengths is None else tuple(lengths), is_equal, culprit)

    def place_rows(self, parts: Sequence[Sequence[Any]]) -> None:
        """Give each replica its own rows: `parts[rank]` holds its leaves."""
        current = self.home
        lengths = tuple(int(leaves[0].shape[0]) for leaves in parts)
        stacked = [
            _engine.stack_parts(current, [leaves[i] for leaves in parts], max(lengths))
            for i in range(len(self._shapes))
        ]
        with _flight.uninterrupted():
            self._group, self._pending = current, None
            self.commit(stacked, "stacked", lengths, equal=False)


def outside(variable: Shared, call: str) -> None:
    """Refuse to run inside a function, where a replica sees its own value only."""
    current = _trace.frame()
    if current is not None:
        raise SynkError(
            f"{current.name}: {call} of {variable.name} is for the serial program, not inside a function. "
            f"There, read and assign {variable.name}.value."
        )


def _in_a_line(error: Exception) -> str:
    """What an error of JAX's says: its first line, or the last where the first announces a traceback."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1 if "Traceback" in lines[0] else 0].strip()[:200]


def named_in(fn: Any, depth: int = 2) -> Iterator[Shared]:
    """The variables that a function names, or functions that it names: a guess at what it reads."""
    fn = inspect.unwrap(getattr(fn, "__func__", fn)) if callable(fn) else fn
    code = getattr(fn, "__code__", None)
    if code is None:
        return
    names = (*code.co_names, *(name for const in code.co_consts for name in getattr(const, "co_names", ())))
    values = [fn.__globals__.get(name) for name in names]
    for cell in fn.__closure__ or ():
        with contextlib.suppress(ValueError):  # it is empty yet
            values.append(cell.cell_contents)
    for value in values:
        if isinstance(value, Shared):
            yield value
        elif depth and inspect.isfunction(value):
            yield from named_in(value, depth - 1)
