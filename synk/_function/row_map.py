"""Map: a function of one row, run for all rows on all replicas."""

from collections.abc import Callable
from dataclasses import replace

import jax

from .._base.errors import public_api
from .._base.pytree import PyTree
from .._reductions.reduction import ELEMENTWISE
from .decorator import Inputs, function
from .function import Function

# Ops of outputs of a row. Others show parts, of which a row knows none.
_OPS = ("concat", "scatter", *ELEMENTWISE, "same")


@public_api
def map(
    fn: Callable[..., PyTree],
    inputs: Inputs = None,
    *,
    outputs: PyTree = "concat",
    axis_name: str | None = None,
    name: str | None = None,
) -> Function:
    """Make a function of one row run for every row: any number of rows, on any number of replicas.

    A replica runs `jax.vmap(fn)` over its rows, or `fn` itself where it has one row. Rows know nothing of one another:
    loops inside (chains of MCMC, solvers of ODEs, root finding) run on each replica until its own rows are done, where
    `jax.jit` over rows cut by a sharding waits for the slowest row of all replicas in every iteration.

    Inside, `synk.row_numbers()` is the row's number among those picked, `synk.row_keys(key)` its key, and a variable
    that holds rows its one row. `synk.part_key` and assigning variables raise, and so do collectives without
    `axis_name`. Keys of JAX's "rbg" draw only with `axis_name`, since their draws would depend on the other rows.

    Args:
      fn: a function of arrays, called with one row of each scattered argument, without axis 0.
      inputs: as for `synk.function`; "broadcast" arguments come whole to every row.
      outputs: an op, or a tree of ops that is a prefix of what `fn` returns: "concat" (one entry a row, in the order of
        the rows), "scatter" (the same, left on the replicas that made them), "sum", "mean", "max", "min", "prod",
        "any", "all" over the rows, or "same" if all rows give the same value. "mean" of a `synk.Weighted` weighs each
        row by its own weight.
      axis_name: a name under which rows communicate inside `fn`, as under `jax.pmap(fn, axis_name)`. Then there are as
        many rows as replicas, and no slices; a single replica takes any number. None for rows that know nothing of one
        another.
      name: the name in messages; None for `fn`'s name.

    Returns:
      A `Function` of all rows; it serves as `chain_method` of numpyro's MCMC.

    Raises:
      TypeError, ValueError: a mode or an op is none of these.

    Example:
      >>> import jax, numpy as np, synk
      >>> @synk.map
      ... def root(x):
      ...     return jax.lax.while_loop(lambda y: abs(y * y - x) > 1e-5, lambda y: (y + x / y) / 2, x)
      >>> [round(float(y), 2) for y in root(np.array([4.0, 9.0, 2.0]))]
      [2.0, 3.0, 1.41]
    """
    made = function(fn, inputs, outputs, axis_name=axis_name or "replica", name=name)
    for op in jax.tree.leaves(made._spec.ops):
        if op.name not in _OPS:
            raise ValueError(
                f"{made.name}: outputs of a row do not combine by {op.name!r}; use one of {', '.join(_OPS)}."
            )
    # A function of rows whose call knows that `fn` takes one row: vmap is applied when its part is traced, which knows
    # the number of rows.
    made._spec = replace(made._spec, made_by="synk.map", of_one_row="alone" if axis_name is None else "axis")
    return made
