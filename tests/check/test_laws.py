"""Laws in the number of devices, and places of wrong numbers, by numbers alone."""

import numpy as np
import pytest

from synk._check import laws  # pure arithmetic, which needs no process
from synk._check.laws import Leaf

X = np.sin(np.arange(48.0)).reshape(24, 2) + 0.5
DEVICES = (2, 3, 4)


def leaf(value, bits=32):
    return Leaf("x", "float32", bits, 0.0, value)


def summed(n):
    return X.reshape(n, -1, 2).sum(0)


def shifted(n):
    """Numbers that are off by the difference of positions counted by shard and in all."""
    return X + (np.tile(np.arange(24 // n), n) - np.arange(24))[:, None]


def edges(n):
    """Numbers that are off in the first row of each shard."""
    off = X.copy()
    off[:: 24 // n] += 1
    return off


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (lambda n: n * X, laws.TIMES_N),
        (lambda n: X / n, laws.ONE_NTH),
        (lambda n: n * n * X, "n^2 times"),
        (lambda n: n**0.5 * X, r"sqrt(n) times"),
        (lambda n: X + (n - 1) * 0.1, laws.PART_TIMES_N),
        (lambda n: X - (1 - 1 / n) * 0.1 * X[::-1], laws.PART_ONE_NTH),
        (lambda n: X + n * np.sin(n * X), None),
    ],
)
def test_laws(value, said):
    """A leaf, or a part of it, that grows with the number of devices is told by its law; anything else is not."""
    found = laws.law_in_n(leaf(X), {n: value(n) for n in DEVICES})
    assert found is None if said is None else found.startswith(said)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (lambda n: np.concatenate([X[i::n] for i in range(n)]), laws.ORDER),
        (lambda n: np.tile(summed(n), (n, 1)), laws.ROW_SUMS),
        (edges, laws.EDGES.format(0)),
        (shifted, laws.FIRST_PART.format(0)),
        (lambda n: X + n * np.sin(n * X), None),
    ],
)
def test_places(value, said):
    """Numbers that are wrong in some places alone are told by these."""
    assert laws.law_of_places(leaf(X), {n: value(n) for n in DEVICES}) == said


def test_edges_take_two_numbers_of_devices():
    """A few numbers that are off at an edge of two shards by chance name no place."""
    few = X[:8, 0]
    off = few + np.eye(8)[0]
    assert laws.law_of_places(leaf(few), {n: off for n in (2, 4, 8)}) is None


def test_what_needs_no_numbers():
    """Dtypes, shapes, stacked values and NaN are told as they are."""
    with_nan = np.where(X == X[3], np.nan, X)
    found = [
        laws.plain_fault(leaf(X), leaf(X)._replace(dtype="bfloat16"), 2),
        laws.plain_fault(leaf(X), leaf(np.stack([X, X])), 2),
        laws.plain_fault(leaf(X), leaf(X[:22]), 4),
        laws.plain_fault(leaf(X), leaf(with_nan), 2),
        laws.plain_fault(leaf(X), leaf(2 * X), 2),
    ]
    assert [mark for _, mark in found] == ["bfloat16", "(2, 24, 2)", "(22, 2)", "nan", ""]
    assert [cause.partition(":")[0] for cause, _ in found[1:3]] == [
        "shape (2, 24, 2), on one device (24, 2)",
        "shape (22, 2), on one device (24, 2)",
    ]
