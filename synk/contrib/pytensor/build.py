"""Build: `synk.contrib.pytensor.function`, Theano's arguments for a graph that runs on every device."""

import inspect
import keyword
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from pytensor.compile.rebuild import rebuild_collect_shared
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.basic import MergeOptimizer
from pytensor.tensor.type import TensorType

import synk

from ..._base.errors import public_api, shown
from ..._call.binding import OPTIONS
from .convert import Converted, as_typed
from .cuts import Cuts, Output, check_inputs, cut
from .held import shared
from .walk import inputs_of

Arrange = Callable[[list[Any]], Any]
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
) -> synk.typing.Function:
    """Make a synk function of a PyTensor graph: rows are scattered, outputs combine, the answer is the serial one.

    Write the graph for one device, as for `pytensor.function`. Each replica computes it for its own rows. Expressions
    in `combine`, and outputs that depend on rows, combine over all rows. Whatever depends on rows through combined
    values alone, such as updates, is computed from these on every replica. Shared variables stay PyTensor's own; from
    now on their values lie on every device (see `synk.contrib.pytensor.shared`).

    Args:
      inputs: symbolic arrays; each is scattered over the replicas by rows (axis 0).
      outputs: an expression, a list or a mapping of expressions. An output that depends on rows is a pair
        (expression, op), with an op of `synk.function`, or is named in `combine`; a scalar of floats may stand alone
        and is a "mean", as a cost is. An output that follows from combined values has no op.
      broadcast: those of the inputs that every replica gets whole, such as a learning rate.
      updates: pairs of shared variable and new expression, or a mapping. All see the old values.
      givens: pairs of variable and expression to put in its place, or a mapping.
      combine: pairs (expression, op) to combine over rows before updates or outputs use the expression. For "mean",
        `synk.Weighted(expression, weight)` weighs a replica's value by a scalar expression, not by its rows.
      no_default_updates: as for `pytensor.function`: leave out the updates that variables bring along; True for all
        variables, or a list of variables.
      name: what messages call the function.
      **options: options of `synk.function`: `engine`, `donate`, `nan`, `wire`, `blocks`, `compiler_options`.

    Returns:
      A `synk.typing.Function` of the inputs, by position or by name. Its results are JAX arrays in the graph's dtypes,
      with 32 bits where the graph says 64 and JAX has these switched off.

    Raises:
      ValueError: an output needs an op; an update, or an output that follows from `combine`, depends on rows by
        another way; an input is unused, missing, or has no rows; the graph draws random numbers.
      TypeError: an argument is of a wrong kind.

    Example:
      >>> import numpy as np, pytensor, pytensor.tensor as pt
      >>> import synk, synk.contrib.pytensor
      >>> x, y, w = pt.fvector("x"), pt.fvector("y"), pytensor.shared(np.float32(0), "w")
      >>> cost = ((w * x - y) ** 2).mean()
      >>> gradient = pt.grad(cost, w)
      >>> updates = [(w, w - np.float32(0.1) * gradient)]
      >>> step = synk.contrib.pytensor.function([x, y], cost, updates=updates, combine=[(gradient, "mean")])
      >>> rows = np.arange(7, dtype="float32")
      >>> print(f"{step(rows, 3 * rows):.1f} {w.get_value():.1f}")
      117.0 7.8
    """
    name = name or "graph"
    _check_arguments(name, inputs, broadcast)
    listed, arrange = _listed(name, outputs)
    named = [_output(name, *pair) for pair in _pairs(name, "combine", combine)]
    pairs = _pairs(name, "updates", updates), _pairs(name, "givens", givens)
    renewed, new = _rebuilt(name, inputs, [*named, *listed], *pairs, no_default_updates)
    rows = {variable for variable in inputs if variable not in broadcast}
    cuts = cut(name, rows, renewed[: len(named)], renewed[len(named) :], new)
    halves = _Halves(name, inputs, broadcast, cuts, arrange)
    modes = ["scatter" if variable in rows else "broadcast" for variable in inputs]
    made = synk.function(halves.first(), modes, halves.ops(), then=halves.then(), name=name, **options)
    # PyTensor's earlier functions lose the variables here, so only after nothing was refused.
    halves.take_variables()
    return made


class _Halves:
    """The two halves of a graph as functions for `synk.function`: of a replica's rows, and of combined values."""

    def __init__(
        self, name: str, inputs: Sequence[Variable], broadcast: Sequence[Variable], cuts: Cuts, arrange: Arrange
    ) -> None:
        self._name = name
        self._inputs = inputs
        self._parameters = _parameters(inputs)
        self._cuts = cuts
        self._arrange = arrange
        self._following = [place for place in cuts.outputs if isinstance(place, Variable)]
        self._broadcast = [variable for variable in inputs if variable in broadcast]
        weights = [part.weight for part in cuts.parts if part.weight is not None]
        self._of_rows = Converted(inputs, [*[part.expression for part in cuts.parts], *weights])
        new = [new for _, new in cuts.updates]
        self._of_combined = Converted([*cuts.combined, *self._broadcast], [*self._following, *new])

    def first(self) -> Callable[..., Any]:
        """Make the function of a replica's rows, which computes the parts."""

        def first(*args: Any) -> Any:
            for variable, value in zip(self._inputs, args, strict=True):
                _check_value(self._name, variable, value)
            # One conversion computes parts and weights, which may have equations in common.
            values = self._of_rows(args)
            weights = iter(values[len(self._cuts.parts) :])
            parts = zip(self._cuts.parts, values, strict=False)
            return self._returned([v if p.weight is None else synk.Weighted(v, next(weights)) for p, v in parts])

        return _with_parameters(first, self._name, self._parameters)

    def ops(self) -> Any:
        return self._returned([part.op for part in self._cuts.parts])

    def then(self) -> Callable[..., Any] | None:
        """Make the function of combined values, which computes updates and outputs; None if nothing follows."""
        if not self._has_then:
            return None

        def then(*args: Any) -> Any:
            values = self._of_combined(args)
            for (variable, _), value in zip(self._cuts.updates, values[len(self._following) :], strict=True):
                # All new values are computed before the first is assigned: updates see the old values.
                shared(variable).value = as_typed(value, variable)
            following = iter(values)
            return self._arrange([args[p] if isinstance(p, int) else next(following) for p in self._cuts.outputs])

        names = dict(zip(self._inputs, self._parameters, strict=True))
        parameters = [f"combined_{i}" for i in range(len(self._cuts.parts))]
        return _with_parameters(then, f"{self._name}.then", [*parameters, *[names[v] for v in self._broadcast]])

    def take_variables(self) -> None:
        updated = [variable for variable, _ in self._cuts.updates]
        for variable in (*self._of_rows.variables, *self._of_combined.variables, *updated):
            shared(variable)

    @property
    def _has_then(self) -> bool:
        return bool(self._following or self._cuts.updates)

    def _returned(self, values: list[Any]) -> Any:
        """Arrange one value a part as `first` returns them: like the user's outputs, if nothing follows."""
        if self._has_then:
            return tuple(values)
        return self._arrange([values[place] for place in self._cuts.outputs if isinstance(place, int)])


def _check_arguments(name: str, inputs: Sequence[Variable], broadcast: Sequence[Variable]) -> None:
    for argument, variables in (("inputs", inputs), ("broadcast", broadcast)):
        if not isinstance(variables, list | tuple):
            raise TypeError(f"{name}: {argument} is {shown(variables)}; give a list of symbolic variables.")
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


def _listed(name: str, outputs: Any) -> tuple[list[Output], Arrange]:
    """List the outputs, and return the function that makes the user's list or mapping of their values."""
    if outputs is None:
        return [], lambda values: None
    if isinstance(outputs, Mapping):
        keys = list(outputs)
        listed, _ = _listed(name, list(outputs.values()))
        return listed, lambda values: dict(zip(keys, values, strict=True))
    if isinstance(outputs, list) or (isinstance(outputs, tuple) and not _is_pair(outputs)):
        return [_output(name, *output) if _is_pair(output) else _output(name, output) for output in outputs], list
    listed, _ = _listed(name, [outputs])
    return listed, lambda values: values[0]


def _is_pair(output: Any) -> bool:
    return (
        isinstance(output, tuple) and len(output) == 2 and not isinstance(output[1], Variable | tuple | synk.Weighted)
    )


def _output(name: str, expression: Any, *op: Any) -> Output:
    """Check an expression, or `Weighted`, and its op; no op if the user named none."""
    weight = None
    if isinstance(expression, synk.Weighted):
        expression, weight = expression.value, expression.weight
    for variable in (expression,) if weight is None else (expression, weight):
        if not isinstance(variable, Variable) or not isinstance(variable.type, TensorType):
            raise TypeError(
                f"{name}: {shown(variable)} is no expression of an array, so it cannot be combined or returned."
            )
    if weight is not None and (op not in (("mean",), ("avg",)) or weight.type.ndim):
        raise ValueError(f'{name}: the weight of {expression} is for op "mean", and a scalar.')
    if op == (None,):
        raise ValueError(f'{name}: the op of {expression} is None; name one, e.g. "mean" or "sum".')
    return Output(expression, *op, weight=weight)


def _pairs(name: str, argument: str, pairs: Pairs) -> list[tuple[Any, Any]]:
    listed = list(pairs.items() if isinstance(pairs, Mapping) else pairs or ())
    for pair in listed:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise TypeError(f"{name}: {argument} holds {shown(pair)}; give pairs.")
    return [(first, second) for first, second in listed]


def _rebuilt(
    name: str,
    inputs: Sequence[Variable],
    outputs: Sequence[Output],
    updates: list[tuple[Any, Any]],
    givens: list[tuple[Any, Any]],
    no_default_updates: Any,
) -> tuple[list[Output], list[tuple[SharedVariable, Variable]]]:
    """Clone outputs and updates with `givens` put in, and the updates that variables bring along added."""
    for variable, _ in givens:
        if variable in inputs:
            raise ValueError(f"{name}: givens replaces {variable}, which is one of its inputs.")
    weights = [output.weight for output in outputs if output.weight is not None]
    _, clones, (_, new, _, _) = rebuild_collect_shared(
        [*[output.expression for output in outputs], *weights],
        [*inputs],
        replace=givens,
        updates=updates,
        no_default_updates=no_default_updates,
    )
    expressions = [*clones, *new.values()]
    check_inputs(name, inputs, expressions)
    # Equal expressions become one, so that a gradient which is taken twice is cut in both places.
    variables = [v for v in inputs_of(expressions) if isinstance(v, SharedVariable)]
    graph = FunctionGraph([*inputs, *variables], expressions, clone=False)
    MergeOptimizer().rewrite(graph)
    merged = iter(graph.outputs)
    outputs = [output._replace(expression=next(merged)) for output in outputs]
    outputs = [output if output.weight is None else output._replace(weight=next(merged)) for output in outputs]
    return outputs, [(variable, next(merged)) for variable in new]


def _parameters(inputs: Sequence[Variable]) -> list[str]:
    """Name the parameters of a Python function after the variables, or by number where that is no name."""
    names: list[str] = []
    for i, variable in enumerate(inputs):
        name = variable.name or ""
        # Names of variables may be anything, given twice, or an option of a call.
        is_name = name.isidentifier() and not keyword.iskeyword(name) and name not in (*names, *OPTIONS)
        names.append(name if is_name and not name.startswith(("combined_", "input_")) else f"input_{i}")
    return names


def _check_value(name: str, variable: Variable, value: jax.Array) -> None:
    """Refuse what PyTensor refuses: another number of axes, lengths against the type, and downcasts."""
    shape, dtype = variable.type.shape, jax.dtypes.canonicalize_dtype(variable.type.dtype)
    has_shape = len(shape) == value.ndim and all(n is None or n == m for n, m in zip(shape, value.shape, strict=True))
    if not has_shape:
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise ValueError(f"{name}: its input {variable} has shape {value.shape} on a replica; expected ({wanted}).")
    # Weak types are Python numbers, which PyTensor casts within their kind.
    if not np.can_cast(value.dtype, dtype, "same_kind" if value.weak_type else "safe"):
        raise TypeError(f"{name}: its input {variable} is of {value.dtype}; the graph says {dtype}. Cast it.")


def _with_parameters(fn: Callable[..., Any], name: str, parameters: Sequence[str]) -> Callable[..., Any]:
    """Give a function of positional arguments a name and a signature of parameters, as `synk.function` reads them."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(parameter, kind) for parameter in parameters])

    def with_parameters(*args: Any, **kwargs: Any) -> Any:
        return fn(*signature.bind(*args, **kwargs).args)

    # A signature of its own, since synk.function finds inputs by their names.
    with_parameters.__name__ = name
    with_parameters.__signature__ = signature
    return with_parameters
