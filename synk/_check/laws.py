"""Laws: why numbers of a parallel program are not those of one device, told from the numbers alone."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from .compare import distance

# Admitted differences by the bits of floats, relative to the largest number of a leaf. Integers are exact.
ROUNDING = {0: 0.0, 8: 0.1, 16: 1e-2, 32: 1e-5, 64: 1e-11}
GROWTH: dict[str, Callable[[int], float]] = {
    "n": lambda n: n, "1/n": lambda n: 1 / n, "n^2": lambda n: n * n, "sqrt(n)": lambda n: n**0.5,
    "1/sqrt(n)": lambda n: n**-0.5,
}  # fmt: skip

REPLICAS = (
    "devices hold different values of what should be one value: a psum or pmean is missing (out_specs=P() with "
    "check_vma=False hides that), or each device updates by its own gradient"
)
STACKED = "a value for each device, stacked: it is not reduced, psum or pmean is missing"
NAN = "NaN that one device does not have: a part without valid rows (0/0), a log or a root of a part"
TIMES_N = (
    "n times too large: added once a device, as psum of what is whole already does, or the transpose of a psum "
    "(shard_map with check_vma=False)"
)
ONE_NTH = "1/n of it: a mean over devices of sums, or divided by n twice"
PART_TIMES_N = (
    "a part of it is added once a device: a penalty inside the sum, or parameters moved by a gradient or a learning "
    "rate n times too large"
)
PART_ONE_NTH = "a part of it is divided by n: a mean over devices of sums, or parameters moved by 1/n of the gradient"
ORDER = "the right numbers in another order: rows are gathered or exchanged in another order"
ROW_SUMS = (
    "each row has the sum over the rows of all devices: a transpose that sums (shard_map adds up gradients by "
    "parameters that it got whole: jax.lax.pcast them)"
)
EDGES = "wrong at the edges of shards alone (axis {}): a halo, a boundary, or a window over neighbouring rows"
FIRST_PART = (
    "right in the first device's part of axis {} alone: positions or offsets are counted by shard, axis_index times "
    "its rows is missing"
)
IN_PART = "a position in a device's part: axis_index times its rows is missing"
# Words of the lines that a cause points to.
LINES = {
    REPLICAS: r"check_vma|out_specs", TIMES_N: "psum|check_vma", PART_TIMES_N: "psum|check_vma", ONE_NTH: "pmean",
    PART_ONE_NTH: "pmean", ROW_SUMS: "shard_map", EDGES: "ppermute|roll", FIRST_PART: "arange|argm|iota|axis_index",
    IN_PART: "argm|axis_index",
    ORDER: r"\[\w*::|all_to_all|all_gather|ppermute|reshape",
}  # fmt: skip


class Leaf(NamedTuple):
    """A leaf that a program returned.

    Attributes:
      name: the leaf's path.
      dtype: the name of its dtype.
      bits: bits of its floats; 0 for other numbers.
      parted: the largest difference between devices that should hold equal numbers, relative to the largest number.
      value: the numbers, widened to 64 bits.
    """

    name: str
    dtype: str
    bits: int
    parted: float
    value: np.ndarray

    @property
    def rounding(self) -> float:
        """Return the difference that rounding may make; for integers one that shows they are no integers."""
        return ROUNDING[self.bits] or 1e-12


def apart(one: np.ndarray, other: np.ndarray) -> float:
    """Return the largest difference, relative to the largest number of `one`; infinite if only one is finite."""
    if one.shape != other.shape or (np.isfinite(one) != np.isfinite(other)).any():
        return np.inf
    return distance(one, other)


def like_one_device(one: np.ndarray, other: np.ndarray, n: int) -> np.ndarray | None:
    """Bring a leaf of `n` devices into the shape that it has on one; None if its shape is another."""
    if one.shape == other.shape:
        return other
    # `jax.pmap` leaves an axis of devices in front: (1, ...) on one device, (n, ...) on n.
    if one.ndim and other.ndim == one.ndim and len(one) == 1 and len(other) == n:
        if other.shape[1:] == one.shape[1:]:
            return other[:1]
        if other.size == one.size:
            return other.reshape(one.shape)
    return None


def plain_fault(one: Leaf, other: Leaf, n: int) -> tuple[str, str]:
    a, b = one.value, other.value
    if one.dtype != other.dtype:
        return f"dtype {other.dtype}, on one device {one.dtype}", other.dtype
    if (same := like_one_device(a, b, n)) is None:
        shapes = f"shape {b.shape}, on one device {a.shape}"
        if b.shape == (n, *a.shape):
            return f"{shapes}: {STACKED}", str(b.shape)
        if a.ndim and b.ndim == a.ndim and a.shape[1:] == b.shape[1:]:
            return f"{shapes}: rows are {'dropped' if len(b) < len(a) else 'added, such as padding'}", str(b.shape)
        return shapes, str(b.shape)
    # A stacked value is right if its entries are equal. Entries that differ were never combined.
    if a.shape != b.shape and b.shape[1:] == a.shape[1:] and max(apart(b[0], part) for part in b) > 1e-4:
        return STACKED, "stacked"
    if (np.isnan(same) & ~np.isnan(a)).any():
        return NAN, "nan"
    return "", ""


def law_in_n(one: Leaf, values: Mapping[int, np.ndarray]) -> str | None:
    """Find how a leaf, or a part of it, grows with the number of devices; three numbers tell."""
    a, tight = one.value, one.rounding
    # Two numbers of devices fit most laws by chance.
    if len(values) < 3 or not all(np.isfinite(b).all() for b in (a, *values.values())):
        return None
    for name, grows in GROWTH.items():
        if all(apart(grows(n) * a, b) < 30 * tight for n, b in values.items()):
            known = {"n": TIMES_N, "1/n": ONE_NTH, "n^2": "n^2 times too large: summed over devices twice"}
            return known.get(name, f"{name} times the value of one device: scaled by the number of devices")
    # a + (f(n) - 1) u with the same u for all n: u is added f(n) times.
    for name, grows in GROWTH.items():
        parts = np.stack([(b - a) / (grows(n) - 1) for n, b in values.items()])
        size = np.abs(parts).max()
        # The difference to one device has lost digits, the more the smaller it is beside the leaf.
        slack = min(0.05, 1e-3 + 10 * tight * np.abs(a).max() / size)
        if np.abs(parts - parts[0]).max() < slack * size:
            known = {"n": PART_TIMES_N, "1/n": PART_ONE_NTH}
            return known.get(name, f"a part of it grows like {name}: it is scaled by the number of devices")
    return None


def law_of_places(one: Leaf, values: Mapping[int, np.ndarray]) -> str | None:
    """Tell where numbers are wrong: another order, edges of shards, all parts but the first."""
    a, tight = one.value, one.rounding
    if not a.ndim or len(a) < 2 or any(b.shape != a.shape for b in values.values()):
        return None
    if all(apart(np.sort(a, None), np.sort(b, None)) < 10 * tight for b in values.values()):
        return ORDER
    rest = a.shape[1:]

    def row_sums(n: int) -> np.ndarray:
        return np.tile(a.reshape(n, -1, *rest).sum(0), (n, *[1] * len(rest)))

    if all(len(a) % n == 0 and apart(row_sums(n), b) < 100 * tight for n, b in values.items()):
        return ROW_SUMS
    for axis in range(a.ndim):
        # Shards of fewer than four rows have no middle to tell from their edges.
        places = [_place(a, b, n, axis, tight) for n, b in values.items() if a.shape[axis] >= 4 * n]
        # One number of devices of several tells nothing: few numbers may be off at edges by chance.
        if len({*places}) == 1 and len(places) >= min(2, len(values)) and places[0]:
            return places[0].format(axis)
    return None


def _place(a: np.ndarray, b: np.ndarray, n: int, axis: int, tight: float) -> str | None:
    """Tell where along an axis that is cut into `n` shards numbers are wrong."""
    if a.shape[axis] % n:
        return None
    others = tuple(i for i in range(a.ndim) if i != axis)
    off = (np.abs(a - b).max(others) > 10 * tight * np.abs(a).max()).reshape(n, -1)
    if not off[0].any() and off[1:].mean() > 0.5:
        return FIRST_PART
    # An edge is wrong on some shards alone: those at the ends of the array may be right.
    ever = off.any(0)
    is_edge = (ever[0] or ever[-1]) and not ever[len(ever) // 2]
    return EDGES if is_edge else None
