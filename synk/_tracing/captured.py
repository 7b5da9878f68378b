"""Captured: arrays that a function closes over. They enter its programs from the host, wherever they lie."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend import linear_util
from jax.extend.core import Jaxpr, Literal
from jax.sharding import Mesh

from .._base.errors import SynkError
from .._base.jax_context import transfers_on_purpose
from .._base.pytree import key_of, narrow
from .._runtime.constants import LARGE, Constant, constant_of
from .equations import RULES, equations, fold, is_over_axis
from .moving import FUNCTIONS, held_whole, moved_axes

# Equations that only change where an array lies.
_PLACES = frozenset(("sharding_constraint", "reshard", "mesh_cast"))
_NO_MESH = jax.sharding.AbstractMesh((), ())


def without_places(
    closed: Any, name: str, merges_equal: bool = False, mesh: Mesh | None = None
) -> tuple[Any, list[Constant]]:
    """Return a jaxpr whose constants lie on the host and whose types name no mesh, and its large constants.

    Args:
      closed: a closed jaxpr, traced outside any mesh.
      merges_equal: whether to leave out equations that repeat an earlier one: the same bits on any number of devices.
      mesh: the devices among which XLA divides work. Operands and results of equations that move numbers stay whole.
    """
    # JAX writes the mesh of a captured array into the type of all values computed from it. Inside jax.shard_map the
    # mesh is another one, and JAX 0.8 to 0.12 refuse to mix the two ("Mesh for all inputs should be equal"):
    # https://github.com/jax-ml/jax/issues/29162. A trace may be under way, in which reading a constant would give a
    # tracer.
    with jax.ensure_compile_time_eval():
        rewriter = _Rewriter(name, merges_equal, mesh)
        return rewriter.top(closed), rewriter.large


def _holds_constants(closed: Any) -> bool:
    # Only jits are looked into: the equations of a loop or a branch cannot take the place of its call.
    inner = [equation.params["jaxpr"] for equation in closed.eqns if equation.primitive.name == "jit"]
    return bool(closed.consts) or any(map(_holds_constants, inner))


def _variables(old: Sequence[Any]) -> list[Any]:
    """Make variables in the place of old ones."""
    return [type(variable)(_without_mesh(variable.aval)) for variable in old]


class _Rewriter:
    """A rewrite of a jaxpr and of inner jaxprs. A jaxpr that occurs twice stays one object, which JAX lowers once."""

    def __init__(self, name: str, merges_equal: bool, mesh: Mesh | None) -> None:
        self.name, self.merges_equal, self.mesh = name, merges_equal, mesh
        self.large: list[Constant] = []
        # By id: the old jaxpr or constant, kept alive so that its id stays its own, and the new one.
        self._done: dict[int, tuple[Any, Any]] = {}

    def _once(self, old: Any, make: Callable[[Any], Any]) -> Any:
        if id(old) not in self._done:
            self._done[id(old)] = old, make(old)
        return self._done[id(old)][1]

    def top(self, closed: Any) -> Any:
        """Rewrite a closed jaxpr, in which the equations of jits that hold constants take the place of their calls."""
        consts = list(closed.consts)
        return closed.replace(jaxpr=self._jaxpr(closed.jaxpr, consts), consts=self._constants(consts))

    def closed(self, closed: Any) -> Any:
        return closed.replace(jaxpr=self._once(closed.jaxpr, self._jaxpr), consts=self._constants(closed.consts))

    def _jaxpr(self, jaxpr: Any, consts: list[Any] | None = None) -> Any:
        """Rewrite a jaxpr; with its constants, to which it adds theirs, also take in jits that hold constants."""
        seen: dict[Any, list[Any]] = {}
        constvars, invars, eqns = _variables(jaxpr.constvars), _variables(jaxpr.invars), list[Any]()

        def take_in(equation: Any, ins: list[Any]) -> list[Any]:
            name = equation.primitive.name
            if consts is not None and name == "jit" and _holds_constants(inner := equation.params["jaxpr"]):
                inside = _variables(inner.jaxpr.constvars)
                constvars.extend(inside)
                consts.extend(inner.consts)
                return fold(inner.jaxpr, inside, ins, take_in)
            if name in _PLACES:
                return ins
            axes = [] if self.mesh is None else moved_axes(equation)
            rewritten = self._equation(equation, self._whole(equation, ins, axes, eqns))
            outs = self._earlier(rewritten, seen) if self.merges_equal else rewritten.outvars
            eqns.extend([rewritten] if outs is rewritten.outvars else [])
            return self._whole(equation, outs, axes[len(ins) :], eqns)

        outs = fold(jaxpr, constvars, invars, take_in)
        return jaxpr.replace(constvars=constvars, invars=invars, eqns=eqns, outvars=outs)

    def _whole(self, equation: Any, atoms: list[Any], axes: Sequence[Any], eqns: list[Any]) -> list[Any]:
        """Keep operands or results of an equation whole along axes, by equations that it adds; return them."""
        kept = list(atoms)
        for i, (atom, along) in enumerate(zip(atoms, axes, strict=False)):
            if (constraint := held_whole(equation, atom, along, self.mesh)) is not None:
                (kept[i],) = outs = _variables([atom])
                eqns.append(constraint.replace(outvars=outs))
        return kept

    def _equation(self, equation: Any, ins: list[Any]) -> Any:
        # Inside a kernel or a shard_map of the user's XLA divides nothing, so nothing there needs to be kept whole.
        before, self.mesh = self.mesh, self.mesh if equation.primitive.name in FUNCTIONS else None
        params = {key: self._param(key, value) for key, value in equation.params.items()}
        self.mesh = before
        ctx = equation.ctx if equation.ctx.cur_abstract_mesh.empty else self._once(equation.ctx, _outside_meshes)
        return equation.replace(invars=ins, outvars=_variables(equation.outvars), params=params, ctx=ctx)

    def _earlier(self, equation: Any, seen: dict[Any, list[Any]]) -> list[Any]:
        """Return the results of the first of the equations that are equal to this one."""
        # XLA drops repeated equations too, but sooner for several devices than for one, and some of its rules depend on
        # how often a value is used: A / broadcast(B) becomes A * broadcast(1 / B) only if B is used once. Merged here,
        # all numbers of devices begin with the same equations. 0.0 equals -0.0, so literals are compared by their text.
        names = tuple((repr(v.val), str(v.aval)) if isinstance(v, Literal) else v for v in equation.invars)
        key = (equation.primitive, names, tuple(sorted(equation.params.items(), key=lambda item: item[0])))
        try:
            first = seen.setdefault(key, equation.outvars)
        except TypeError:
            # Its parameters have no hash.
            return equation.outvars
        # A dropped variable cannot be read; an effect, such as a print, must happen as often as it was asked for.
        has_dropped = any(type(variable).__name__ == "DropVar" for variable in first)
        return equation.outvars if equation.effects or has_dropped else first

    def _param(self, key: str, value: Any) -> Any:
        if isinstance(value, tuple | list | dict):
            return jax.tree.map(partial(self._param, key), value)
        # JAX calls these rules when it differentiates, perhaps after the trace, so each result is rewritten at that
        # time.
        if key in RULES:
            return linear_util.wrap_init(self._rule(value), debug_info=value.debug_info)
        if key == "bwd" and hasattr(value, "call_wrapped"):
            return linear_util.wrap_init(partial(self._backward, value), debug_info=value.debug_info)
        if isinstance(value, jax.sharding.Sharding):
            # The function runs on one device, which holds all of its arguments.
            return _unspecified() if key.endswith("_shardings") else None
        if hasattr(value, "jaxpr"):
            return self._once(value, self.closed)
        return self._once(value, self._jaxpr) if hasattr(value, "eqns") else value

    def _rule(self, rule: Any) -> Callable[..., Any]:
        def traced(*zeros: bool) -> Any:
            jaxpr, consts, *rest = rule.call_wrapped(*zeros)
            with jax.ensure_compile_time_eval():
                return self._once(jaxpr, self._jaxpr), self._constants(consts), *rest

        return traced

    def _backward(self, rule: Any, *args: Any) -> Any:
        """Run the backward rule of a `jax.custom_vjp`, which JAX does not trace before."""
        # Symbolic zeros are no arguments of a trace.
        if not all(isinstance(arg, jax.Array) for arg in args):
            return rule.call_wrapped(*args)
        # Traced without a mesh, since captured arrays in the rule have types with their own mesh; the rewritten jaxpr
        # is then run under the trace that asks.
        results: list[Any] = []

        def arrays(*args: jax.Array) -> list[jax.Array]:
            # In the place of None JAX returns zeros of its own.
            results[:] = jax.tree.flatten(rule.call_wrapped(*args))
            return [leaf for leaf in results[0] if isinstance(leaf, jax.Array)]

        with jax.sharding.use_abstract_mesh(_NO_MESH):
            closed = jax.make_jaxpr(arrays)(*(jax.ShapeDtypeStruct(arg.shape, arg.dtype) for arg in args))
        with jax.ensure_compile_time_eval():
            closed = self.closed(closed)
        values = iter(jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *args))
        leaves, treedef = results
        return treedef.unflatten([next(values) if isinstance(leaf, jax.Array) else leaf for leaf in leaves])

    def _constants(self, consts: Sequence[Any]) -> list[Any]:
        return [self._once(const, self._constant) for const in consts]

    def _constant(self, const: Any) -> Any:
        if isinstance(const, jax.core.Tracer):
            raise SynkError(
                f"{self.name}: it uses values of a transformation around the call (jit, grad, vmap, ...) that are not "
                f'among its arguments. Pass them as "broadcast" arguments.'
            )
        # https://docs.jax.dev/en/latest/array_refs.html
        if isinstance(const, jax.Ref):
            raise TypeError(
                f"{self.name}: it uses a jax.Ref from outside, which lies on one device and which every replica would "
                f"write. Keep what changes in a synk.shared variable, or return it; a jax.Ref made inside works."
            )
        if not isinstance(const, jax.Array):
            # A copy, since the user may change the array in place.
            return self._kept(np.asarray(const), is_copied=True)
        if not (const.is_fully_addressable or const.is_fully_replicated):
            raise ValueError(
                f"{self.name}: it uses an array from outside, {const.dtype.name}{list(const.shape)}, whose parts lie "
                f"in other processes. Pass it as an argument, or keep it in a synk.shared variable."
            )
        impl = key_of(const)
        if impl is None:
            return self._kept(np.asarray(const), is_copied=False)
        return jax.random.wrap_key_data(jnp.asarray(np.asarray(jax.random.key_data(const))), impl=impl)

    def _kept(self, array: np.ndarray, is_copied: bool) -> np.ndarray:
        array = array.astype(narrow(array.dtype), copy=False)
        # Small constants are written into the program, where XLA folds them. Large ones become arguments: as literals
        # they would be copied into each program and slow down its compilation.
        if array.nbytes <= LARGE:
            return np.array(array) if is_copied else array
        self.large.append(constant_of(array, is_copied))
        return self.large[-1].value


@cache
def _unspecified() -> Any:
    """Return what stands for the sharding of an argument of `jax.jit` that was given none."""
    # JAX has no public name for it (UnspecifiedValue), so it is read from a jit that was given no sharding.
    with jax.ensure_compile_time_eval():
        return jax.make_jaxpr(jax.jit(lambda x: x))(1.0).eqns[0].params["in_shardings"][0]


def _outside_meshes(context: Any) -> Any:
    # JAX has no public constructor of contexts, so this traces an equation in such a context.
    with context.manager, jax.sharding.use_abstract_mesh(_NO_MESH):
        return jax.make_jaxpr(jax.lax.neg)(1.0).eqns[0].ctx


def _without_mesh(aval: Any) -> Any:
    # The type of a jax.Ref wraps the type of its array.
    if hasattr(aval, "inner_aval"):
        inner = _without_mesh(aval.inner_aval)
        return aval if inner is aval.inner_aval else aval.update(inner_aval=inner)
    sharding = getattr(aval, "sharding", None)
    return aval if sharding is None or sharding.mesh.empty else aval.update(sharding=None)


def split(closed: Any, large: Sequence[Constant]) -> tuple[Callable[[], list[Any]], Jaxpr]:
    """Split off the equations on captured arrays alone, unless their results are larger than the arrays.

    Returns:
      A function that computes the constants of the second part, large ones as `Constant`s; and the second part.
    """
    # XLA folds no large constants, and none inside branches and loops, so a program would compute `table / table.max()`
    # in each call. The equations run once instead, before any program. Without a large array nothing is gained.
    jaxpr, constants = closed.jaxpr, {id(constant.value): constant for constant in large}
    is_worth_it = any(id(const) in constants for const in closed.consts)
    known = dict.fromkeys(jaxpr.constvars)
    early: list[Any] = []
    late: list[Any] = []
    for equation in jaxpr.eqns:
        # A result larger than its operands, as of a broadcast, would take more memory and transfer than it saves.
        is_early = is_worth_it and _is_known(equation, known) and _size(equation.outvars) <= _size(equation.invars)
        (early if is_early else late).append(equation)
        known |= dict.fromkeys(equation.outvars) if is_early else {}
    used = {atom for equation in late for atom in equation.invars if not isinstance(atom, Literal)}
    used |= {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)}
    # Constants and early results that no late equation reads would become arguments that programs never use.
    passed = [variable for variable in known if variable in used]
    made = [variable for variable in passed if variable not in jaxpr.constvars]
    first = Jaxpr(
        jaxpr.constvars, [], made, early, debug_info=jaxpr.debug_info._replace(arg_names=(), result_paths=None)
    )

    @cache
    def compute() -> list[Any]:
        values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        if made:
            # A trace may be under way around the call, with a mesh.
            no_mesh = jax.sharding.use_abstract_mesh(_NO_MESH)
            with jax.ensure_compile_time_eval(), no_mesh, jax.disable_jit(False), transfers_on_purpose():
                results = jax.jit(partial(jax.core.eval_jaxpr, first))(closed.consts)
            values |= zip(made, results, strict=True)
        return [constants.get(id(values[variable])) or _as_constant(values[variable]) for variable in passed]

    return compute, Jaxpr(passed, jaxpr.invars, jaxpr.outvars, late, jaxpr.effects, jaxpr.debug_info)


def _as_constant(value: Any) -> Any:
    """Return the constant of a large array that nobody changes, any other value as it is."""
    if key_of(value) is not None:
        return value
    array = np.asarray(value)
    return constant_of(array, is_copied=False) if array.nbytes > LARGE else array


def _is_known(equation: Any, known: dict[Any, None]) -> bool:
    """Check whether an equation computes on captured arrays alone, without effects or communication."""
    atoms = [atom for atom in equation.invars if not isinstance(atom, Literal)]
    # Equations without operands, such as iota, cost nothing in a program and memory as constants.
    if equation.effects or not atoms or not all(atom in known for atom in atoms):
        return False
    # A collective needs all replicas; a callback of the user's runs with the program, not before it.
    return not any(
        is_over_axis(each) or each.primitive.name == "pure_callback" or each.primitive.name in _PLACES
        for each in equations([equation])
    )


def _size(atoms: Sequence[Any]) -> int:
    """Return the bytes of arrays. A PRNG key counts as four words, the most that its data has."""
    return sum(
        atom.aval.size * (atom.aval.dtype.itemsize if isinstance(atom.aval.dtype, np.dtype) else 16)
        for atom in atoms
        if hasattr(atom.aval, "size") and not jnp.issubdtype(atom.aval.dtype, jax.dtypes.float0)
    )
