"""Compare: whether two values are equal to rounding, where they differ, and which op would have matched."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

# Relative and absolute tolerance by the bits of a dtype: sums in another order round differently.
TOLERANCES = {8: (0.2, 0.1), 16: (2e-2, 2e-2), 32: (2e-4, 2e-5), 64: (1e-9, 1e-11)}


class Tolerance(NamedTuple):
    """A relative and an absolute tolerance; None chooses by dtype."""

    rtol: float | None
    atol: float | None

    def of(self, dtype: Any) -> tuple[float, float]:
        """Return the relative and the absolute tolerance for numbers of a dtype."""
        rtol, atol = TOLERANCES[jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.inexact) else 64]
        return rtol if self.rtol is None else self.rtol, atol if self.atol is None else self.atol

    def admits(self, one: Any, other: Any, dtype: Any = None) -> bool:
        """Check whether two values are equal, to the rounding of a dtype (that of `one`)."""
        one, other = np.asarray(one), np.asarray(other)
        if one.shape != other.shape:
            return False
        dtype = dtype or one.dtype
        has_floats = any(jnp.issubdtype(kind, jnp.inexact) for kind in (dtype, one.dtype, other.dtype))
        if self == (None, None) and not has_floats:
            return np.array_equal(one, other)
        rtol, atol = self.of(dtype)
        # In a narrow dtype the difference and the tolerance would round, and unsigned integers would wrap around.
        wide = np.complex128 if np.iscomplexobj(one) or np.iscomplexobj(other) else np.float64
        return np.allclose(one.astype(wide), other.astype(wide), rtol=rtol, atol=atol, equal_nan=True)


def rounding(dtype: Any, *values: np.ndarray) -> Tolerance:
    """Make the tolerance for numbers computed in a dtype, relative to themselves and to the largest of `values`."""
    rtol, _ = Tolerance(None, None).of(dtype)
    return Tolerance(rtol, rtol * max(float(np.abs(value[np.isfinite(value)]).max(initial=0)) for value in values))


def least_tolerance(one: Any, other: Any, rtol: float, atol: float) -> str:
    """Write the options of `f.check` that admit two values: `rtol`, and an `atol` if the one here is too small."""
    wide = np.complex128 if np.iscomplexobj(one) else np.float64
    one, other = np.asarray(one, wide), np.asarray(other, wide)
    with np.errstate(invalid="ignore"):
        needed = float(np.nanmax(np.abs(one - other) - rtol * np.abs(one)))
    if needed <= atol:
        return f"rtol={rtol:g}"
    unit = 10.0 ** np.floor(np.log10(needed))
    return f"rtol={rtol:g}, atol={(np.floor(needed / unit) + 1) * unit:.1g}"


def difference(one: Any, other: Any) -> str:
    """Tell where a value differs most from the serial one, measured in tolerances."""
    one, other = np.asarray(one), np.asarray(other)
    if one.shape != other.shape:
        return f"its shape is {other.shape}, serially {one.shape}"
    wide = np.complex128 if np.iscomplexobj(one) else np.float64
    with np.errstate(all="ignore"):
        rtol, atol = Tolerance(None, None).of(one.dtype)
        off = np.abs(one.astype(wide) - other.astype(wide)) / (atol + rtol * np.abs(one.astype(wide)))
    is_same = (one == other) | ((one != one) & (other != other))  # NaN in both places is equal
    off = np.where(is_same, -1, np.nan_to_num(off, nan=np.inf))
    at = np.unravel_index(int(np.argmax(off)), off.shape)
    forms = (".6g", "") if one.dtype.kind in "iub" else (".6g", ".9g", ".17g")
    shown = [(f"{other[at].item():{form}}", f"{one[at].item():{form}}") for form in forms]
    # The shortest form in which the two numbers look different.
    got, wanted = next((pair for pair in shown if pair[0] != pair[1]), shown[-1])
    return f"it is {got}, serially {wanted}" + (" where they differ most" if one.ndim else "")


def matching_ops(value: np.ndarray, rows: np.ndarray, serial: Any, tolerance: Tolerance) -> list[str]:
    """List the ops that combine an output's parts to the serial value; `rows` counts the rows of each part."""
    if value.ndim == 0 or len(value) != len(rows):
        return []
    # Integers add up exactly, and wrap around as they do on the replicas.
    is_exact = value.dtype.kind in "iu" and serial.dtype.kind in "iu"
    number = value if is_exact else value.astype(np.complex128 if np.iscomplexobj(value) else np.float64)
    is_complex = np.iscomplexobj(value)
    with np.errstate(all="ignore"):
        combined: dict[str, Any] = {
            "mean": np.tensordot(rows / rows.sum(), number, 1),
            "sum": number.sum(0),
            "max": np.nan if is_complex else number.max(0),
            "min": np.nan if is_complex else number.min(0),
            "prod": number.prod(0),
        }
    if value.ndim > 1:
        combined["concat"] = number.reshape(-1, *number.shape[2:])
    if value.dtype == bool:
        combined = {"any": value.any(0), "all": value.all(0)}
    return [f'"{op}"' for op, whole in combined.items() if tolerance.admits(serial, np.asarray(whole), serial.dtype)]
