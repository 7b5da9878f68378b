"""Trace context: what a user's function may see and do while it is traced."""

import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_leaves_with_path

from .._base.errors import SynkError, public_api
from .._base.jax_context import is_traced, trace_state
from .._base.pytree import PyTree, check_key
from .._runtime.dispatch import LOCK, retire_finished
from .._runtime.group import current_group

_local = threading.local()


class TracedState(Protocol):
    """A shared variable, as tracing needs it."""

    name: str

    def _unpack(self, leaves: Sequence[Any]) -> PyTree:
        """Stored leaves as the user's tree."""
        ...

    def _conform(self, new: PyTree, shapes: Sequence[jax.ShapeDtypeStruct], call: str) -> list[Any]:
        """A new value's stored leaves; an error where tree, shapes or dtypes differ."""
        ...


@dataclass
class TraceContext:
    """What one function may see while it is traced, and what it did."""

    name: str  # what messages call the function
    size: int  # how many replicas there are
    shapes_of: Callable[[Any], Sequence[jax.ShapeDtypeStruct]]  # of a variable's stored leaves on one replica
    rows_held: Callable[[Any], int | None] = lambda variable: None  # how many rows a variable brings a replica
    rows: int | None = None  # of the part; None where there are none
    is_sliced: bool = False  # whether updates must say how slices combine
    has_axis: bool = True  # whether the replicas' axis is there, to communicate over
    instead: str = "Do it outside."  # what to do where it is not
    block: int | None = None  # of how many rows are the blocks that it runs on, of which no answer may tell the replica
    # Of one trace:
    rank: Any = None  # of the replica, int32
    first_row: Any = None  # the number of the part's first row among all rows of the call, int32
    values: Mapping[Any, Sequence[jax.Array]] = field(default_factory=dict)  # leaves of the variables known to be read
    state: Any = field(default_factory=trace_state, init=False)
    reads: dict[Any, None] = field(default_factory=dict, init=False)
    writes: dict[Any, tuple[list[jax.Array], str | None]] = field(default_factory=dict, init=False)
    uses_rank: bool = field(default=False, init=False)
    handed_out: list[tuple[Any, PyTree, list[tuple[Any, Any]]]] = field(default_factory=list, init=False)

    def read(self, variable: TracedState) -> PyTree:
        """The variable's value as the call found it; of an unknown one a stand-in, and the trace is made again."""
        self.reads[variable] = None
        if self.rows is None:
            self.rows = self.rows_held(variable)
        leaves = self.values.get(variable)
        if leaves is None:
            leaves = [jnp.zeros(s.shape, s.dtype) for s in self.shapes_of(variable)]
        tree = variable._unpack(leaves)
        self.handed_out.append((variable, tree, tree_leaves_with_path(tree)))
        return tree

    def refuse_replica(self, what: str) -> None:
        """SynkError where its answer must not depend on the replica that runs."""
        if self.block is not None:
            raise SynkError(
                f"{self.name}: it asks for {what}, but with blocks={self.block} its answer depends on no replica. Use "
                f"synk.row_numbers or synk.part_key, or ask in then."
            )

    def write(self, variable: TracedState, new: PyTree, slices: str | None) -> None:
        """Note a new value, which takes effect when the call ends."""
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
            self.reads[variable] = None  # what is added is the difference from the old value
        self.writes[variable] = variable._conform(new, self.shapes_of(variable), self.name), slices

    def without_axis(self, what: str) -> str:
        """What is said of what communicates where the axis is not there."""
        return (
            f"{self.name}: {what}, which takes all rows in one call without slices, as many on every replica. "
            f"{self.instead}"
        )

    def check_values_unchanged(self) -> None:
        """Changes inside a tree that was read would be lost: SynkError names the first."""
        for variable, tree, before in self.handed_out:
            for old, new in zip_longest(before, tree_leaves_with_path(tree), fillvalue=((), None)):
                if old[0] != new[0] or old[1] is not new[1]:
                    raise SynkError(
                        f"{self.name}: {variable.name}.value{keystr(new[0] or old[0])} was changed in place, which "
                        f"would be lost. Assign the whole value: "
                        f"{variable.name}.value = {{**{variable.name}.value, ...}}."
                    )


def current_trace() -> TraceContext | None:
    """The function being traced on this thread, if any."""
    return getattr(_local, "context", None)


@contextmanager
def tracing(context: TraceContext) -> Generator[None]:
    """Let a function be traced on this thread."""
    before, _local.context = current_trace(), context
    try:
        yield
    finally:
        _local.context = before


def stateless(name: str, advice: str) -> AbstractContextManager[None]:
    """Let functions be traced that may use no shared variables, since programs are kept without them, nor parts."""

    def refuse(variable: Any) -> Any:
        raise SynkError(f"{name} uses the shared variable {variable.name}. {advice}")

    return tracing(TraceContext(name, 0, refuse, has_axis=False))


@contextmanager
def eager() -> Generator[None]:
    """Hold the lock and step out of any transformation around this line, so that values of now are read."""
    _refuse_callback()
    with LOCK:
        retire_finished()
        with jax.ensure_compile_time_eval() if is_traced() else nullcontext():
            yield


def _refuse_callback() -> None:
    """Raise in a thread that JAX has started for a host callback, which would wait for its own program."""
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
      SynkError: called outside a synk function.

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
    return jax.random.fold_in(key, _own_part("part_key", "there are parts").first_row.astype(jnp.uint32))


@public_api
def row_numbers() -> jax.Array:
    """Return the numbers of this part's rows in the selection, inside a function only.

    Returns:
      An int32 array, one number a row (per replica), counted from 0 over the rows of the call in their order.

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
    """The same for this call of synk's, which messages name."""
    context = _own_part(call, "there are rows")
    if context.rows is None:
        raise SynkError(
            f"{context.name}: synk.{call}: it has no scattered input, so no rows. If a variable brings them, read "
            f"its value first."
        )
    return context.first_row + jnp.arange(context.rows, dtype=jnp.int32)


def _own_part(call: str, what: str) -> TraceContext:
    """The function being traced, whose results now depend on which part it runs on."""
    context = current_trace()
    if context is None or context.size == 0:  # a function of rows alone has no part either
        raise SynkError(f"synk.{call}: {what} only inside a synk function, on each replica.")
    context.uses_rank = True
    return context
