"""Gradients through what replicas run and leave out: as the serial ones, and no NaN where these have none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import synk

from ..helpers import group_of, slow

GROUPS = [("simulated", 3), ("devices", 4)]
RANDOM = np.random.default_rng(0)
PATH, WEIGHTS = RANDOM.normal(size=(7, 2)).astype(np.float32), RANDOM.normal(size=7).astype(np.float32)


def distance(a, b):
    """Its gradient is NaN where both are the same point."""
    return jnp.sqrt(jnp.sum((b - a) ** 2, -1))


def follow(a, b):
    """Two pieces of a path as one."""
    return {"first": a["first"], "last": b["last"], "far": a["far"] + b["far"] + distance(a["last"], b["first"])}


def serial(path):
    return distance(path[:-1], path[1:]).sum()


@synk.function
def length(path):
    return synk.Monoid({"first": path[0], "last": path[-1], "far": serial(path)}, follow, lambda state: state["far"])


@synk.function(reduce="sum")
def smooth(path):
    """Of parts alone; XLA's CPU backend shall find the convolution outside branches, so all of them run."""
    return serial(path) + jnp.convolve(path[:, 0], jnp.ones(1, path.dtype)).sum()


def assert_gradient(of, want, path):
    got, want = jax.jit(jax.grad(of))(path), jax.grad(want)(jnp.asarray(path))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def every(quick):
    """These, and for slow tests fewer rows than replicas, and more."""
    return [*quick, *(slow(*group, rows) for group, rows in zip(GROUPS, (1, 7), strict=True))]


@pytest.mark.parametrize(("kind", "n", "rows"), every([("simulated", 3, 4)]))
def test_merges(kind, n, rows):
    """The first of several slices follows none."""
    with group_of(kind, n):
        for slices in (1, 2, 3) if rows > 5 else (2,):
            assert_gradient(lambda path, slices=slices: length(path, num_slices=slices), serial, PATH[:rows])


@pytest.mark.parametrize(("kind", "n", "rows"), every([("devices", 2, 3)]))
def test_scans(kind, n, rows):
    """The first replica follows none, and rows that fill a part up follow themselves."""

    def of(scan, reverse):
        def weighted(path):
            pieces = {"first": path, "last": path, "far": jnp.zeros(rows)}
            return (WEIGHTS[:rows] * scan(follow, pieces, reverse=reverse)["far"]).sum()

        return weighted

    with group_of(kind, n):
        for reverse in (False, True) if rows > 4 else (rows == 4,):
            assert_gradient(of(synk.contrib.scan, reverse), of(jax.lax.associative_scan, reverse), PATH[:rows])


@pytest.mark.parametrize(("kind", "n", "rows"), every([("devices", 2, 5)]))
def test_parts_that_another_replica_has(kind, n, rows):
    """Where all branches run, the longer one runs on a copy of the last row."""
    parts = [part for part in np.array_split(np.arange(rows), n) if len(part)]
    with group_of(kind, n):
        assert_gradient(smooth, lambda path: sum(serial(path[part]) for part in parts) + path[:, 0].sum(), PATH[:rows])


@pytest.mark.parametrize(("kind", "n", "rows"), every([("simulated", 3, 4)]))
def test_pairs(kind, n, rows):
    """Nor are there pairs with rows that fill up."""
    others = PATH[:5] + 10

    def of(path):
        return (WEIGHTS[:rows] * synk.contrib.pairs(distance, path, others, reduce="max")).sum()

    with group_of(kind, n):
        assert_gradient(
            of, lambda path: (WEIGHTS[:rows] * distance(path[:, None], others[None]).max(1)).sum(), PATH[:rows]
        )
