"""Build: `synk.pytensor.function`, Theano's arguments for a graph that runs on every device."""

import inspect
import keyword
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from pytensor.compile.rebuild import rebuild_collect_shared
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Constant, Variable
from pytensor.tensor.type import TensorType

import synk

from .._base.errors import public_api, shown
from .._call.binding import OPTIONS
from .convert import Converted, as_typed
from .cuts import Cuts, Graph, Output, check_inputs, cut, merged
from .held import shared
from .walk import inputs_of

Build = Callable[[list[Any]], Any]
Pairs = Mapping[Variable, Any] | Iterable[tuple[Variable, Any]] | None


@public_api
def function(
    inputs: Sequence[Variable],
    outputs: Any = None,
    *,
    broadcast: Sequence[Variable] = (),
    updates: Pairs = None,
    givens: Pairs = None,
    combine: Sequence[tuple[Any, Any]] = (),
    no_default_updates: bool | list[SharedVariable] = False,
    name: str | None = None,
    **options: Any,
) -> synk.Function:
    """Make a graph of PyTensor a synk function: rows scattered, outputs combined, the serial answer back.

    The graph is that of one device, as `pytensor.function` takes it. Each replica computes it of its own rows; what
    `combine` names, and the outputs, combine over all rows; what depends on rows through these alone (updates, other
    outputs) follows on every replica. Shared variables are PyTensor's own, and lie on every device from now on; see
    `synk.pytensor.shared`.

    Args:
      inputs: symbolic variables, arrays; each is scattered over the replicas by rows (axis 0).
      outputs: an expression, a list or a mapping of them; each alone, or as (expression, op), an op of
        `synk.function`. Left out, it is "mean" where the graph shows a mean over rows, such as a cost, and "concat"
        where it shows an entry a row; what follows from combined values has none.
      broadcast: those of the inputs that come to every replica whole, such as a learning rate.
      updates: pairs of shared variable and new expression, or a mapping. All see the old values.
      givens: pairs of variable and expression to put in its place, or a mapping.
      combine: pairs (expression, op): what combines over rows before updates or outputs go on with it. Of "mean",
        `synk.Weighted(expression, weight)` is weighted by a scalar expression, else by rows.
      no_default_updates: as of `pytensor.function`: whether (or which) variables' own updates are left out.
      name: what messages call it.
      **options: those of `synk.function`: `engine`, `donate`, `nan`, `wire`, `blocks`, `compiler_options`.

    Returns:
      A `synk.Function` of the inputs, by position or by name. Its results are JAX arrays; where the graph says 64 bits
      and JAX has them switched off, of 32.

    Raises:
      ValueError: an update, or an output that follows from `combine`, depends on rows by another way; an input is not
        used, missing, or has no rows; the graph draws random numbers.
      TypeError: an argument is of a wrong kind.

    Example:
      >>> import numpy as np, pytensor, pytensor.tensor as pt
      >>> import synk, synk.pytensor
      >>> x, y, w = pt.fvector("x"), pt.fvector("y"), pytensor.shared(np.float32(0), "w")
      >>> cost = ((w * x - y) ** 2).mean()
      >>> gradient = pt.grad(cost, w)
      >>> updates = [(w, w - np.float32(0.1) * gradient)]
      >>> step = synk.pytensor.function([x, y], cost, updates=updates, combine=[(gradient, "mean")])
      >>> rows = np.arange(7, dtype="float32")
      >>> print(f"{step(rows, 3 * rows):.1f} {w.get_value():.1f}")
      117.0 7.8
    """
    called = name or "graph"
    _check_inputs(called, inputs, broadcast)
    whole = [variable for variable in inputs if variable in broadcast]
    listed, build = _listed(called, outputs)
    named = [_output(called, *_two(called, "combine", pair)) for pair in combine]
    graph = Graph(called, [v for v in inputs if v not in whole], whole, named, listed, [])
    changes = _pairs(called, "updates", updates)
    graph = _rebuilt(graph, changes, _pairs(called, "givens", givens), no_default_updates)
    check_inputs(graph)
    halves = _Halves(called, inputs, whole, cut(merged(graph)), build)
    modes = ["broadcast" if v in whole else "scatter" for v in inputs]
    made = synk.function(halves.on_part(), modes, halves.ops(), then=halves.then(), name=called, **options)
    halves.take_variables()
    return made


class _Halves:
    """The two halves of a graph as functions for `synk.function`: of a replica's rows, and of what is combined."""

    def __init__(
        self, name: str, inputs: Sequence[Variable], broadcast: Sequence[Variable], cuts: Cuts, build: Build
    ) -> None:
        self.name = name
        self.names = _parameters(inputs)
        self._inputs = inputs
        self._broadcast = broadcast
        self._cuts = cuts
        self._build = build  # the user's tree of outputs
        weights = [part.weight for part in cuts.parts if part.weight is not None]
        self._of_rows = _Reading(inputs, [*[part.expression for part in cuts.parts], *weights])
        self._following = [place for place in cuts.outputs if isinstance(place, Variable)]
        new = [new for _, new in cuts.updates]
        self._after = _Reading([*cuts.combined, *broadcast], [*self._following, *new])

    def take_variables(self) -> None:
        """Bring the values of all variables to the devices: PyTensor's earlier functions cannot have them any more."""
        for variable in (*self._of_rows.read, *self._after.read, *[variable for variable, _ in self._cuts.updates]):
            shared(variable)

    @property
    def _has_after(self) -> bool:
        return bool(self._following or self._cuts.updates)

    def ops(self) -> Any:
        """How what `on_part` returns combines."""
        return self._of_parts([part.op for part in self._cuts.parts])

    def on_part(self) -> Callable[..., Any]:
        """What is to combine, of a replica's rows."""

        def on_part(*args: Any) -> Any:
            for variable, value in zip(self._inputs, args, strict=True):
                _check_value(self.name, variable, value)
            values = self._of_rows(args)
            weights = iter(values[len(self._cuts.parts) :])
            both = zip(self._cuts.parts, values, strict=False)
            return self._of_parts([v if p.weight is None else synk.Weighted(v, next(weights)) for p, v in both])

        return _with_parameters(on_part, self.name, self.names)

    def _of_parts(self, values: list[Any]) -> Any:
        """What the first half returns: the outputs themselves where nothing follows."""
        if self._has_after:
            return tuple(values)
        return self._build([values[place] for place in self._cuts.outputs if isinstance(place, int)])

    def then(self) -> Callable[..., Any] | None:
        """What follows the combined values: outputs and updates, all of them of old values."""
        if not self._has_after:
            return None
        count = len(self._cuts.parts)

        def then(*args: Any) -> Any:
            found = self._after(args)
            for (variable, _), value in zip(self._cuts.updates, found[len(self._following) :], strict=True):
                shared(variable).value = as_typed(value, variable)
            following = iter(found)
            return self._build([args[p] if isinstance(p, int) else next(following) for p in self._cuts.outputs])

        after = [name for name, v in zip(self.names, self._inputs, strict=True) if v in self._broadcast]
        return _with_parameters(then, f"{self.name}.then", [*(f"combined_{i}" for i in range(count)), *after])


class _Reading:
    """Expressions as a function of their inputs; it reads the shared variables by itself."""

    def __init__(self, inputs: Sequence[Variable], expressions: Sequence[Variable]) -> None:
        self.read = [v for v in inputs_of(expressions) if isinstance(v, SharedVariable)]
        self._run = Converted([*inputs, *self.read], expressions)

    def __call__(self, values: Sequence[Any]) -> list[jax.Array]:
        return self._run(*values, *[shared(variable).value for variable in self.read])


def _check_inputs(name: str, inputs: Sequence[Variable], broadcast: Sequence[Variable]) -> None:
    for argument, given in (("inputs", inputs), ("broadcast", broadcast)):
        if not isinstance(given, list | tuple):
            raise TypeError(f"{name}: {argument} is {shown(given)}; give a list of symbolic variables.")
    for variable in inputs:
        if not isinstance(variable, Variable) or isinstance(variable, SharedVariable | Constant) or variable.owner:
            raise TypeError(f"{name}: inputs holds {shown(variable)}; give symbolic variables, e.g. pt.matrix('x').")
        if not isinstance(variable.type, TensorType):
            raise TypeError(f"{name}: its input {variable} is a {variable.type}; synk deals out arrays.")
        if inputs.count(variable) > 1:
            raise ValueError(f"{name}: its inputs name {variable} twice.")
        if variable.type.ndim == 0 and variable not in broadcast:
            raise ValueError(f"{name}: its input {variable} is a scalar, which has no rows: broadcast=[{variable}].")
    for variable in broadcast:
        if variable not in inputs:
            raise ValueError(f"{name}: broadcast names {variable}, which is none of its inputs.")


def _listed(name: str, outputs: Any) -> tuple[list[Output], Build]:
    """The outputs in a list, and what makes the user's tree of them."""
    if outputs is None:
        return [], lambda values: None
    if isinstance(outputs, Mapping):
        keys = list(outputs)
        listed, _ = _listed(name, list(outputs.values()))
        return listed, lambda values: dict(zip(keys, values, strict=True))
    if isinstance(outputs, list) or (isinstance(outputs, tuple) and not _is_pair(outputs)):
        return [_output(name, *pair) if _is_pair(pair) else _output(name, pair) for pair in outputs], list
    one = _output(name, *outputs) if _is_pair(outputs) else _output(name, outputs)
    return [one], lambda values: values[0]


def _is_pair(given: Any) -> bool:
    """Is it (expression, op)?"""
    return isinstance(given, tuple) and len(given) == 2 and not isinstance(given[1], Variable | tuple | synk.Weighted)


def _output(name: str, given: Any, *op: Any) -> Output:
    weight = None
    expression = given
    if isinstance(given, synk.Weighted):
        expression, weight = given.value, given.weight
    for variable in (expression,) if weight is None else (expression, weight):
        if not isinstance(variable, Variable) or not isinstance(variable.type, TensorType):
            raise TypeError(
                f"{name}: {shown(variable)} is no expression of an array, so it cannot be combined or returned."
            )
    if weight is not None and (op not in (("mean",), ("avg",)) or weight.type.ndim):
        raise ValueError(f'{name}: the weight of {expression} is for op "mean", and a scalar.')
    return Output(expression, op[0] if op else None, weight, bool(op))


def _two(name: str, argument: str, pair: Any) -> tuple[Any, Any]:
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        raise TypeError(f"{name}: {argument} holds {shown(pair)}; give pairs.")
    return pair[0], pair[1]


def _pairs(name: str, argument: str, given: Pairs) -> list[tuple[Variable, Any]]:
    pairs = given.items() if isinstance(given, Mapping) else given or ()
    return [_two(name, argument, pair) for pair in pairs]


def _rebuilt(
    graph: Graph, updates: list[tuple[Variable, Any]], givens: list[tuple[Variable, Any]], no_default_updates: Any
) -> Graph:
    """A clone with `givens` put in and the updates as PyTensor has them, those of the variables themselves included."""
    inputs = [*graph.rows, *graph.broadcast]
    for variable, _ in givens:
        if variable in inputs:
            raise ValueError(f"{graph.name}: givens replaces {variable}, which is one of its inputs.")
    _, expressions, (_, new, _, _) = rebuild_collect_shared(
        graph.expressions,
        inputs,
        replace=givens,
        updates=updates,
        no_default_updates=no_default_updates,
    )
    return graph.of(expressions)._replace(updates=list(new.items()))


def _parameters(inputs: Sequence[Variable]) -> list[str]:
    """Names for the parameters of a Python function: of the variables, where those are names."""
    names: list[str] = []
    for i, variable in enumerate(inputs):
        name = variable.name or ""
        is_name = name.isidentifier() and not keyword.iskeyword(name) and name not in (*names, *OPTIONS)
        names.append(name if is_name and not name.startswith(("combined_", "input_")) else f"input_{i}")
    return names


def _check_value(name: str, variable: Variable, value: jax.Array) -> None:
    """Refuse what PyTensor refuses: other numbers of axes, other lengths than the type says, and downcasts."""
    shape, dtype = variable.type.shape, jax.dtypes.canonicalize_dtype(variable.type.dtype)
    has_shape = len(shape) == value.ndim and all(n is None or n == m for n, m in zip(shape, value.shape, strict=True))
    if not has_shape:
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise ValueError(f"{name}: its input {variable} has shape {value.shape} on a replica; expected ({wanted}).")
    if not np.can_cast(value.dtype, dtype, "same_kind" if value.weak_type else "safe"):
        raise TypeError(f"{name}: its input {variable} is of {value.dtype}; the graph says {dtype}. Cast it.")


def _with_parameters(fn: Callable[..., Any], name: str, parameters: Sequence[str]) -> Callable[..., Any]:
    """The function of arguments by position as one of these parameters."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(parameter, kind) for parameter in parameters])

    def named(*args: Any, **kwargs: Any) -> Any:
        return fn(*signature.bind(*args, **kwargs).args)

    named.__name__ = name
    named.__signature__ = signature
    return named
