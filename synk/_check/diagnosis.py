"""Diagnosis: why an output is not the serial one: its op, rounding, or rows that depend on each other."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from .._reductions.outputs import OutputLeaf
from .compare import Tolerance, difference, matching_ops, rounding, widened

_NOISE = 'synk.row_keys gives each row noise of its own, synk.row_numbers its place; so does engine="jit"'
ORDER = f"the answer depends on the order of the rows (noise drawn by shape, positions): {_NOISE}"
PLACE = f"a row's output depends on where the row stands (noise drawn by shape, positions): {_NOISE}"
_AS_ONE = 'engine="jit" runs all rows as one device does'
COUPLED_ROWS = f"a row's output depends on the other rows (batch norm, a softmax over rows): {_AS_ONE}"
CONSTANT = "something is added once a part, such as a penalty on the parameters: add it in then, or return a mean"
PAIRS = "synk.contrib.pairs combines all pairs of rows"
STATISTIC = (
    f"a statistic across rows (batch norm, std, a contrastive loss): {_AS_ONE}; synk.stats combines some, {PAIRS}"
)
COUPLED = f"rows are not independent in it: {_AS_ONE}; where they meet in pairs, as in a contrastive loss, {PAIRS}"
COLLECTIVE = "a collective combines by its op too: jax.lax.psum what adds up over rows, jax.lax.pmean means of rows"
QUOTIENT = (
    "synk.Weighted is missing. A sum over rows divided by another, as a masked mean is, weighs by its divisor:\n"
    "    total, count = (losses * mask).sum(), mask.sum()\n"
    '    return synk.Weighted(total / count, count)  # under "mean"\n'
    "  What follows the quotient, such as a root, goes into then"
)
OVERFLOW = (
    "overflow in float16: a part has fewer rows, each with a larger share of its mean. Scale the loss by less, or "
    "compute in bfloat16"
)
ADDS_UP = 'its parts add up, but it is their mean: return synk.Weighted(sum / weight, weight), or the sum by op "sum"'


class UnequalOutput(NamedTuple):
    """A combined output that is not the serial one.

    Attributes:
      leaf: how the output combines.
      name: what messages call the output, and whether its op is the user's.
      serial: the serial value.
      got: the value on the replicas.
      values: for the order of the rows, and another one if there is any: the parts of the value (the value if it has an
        entry a row), how many rows each part has, and the serial value.
      inside: the narrowest dtype of floats that the function computes; None if there are no floats.
    """

    leaf: OutputLeaf
    name: tuple[str, bool]
    serial: np.ndarray
    got: np.ndarray
    values: list[tuple[np.ndarray, np.ndarray, np.ndarray]]
    inside: np.dtype | None


def finding(output: UnequalOutput, tolerance: Tolerance, cause: Callable[[Tolerance], str | None]) -> str:
    """Tell in words why an output differs: by its op, by rounding in a narrow dtype, or by another cause."""
    # `cause` runs the function again, so it is asked only if neither an op nor rounding explains the difference.
    leaf, inside, (name, is_users) = output.leaf, output.inside, output.name
    dtype, off = leaf.dtype, difference(output.serial, output.got)
    if leaf.reduction.name == "merge":
        return f"{name}: {off}; is merge associative, and the state that of all rows?"
    op = '"mean" of Weighted' if leaf.weight is not None else f'"{leaf.reduction.name}"'
    said = f"{name}{f' combined by {op}' * is_users}: {off}"
    fitting, likely = _fitting(output, tolerance), None
    is_float = jnp.issubdtype(dtype, jnp.inexact)
    if fitting is None and inside is not None and is_float and jnp.finfo(inside).bits < jnp.finfo(dtype).bits:
        # Computing in bfloat16, say, rounds far more than the float32 output shows.
        tolerance = rounding(inside, output.serial, output.values[0][0])
        if tolerance.admits(output.serial, output.got):
            return (
                f"{said}; {inside.name}, in which it computes, may round by as much. rtol={tolerance.rtol:g}, "
                f"atol={tolerance.atol:g} admits it; a mistake that this hides shows in a check of it computed in "
                f"{dtype.name}."
            )
        fitting = _fitting(output, tolerance)
    if fitting is None:
        likely = OVERFLOW if _overflows(output) else cause(tolerance)
        fitting = "no op would have matched"
    return f"{said}{f'; {fitting}' * is_users}{'' if likely is None else f'. Likely cause: {likely}'}."


def _fitting(output: UnequalOutput, tolerance: Tolerance) -> str | None:
    """Name the ops that would have matched, in any order of the rows; None if there is none."""
    first, *others = [matching_ops(*value, tolerance) for value in output.values]
    ops = [op for op in first if all(op in other for other in others)]
    if output.leaf.weight is not None:
        return ADDS_UP if '"sum"' in ops else None
    return f"{' or '.join(ops)} would have matched" if ops else None


def _overflows(output: UnequalOutput) -> bool:
    # A loss that is scaled for float16 overflows in a part alone: the part has fewer rows, and each a larger share of
    # the mean.
    if output.leaf.reduction.name != "mean" or output.inside != np.float16 or output.serial.shape != output.got.shape:
        return False
    return bool((np.isfinite(output.serial) & ~np.isfinite(output.got)).any())


def likely_cause(run: Callable[[np.ndarray], np.ndarray], rows: int, tolerance: Tolerance) -> str | None:
    """Find the cause by a few runs of some rows, in words; None if there are too few rows."""
    if rows < 4:
        return None
    # Fewer rows, moved rows and doubled rows: each changes the answer of some kinds of functions, and of no other.
    every, order = np.arange(rows), np.random.default_rng(0).permutation(rows)
    whole, moved, third = run(every), run(order), run(every[: rows // 3])
    if whole.ndim and len(whole) == rows and len(third) == rows // 3:
        return COUPLED_ROWS if tolerance.admits(whole[order], moved) else PLACE
    if not tolerance.admits(whole, moved):
        return ORDER
    if third.shape != whole.shape:
        return COUPLED
    # Numbers are summed with an error far below what is admitted between two orders of the rows.
    if _is_quotient(run, rows, tolerance.of(whole.dtype)[0] / 20):
        return QUOTIENT
    # By how much two parts add up to more than all rows, for cuts at a third and at half. An extra that is equal for
    # both depends on the number of parts, not on their rows.
    extras: list[np.ndarray] = []
    for cut in (rows // 3, rows // 2):
        first, second, both = widened(run(every[:cut]), run(every[cut:]), whole)
        with np.errstate(all="ignore"):
            extras.append((first + second - both).astype(whole.dtype))
    is_there = np.isfinite(extras).all() and not tolerance.admits(extras[0], np.zeros_like(extras[0]))
    if is_there and tolerance.admits(*extras):
        return CONSTANT
    # Every row twice leaves means, variances and maxima as they are, but not sums or sequences.
    return STATISTIC if tolerance.admits(whole, run(np.repeat(every, 2))) else COUPLED


def _is_quotient(run: Callable[[np.ndarray], np.ndarray], rows: int, error: float) -> bool:
    """Tell whether the output of a function is a quotient of two sums over rows, to a relative error."""
    # Few rows differ most, but they may weigh nothing.
    for size in (2**i for i in range(1, rows.bit_length() - 1)):
        one, two = (np.arange(size) * (rows // size) + first for first in (0, rows // size // 2))
        # If f = A / B for sums A and B, (f(S + T) - f(S)) / (f(T) - f(S + T)) is B(T) / B(S), and half of that if S is
        # there twice.
        f = np.stack(widened(*map(run, map(np.concatenate, ([one], [two], [one, two], [one, one, two])))))
        noise = error * np.abs(f[np.isfinite(f)]).max(initial=0)
        up, down, up_twice, down_twice = f[2] - f[0], f[1] - f[2], f[3] - f[0], f[1] - f[3]
        is_told = np.min(np.abs([up, down, up_twice, down_twice]), 0) > noise
        if is_told.any():
            off = np.abs(2 * up_twice * down - up * down_twice)
            is_one = (off <= 4 * noise * np.abs(f[1] - f[0])) & ((up * np.conj(down)).real > 0)
            return bool(is_one[is_told].all())
    return False
