"""Route: the short way of a call whose like has gone before: looked at by its form alone, then straight to its program.

What has no short way here, bad input among it, goes the long way, where everything is checked. A step of a training
loop meets its processor's caches full of other things, so that each line here costs several times what it seems to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from time import perf_counter
from typing import Any, NamedTuple

import jax
import numpy as np

from . import _group
from ._arguments import SCALARS, Scalars
from ._bind import Layout
from ._context import EAGER, has_wishes, trace_state
from ._data import Data
from ._engine import Lies
from ._group import Group
from ._plan import Call, Plan
from ._program import Signature
from ._rows import Selection, are_below, fill, place, put, selected
from ._run import Prepared
from ._shared import Shared
from ._slots import Slot, slots
from ._sources import Source
from ._trace import frame, key_of, settings

SMALL = 1 << 18  # bytes of an array of JAX's: larger ones, which may be where they belong, are not copied for a slot
_INT32 = np.dtype(np.int32)
_key_data = jax.jit(jax.random.key_data)  # which takes half the time so


class Arguments(NamedTuple):
    """A call's arguments, as they came."""

    layout: Layout
    leaves: Sequence[Any]
    batch: Any
    batch_s: Any


class Form(NamedTuple):
    """What decides which program a call runs and how its rows come."""

    group: Group
    layout: Layout
    settings: tuple[Any, ...]
    batch: Any
    batch_s: Any
    leaves: tuple[Any, ...]
    specs: tuple[int, ...]  # of the function's variables


def form(current: Group, given: Arguments, known: Iterable[Shared]) -> Form | None:
    """The form of a call; None where it goes the long way."""
    if given.batch is not None and given.batch_s is not None:
        return None
    batch, batch_s, leaves = _pick_form(given.batch), _pick_form(given.batch_s), tuple(map(_form, given.leaves))
    if batch is None or batch_s is None or None in leaves:
        return None
    return Form(current, given.layout, settings(), batch, batch_s, leaves, specs(known))


def specs(known: Iterable[Shared]) -> tuple[int, ...]:
    """Trees, shapes and lengths of variables, as small numbers."""
    return tuple([variable.spec for variable in known])


def _pick_form(batch: Any) -> Any:
    """Of integer indexes their shape."""
    if batch is None:
        return ()
    return batch.shape if type(batch) is np.ndarray and batch.dtype.kind == "i" and batch.ndim else None


def _form(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):  # a key makes its aval and its sharding anew each time
        return (leaf.aval, leaf.sharding) if isinstance(leaf.dtype, np.dtype) else (leaf.shape, leaf.dtype)
    if type(leaf) is np.ndarray:
        return leaf.shape, leaf.dtype
    if type(leaf) is Data:
        return leaf.form
    if isinstance(leaf, SCALARS):
        return type(leaf)
    return (leaf.shape, leaf.dtype) if isinstance(leaf, np.generic) else None


class Route:
    """Where calls of one form go, and how their rows come.

    Attributes:
      rows: of a call, on all replicas.
    """

    def __init__(
        self, form: Form, signature: Signature, ready: Prepared, rows: int, limit: int, hows: Sequence[str],
        known: Iterable[Shared], scalars: Scalars,
    ) -> None:  # fmt: skip
        self.form, self.signature, self.rows = form, signature, rows
        self._built, self._limit, self._known, self._scalars = ready.built, limit, known, scalars
        layout, size = form.layout, signature.group.size
        leaves = len(form.leaves)
        is_flat = layout.treedef == jax.tree.structure(((0,) * leaves, {}))
        self._count = leaves if is_flat else -1  # of arguments, where each is a leaf
        self._inputs = list(zip(layout.scattered, hows, signature.row_shapes, strict=True))
        self._broadcast = list(zip(layout.broadcast, signature.broadcast_shapes, strict=True))
        self._is_sent = "send" in hows
        self._is_taken = "take" in hows or signature.local is not None
        self._shape = (size, rows // size)
        self._all = Selection(None, 0, rows)
        self._begins = [rank * self._shape[1] for rank in range(size)]

    def take(self, args: Sequence[Any], batch: Any, batch_s: Any) -> Prepared | None:
        """Prepare a call with these arguments, all by position; None where it is of another form, or goes the long way.

        It starts programs, so an environment that disturbs them is of another form too.
        """
        form = self.form
        if (
            len(args) != self._count
            or _group.current() is not form.group
            or (() if batch is None else _pick_form(batch)) != form.batch
            or (() if batch_s is None else _pick_form(batch_s)) != form.batch_s
            or tuple(map(_form, args)) != form.leaves
            or specs(self._known) != form.specs
            or settings() != form.settings
            or frame() is not None
            or has_wishes()
            or not trace_state() == EAGER
        ):
            return None
        return self.prepare(args, batch, batch_s)

    def prepare(self, leaves: Sequence[Any], batch: Any, batch_s: Any) -> Prepared | None:
        """Send the rows of a call of this form; None where the long way must look at the indexes."""
        signature, index, where = self.signature, batch if batch_s is None else batch_s, None
        group = signature.group
        selection = self._all
        if index is not None:
            if not are_below(index, self._limit):
                return None
            if batch is not None and (self._is_sent or self.rows == self._limit):
                selection = selected(batch.astype(np.int64, copy=False))
                if selection.indexes is None and selection.rows == self._limit:  # all: they stay where they are
                    return None
        values: list[Any] = []
        loans: list[Slot] = []
        if index is not None or self._is_sent:
            time = perf_counter()
            if index is not None and self._is_taken:  # what picks from resident rows is the same for all arguments
                each = np.broadcast_to(index, self._shape) if batch is None else index.reshape(self._shape)
                slot = slots(group, "stacked", self._shape, _INT32).take()
                if slot is None:
                    where = put(group, np.array(each, np.int32))
                else:
                    slot.memory[...] = each.reshape(slot.memory.shape)
                    loans.append(slot)
                    where = slot.array
            for i, how, row in self._inputs:
                leaf = leaves[i]
                if how == "take":
                    values += [leaf.resident(group), where]
                elif how == "there":
                    values.append(leaf)
                else:
                    source = leaf.source if type(leaf) is Data else leaf
                    values.append(self._sent(source, selection, row, loans))
            if signature.local is not None:
                values.append(where)
            signature.task.stats.sending += perf_counter() - time
        else:
            values = [leaves[i] for i, _, _ in self._inputs]
        for i, each in self._broadcast:
            values.append(self._everywhere(leaves[i], each, loans))
        return Prepared(self._built, values, None, loans)

    def _sent(self, source: Source, selection: Selection, row: jax.ShapeDtypeStruct, loans: list[Slot]) -> Any:
        """Bring each replica its rows of the selection."""
        group = self.signature.group
        slot = _slot(group, "rows", (self.rows, *row.shape), row.dtype, source)
        if slot is None:
            return place(group, source, selection, self._begins, self._shape[1], row.dtype, True)
        host = np.asarray(source) if isinstance(source, jax.Array) else source
        fill(slot.parts, host, selection, self._begins[: len(slot.parts)])
        loans.append(slot)
        return slot.array

    def _everywhere(self, leaf: Any, each: jax.ShapeDtypeStruct, loans: list[Slot]) -> jax.Array:
        """Bring every replica an argument."""
        group, slot = self.signature.group, None
        if isinstance(leaf, SCALARS):
            placed = self._scalars.placed(group, leaf)
            if placed is not None:
                return placed
            if _is_plain(leaf):
                slot = _slot(group, "everywhere", each.shape, each.dtype, leaf)
        elif type(leaf) is not Data:
            if isinstance(leaf, jax.Array):
                leaf = leaf if isinstance(leaf.dtype, np.dtype) else _key_data(leaf)
                if leaf.sharding == group.everywhere:
                    return leaf
            slot = _slot(group, "everywhere", each.shape, each.dtype, leaf)
        if slot is None:
            return self._scalars.everywhere(group, leaf, None)
        slot.memory[...] = leaf
        loans.append(slot)
        return slot.array


def _slot(group: Group, lies: Lies, shape: tuple[int, ...], dtype: np.dtype, source: Any) -> Slot | None:
    """A slot for a value, if it can be read at once, and JAX would not bring it with less copying."""
    can_be = not isinstance(source, jax.Array) or (prod(shape) * dtype.itemsize <= SMALL and _is_here(source))
    return slots(group, lies, shape, dtype).take() if can_be else None


def _is_here(array: Any) -> bool:
    return not array.is_deleted() and array.is_fully_addressable and array.is_ready()


def _is_plain(number: Any) -> bool:
    """Does NumPy make of it what JAX does, without a word?"""
    return type(number) is bool or (isinstance(number, int | float) and not abs(number) >= 1 << 31)


def route(
    form: Form, signature: Signature, ready: Prepared, call: Call, the_plan: Plan, given: Arguments,
    known: Iterable[Shared], scalars: Scalars,
) -> Route | None:  # fmt: skip
    """The way of calls of this form, if it is a short one."""
    group, local, lengths = signature.group, the_plan.local, the_plan.lengths
    if not the_plan.is_plain:
        return None
    sources = [given.leaves[i] for i in given.layout.scattered]
    hows: list[str] = []
    for leaf, one in zip(sources, call.inputs.each, strict=True):
        if key_of(leaf) is not None:
            return None
        is_there = isinstance(leaf, jax.Array) and leaf.sharding == group.stacked and leaf.dtype == one.dtype
        if one.feed.how == "take" and one.exchanged is None:
            hows.append("take")
        elif is_there and given.batch is None and given.batch_s is None:
            hows.append("there")
        elif one.feed.how == "given" and not group.spans and given.batch_s is None:
            hows.append("send")
        else:
            return None
    limit = min(local.held) if local is not None else len(sources[0]) if sources else 0
    rows = lengths[0] * group.size if lengths else 0
    return Route(form, signature, ready, rows, limit, hows, known, scalars)
