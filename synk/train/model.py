"""Model: a user's loss, the variables that it trains, and the step that an optimizer of optax's takes."""

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import (
    Any,
    Literal,
    NamedTuple,
    Protocol,
)

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from .._base.errors import SynkError, shown, users_names
from .._base.pytree import PyTree
from .._function.decorator import Inputs, Options, function
from .._function.function import Function
from .._reductions.outputs import check_ops
from .._reductions.reduction import (
    REDUCTIONS,
    UNREDUCED_MEAN,
    WEIGHTS_APART,
    Weighted,
)
from .._reductions.wire import check_wire
from .._runtime.way import EngineName
from .._variables.value import conform
from .._variables.variable import (
    Shared,
    abstract_value,
    newest,
    shared,
    shared_from,
)

# A function from gradients, state, parameters and the loss to the new parameters, the new state and the updates.
Update = Callable[[PyTree, PyTree, PyTree, Any], tuple[PyTree, PyTree, PyTree]]

# Messages of optax if an optimizer gets the gradient of the mean loss and asks for more.
_ASKS_FOR_LOSS = r"missing .* keyword-only argument.*('grad'|'value_fn')|grad_fn must be provided"


def update_of(optax: Any, optimizer: Any) -> Update:
    # The signature tells: some optimizers are a GradientTransformationExtraArgs and take no `value` all the same.
    parameters = inspect.signature(optimizer.update).parameters.values()
    # Some optimizers scale the step by the loss (optax.contrib.reduce_on_plateau), and ask for it by this name.
    takes_value = any(p.name == "value" or p.kind == p.VAR_KEYWORD for p in parameters)

    def update(grads: PyTree, state: PyTree, params: PyTree, loss: Any) -> tuple[PyTree, PyTree, PyTree]:
        extra = {"value": loss} if takes_value else {}
        try:
            updates, new = optimizer.update(grads, state, params, **extra)
        except (TypeError, ValueError) as error:
            if not re.search(_ASKS_FOR_LOSS, str(error)):
                raise
            raise TypeError(
                "synk.train: the optimizer evaluates the loss itself (a line search, as in optax.lbfgs, or an opaque "
                "optax.contrib.sam), but a step gives it gradients alone. Make f = synk.function(loss, inputs=[...], "
                'reduce="mean"), and call the optimizer under a jax.jit of your own, with value_fn=lambda params: '
                "f(params, *rows), or grad_fn=jax.grad(lambda params, _: f(params, *rows))."
            ) from error
        jax.tree_util.tree_map_with_path(_check_shape, params, updates, is_leaf=lambda leaf: leaf is None)
        # If trees differ, assigning the variable raises.
        if jax.tree.structure(new) == jax.tree.structure(state):
            jax.tree_util.tree_map_with_path(_check_dtype, state, new)
        return optax.apply_updates(params, updates), new, updates

    return update


def _check_dtype(path: Any, before: Any, after: Any) -> None:
    was, has = getattr(before, "dtype", None), getattr(after, "dtype", None)
    if was is not None and has is not None and was != has:
        raise TypeError(
            f"synk.train: an update makes {has} of the optimizer's state{keystr(path)}, which was {was} before, and a "
            f"variable keeps its dtype. Give the optimizer a dtype of its own (mu_dtype= of optax.adam), or parameters "
            f"one dtype; to optax.inject_hyperparams name what is no hyperparameter: static_args=('b1', 'b2', ...)."
        )


def _check_shape(path: Any, param: Any, update: Any) -> None:
    """Raise ValueError if adding the update would broadcast the update or the parameter."""
    # jax.numpy would broadcast the sum to a parameter of another shape without a word.
    if param is not None and np.shape(update) != np.shape(param):
        raise ValueError(
            f"synk.train: the optimizer's update of params{keystr(path)} has shape {np.shape(update)}, but that has "
            f"shape {np.shape(param)}. If it takes each example's gradient, as optax.contrib.dpsgd does, return "
            f'jax.vmap(gradient, (None, 0))(params, rows) from a synk.function with reduce="concat", and call '
            f"optimizer.update in its then."
        )


# A leaf of a state is a number to average, a PRNG key, or a count, which may be behind on some replicas.
LeafKind = Literal["number", "key", "count"]

_ADVICE = "A loss is that of its rows: return the mean over them, or synk.Weighted(mean, weight)."


class GradientSum(Protocol):
    """A value of `wire=` that adds up gradients itself, such as `synk.contrib.PowerSGD`."""

    def variables(self, params: PyTree) -> tuple[dict[str, Shared], dict[str, Shared]]:
        """Make the variables that a step keeps for it: those that replicas share, and those of which each has its own.

        `params` are shapes and dtypes.
        """
        ...

    def sum(self, parts: PyTree, variables: Mapping[str, Shared]) -> PyTree:
        """Add up the replicas' weighted parts of a mean gradient, inside `then`, and assign to the variables."""
        ...


def is_sum(wire: Any) -> bool:
    return hasattr(wire, "variables") and hasattr(wire, "sum")


class StepOptions(NamedTuple):
    """Arguments of `synk.train.step` as its user gave them, and settings of the programs."""

    # Local steps have the arguments that they take too. Options of `synk.function` are handed on to it by their names.
    loss: Callable[..., Any]
    params: PyTree
    optimizer: Any
    state: PyTree = None
    inputs: Inputs = None
    aux: PyTree = None
    clip: float | None = None
    donate: bool = True
    nan: Literal["raise"] | None = None
    wire: str | GradientSum | None = None
    shard_optimizer: bool = False
    shard_params: bool = False
    blocks: int | None = None
    ema: float | None = None
    log: Callable[[PyTree, PyTree, PyTree], PyTree] | None = None
    axis_name: str = "replica"
    engine: EngineName = "shard_map"
    compiler_options: Mapping[str, Any] | None = None
    name: str | None = None
    # Whether a barrier may stand between combining and the update; and the number of slices of calls that name none.
    has_barrier: bool = True
    num_slices: int | Literal["auto"] | None = None


class TrainingModel:
    """A loss, the variables that it trains, and the step that updates them.

    Attributes:
      call: the call that made it, in messages.
      params, opt_state, state, ema: the shared variables; `state` and `ema` are None for a model without them.
      variables: all shared variables that a step updates, by name.
      options: the options of the step, checked.
    """

    def __init__(self, call: str, options: StepOptions) -> None:
        try:
            import optax  # type: ignore[import-untyped]  # it has no stubs
        except ImportError as error:
            raise ImportError("synk.train: optax is not installed. Get it by: pip install optax") from error
        options = checked_step(options, call)
        loss, params, optimizer, state = options.loss, options.params, options.optimizer, options.state
        self.call, self.name, self.loss = call, options.name or getattr(loss, "__name__", type(loss).__name__), loss
        self.has_aux = options.aux is not None
        self.aux_ops = check_ops(options.aux, self.name) if self.has_aux else ()
        self.params = params if isinstance(params, Shared) else shared(params, "params", sharded=options.shard_params)
        _check_params(self.params, call)
        is_sharded = self.params._spec.storage.is_sharded
        if options.shard_params and not is_sharded:
            raise ValueError(
                f"{call}: shard_params=True, but {self.params.name} is whole on every replica. Make it by "
                f"synk.shared(value, sharded=True), or give the value itself."
            )
        self._optax, self._update = optax, update_of(optax, optimizer)
        in_shards = options.shard_optimizer or is_sharded
        self.opt_state = shared_from(self.params, optimizer.init, "opt_state", in_shards)
        self.state = state if isinstance(state, Shared) or state is None else shared(state, "state")
        self.ema = None if options.ema is None else shared_from(self.params, lambda params: params, "ema", is_sharded)
        own = {"params": self.params, "opt_state": self.opt_state, "state": self.state, "ema": self.ema}
        self.variables = {name: variable for name, variable in own.items() if variable is not None}
        self._of_wire = self._variables_of_wire(options.wire, call)
        self.variables |= self._of_wire
        for variable in self.variables.values():
            # A variable that has a step too is none to take the place of another step's variable (`_check_names`).
            variable._has_step = True
        names, given = users_names(), [v for v in (params, state) if isinstance(v, Shared)]
        # Where the user has variables that were given, and the newest one of that time.
        self._named = [(names, name, v) for name, value in [*names.items()] for v in given if value is v]
        self._made = newest()
        # Variables take the place of the user's arrays, which need not stay in memory.
        self.options = options._replace(params=self.params, state=self.state)
        self.signature = self._signature_of_rows(call)

    def _variables_of_wire(self, wire: Any, call: str) -> dict[str, Shared]:
        self._sum: Callable[..., PyTree] | None = wire.sum if is_sum(wire) else None
        if self._sum is None:
            return {}
        shared_by_all, of_each = wire.variables(abstract_value(self.params))
        for variable in of_each.values():
            variable._may_differ = True
        if taken := sorted({*shared_by_all, *of_each} & {*self.variables}):
            raise ValueError(f"{call}: wire={wire!r} names a variable {taken[0]}, as the step does; name it otherwise.")
        return {**shared_by_all, **of_each}

    def _signature_of_rows(self, call: str) -> inspect.Signature:
        signature = inspect.signature(self.loss)
        parameters = list(signature.parameters.values())
        count = 1 if self.state is None else 2
        # Rows are the loss's other parameters, so that `inputs` may name them.
        first = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:count]
        if len(first) < count:
            what = "the parameters" if count == 1 else "the parameters and the state"
            raise TypeError(f"{call}: the loss {self.name}{signature} must take {what} first, and after them rows.")
        # Parameters that a functools.partial has bound are no rows.
        bound = self.loss.keywords if isinstance(self.loss, functools.partial) else ()
        return signature.replace(parameters=[p for p in parameters if p not in first and p.name not in bound])

    def function(
        self,
        options: StepOptions,
        fn: Callable[..., PyTree],
        outputs: dict[str, PyTree],
        then: Callable[..., PyTree],
        then_of_unreduced: Callable[..., PyTree] | None = None,
    ) -> Function:
        """Make a function of rows that looks like the loss, in messages and to `inputs`."""
        fn.__name__, fn.__signature__ = self.name, self.signature  # type: ignore[attr-defined]  # inspect reads it
        fn.__wrapped__ = self.loss  # type: ignore[attr-defined]  # calls look up names of the loss
        ops = {**outputs, "aux": self.aux_ops}
        narrow = options.wire if self._sum is None else None
        # The gradients alone travel narrowly.
        wire = None if narrow is None else {**dict.fromkeys(ops), "loss": (None, narrow)}
        given: Any = {name: value for name, value in options._asdict().items() if name in Options.__annotations__}
        made = function(fn, options.inputs, ops, **(given | {"then": then, "wire": wire}))
        names = {
            "['loss'][0]": ("the loss", False),
            "['loss'][1]": (f"the gradient of {self.params.name}", False),
            "['state']": ("state" if self.state is None else self.state.name, False),
            "['aux']": ("aux", True),
        }
        inside = f"Read {self.params.name}.value there."
        spec = replace(
            made._spec, made_by=self.call, advice=_ADVICE, output_names=names, inside=inside,
            has_barrier=options.has_barrier, log=options.log,
        )  # fmt: skip
        if self._sum is not None:
            unreduced = {**spec.ops, "loss": (REDUCTIONS["mean"], UNREDUCED_MEAN)}
            # The step adds up the gradients itself, in `then_of_unreduced`. `plain` is the step that does not, for what
            # needs the law.
            spec = replace(spec, ops=unreduced, then=then_of_unreduced, plain=spec)
        made._spec = spec
        return made

    def value_and_grad(
        self, params: PyTree, state: Shared | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[jax.Array, Any, PyTree, PyTree, PyTree]:
        """Return a part's mean loss, its weight, its gradient, the model's new state and the aux outputs."""
        self._check_names()
        # The loss gets a tree of its own, which it may change in place.
        before = () if state is None else (jax.tree.map(lambda leaf: leaf, state.value),)

        def value(params: PyTree) -> tuple[Any, Any]:
            value, *rest = self._unpack(self.loss(params, *before, *args, **kwargs))
            value, weight = (value.value, value.weight) if isinstance(value, Weighted) else (value, None)
            is_array = isinstance(value, jax.Array | np.ndarray | np.generic | int | float)
            form = f"{jnp.result_type(value).name}{list(jnp.shape(value))}" if is_array else type(value).__name__
            if not is_array or jnp.shape(value) or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
                raise TypeError(
                    f"{self.name}: it returned a loss of {form}; return the mean over the rows, one floating number, "
                    f"or synk.Weighted(mean, weight)."
                )
            if weight is not None and jnp.ndim(weight):
                raise ValueError(
                    f"{self.name}: the weight of its loss has shape {jnp.shape(weight)}; a part has one scalar weight."
                )
            return value, (weight, rest)

        (mean, (weight, rest)), grads = jax.value_and_grad(value, has_aux=True)(params)
        # State and aux outputs are `()` where there are none: a tree without leaves combines with nothing.
        new_state: PyTree = ()
        if state is not None:
            new_state = rest[0]
            conform(state._spec, new_state, state._spec.shapes, state.name, self.name)
        return mean, weight, grads, new_state, rest[-1] if self.has_aux else ()

    def _check_names(self) -> None:
        """Raise SynkError if the user has made a variable again since, as by a cell of a notebook that runs twice."""
        # Once a variable has been made, the next call traces the step anew, and comes here.
        for names, name, variable in self._named:
            now = names.get(name)
            if isinstance(now, Shared) and now is not variable and now._number > self._made and not now._has_step:
                raise SynkError(
                    f"{self.name}: it trains the variable {variable.name} of which it was made, but the name {name} is "
                    f"another variable now, made since. Make the step again, by {self.call}; or, to go on with the "
                    f"old one, give the new one another name."
                )

    def _unpack(self, out: Any) -> tuple[Any, ...]:
        """Return a tuple of all that the loss returns; raise TypeError if that is not as many values as announced."""
        names = ["the loss", *["the new state"] * (self.state is not None), *["aux outputs"] * self.has_aux]
        values = out if isinstance(out, tuple) else (out,)
        if sum(isinstance(value, Weighted) for value in values) > 1:
            raise TypeError(f"{self.name}: it returned several synk.Weighted, but a step has one loss. {WEIGHTS_APART}")
        if len(values) != len(names):
            returned = "one value" if len(values) == 1 else f"{len(values)} values"
            wanted = f"{' and '.join(names)}, as a tuple" if len(names) > 1 else "the loss alone"
            raise TypeError(
                f"{self.name}: it returned {returned}; return {wanted}. Announce a new state by state=, and aux "
                f'outputs by aux="mean" (or another op).'
            )
        return values

    def step(
        self, params: Shared, opt_state: Shared, grads: PyTree, loss: jax.Array, unreduced: bool
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Take a step inside `then`. Return the new parameters, the mean gradient and the updates."""
        if self._sum is not None and unreduced:
            # Unreduced gradients come in their accumulation dtype.
            like = abstract_value(self.params)
            grads = jax.tree.map(lambda g, s: g.astype(s.dtype), self._sum(grads, self._of_wire), like)
        new, opt_state.value, updates = self.apply_updates(params.value, opt_state.value, grads, loss)
        params.value = new
        return new, grads, updates

    def apply_updates(
        self, params: PyTree, opt_state: PyTree, grads: PyTree, loss: jax.Array
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Return parameters and optimizer state after a step, and the updates of the parameters."""
        if self.options.clip is not None:
            # Clipped here and not by a chain of optax: clipping has no state, so checkpoints are the same with it and
            # without.
            grads, _ = self._optax.clip_by_global_norm(self.options.clip).update(grads, self._optax.EmptyState())
        return self._update(grads, opt_state, params, loss)


def checked_step(options: StepOptions, call: str) -> StepOptions:
    """Check the options that need no variable. Return them with numbers as floats."""
    loss, optimizer, wire, blocks, log = options.loss, options.optimizer, options.wire, options.blocks, options.log
    if not callable(loss):
        raise TypeError(f"{call}: loss is {shown(loss)}; give a function of the parameters and rows.")
    if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
        raise TypeError(f"{call}: optimizer is {shown(optimizer)}; give one of optax's, e.g. optax.sgd(0.1).")
    if options.clip is not None:
        wanted = "give the largest global norm of a gradient, a number > 0"
        options = options._replace(clip=checked_number(options.clip, f"{call}: clip", wanted, lambda clip: clip > 0))
    if options.ema is not None:
        wanted = "give its decay, a number >= 0 and < 1, such as 0.999"
        options = options._replace(ema=checked_number(options.ema, f"{call}: ema", wanted, lambda ema: 0 <= ema < 1))
    if blocks is not None and wire is not None:
        raise ValueError(f"{call}: wire={wire!r} works on each replica's sums, so it does not go with blocks={blocks}.")
    in_shards = [name for name in ("shard_params", "shard_optimizer") if getattr(options, name)]
    if options.engine == "jit" and (in_shards or is_sum(wire)):
        option = f"{in_shards[0]}=True" if in_shards else f"wire={wire!r}"
        raise ValueError(f'{call}: {option} is for parts of a batch, but engine="jit" runs all its rows as one.')
    if log is not None and not callable(log):
        raise TypeError(f"{call}: log is {shown(log)}; give a function of gradients, updates and parameters.")
    if not is_sum(wire):
        check_wire(wire, call)
    return options


def checked_number(value: Any, what: str, wanted: str, is_valid: Callable[[float], bool]) -> float:
    """Return a user's number as a float. Raise TypeError if it is none, ValueError if it is not valid."""
    if isinstance(value, str | bool) or np.ndim(value):
        raise TypeError(f"{what} is {shown(value)}; {wanted}.")
    if not is_valid(float(value)):
        raise ValueError(f"{what} is {shown(value)}; {wanted}.")
    return float(value)


def _check_params(params: Shared, call: str) -> None:
    spec = params._spec
    for path, shape, key in zip(spec.paths, spec.shapes, spec.keys, strict=True):
        if key is not None or not jnp.issubdtype(shape.dtype, jnp.inexact):
            what = shape.dtype.name if key is None else "a PRNG key"
            raise TypeError(
                f"{call}: params{path} is {what}, which has no gradient. Keep it in state=, or convert it to a "
                f"floating dtype."
            )


def kinds_of(variable: Shared) -> PyTree:
    """Return the tree of the kinds of leaves; unsigned integers count as raw PRNG keys."""

    def kind(shape: jax.ShapeDtypeStruct, key: Any) -> LeafKind:
        # Raw PRNG keys are arrays of uint32: nothing else tells them from other unsigned integers.
        if key is not None or jnp.issubdtype(shape.dtype, jnp.unsignedinteger):
            return "key"
        return "number" if jnp.issubdtype(shape.dtype, jnp.inexact) else "count"

    return variable._spec.treedef.unflatten(map(kind, variable._spec.shapes, variable._spec.keys))
