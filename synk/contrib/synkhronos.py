"""Synkhronos' names for functions of JAX: `import synk.contrib.synkhronos as synk`.

Outputs and collectives combine by "avg" unless a call names an op, as there. `group`, `init`, `size` and members such
as `f.serial` are those of `synk`. Graphs of Theano are for `synk.contrib.pytensor`.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

import synk as _synk
from synk import close, group, init, shared, size
from synk.typing import Data as _Data
from synk.typing import Shared

from .._base.errors import public_api
from .._tracing.context import eager
from .._variables.collectives import variables_of
from .._variables.variable import commit_all, group_of, logical_shapes, state_with_rank

__all__ = [
    "Data", "all_gather", "all_reduce", "broadcast", "build_inputs", "close", "data", "distribute", "fork", "function",
    "gather", "get_lengths", "get_shapes", "get_value", "group", "init", "reduce", "scatter", "set_value", "shared",
    "size",
]  # fmt: skip

Variables: TypeAlias = Shared | Sequence[Shared]


class Forked(int):
    """The number of replicas, which `fork` returns; members such as `size` and `devices` are the group's."""

    def __getattr__(self, member: str) -> Any:
        return getattr(group(), member)


@public_api
def fork(n_parallel: int | None = None) -> Forked:
    """Make the group, as `synk.init(n_parallel)` does, and return the number of replicas. Nothing is forked.

    Example:
      >>> import synk.contrib.synkhronos as synk
      >>> synk.fork(1)
      1
    """
    return Forked(init(n_parallel).size)


@public_api
def distribute() -> None:
    """Do nothing: functions and shared variables reach the devices by themselves.

    Example:
      >>> import synk.contrib.synkhronos as synk
      >>> synk.distribute()
    """


def function(
    fn: Callable[..., Any] | None = None, inputs: Any = None, outputs: Any = None, reduce: Any = "avg", **options: Any
) -> Any:
    """Make a function that runs on every replica, as `synk.function` does; outputs combine by "avg" unless told.

    Example:
      >>> import numpy as np, synk.contrib.synkhronos as synk
      >>> float(synk.function(lambda x: x.mean())(np.arange(5.0)))
      2.0
    """
    return _synk.function(fn, inputs, outputs, reduce, **options)


class Data(_Data):
    """Rows for the inputs of functions; made by `data`. Its arguments about memory have no effect: it holds the array.

    Example:
      >>> import numpy as np, synk.contrib.synkhronos as synk
      >>> x = synk.data(np.zeros((5, 2), np.float32))
      >>> x.set_value(np.ones((3, 2)), force_cast=True, oversize=1.1)
      >>> x.data.tolist(), x.alloc_size
      ([[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]], 6)
    """

    @property
    def data(self) -> Any:
        """Return all rows as an array."""
        return self[:]

    @property
    def alloc_size(self) -> int:
        """Return the number of items."""
        return self.size

    def set_value(self, value: Any, force_cast: bool = False, oversize: float = 1) -> None:
        """Hold another array; see `synk.typing.Data.set_value`."""
        super().set_value(value)

    def set_length(self, rows: int, oversize: float = 1) -> None:
        """Let only so many first rows count; see `synk.typing.Data.set_length`."""
        super().set_length(rows)

    def free_memory(self) -> None:
        """Let go of the array and of all copies; see `synk.typing.Data.free`."""
        self.free()


def data(
    value: Any,
    *,
    dtype: Any = None,
    minibatch: bool = False,
    name: str | None = None,
    place: Any = "host",
    force_cast: bool = False,
    oversize: float = 1,
) -> Data:
    """Hold an array of rows for the inputs of functions, as `synk.data` does.

    Example:
      >>> import numpy as np, synk.contrib.synkhronos as synk
      >>> synk.data(np.zeros((5, 2), np.float32), name="x").shape
      (5, 2)
    """
    made: Any = Data(value, name or "data", place, minibatch, dtype)
    return made


def build_inputs(*values: Any, place: Any = "host", minibatch: bool = False) -> tuple[Data, ...]:
    """Make the data of a function's inputs, one of each array.

    Example:
      >>> import numpy as np, synk.contrib.synkhronos as synk
      >>> x, y = synk.build_inputs(np.zeros((5, 2)), np.zeros(5))
      >>> x.shape, y.shape
      ((5, 2), (5,))
    """
    return tuple(data(value, place=place, minibatch=minibatch) for value in values)


def broadcast(shared_vars: Variables, values: Any = None) -> None:
    """Give every replica values, or the first replica's; see `synk.broadcast`.

    Example:
      >>> import numpy as np, synk.contrib.synkhronos as synk
      >>> w = synk.shared(np.zeros(2))
      >>> synk.broadcast(w, np.ones(2))
      >>> w.get_value().tolist()
      [1.0, 1.0]
    """
    _synk.broadcast(shared_vars, _rows(values))


def scatter(shared_vars: Variables, values: Any, batch: Any = None) -> None:
    """Deal the rows of values out over the replicas; see `synk.scatter`.

    Example:
      >>> import numpy as np, synk, synk.contrib.synkhronos as synkhronos
      >>> with synk.simulate(2):
      ...     w = synkhronos.shared(np.zeros(2, np.int32))
      ...     synkhronos.scatter(w, np.arange(3, dtype=np.int32))
      ...     synkhronos.get_lengths(w)
      [2, 1]
    """
    _synk.scatter(shared_vars, _rows(values), batch)


def gather(shared_vars: Variables, nd_up: int = 1) -> Any:
    """Return the values of all replicas; see `synk.gather`.

    Example:
      >>> import numpy as np, synk, synk.contrib.synkhronos as synkhronos
      >>> with synk.simulate(2):
      ...     synkhronos.gather(synkhronos.shared(np.arange(2)), nd_up=0).tolist()
      [0, 1, 0, 1]
    """
    return _like_there(shared_vars, _synk.gather(shared_vars, nd_up))


def all_gather(shared_vars: Any) -> Any:
    """Give every replica all rows; see `synk.all_gather`, also for its use inside functions.

    Example:
      >>> import numpy as np, synk, synk.contrib.synkhronos as synkhronos
      >>> with synk.simulate(2):
      ...     w = synkhronos.shared(np.zeros(2, np.int32))
      ...     synkhronos.scatter(w, np.arange(3, dtype=np.int32))
      ...     synkhronos.all_gather(w)
      ...     synkhronos.get_lengths(w)
      [3, 3]
    """
    return _synk.all_gather(shared_vars)


def reduce(shared_vars: Variables, op: Any = "avg", in_place: bool = True) -> Any:
    """Combine the values of all replicas on the first; see `synk.reduce`.

    Example:
      >>> import numpy as np, synk, synk.contrib.synkhronos as synkhronos
      >>> with synk.simulate(2):
      ...     float(synkhronos.reduce(synkhronos.shared(np.float32(3)), in_place=False))
      3.0
    """
    return _like_there(shared_vars, _synk.reduce(shared_vars, op, in_place))


def all_reduce(shared_vars: Any, op: Any = "avg", weights: Sequence[float] | None = None) -> Any:
    """Combine the values of all replicas on every one; see `synk.all_reduce`, also for its use inside functions.

    Example:
      >>> import numpy as np, synk, synk.contrib.synkhronos as synkhronos
      >>> with synk.simulate(2):
      ...     w = synkhronos.shared(np.float32(1))
      ...     synkhronos.set_value(1, w, np.float32(4))
      ...     synkhronos.all_reduce(w)
      ...     float(w.value)
      2.5
    """
    return _synk.all_reduce(shared_vars, op, weights)


def get_value(rank: int, shared_vars: Variables, borrow: bool = False) -> Any:
    """Return the value of one replica; see `synk.typing.Shared.get_value`.

    Example:
      >>> import numpy as np, synk, synk.contrib.synkhronos as synkhronos
      >>> with synk.simulate(2):
      ...     synkhronos.get_value(1, synkhronos.shared(np.arange(2))).tolist()
      [0, 1]
    """
    found = variables_of(shared_vars, "contrib.synkhronos.get_value", is_read=True)
    return _like_there(shared_vars, [variable.get_value(rank, borrow) for variable in found])


@public_api
def set_value(rank: int, shared_vars: Variables, values: Any, batch: Any = None, borrow: bool = False) -> None:
    """Set the value on one replica; the others keep theirs. `batch` picks rows of the value, as in a call.

    Example:
      >>> import numpy as np, synk, synk.contrib.synkhronos as synkhronos
      >>> with synk.simulate(2):
      ...     w = synkhronos.shared(np.zeros(2, np.int32))
      ...     synkhronos.set_value(1, w, np.arange(5, dtype=np.int32), batch=[4, 0, 3])
      ...     synkhronos.get_lengths(w), w.get_value(1).tolist()
      ([2, 3], [4, 0, 3])
    """
    found = variables_of(shared_vars, "contrib.synkhronos.set_value")
    new = [values] if isinstance(shared_vars, Shared) else values
    if len(new) != len(found):
        raise ValueError(f"synk.contrib.synkhronos.set_value: {len(found)} variables need a list of as many values.")
    # An int n picks the first n rows, as in a call; NumPy would pick row n.
    picked = slice(batch) if isinstance(batch, int) else batch
    if batch is not None:
        new = jax.tree.map(lambda leaf: np.asarray(leaf)[picked], [*map(_rows, new)])
    with eager():
        commit_all(
            [
                (variable, state_with_rank(variable, rank, value))
                for variable, value in zip(found, map(_rows, new), strict=True)
            ]
        )


@public_api
def get_lengths(shared_vars: Variables) -> Any:
    """Return the number of rows of the value on each replica, a list of ints in rank order (for a list, one each).

    Raises:
      ValueError: the value has no rows.

    Example:
      >>> import numpy as np, synk, synk.contrib.synkhronos as synkhronos
      >>> with synk.simulate(2):
      ...     synkhronos.get_lengths(synkhronos.shared(np.zeros((3, 4))))
      [3, 3]
    """

    def lengths(variable: Shared) -> list[int]:
        storage, abstract = variable._spec.storage, variable._state.abstract
        found = [storage.rows_of(abstract, rank) for rank in range(group_of(variable).size)]
        if None in found:
            raise ValueError(f"get_lengths: the leaves of {variable.name} have no common axis 0, so it has no rows.")
        return [rows or 0 for rows in found]

    found = variables_of(shared_vars, "contrib.synkhronos.get_lengths", is_read=True)
    return _like_there(shared_vars, [*map(lengths, found)])


@public_api
def get_shapes(shared_vars: Variables) -> Any:
    """Return a list, in rank order, of the value's tree with the shape of each leaf (for a list, one each).

    Example:
      >>> import numpy as np, synk, synk.contrib.synkhronos as synkhronos
      >>> with synk.simulate(2):
      ...     synkhronos.get_shapes(synkhronos.shared(np.zeros((3, 4))))
      [(3, 4), (3, 4)]
    """

    def shapes(variable: Shared) -> list[Any]:
        rows = [variable._state.abstract.rows_of(rank) for rank in range(group_of(variable).size)]
        leaves = [[shape.shape for shape in logical_shapes(variable, count)] for count in rows]
        return [variable._spec.treedef.unflatten(each) for each in leaves]

    found = variables_of(shared_vars, "contrib.synkhronos.get_shapes", is_read=True)
    return _like_there(shared_vars, [*map(shapes, found)])


def _rows(values: Any) -> Any:
    """Return values with an array for each `Data` in them."""
    return jax.tree.map(lambda leaf: leaf[:] if isinstance(leaf, _Data) else leaf, values)


def _like_there(shared_vars: Variables, results: Any) -> Any:
    """Return the result of one variable as it is, those of several as a tuple."""
    if isinstance(shared_vars, Shared):
        return results[0] if isinstance(results, list) else results
    return results if results is None else tuple(results)
