"""Variable: `synk.shared`, the variables that it makes, and how these are placed, read and replaced."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, ClassVar, NoReturn
from weakref import ref

import jax
import jax.numpy as jnp
import numpy as np

from .._base.errors import (
    DivergedError,
    PeerError,
    SharedLostError,
    SynkError,
    in_a_line,
    public_api,
    refuse_use,
    shown,
    warn,
)
from .._base.jax_context import is_staged, is_traced
from .._base.pytree import PyTree, abstract_array, as_data, as_keys
from .._reductions.reduction import UPDATES
from .._runtime.dispatch import drain, uninterrupted
from .._runtime.group import CURRENT, Group, current_group
from .._tracing.context import current_trace, eager
from .state import AbstractState, VariableState, refuse_narrow
from .storage import Shards
from .value import conform, copies_of, spec_of_value

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
        "_has_step",
        "_is_averaged",
        "_made_by",
        "_may_differ",
        "_number",
        "_spec",
        "_state",
        "name",
    )

    # All variables that live, by their numbers, which grow.
    _living: ClassVar[OrderedDict[int, ref[Shared]]] = OrderedDict()

    def __init__(self, value: PyTree, name: str | None, borrow: bool = False, sharded: bool = False) -> None:
        with _lock:
            self._number = number = next(_made)
            # Bound here: a variable may outlive this module's globals, which Python clears as it exits.
            living = self._living
            living[number] = ref(self, lambda _: living.pop(number, None))
        self.name = name or f"shared_{next(_numbers)}"
        # Processes compare this name: a made-up one has a number that may differ between them.
        self._given_name = name or "a shared variable without a name"
        # A function that makes the first value in shards.
        self._made_by: Callable[[], PyTree] | None = None
        # A callable that is a pytree node, such as a model of equinox or a partial of JAX, is a value.
        if callable(value) and jax.tree.leaves(value) == [value]:
            if sharded:
                self._made_by, value = value, jax.eval_shape(value)
            else:
                value = value()
        self._spec, leaves = spec_of_value(value, self.name, borrow, sharded)
        # None until the first use places the leaves.
        self._group: Group | None = None
        self._state = VariableState(leaves, AbstractState(tuple(map(abstract_array, leaves))))
        # Whether replicas differ by design. Then they are not compared, and other numbers of them load the average.
        self._may_differ = False
        # Whether replicas that differ become equal after some steps by themselves.
        self._is_averaged = False
        # Whether a training step updates it.
        self._has_step = False
        # How replicas become equal again, by the name of the function that made them differ.
        self._cures: dict[str, str] = {}

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self.name}: a shared variable is not copied or pickled, since functions use this one. Make another one: "
            f"synk.shared({self.name}.value); to keep it, synk.save."
        )

    def __repr__(self) -> str:
        held = self._state.rows_per_replica
        shapes = logical_shapes(self, None if held is None else sum(held))
        more = [f"{len(shapes) - 4} more"] if len(shapes) > 4 else []
        shown = ", ".join([*(f"{s.dtype.name}{list(s.shape)}" for s in shapes[:4]), *more])
        rows = "" if held is None else f"; {sum(held)} rows on {len(held)} replicas"
        differs = f"; replicas may differ since {self._state.diverged_by}" if self._state.diverged_by else ""
        away = "" if self._group in (None, CURRENT.group) else f"; it lives in {self._group}, which is not current"
        return f"Shared({self.name}: {shown}{rows}{differs}{away})"

    @property
    @public_api
    def value(self) -> PyTree:
        """Read, inside a function, this replica's value, or what the function has assigned; outside, a copy of the
        value all share.

        What is assigned inside is read from there on in the function, and everywhere else when the call ends; outside
        it is `synk.broadcast(w, new)`. A new value keeps tree, shapes and dtypes.

        Raises:
          DivergedError: read outside while replicas hold different values.
          SharedLostError: the program that was to write its value died.
          SynkError: assigned under a transformation of JAX's outside any function, which would do it once; or used in
            a host callback, which would wait for its own program.
        """
        context = current_trace()
        if context is not None:
            return context.read(self)
        _warn_of_constant(self)
        with eager():
            return common_value(self)

    @value.setter
    @public_api
    def value(self, new: PyTree) -> None:
        context = current_trace()
        if context is not None:
            context.write(self, new, None)
            return
        refuse_traced(self.name, f"assigning {self.name}.value")
        with eager():
            commit_all([(self, state_of_value(self, new, f"{self.name}.value", is_assigned=True))])

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
        context.write(self, new, slices)

    @public_api
    def get_value(self, rank: int = 0, borrow: bool = False) -> PyTree:
        """Return a copy of the value of one replica, arrays that lie on every replica.

        Over processes all ask together; `.value` is each one's to read, but for state that lies in shards.

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
        _warn_of_constant(self)
        with eager():
            return value_of_rank(self, rank, borrow)

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
                state = state_of_value(self, new, borrow=borrow)
            else:
                state = state_with_rank(self, rank, new)
            commit_all([(self, state)])

    # Methods that `TraceContext` calls.

    def _unpack(self, leaves: Sequence[Any]) -> PyTree:
        return self._spec.tree(leaves)

    def _tree(self, leaves: Sequence[Any]) -> PyTree:
        return self._spec.treedef.unflatten(map(as_keys, leaves, self._spec.keys))

    def _conform(self, new: PyTree, shapes: Sequence[jax.ShapeDtypeStruct], call: str) -> list[Any]:
        return conform(self._spec, new, self._spec.storage.seen(shapes), self.name, call)

    def _pack(self, leaves: Sequence[Any], shapes: Sequence[jax.ShapeDtypeStruct]) -> list[Any]:
        return self._spec.storage.pack(leaves, shapes)


refuse_use(Shared, lambda self, how: f"{self.name} is a shared variable, {how}: its value is {self.name}.value.")


@public_api
def shared(value: PyTree, name: str | None = None, *, borrow: bool = False, sharded: bool = False) -> Shared:
    """Make a shared variable: every replica starts with a copy of `value` and keeps its own between calls.

    It is placed on the group of its first use; making one starts no device.

    Args:
      value: a pytree of arrays and numbers, per replica, or a function without arguments that makes it; float64
        narrows as JAX does. With `sharded` the function makes the value on the replicas: no device holds all of it.
      name: what messages call it.
      borrow: whether memory may be shared with `value` where that saves a copy.
      sharded: whether each of n replicas keeps one n-th of every leaf above 64 KB, for any n. Functions see the whole
        value, and gather a leaf where they use it. `then` alone assigns it.

    Raises:
      TypeError: a leaf is no array.
      SynkError: it is called inside a synk function.

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
    if (context := current_trace()) is not None:
        raise SynkError(
            f"{context.name}: it makes the shared variable {name or 'without a name'} inside, so another one whenever "
            f"it is traced. Call synk.shared once, outside."
        )
    if not isinstance(sharded, bool):
        raise TypeError(f"synk.shared: sharded is {shown(sharded)}; give True or False.")
    return Shared(value, name, borrow, sharded)


def shared_from(source: Shared, fn: Callable[[PyTree], PyTree], name: str, sharded: bool) -> Shared:
    """Make a shared variable of a function of another one's value; in shards both are placed now."""
    if not sharded:
        return Shared(map_value(source, fn), name)
    made = Shared(jax.eval_shape(fn, abstract_value(source)), name, sharded=True)
    # The source may be made of shapes itself; then there is no value to make this one of.
    has_value = source._made_by is not None or not is_made_of_shapes(source)
    # On devices that are not here it is made of shapes alone.
    if has_value and (group := group_of(source)).accelerator is None:
        with eager():
            made._state, made._group = _made_state(made, group, fn, source), group
    return made


def newest() -> int:
    """Return the number of the newest variable that still lives."""
    # Numbers grow and the dictionary keeps their order, so the last key is the newest. No lock: warm calls ask each
    # time.
    while True:
        try:
            return next(reversed(Shared._living), 0)
        # Another thread has made a variable, or let one go.
        except RuntimeError:
            continue


def refuse_inside(name: str, call: str) -> None:
    """Raise SynkError inside a function, where a replica sees only its own value."""
    context = current_trace()
    if context is not None:
        raise SynkError(
            f"{context.name}: {call} of {name} is for the serial program, not inside a function. "
            f"There, read and assign {name}.value."
        )


def refuse_traced(name: str, call: str) -> None:
    """Raise SynkError under a transformation, which would run the call once, when it is traced, and never again."""
    if is_traced():
        raise SynkError(
            f"{call}: it runs when called, but {name} is used inside jit, grad, vmap or the like, "
            f"which would run it once and never again. Call it outside."
        )


def _warn_of_constant(variable: Shared) -> None:
    """Warn in a trace of the user's own, which keeps what is read for all its runs."""
    if is_staged():
        warn(
            f"{variable.name}: its value is read under jax.jit (or scan, eval_shape, ...), where it is a constant: "
            f"later runs of the same trace see it again, whatever is assigned. Pass {variable.name}.value as an "
            f"argument."
        )


# Callers of what follows hold the lock.


def group_of(variable: Shared) -> Group:
    """Return the group in which the variable lives, or will live."""
    return variable._group or current_group()


def bind(variable: Shared, group: Group) -> VariableState:
    """Return the state in this group. The first use places the value there."""
    if variable._group is not group:
        group._refuse_if_absent(variable.name)
    # Forgotten once it has run: it may hold another model alive.
    if variable._group is None and variable._made_by is not None:
        variable._state, variable._group = _made_state(variable, group, variable._made_by), group
        variable._made_by = None
    if variable._group is None:
        if is_made_of_shapes(variable):
            raise SynkError(
                f"{variable.name}: it was made of shapes alone, for compile and explain. Give it a value first: "
                f"{variable.name}.value = ..., or synk.load."
            )
        state = variable._state
        refuse_narrow(state.abstract, variable.name)
        _compare_processes(variable, group, state.leaves)
        variable._state, variable._group = variable._spec.storage.placed(group, state), group
    if variable._group is not group:
        current = str(group) if str(group) != str(variable._group) else "a later one of that kind"
        raise SynkError(
            f"{variable.name}: it lives in {variable._group}, but the current group is {current}. Use it in its own "
            f"group (`with group:`), or make a new one from {variable.name}.get_value()."
        )
    if variable._state.failure is not None:
        name, cause = variable._state.failure
        # After the loss of a process a new value would not help.
        if isinstance(cause, PeerError):
            raise cause
        raise SharedLostError(
            f"{variable.name}: a program of {name} that was to write it died ({in_a_line(cause)}), so its value is "
            f"lost. Set or load it again."
        ) from cause
    return variable._state


def _made_state(variable: Shared, group: Group, make: Callable[..., PyTree], *sources: Shared) -> VariableState:
    """Make the first state of a variable in shards on the replicas, by a function of the values of others."""
    given = [(source._spec, bind(source, group)) for source in sources]
    for source, (_, state) in zip(sources, given, strict=True):
        if not state.is_equal:
            raise DivergedError(divergence(source))

    def leaves_of(*leaves: jax.Array) -> list[Any]:
        rest = iter(leaves)
        values = [spec.tree([next(rest) for _ in state.leaves]) for spec, state in given]
        return [*map(as_data, jax.tree.leaves(make(*values)))]

    storage = variable._spec.storage
    assert isinstance(storage, Shards)
    return storage.made(group, leaves_of, [(spec.storage, state) for spec, state in given], variable.name)


def state_in(variable: Shared, group: Group) -> VariableState:
    """Return the state as a call in a group sees it, without placing anything."""
    state, storage = variable._state, variable._spec.storage
    if variable._group is None:
        return replace(state, abstract=storage.abstract(state.abstract, group))
    # Shards in another group have other shapes: raise before a program is compiled for them.
    return bind(variable, group) if storage.is_sharded else state


def is_made_of_shapes(variable: Shared) -> bool:
    # Any leaf tells, since `spec_of_value` makes shapes of all if one is a shape.
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in variable._state.leaves)


def map_value(variable: Shared, fn: Callable[[PyTree], PyTree]) -> PyTree:
    """Apply a function to the value. A first value is not placed; if it is made of shapes, return shapes."""
    if variable._group is not None:
        with eager():
            value = common_value(variable)
        return fn(value)
    if is_made_of_shapes(variable):
        return jax.eval_shape(fn, abstract_value(variable))
    return fn(variable._spec.tree(variable._state.leaves))


def abstract_value(variable: Shared) -> PyTree:
    # eval_shape turns raw data into keys without making a key.
    spec, shapes = variable._spec, logical_shapes(variable)
    return jax.eval_shape(lambda *leaves: spec.treedef.unflatten(map(as_keys, leaves, spec.keys)), *shapes)


def _compare_processes(variable: Shared, group: Group, leaves: list[Any]) -> None:
    """Compare new leaves between processes. First values always are: unseeded random numbers, say, differ."""
    name, cure = variable._given_name, f"synk.broadcast({variable.name})"
    remedy = f"Make it alike, e.g. of one seed, or give all of them that of the first replica: {cure}."
    group._peers.compare_values(f"the value of {name}", lambda: leaves, remedy, variable._group is None)


def logical_shapes(variable: Shared, rows: int | None = None) -> Sequence[jax.ShapeDtypeStruct]:
    """Return shapes of the leaves that the user sees, on a replica with `rows` rows, or with the most for None."""
    return variable._spec.storage.logical_shapes(variable._state.abstract, rows)


# Reading.


def computed_state(variable: Shared) -> VariableState:
    """Return the state once its leaves are computed; SharedLostError if the program that was to write them died."""
    group = group_of(variable)
    state = bind(variable, group)
    try:
        jax.block_until_ready(state.leaves)
        return state
    except Exception as error:
        # An exception that a handler of a signal has raised is no failure of the program.
        if _end_well(state.leaves):
            raise
        gone = group._peers.translate_error(error)
        if gone is not None:
            raise gone from error
        # A program of a function marks the variable itself. A collective has no function to name.
        drain()
        invalidate(variable, state, "a function", error)
        # This raises, unless a handler of a signal has set the variable meanwhile.
        return computed_state(variable)


def _end_well(leaves: Sequence[jax.Array]) -> bool:
    with uninterrupted():
        try:
            jax.block_until_ready(leaves)
        except Exception:
            return False
    return True


def common_value(variable: Shared) -> PyTree:
    """Return a copy of the value that all replicas share; DivergedError if they share none."""
    group = group_of(variable)
    if not bind(variable, group).is_equal:
        raise DivergedError(divergence(variable))
    _agree_to_read(variable, group, None)
    state = computed_state(variable)
    return variable._spec.tree(variable._spec.storage.read(group, state.leaves, state.layout, "replicated"))


def value_of_rank(variable: Shared, rank: int, borrow: bool) -> PyTree:
    """Return a copy of one replica's value; NumPy arrays that may share memory with it if `borrow`."""
    group = _group_with_rank(variable, rank)
    _agree_to_read(variable, group, rank)
    # Under a trace a program that asks for its rank would mix with the trace.
    spec, state = variable._spec, computed_state(variable)
    if borrow or is_traced():
        leaves = spec.storage.to_host(group, state, rank)
        return spec.tree(leaves if borrow else [jnp.array(leaf) for leaf in leaves])
    return spec.tree(spec.storage.of_rank(group, state, rank))


def _agree_to_read(variable: Shared, group: Group, rank: int | None) -> None:
    """Let processes meet before a read that communicates, so that a process that reads alone is told."""
    if variable._spec.storage.asks_all(variable._state, rank):
        group._peers.agree(f"a read of {variable._given_name}", "")


def divergence(variable: Shared) -> str:
    name, state = variable.name, variable._state
    if state.rows_per_replica is not None:
        return (
            f"{name}: its replicas hold different rows, {list(state.rows_per_replica)} of them. Read them all with "
            f"synk.gather({name}, nd_up=0), one replica's with {name}.get_value(rank)."
        )
    cure = f"Update it in then, from combined outputs; or combine it with synk.all_reduce({name})"
    cure = variable._cures.get(state.diverged_by, cure)
    return (
        f"{name}: its replicas may hold different values, since {state.diverged_by} updated it on each from its own "
        f"rows. {cure}; {name}.get_value(rank) reads one replica's. If they are equal after all, "
        f"synk.check_replicas({name}) notes it."
    )


def _group_with_rank(variable: Shared, rank: int) -> Group:
    """Return the group in which the variable lives from now on; raise if it has no such rank."""
    group = group_of(variable)
    bind(variable, group)
    if isinstance(rank, bool) or not isinstance(rank, int | np.integer):
        raise TypeError(f"{variable.name}: rank is {shown(rank)}; give an integer from 0 to {group.size - 1}.")
    if not 0 <= rank < group.size:
        raise IndexError(f"{variable.name}: there is no rank {rank}; ranks are 0 to {group.size - 1}.")
    return group


# Replacing.


def commit_all(states: Sequence[tuple[Shared, VariableState]]) -> None:
    """Give variables new states: all of them or, on Ctrl-C, none."""
    # Signals wait, so that no KeyboardInterrupt comes between two assignments.
    with uninterrupted():
        for variable, state in states:
            variable._group, variable._state = group_of(variable), state


def invalidate(variable: Shared, state: VariableState, name: str, cause: Exception) -> None:
    """Mark the variable as lost, if it still has this state, whose program died."""
    # The variable may have been set since: then the dead program's value is not the variable's any more.
    if variable._state is state:
        variable._state = replace(state, failure=(name, cause))


def state_of_copies(variable: Shared, leaves: list[Any]) -> VariableState:
    return variable._spec.storage.state_of_copies(group_of(variable), leaves, variable._state.layout)


def state_of_value(
    variable: Shared, new: PyTree, call: str = "set_value", *, borrow: bool = False, is_assigned: bool = False
) -> VariableState:
    return state_of_copies(variable, new_leaves(variable, new, call, borrow, is_assigned))


def state_with_rank(variable: Shared, rank: int, new: PyTree) -> VariableState:
    group = _group_with_rank(variable, rank)
    variable._spec.storage.refuse(variable.name, "set_value(rank=...)")
    leaves = new_leaves(variable, new, "set_value", borrow=False)
    return variable._spec.storage.state_with_rank(group, computed_state(variable), rank, leaves, variable.name)


def new_leaves(variable: Shared, new: PyTree, call: str, borrow: bool, is_assigned: bool = False) -> list[Any]:
    spec = variable._spec
    any_rows = spec.storage.takes_other_rows(variable._state.abstract, is_assigned)
    leaves = conform(spec, new, logical_shapes(variable), variable.name, call, any_rows)
    leaves = leaves if borrow else copies_of(leaves)
    # Compared after they are checked, so that a wrong value raises its own message in the process that has it.
    _compare_processes(variable, group_of(variable), leaves)
    return leaves
