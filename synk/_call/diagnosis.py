"""Diagnosis: why no op combines an output's parts into the serial answer: what rows do to each other, by a few runs."""

from collections.abc import Callable
from typing import Any

import numpy as np

from .compare import Tolerance

_NOISE = "synk.row_keys gives each row noise of its own, synk.row_numbers its place"
ORDER = f"the answer depends on the order of the rows (noise drawn by shape, positions): {_NOISE}"
PLACE = f"a row's output depends on where the row stands (noise drawn by shape, positions): {_NOISE}"
COUPLED_ROWS = "a row's output depends on the other rows (batch norm, a softmax over rows): take what they share first"
CONSTANT = "something is added once a part, such as a penalty on the parameters: add it in then, or return a mean"
STATISTIC = "a statistic across rows (batch norm, std, a contrastive loss): synk.stats has those that combine"
COUPLED = "rows are not independent in it"


def likely_cause(run: Callable[[np.ndarray], Any], rows: int, tolerance: Tolerance) -> str | None:
    """The cause, in words; `run` gives the serial output of rows by their numbers. None where there are too few."""
    if rows < 4:
        return None
    every, order = np.arange(rows), np.random.default_rng(0).permutation(rows)
    whole, moved, third = (np.asarray(run(index)) for index in (every, order, every[: rows // 3]))
    if whole.ndim and len(whole) == rows and len(third) == rows // 3:
        return COUPLED_ROWS if tolerance.admits(whole[order], moved, whole.dtype) else PLACE
    if not tolerance.admits(whole, moved, whole.dtype):
        return ORDER
    if third.shape != whole.shape:
        return COUPLED
    extra = [_more(run, whole, every, cut) for cut in (rows // 3, rows // 2)]
    is_same = tolerance.admits(extra[0], extra[1], whole.dtype)
    if is_same and not tolerance.admits(extra[0], np.zeros_like(extra[0]), whole.dtype):
        return CONSTANT
    twice = run(np.repeat(every, 2))
    return STATISTIC if tolerance.admits(whole, twice, whole.dtype) else COUPLED


def _more(run: Callable[[np.ndarray], Any], whole: np.ndarray, every: np.ndarray, cut: int) -> np.ndarray:
    """By how much the outputs of two parts add up to more than that of all rows."""
    wide = np.complex128 if np.iscomplexobj(whole) else np.float64
    parts = (np.asarray(run(every[:cut]), wide), np.asarray(run(every[cut:]), wide))
    with np.errstate(all="ignore"):
        return parts[0] + parts[1] - whole.astype(wide)
