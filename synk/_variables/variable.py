"""Variable: `synk.shared`, and what its users do with what it makes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from itertools import count
from typing import Any, ClassVar, NoReturn
from weakref import ref

import jax

from .._base.errors import SynkError, public_api
from .._base.pytree import PyTree, abstract_array
from .._base.refusals import refuse_use
from .._reductions.reduction import UPDATES
from .._runtime.group import Group
from .._tracing.context import current_trace, eager
from . import access
from .pieces import refuse_pieces
from .state import AbstractState, VariableState, refuse_inside, refuse_traced
from .value import conform, spec_of_value

_numbers, _made, _lock = count(), count(1), threading.RLock()


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

    # So that a misspelt w.valeu = ... raises.
    __slots__ = (
        "__weakref__",
        "_cures",
        "_given_name",
        "_group",
        "_may_differ",
        "_number",
        "_spec",
        "_state",
        "name",
    )

    _living: ClassVar[OrderedDict[int, ref[Shared]]] = OrderedDict()  # by number, which grows with each

    def __init__(self, value: PyTree, name: str | None, borrow: bool, flat: bool) -> None:
        with _lock:
            self._number = number = next(_made)
            # Bound here: a variable may outlive this module's globals, which Python clears as it exits.
            living = self._living
            living[number] = ref(self, lambda _: living.pop(number, None))
        self.name = name or f"shared_{next(_numbers)}"
        self._given_name = name or ""
        self._spec, leaves = spec_of_value(value, self.name, borrow, flat)
        self._group: Group | None = None
        self._state = VariableState(leaves, AbstractState(tuple(map(abstract_array, leaves))))
        # Whether each replica has its own by design: no replicas are compared, and others load the average of all.
        self._may_differ = False
        self._cures: dict[str, str] = {}  # by the name of what made replicas differ: how they become equal again

    @property
    def _is_per_replica(self) -> bool:
        """Return whether each replica stores leaves of its own by design: a shard, or what it alone has left out."""
        return self._may_differ or self._spec.is_cut is not None

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self.name}: a shared variable is not copied or pickled, since functions use this one. Make another one: "
            f"synk.shared({self.name}.value); to keep it, synk.save."
        )

    def __repr__(self) -> str:
        held = self._state.rows_per_replica
        shapes = access.logical_shapes(self, None if held is None else sum(held))
        shown = ", ".join([f"{s.dtype.name}{list(s.shape)}" for s in shapes[:4]] + ["..."] * (len(shapes) > 4))
        rows = "" if held is None else f"; {sum(held)} rows on {len(held)} replicas"
        return f"Shared({self.name}: {shown}{'; flat' if self._spec.buffers else ''}{rows})"

    @property
    @public_api
    def value(self) -> PyTree:
        """Inside a function, this replica's value when the call began; outside, a copy of the value all share.

        Assigning inside takes effect when the call ends; outside it is `synk.broadcast(w, new)`. A new value keeps
        tree, shapes and dtypes.

        Raises:
          DivergedError: read outside while replicas hold different values.
          SharedLostError: the program that was to write its value died.
          SynkError: assigned under a transformation of JAX's outside any function, which would do it once; or used in
            a host callback, which would wait for its own program.
        """
        context = current_trace()
        if context is not None:
            refuse_pieces(self, context.name)
            return context.read(self)
        with eager():
            return access.common_value(self)

    @value.setter
    @public_api
    def value(self, new: PyTree) -> None:
        context = current_trace()
        if context is not None:
            refuse_pieces(self, context.name)
            context.write(self, new, None)
            return
        refuse_traced(self.name, f"assigning {self.name}.value")
        with eager():
            any_rows = self._state.rows_per_replica is not None
            access.commit_all([(self, access.copied_state(self, new, f"{self.name}.value", any_rows=any_rows))])

    @public_api
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
        context = current_trace()
        if context is None:
            raise SynkError(f"{self.name}.update: it is for use inside a function; outside, assign {self.name}.value.")
        if slices is not None and slices not in UPDATES:
            raise ValueError(f"{self.name}.update: slices={slices!r} is none of {', '.join(UPDATES)}.")
        refuse_pieces(self, context.name)
        context.write(self, new, slices)

    @public_api
    def get_value(self, rank: int = 0, borrow: bool = False) -> PyTree:
        """Return a copy of the value of one replica, arrays that lie on every replica.

        Over processes all ask together; `.value` is each one's to read, but for state that lies in pieces.

        Args:
          rank: whose.
          borrow: whether to return NumPy arrays instead, which share memory with the variable where that saves a copy,
            and are not to be read after it has changed.

        Raises:
          IndexError: there is no such rank.

        Example:
          >>> import numpy as np, synk
          >>> with synk.simulate(2):
          ...     synk.shared(np.arange(3)).get_value(1).tolist()
          [0, 1, 2]
        """
        refuse_inside(self.name, "get_value")
        with eager():
            return access.value_of_rank(self, rank, borrow)

    @public_api
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
        refuse_inside(self.name, "set_value")
        refuse_traced(self.name, "set_value")
        with eager():
            if rank is None:
                state = access.copied_state(self, new, borrow=borrow)
            else:
                state = access.state_with_rank(self, rank, new)
            access.commit_all([(self, state)])

    # What tracing calls (TracedState).

    def _unpack(self, leaves: Sequence[Any]) -> PyTree:
        return self._spec.tree(leaves)

    def _conform(self, new: PyTree, shapes: Sequence[jax.ShapeDtypeStruct], call: str) -> list[Any]:
        logical = shapes if self._spec.buffers is None else self._spec.shapes
        return self._spec.pack(conform(self._spec, new, logical, self.name, call))


refuse_use(Shared, lambda self, how: f"{self.name} is a shared variable, {how}: its value is {self.name}.value.")


def newest() -> int:
    """The number of the newest variable that still lives: one that is gone has nobody's place."""
    while True:
        try:
            return next(reversed(Shared._living), 0)
        except RuntimeError:  # another thread made one, or let one go
            continue


@public_api
def shared(value: PyTree, name: str | None = None, *, borrow: bool = False, flat: bool = False) -> Shared:
    """Make a shared variable: every replica starts with a copy of `value` and keeps its own between calls.

    It is placed on the group of its first use; making one starts no device.

    Args:
      value: a pytree of arrays and numbers, per replica; float64 narrows as JAX does.
      name: what messages call it.
      borrow: whether memory may be shared with `value` where that saves a copy.
      flat: whether to keep one buffer a dtype behind the tree: a call then takes and returns as many arrays, where it
        took one a leaf (a few microseconds each). Reading and assigning `value` cuts and joins them inside the
        program, which then takes longer to compile. It cannot hold rows.

    Raises:
      TypeError: a leaf is no array.

    Example:
      >>> import jax.numpy as jnp, numpy as np, synk
      >>> w = synk.shared(np.float32(1.0), name="w")
      >>> @synk.function(reduce="mean")
      ... def step(x):
      ...     return jnp.mean(x * w.value)
      >>> @step.then
      ... def step(slope):
      ...     w.value = w.value - 0.1 * slope
      >>> step(np.array([1.0, 2.0, 3.0], np.float32))
      >>> round(float(w.value), 3)
      0.8
    """
    return Shared(value, name, borrow, flat)
