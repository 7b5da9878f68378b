"""Trace context: the values that a user's function sees while it is traced, and a record of its reads and writes."""

import sys
import threading
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_leaves_with_path

from .._base.errors import SynkError, public_api
from .._base.jax_context import is_traced, trace_state
from .._base.pytree import PyTree, check_key
from .._runtime.dispatch import LOCK, retire_finished
from .._runtime.group import current_group
from .._runtime.way import AXIS

# Threads trace at once, each its own function.
_local = threading.local()
# A user's inner jax.jit caches what it traced; a fresh value of this context makes it trace anew.
_fresh = jax.make_user_context(None)


class NoAxisError(ValueError):
    """A function communicates where the axis of the replicas is missing."""


@dataclass
class TraceContext:
    """The surroundings of one function while it is traced, and what it did.

    Attributes:
      shapes_of: returns the shapes of a variable's leaves on one replica.
      rows_held: returns the rows that a variable holds on one replica, None if it holds no rows.
      rows: the rows of the part, None if there are no rows.
      is_sliced: whether updates must say how slices combine.
      has_axis: whether the function may communicate over the axis of the replicas.
      instead: what messages advise without that axis.
      or_in_then: whether communicating in `then` would do too.
      block: the rows of a block, if the function runs on blocks. Then no answer may depend on the replica.
      rank: the rank of the replica, a traced int32.
      first_row: the number of the part's first row among all rows of the call, a traced int32.
      row: the place in the part of the one row that a map runs, a traced int32; None for a function of a part.
      values: the leaves of the variables that are expected to be read.
      written_before: of `then` the variables that its function has written.
      state: JAX's trace at the start of the function.
      reads: the variables whose values from before the call are read, in order.
      writes: for each variable written, its new stored leaves and how slices combine.
      written: for each variable written, its new logical leaves, which later reads see.
      read_inside: the variables read inside transformations, whose traces JAX keeps for this context.
      forget_traces: makes JAX trace inner functions anew from here on.
      uses_rank: the calls by which results may differ between replicas with equal inputs.
      uses_size: whether `synk.size` was asked.
      handed_out: for each read the variable, the tree handed out, and its leaves at that time.
    """

    name: str
    size: int
    shapes_of: Callable[[Any], Sequence[jax.ShapeDtypeStruct]]
    rows_held: Callable[[Any], int | None] = lambda variable: None
    rows: int | None = None
    is_sliced: bool = False
    has_axis: bool = True
    axis_name: str = AXIS
    instead: str = "Do it outside."
    or_in_then: bool = False
    block: int | None = None
    rank: Any = None
    first_row: Any = None
    row: Any = None
    values: Mapping[Any, Sequence[jax.Array]] = field(default_factory=dict)
    written_before: Collection[Any] = ()
    state: Any = field(default_factory=trace_state, init=False)
    reads: dict[Any, None] = field(default_factory=dict, init=False)
    writes: dict[Any, tuple[list[jax.Array], str | None]] = field(default_factory=dict, init=False)
    written: dict[Any, Sequence[Any]] = field(default_factory=dict, init=False)
    read_inside: set[Any] = field(default_factory=set, init=False)
    forget_traces: Callable[[], Any] = field(default=lambda: None, init=False)
    uses_rank: set[str] = field(default_factory=set, init=False)
    uses_size: bool = field(default=False, init=False)
    handed_out: list[tuple[Any, PyTree, list[tuple[Any, Any]]]] = field(default_factory=list, init=False)

    def read(self, variable: Any) -> PyTree:
        """Return the value of a shared variable: the one that the function has written, or that at the start of the
        call."""
        # An inner jit has cached the old value; `write` then makes JAX trace inner functions anew.
        if trace_state() != self.state:
            self.read_inside.add(variable)
        if variable in self.written:
            tree = variable._tree([*map(jnp.asarray, self.written[variable])])
        else:
            tree = self._value_before(variable)
        # Leaves are noted now, since the user may change the tree in place later; see `check_values_unchanged`.
        self.handed_out.append((variable, tree, tree_leaves_with_path(tree)))
        return tree

    def _value_before(self, variable: Any) -> PyTree:
        """Return the value of a shared variable at the start of the call."""
        if variable in self.written_before:
            fn = self.name.removesuffix(".then")
            raise SynkError(
                f"{self.name}: it reads {variable.name}, which {fn} has assigned on each replica for itself. Return "
                f"the new value as an output of {fn}: then gets it combined, and may assign it to {variable.name}."
            )
        self.reads[variable] = None
        # A variable that holds rows brings them to a call without scattered arguments.
        if self.rows is None:
            self.rows = self.rows_held(variable)
        # Which variables a function reads is known only once it is traced. One that was not expected gives zeros, and
        # the function is traced again with its leaves as arguments.
        leaves = self.values.get(variable)
        if leaves is None:
            leaves = [jnp.zeros(s.shape, s.dtype) for s in self.shapes_of(variable)]
        tree = variable._unpack(leaves)
        if self.row is not None and self.rows_held(variable) is not None:
            tree = jax.tree.map(lambda leaf: leaf[self.row], tree)
        return tree

    def refuse_replica(self, what: str) -> None:
        """Raise SynkError if the answer must not depend on the replica that runs."""
        if self.block is not None:
            raise SynkError(
                f"{self.name}: it asks for {what}, but with blocks={self.block} its answer depends on no replica. Use "
                f"synk.row_numbers or synk.part_key, or ask in then."
            )

    def refuse_row(self, what: str, advice: str) -> None:
        if self.row is not None:
            raise SynkError(f"{self.name}: {what} in synk.map, where a row knows nothing of the others. {advice}")

    def write(self, variable: Any, new: PyTree, slices: str | None) -> None:
        """Note a new value of a shared variable. Later reads of the function see it, all others when the call ends."""
        self.refuse_row(f"{variable.name} is assigned", "Return what it depends on, and assign it in then.")
        # A tracer that left its transformation would raise JAX's UnexpectedTracerError later, which names no variable.
        if trace_state() != self.state:
            raise SynkError(
                f"{self.name}: {variable.name} is assigned inside a jax transformation (jit, grad, scan, cond, vmap, "
                f"...), from where the new value cannot leave. Return it from there and assign it outside, "
                f"in the body of {self.name}."
            )
        if self.is_sliced and self.rows_held(variable) is not None:
            raise ValueError(
                f"{self.name}: {variable.name} holds rows, so it cannot be updated with num_slices > 1. Take the rows "
                f'as an argument, return the new ones by op "scatter", and pass those in again.'
            )
        if self.is_sliced and slices is None:
            raise ValueError(
                f"{self.name}: with num_slices > 1 the update of {variable.name} must say how slices "
                f'combine: {variable.name}.update(new, slices=...) with "mean", "max", "min", "last" or "add"; '
                f"or assign it in then."
            )
        if slices == "add":
            # Slices add the difference from the old value, so that is read.
            self.reads[variable] = None
        shapes = self.shapes_of(variable)
        leaves = variable._conform(new, shapes, self.name)
        self.writes[variable] = variable._pack(leaves, shapes), slices
        self.written[variable] = leaves
        if variable in self.read_inside:
            # An inner jax.jit that has read the old value would go on with it.
            self.read_inside.clear()
            self.forget_traces()

    def without_axis(self, what: str, can_move: bool) -> str:
        """Return the message for communication where the axis of the replicas is missing.

        Args:
          what: what communicates.
          can_move: whether it could be done in `then`, as it could not in a loop.
        """
        instead = f"Communicate in then, or {self.instead}" if self.or_in_then and can_move else self.instead
        return (
            f"{self.name}: {what}, which takes all rows in one call without slices, as many on every replica. "
            f"{instead[0].upper()}{instead[1:]}"
        )

    def check_values_unchanged(self) -> None:
        """Raise SynkError if a tree that was read has been changed in place: the change would be lost."""
        # A value is a tree of plain containers, and JAX sees no assignment to an entry: the variable would keep its old
        # value.
        for variable, tree, before in self.handed_out:
            for old, new in zip_longest(before, tree_leaves_with_path(tree), fillvalue=((), None)):
                if old[0] != new[0] or old[1] is not new[1]:
                    what, value = keystr(new[0] or old[0]), f"{variable.name}.value"
                    cure = f"Assign the whole value: {value} = {{**{value}, ...}}."
                    # What nnx.merge makes shares the arrays of a tree of nnx, and changes them.
                    if any(map(_is_of_nnx, jax.tree.leaves(tree, is_leaf=_is_of_nnx))):
                        cure = f"Merge a copy, and keep its nnx.state: nnx.merge(graph, {value}, copy=True)."
                    raise SynkError(f"{self.name}: {value}{what} was changed in place, which would be lost. {cure}")


def _is_of_nnx(node: Any) -> bool:
    return type(node).__module__.startswith("flax.nnx")


class ItemAsked:
    """Mark of a thread in which `synk.resume` asks for an item of the user, for which nothing may be computed."""


def surroundings() -> TraceContext | ItemAsked | None:
    """Return what this thread is in, where calls are refused."""
    return getattr(_local, "inside", None)


def current_trace() -> TraceContext | None:
    inside = getattr(_local, "inside", None)
    return inside if isinstance(inside, TraceContext) else None


@contextmanager
def asking_for_item() -> Generator[None]:
    before, _local.inside = surroundings(), ItemAsked()
    try:
        yield
    finally:
        _local.inside = before


@contextmanager
def tracing(context: TraceContext) -> Generator[None]:
    before, _local.inside = surroundings(), context
    try:
        with ExitStack() as stack:
            # JAX's caches of inner functions have this user context in their keys. A fresh one for each trace keeps an
            # inner jit from giving what it read in another trace; a fresh one after a write, what it read before.
            context.forget_traces = lambda: stack.enter_context(_fresh(object()))
            context.forget_traces()
            yield
    finally:
        _local.inside = before


def stateless(name: str, advice: str) -> AbstractContextManager[None]:
    """Let functions be traced that may use no shared variables and no parts: their programs are kept without these."""

    def refuse(variable: Any) -> Any:
        raise SynkError(f"{name} uses the shared variable {variable.name}. {advice}")

    # A size of 0 stands for functions without parts: `_own_part` refuses them.
    return tracing(TraceContext(name, 0, refuse, has_axis=False))


@contextmanager
def eager() -> Generator[None]:
    """Hold the lock, and step out of any transformation around this line, so that reads return values of now."""
    _refuse_callback()
    # The lock keeps the states that are read those of one moment; finished programs are retired first, so a failed one
    # marks its variables.
    with LOCK:
        retire_finished()
        with jax.ensure_compile_time_eval() if is_traced() else nullcontext():
            yield


def _refuse_callback() -> None:
    """Raise in a thread that JAX has started for a host callback."""
    # A read would wait for the program that waits for this callback (https://github.com/jax-ml/jax/issues/24255). JAX's
    # function is the outermost on such a thread's stack; threads that other libraries start may use variables.
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    if frame.f_globals.get("__name__", "").startswith("jax."):
        raise SynkError(
            "A host callback inside a running program asks for a shared variable, which may wait for that program. "
            "Read the variable in the function, and pass its value to the callback."
        )


@public_api
def rank() -> jax.Array:
    """Return the number of the replica that runs, inside a function only.

    Returns:
      A traced int32 scalar, 0 on the first replica.

    Raises:
      SynkError: called outside a synk function.

    Example:
      >>> import synk
      >>> with synk.simulate(3):
      ...     synk.function(lambda: synk.rank(), reduce="stack")().tolist()
      [0, 1, 2]
    """
    context = _own_part("rank", "there is a rank")
    context.refuse_replica("synk.rank()")
    return context.rank


@public_api
def size() -> int:
    """Return how many replicas there are: inside a function those that run it, outside those of the current group.

    Example:
      >>> import synk
      >>> with synk.simulate(3):
      ...     synk.size()
      3
    """
    context = current_trace()
    if context is not None:
        context.refuse_replica("synk.size()")
        context.uses_size = True
    return (context.size if context is not None else 0) or current_group().size


@public_api
def part_key(key: jax.Array) -> jax.Array:
    """Give each part, that is each slice of each replica, a PRNG key of its own, inside a function only.

    So dropout draws another mask in each slice, where `jax.random.fold_in(key, synk.rank())` repeats one. The noise
    then depends on how rows are cut; `synk.row_keys` gives noise that does not.

    Args:
      key: a typed key (`jax.random.key`) or a raw one, the same on all replicas.

    Returns:
      A key of the same kind: `key` with the number of the part's first row folded in.

    Raises:
      SynkError: called outside a synk function, or by a row of `synk.map`, which is no part.

    Example:
      >>> import jax, numpy as np, synk
      >>> with synk.simulate(2):
      ...     @synk.function(inputs=["x"], reduce="stack")
      ...     def noise(x, key):
      ...         return jax.random.normal(synk.part_key(key))
      ...     a, b = noise(np.zeros(4), jax.random.key(0))
      ...     bool(a != b)
      True
    """
    check_key(key, "synk.part_key")
    context = _own_part("part_key", "there are parts")
    context.refuse_row("synk.part_key is called", "Use synk.row_keys(key), which there is the row's own key.")
    # The first row numbers a part alike on any number of replicas; fold_in takes unsigned numbers.
    return jax.random.fold_in(key, context.first_row.astype(jnp.uint32))


@public_api
def row_numbers() -> jax.Array:
    """Return the numbers of this part's rows in the selection, inside a function only.

    Returns:
      An int32 array, one number a row (per replica), counted from 0 over the rows of the call in their order. Inside a
      function of one row (`synk.map`) an int32 scalar, the number of that row.

    Raises:
      SynkError: called outside a synk function, or in one without scattered rows.

    Example:
      >>> import numpy as np, synk
      >>> with synk.simulate(2):
      ...     synk.function(lambda x: synk.row_numbers() * 10, reduce="concat")(np.zeros(5)).tolist()
      [0, 10, 20, 30, 40]
    """
    return own_row_numbers("row_numbers")


def own_row_numbers(call: str) -> jax.Array:
    """Return the numbers of this part's rows, or of a map's one row, for a call of synk's that messages name."""
    context = _own_part(call, "there are rows")
    if context.rows is None:
        raise SynkError(
            f"{context.name}: synk.{call}: it has no scattered input, so no rows. If a variable brings them, read "
            f"its value first."
        )
    return context.first_row + (jnp.arange(context.rows, dtype=jnp.int32) if context.row is None else context.row)


def _own_part(call: str, what: str) -> TraceContext:
    """Return the context of the function, and note that its results depend on the part."""
    context = current_trace()
    # A size of 0 stands for functions without parts, see `stateless`.
    if context is None or context.size == 0:
        raise SynkError(f"synk.{call}: {what} only inside a synk function, on each replica.")
    context.uses_rank.add(f"synk.{call}")
    return context
