"""Moving: the axes along which an equation moves numbers, so that XLA's partitioner must not divide them."""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .._runtime.dispatch import JAXLIB
from .equations import CALLS, ELEMENTWISE

# The partitioner of jaxlib 0.8.2 to 0.12 takes windows of one operand for one another, reads wrong shards in strided
# slices, pads and gradients of strided convolutions, and ends the process on others. Where operands and results lie
# whole along these axes, it has nothing to do there, and still divides all other axes.

# Equations whose functions are divided as well. Those of all others belong to who wrote them: kernels, `jax.shard_map`.
FUNCTIONS = CALLS | frozenset("scan while cond custom_linear_solve custom_vjp_call_jaxpr".split())
# Equations that the partitioner divides right, as far as random tests can tell: tests/call/test_moving.py.
_DIVIDED = (
    ELEMENTWISE
    | FUNCTIONS
    | frozenset(
        "all_gather argmax argmin axis_index bitcast_convert_type broadcast_in_dim cholesky concatenate "
        "custom_partitioning debug_callback device_put dot_general dynamic_slice dynamic_update_slice eig eigh "
        "empty empty2 expand_dims fft gather geqrf hessenberg householder_product io_callback iota lu "
        "lu_pivots_to_permutation name optimization_barrier pcast pmax pmin psum psum_invariant pure_callback "
        "pvary qr random_bits random_clone random_fold_in random_gamma random_seed random_split random_unwrap "
        "random_wrap reduce_max reduce_min reduce_prod reduce_sum reshape rev rng_bit_generator scatter scatter-add "
        "scatter-max scatter-min scatter-mul scatter-sub schur shard_map sharding_constraint sort split "
        "squeeze stack svd threefry2x32 tie tile top_k transpose triangular_solve tridiagonal tridiagonal_solve "
        "unstack".split()
    )
)
_CUMULATIVE = frozenset("cumsum cumprod cummax cummin cumlogsumexp".split())


def moved_axes(equation: Any) -> list[Sequence[int]]:
    """Return the axes along which an equation moves the numbers of each operand, then of each result."""
    atoms = [*equation.invars, *equation.outvars]
    if equation.primitive.name == "conv_general_dilated":
        numbers, kernel, params = equation.params["dimension_numbers"], atoms[1].aval.shape, equation.params
        # Specs of dimensions begin with batch and features, or the features of the kernel; windows move along the rest.
        sizes = [kernel[axis] for axis in numbers.rhs_spec[2:]]
        moved = _window(sizes, params["window_strides"], params["padding"], params["lhs_dilation"])
        return [[spec[2 + i] for i in moved] for spec in numbers]
    axes = _axes(equation, atoms[0].aval if atoms else None)
    # Axes of the first operand are meant; an operand of another rank, such as the value of a pad, has none of them.
    dims = [len(getattr(atom.aval, "shape", ())) for atom in atoms]
    return [range(n) if axes is None else axes if n == dims[0] else () for n in dims]


def moving_along(equations: Iterable[Any], length: int | None) -> dict[str, None]:
    """Return the names of equations that move numbers along an axis of this length."""
    return {
        equation.primitive.name: None
        for equation in equations
        for atom, axes in zip([*equation.invars, *equation.outvars], moved_axes(equation), strict=True)
        if any(atom.aval.shape[axis] == length for axis in axes)
    }


def _axes(equation: Any, operand: Any) -> Sequence[int] | None:
    """Return the axes of the first operand along which an equation moves numbers; None for all axes of all operands."""
    name, params = equation.primitive.name, equation.params
    if name in _CUMULATIVE:
        return (params["axis"],)
    if "window_dimensions" in params:
        dilation = params.get("base_dilation") or (1,) * len(operand.shape)
        return _window(params["window_dimensions"], params["window_strides"], params["padding"], dilation)
    if name == "slice":
        strides = params["strides"] or (1,) * len(operand.shape)
        # jaxlib 0.8.2 takes wrong rows in gradients of `jnp.diff` followed by a sort and a product, too.
        cuts = zip(params["start_indices"], params["limit_indices"], operand.shape, strict=True)
        is_cut = [JAXLIB < (0, 10) and stop - start < size for start, stop, size in cuts]
        return [i for i, stride in enumerate(strides) if stride != 1 or is_cut[i]]
    if name == "pad":
        return [i for i, (low, high, inside) in enumerate(params["padding_config"]) if min(low, high) < 0 or inside]
    if name in ("reduce_and", "reduce_or", "reduce_xor"):
        # XLA:CPU combines devices by "and" and "or" of booleans alone.
        return () if operand.dtype == bool and name != "reduce_xor" else params["axes"]
    if name == "reduce":
        return params["dimensions"]
    # The partitioner ends the process at a scatter whose indexes are unsigned, as in gradients of sorts. JAX makes it
    # of a sort, or of a gather, also under `jax.grad` around the call, where nothing else keeps its operands whole.
    if name == "sort":
        return None if jnp.issubdtype(operand.dtype, jnp.inexact) else ()
    if name.startswith(("scatter", "gather")) and params["dimension_numbers"].operand_batching_dims:
        return None if jnp.issubdtype(equation.invars[1].aval.dtype, jnp.unsignedinteger) else ()
    # A primitive that is not listed may be new in JAX: whole is slower, and right.
    return () if name in _DIVIDED else None


def _window(sizes: Iterable[int], strides: Iterable[int], padding: Any, dilation: Iterable[int]) -> list[int]:
    """Return the axes along which a window is more than one number after the other."""
    windows = zip(sizes, strides, map(tuple, padding), dilation, strict=True)
    return [i for i, window in enumerate(windows) if window != (1, 1, (0, 0), 1)]


def held_whole(equation: Any, atom: Any, axes: Sequence[int], mesh: Mesh | None) -> Any:
    """Return an equation, like this one, that keeps an operand or result of it whole along axes; None if it needs none.

    The equation's result has no name yet.
    """
    is_array = isinstance(getattr(atom.aval, "shape", None), tuple) and not hasattr(atom.aval, "inner_aval")
    if mesh is None or not axes or not is_array or isinstance(atom, Literal):
        return None
    # The equation is copied for its context and its source line, which a constructor would need from private JAX.
    constraint = _constraint(mesh, len(atom.aval.shape), frozenset(axes))
    return equation.replace(
        primitive=constraint.primitive, params=constraint.params, effects=constraint.effects, invars=[atom], outvars=[]
    )


@cache
def _constraint(mesh: Mesh, ndim: int, axes: frozenset[int]) -> Any:
    spec = P(*(None if axis in axes else P.UNCONSTRAINED for axis in range(ndim)))
    # Traced outside any mesh, as all equations of the program are; one element a dimension suffices for the parameters.
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        traced = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec)))
        return traced(jax.ShapeDtypeStruct((1,) * ndim, jnp.float32)).eqns[0]
