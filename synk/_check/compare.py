"""Compare: whether two values are equal to rounding, where they differ, and which op would have matched."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

# Relative and absolute tolerance by the bits of a dtype: sums in another order round differently.
TOLERANCES = {8: (0.2, 0.1), 16: (2e-2, 2e-2), 32: (2e-4, 2e-5), 64: (1e-9, 1e-11)}


class Tolerance(NamedTuple):
    """A relative and an absolute tolerance; None chooses by dtype."""

    rtol: float | None = None
    atol: float | None = None

    def of(self, dtype: Any) -> tuple[float, float]:
        """Return the relative and the absolute tolerance for numbers of a dtype."""
        rtol, atol = TOLERANCES[jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.inexact) else 64]
        return rtol if self.rtol is None else self.rtol, atol if self.atol is None else self.atol

    def admits(self, one: Any, other: Any) -> bool:
        """Check whether two values are equal, to the rounding of the dtype of `one`."""
        one, other = np.asarray(one), np.asarray(other)
        if one.shape != other.shape:
            return False
        has_floats = any(jnp.issubdtype(value.dtype, jnp.inexact) for value in (one, other))
        # Integers add up exactly in any order.
        if self == (None, None) and not has_floats:
            return np.array_equal(one, other)
        rtol, atol = self.of(one.dtype)
        return np.allclose(*widened(one, other), rtol=rtol, atol=atol, equal_nan=True)


def widened(*values: Any) -> list[np.ndarray]:
    # In a narrow dtype differences round, and unsigned integers wrap around.
    dtype = np.complex128 if any(map(np.iscomplexobj, values)) else np.float64
    return [np.asarray(value, dtype) for value in values]


def rounding(dtype: Any, *values: np.ndarray) -> Tolerance:
    """Make the tolerance for numbers computed in a dtype, relative to themselves and to the largest of `values`."""
    rtol, _ = Tolerance().of(dtype)
    return Tolerance(rtol, rtol * max(float(np.abs(value[np.isfinite(value)]).max(initial=0)) for value in values))


def difference(one: Any, other: Any) -> str:
    """Tell where a value differs most from the serial one, measured in tolerances."""
    one, other = np.asarray(one), np.asarray(other)
    if one.shape != other.shape:
        return f"its shape is {other.shape}, serially {one.shape}"
    rtol, atol = Tolerance().of(one.dtype)
    serial, parallel = widened(one, other)
    with np.errstate(all="ignore"):
        off = np.abs(serial - parallel) / (atol + rtol * np.abs(serial))
    is_same = (one == other) | ((one != one) & (other != other))  # NaN in both places is equal
    off = np.where(is_same, -1, np.nan_to_num(off, nan=np.inf))
    at = np.unravel_index(int(np.argmax(off)), off.shape)
    forms = (".6g", "") if one.dtype.kind in "iub" else (".6g", ".9g", ".17g")
    shown = [(f"{other[at].item():{form}}", f"{one[at].item():{form}}") for form in forms]
    # The shortest form in which the two numbers look different.
    got, wanted = next((pair for pair in shown if pair[0] != pair[1]), shown[-1])
    return f"it is {got}, serially {wanted}" + (" where they differ most" if one.ndim else "")


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Return the largest finite difference between two arrays, relative to the largest number of the first."""
    a, b = widened(one, other)
    with np.errstate(all="ignore"):
        off, size = np.abs(a - b), np.abs(a)
    largest = float(size[np.isfinite(size)].max(initial=0))
    return float(off[np.isfinite(off)].max(initial=0)) / (largest or 1.0)


def matching_ops(value: np.ndarray, rows: np.ndarray, serial: np.ndarray, tolerance: Tolerance) -> list[str]:
    """List the ops that combine an output's parts to the serial value; `rows` counts the rows of each part."""
    if value.ndim == 0 or len(value) != len(rows):
        return []
    # Integers add up exactly, and wrap around as they do on the replicas.
    is_exact = value.dtype.kind in "iu" and serial.dtype.kind in "iu"
    number = value if is_exact else widened(value)[0]
    if value.dtype == bool:
        combined: dict[str, Any] = {"any": value.any(0), "all": value.all(0)}
    else:
        with np.errstate(all="ignore"):
            combined = {op: getattr(number, op)(0) for op in ("sum", "max", "min", "prod")}
            combined["mean"] = np.tensordot(rows / rows.sum(), number, 1)
    return [f'"{op}"' for op, whole in combined.items() if tolerance.admits(serial, whole)]
