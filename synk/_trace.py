"""Trace: run a user's function once per shape, and learn what it reads, writes, returns and communicates."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from . import _flight, _group
from ._context import is_traced, trace_state
from ._errors import SynkError, entry
from ._group import AXIS, PyTree

if TYPE_CHECKING:
    from ._shared import Shared

# A user's inner jax.jit caches what it traced; a fresh value of this context makes it trace anew.
_context = jax.make_user_context(None)
_local = threading.local()
_config: Any = jax.config
_PATIENCE = 5.0  # seconds that a callback waits for a call under way


class Value(NamedTuple):
    """A shared variable's value while tracing: shapes are one replica's."""

    treedef: Any
    shapes: tuple[jax.ShapeDtypeStruct, ...]  # key data, where the leaf is a typed key
    keys: tuple[Any, ...]  # PRNG implementation of each leaf, None for plain arrays


@dataclass
class Frame:
    """What one function may see while it is traced."""

    name: str
    rank: jax.Array
    size: int
    slices: int
    is_then: bool
    communicates: bool  # whether the replicas' axis is there
    values: dict[Shared, list[jax.Array]]
    describe: Callable[[Shared], Value]
    state: Any = field(default_factory=trace_state)
    reads: dict[Shared, None] = field(default_factory=dict)
    writes: dict[Shared, tuple[list[jax.Array], str | None]] = field(default_factory=dict)
    uses_rank: bool = False

    def read(self, variable: Shared) -> PyTree:
        """The variable's value as the call found it; of an unknown one a stand-in, and the trace is made again."""
        self.reads[variable] = None
        value = self.describe(variable)
        leaves = self.values.get(variable)
        if leaves is None:
            leaves = [jnp.zeros(s.shape, s.dtype) for s in value.shapes]
        return variable.unflatten(leaves)

    def write(self, variable: Shared, new: PyTree, slices: str | None) -> None:
        """Note a new value, which takes effect when the call ends."""
        if trace_state() != self.state:
            raise SynkError(
                f"{self.name}: {variable.name} is assigned inside a jax transformation (jit, grad, scan, cond, vmap, "
                f"...), from where the new value cannot leave. Return it from there and assign it outside, "
                f"in the body of {self.name}."
            )
        if self.slices > 1 and slices is None and not self.is_then:
            raise ValueError(
                f"{self.name}: with num_slices={self.slices} the update of {variable.name} must say how slices "
                f'combine: {variable.name}.update(new, slices=...) with "mean", "max", "min", "last" or "add"; '
                f"or assign it in then."
            )
        if slices == "add":
            self.reads[variable] = None  # what is added is the difference from the old value
        self.writes[variable] = variable.conform(new, self.describe(variable), self.name), slices


def frame() -> Frame | None:
    """The function being traced on this thread, if any."""
    return getattr(_local, "frame", None)


def settings() -> tuple[Any, ...]:
    """JAX's options that change what is traced; programs are kept for each."""
    config = _config
    return (
        config.jax_enable_x64,
        config.jax_threefry_partitionable,
        config.jax_default_matmul_precision,
        config.jax_numpy_dtype_promotion,
        config.jax_default_prng_impl,
    )


@contextmanager
def eager() -> Generator[None]:
    """Hold the lock, and step out of any transformation around this line: what is read are values of now."""
    _lock()
    try:
        if not is_traced():
            yield
            return
        with jax.ensure_compile_time_eval():
            yield
    finally:
        _flight.LOCK.release()


def _lock() -> None:
    """Take the lock; a callback of a running program must not wait for the call that waits for the program."""
    is_callback = threading.current_thread().name.startswith("Dummy-")  # a thread that Python has not started
    if not _flight.LOCK.acquire(timeout=_PATIENCE if is_callback else -1):
        raise SynkError(
            "A host callback inside a running program asks for a shared variable while a call is under way. "
            "Read the variable in the function, and pass its value to the callback."
        )


@entry
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
    current = frame()
    if current is None:
        raise SynkError("synk.rank: there is a rank only inside a synk function, on each replica.")
    current.uses_rank = True
    return current.rank


@entry
def size() -> int:
    """Return how many replicas there are: inside a function those that run it, outside those of the current group.

    Example:
      >>> import synk
      >>> with synk.simulate(3):
      ...     synk.size()
      3
    """
    current = frame()
    return current.size if current is not None else _group.group().size


def as_keys(data: jax.Array, key: Any) -> jax.Array:
    """Raw data as a typed PRNG key array, where it is one."""
    return data if key is None else jax.random.wrap_key_data(data, impl=key)


def key_of(leaf: Any) -> Any:
    """The PRNG implementation of a typed key array, None of anything else."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_impl(leaf)
    return None


def as_data(leaf: jax.Array) -> jax.Array:
    """A typed PRNG key array as raw data; anything else as it is."""
    return leaf if key_of(leaf) is None else jax.random.key_data(leaf)


@dataclass(frozen=True)
class Traced:
    """A function as a jaxpr of plain arrays: variables' leaves, argument leaves, rank -> outputs, written leaves."""

    run: Callable[..., list[jax.Array]]
    variables: tuple[Shared, ...]  # whose leaves come first, in this order
    writes: tuple[tuple[Shared, str | None], ...]
    outputs: Any  # what `pack` said of the return value
    shapes: tuple[jax.ShapeDtypeStruct, ...]  # of the outputs, then of what is written
    reads: tuple[Shared, ...]
    uses_rank: bool
    has_effects: bool  # prints or calls back to the host: it must not run on rows that are not there


def trace(
    fn: Callable[..., PyTree],
    arguments: Sequence[jax.ShapeDtypeStruct],
    *,
    name: str,
    size: int,
    describe: Callable[[Shared], Value],
    known: Sequence[Shared] = (),
    pack: Callable[[PyTree], tuple[list[jax.Array], Any]],
    slices: int = 1,
    is_then: bool = False,
    communicates: bool = True,
) -> Traced:
    """Trace `fn(*leaves)` for one replica; twice where it reads variables that are not among `known`."""
    variables = tuple(known)
    seen: dict[str, Any] = {}

    def flat(*leaves: jax.Array) -> list[jax.Array]:
        rest = list(leaves[:-1])
        values = {variable: [rest.pop(0) for _ in describe(variable).shapes] for variable in variables}
        current = Frame(name, leaves[-1], size, slices, is_then, communicates, values, describe)
        before, _local.frame = frame(), current
        try:
            with _context(object()):
                out, seen["outputs"] = pack(fn(*rest))
        finally:
            _local.frame = before
        # And no more of the frame: what is traced must not outlive its trace.
        seen["reads"], seen["uses_rank"] = tuple(current.reads), current.uses_rank
        seen["writes"] = tuple((variable, slices) for variable, (_, slices) in current.writes.items())
        written = [leaf for new, _ in current.writes.values() for leaf in new]
        seen["shapes"] = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (*out, *written))
        return [*out, *written]

    while True:
        shapes = [shape for variable in variables for shape in describe(variable).shapes]
        rank_shape = jax.ShapeDtypeStruct((), np.int32)
        axes = [(AXIS, size)] if communicates else None
        closed = jax.make_jaxpr(flat, axis_env=axes)(*shapes, *arguments, rank_shape)
        used: tuple[Shared, ...] = seen["reads"]
        if set(used) <= set(variables):
            break
        variables = tuple(dict.fromkeys((*variables, *used)))
    # Variables that other branches read are in the jaxpr, but nothing in it uses them.
    is_used = [variable in used for variable in variables for _ in describe(variable).shapes]
    return Traced(
        run=_runner(closed, is_used, name),
        variables=tuple(variable for variable in variables if variable in used),
        writes=seen["writes"],
        outputs=seen["outputs"],
        shapes=seen["shapes"],
        reads=used,
        uses_rank=seen["uses_rank"] or _tells_ranks_apart(closed.jaxpr),
        has_effects=bool(closed.effects),
    )


# What gives replicas different values of what was equal on all. A host's answers need not be the same for each.
_BY_RANK = ("axis_index", "ppermute", "all_to_all", "reduce_scatter")
_BY_HOST = ("io_callback",)


def _tells_ranks_apart(jaxpr: Any) -> bool:
    """Does it use the replicas' axis in a way whose result depends on the rank?"""
    for equation in jaxpr.eqns:
        params = equation.params
        if equation.primitive.name in _BY_HOST:
            return True
        if AXIS in str(params.get("axis_name", params.get("axes", ""))) and (
            equation.primitive.name in _BY_RANK or params.get("axis_index_groups") is not None
        ):
            return True
        inner = [getattr(value, "jaxpr", value) for value in jax.tree.leaves(tuple(params.values()))]
        if any(_tells_ranks_apart(value) for value in inner if hasattr(value, "eqns")):
            return True
    return False


def _runner(closed: Any, is_used: Sequence[bool], name: str) -> Callable[..., list[jax.Array]]:
    if any(isinstance(const, jax.core.Tracer) for const in closed.consts):
        raise SynkError(
            f"{name}: it uses values of a transformation around the call (jit, grad, vmap, ...) that are not among its "
            f'arguments. Pass them as "broadcast" arguments.'
        )
    # A constant that lives on one device cannot enter a program over several; on the host it can.
    committed = [isinstance(c, jax.Array) and key_of(c) is None and c.committed for c in closed.consts]
    consts = [np.asarray(c) if pinned else c for c, pinned in zip(closed.consts, committed, strict=True)]

    def run(*args: jax.Array) -> list[jax.Array]:
        given = iter(args)
        variables = [next(given) if used else None for used in is_used]
        results = jax.core.eval_jaxpr(closed.jaxpr, consts, *variables, *given)
        # A result that depends on nothing is a number of Python's, or one of NumPy's.
        return [
            result if isinstance(result, jax.Array) else jnp.asarray(result, aval.dtype)
            for result, aval in zip(results, closed.out_avals, strict=True)
        ]

    return run
