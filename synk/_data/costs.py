"""Costs: one number a row, by which rows of like cost are put together."""

from collections.abc import Sequence
from typing import Any

import jax.core
import numpy as np

from .._base.errors import shown


def checked_costs(costs: Any, rows: int, what: str) -> np.ndarray:
    """Return the costs of so many rows as floats. Raise TypeError if they are no numbers, else ValueError."""
    if isinstance(costs, jax.core.Tracer):
        raise TypeError(f"{what} is a traced value, but rows are dealt before anything runs. Give a NumPy array.")
    try:
        numbers = np.asarray(costs, np.float64)
    except (TypeError, ValueError):
        raise TypeError(f"{what} is {shown(costs)}; give a list or an array with a number for each row.") from None
    if numbers.shape != (rows,):
        raise ValueError(f"{what} has shape {list(numbers.shape)}, but there are {rows} rows. Give one number a row.")
    wrong = ~(np.isfinite(numbers) & (numbers >= 0))
    if wrong.any():
        row = int(wrong.argmax())
        raise ValueError(f"{what}[{row}] is {numbers[row]:g}; give a finite number >= 0 for each row.")
    return numbers


def round_up(
    costs: np.ndarray, bounds: Sequence[float] | None, budget: float, name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Round costs up to `bounds`, or to powers of two, and to the budget where that is less.

    Return the bounds, in ascending order, and the number of each row's. Raise ValueError for a cost above all.
    """
    if bounds is None:
        # Exact, where a logarithm rounds. A cost of 0 has the bound of the least of all others.
        mantissa, exponent = np.frexp(np.maximum(costs, costs[costs > 0].min(initial=1.0)))
        bounds = np.ldexp(1.0, exponent - (mantissa == 0.5))
    found = np.unique(np.minimum(np.asarray(bounds, np.float64), budget))
    if not (len(found) and found[0] > 0 and np.isfinite(found[-1])):
        raise ValueError(f"{name}: buckets is {shown(bounds)}; give costs above 0, such as [64, 128, 256].")
    row = int(costs.argmax())
    if costs[row] > found[-1]:
        limit = f"budget={budget:g}" if found[-1] == budget else f"the largest of buckets, {found[-1]:g}"
        raise ValueError(
            f"{name}: cost[{row}] is {costs[row]:g}, above {limit}: no batch has room for row {row}. Give a larger "
            f"one, or cut the row or leave it out."
        )
    return found, np.searchsorted(found, costs)
