"""Functions that move numbers along rows under engine="jit", where XLA's partitioner alone is wrong or ends the process."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import synk

from ..helpers import assert_close, group_of, needs_devices
from .constructs import CONSTRUCTS, draw, function_of

pytestmark = [pytest.mark.filterwarnings("ignore:.*it has compiled for"), needs_devices(8)]
X = np.random.default_rng(3).normal(size=(24, 4))


@pytest.fixture(autouse=True)
def as_users_write():
    """Let JAX promote, as it does by default, and compute in float64."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"), jax.enable_x64(True):
        yield


def assert_serial(fn, kind, n, rows):
    """The value, the gradient inside, or the gradient around a call is that of the serial run."""

    def loss(x):
        return (jnp.sin(fn(x)) ** 2).sum()

    inner = {"value": fn, "slope inside": jax.grad(loss), "slope around": loss}[kind]
    with group_of("devices", n):
        f = synk.function(inner, reduce="first", engine="jit")
        got = jax.grad(f)(jnp.asarray(X[:rows])) if kind == "slope around" else f(X[:rows])
        want = jax.jit(jax.grad(loss))(X[:rows]) if kind == "slope around" else f.serial(X[:rows])
    np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("seed", range(40))
def test_drawn(seed):
    """Two or three constructs along rows, one after the other, give what one device gives."""
    names, *call = draw(seed)
    assert_serial(function_of(names), *call)


@pytest.mark.parametrize(
    ("name", "kind", "n", "rows"),
    [
        ("two", "value", 3, 7), ("two windows", "value", 3, 8), ("x[1::3]", "value", 3, 2),
        ("pad (-1, 2, 1)", "value", 3, 7), ("xor", "value", 3, 7), ("slope stride", "value", 8, 8),
        ("conv stride", "slope around", 8, 7), ("row sort", "slope inside", 3, 7), ("row sort", "slope around", 3, 7), ("generic", "value", 3, 7),
        ("custom_vjp", "slope around", 3, 7), ("cond", "slope inside", 3, 7), ("checkpoint", "slope around", 3, 5),
    ],
)  # fmt: skip
def test_what_the_partitioner_gets_wrong(name, kind, n, rows):
    """It is right, also inside other functions and under gradients."""
    assert_serial(CONSTRUCTS[name], kind, n, rows)


@pytest.mark.parametrize("kind", ["value", "slope inside"])
def test_results_that_others_want_cut(kind):
    """Windows whose results meet rows that are cut."""
    assert_serial(lambda x: jnp.cumsum(x, 0) * x + lax.cummax(x, 0) / (1 + x * x), kind, 3, 2)


def test_uneven_calls_of_functions_that_communicate():
    """They run as one replica too, where rows do not divide, and so does their `then`."""
    with group_of("devices", 3):
        f = synk.function(lambda x: x - lax.pmean(x.mean(0), "replica"), reduce="concat")
        f.then(lambda y: (jnp.cumsum(y, 0), lax.cummax(y, 0), y[1::3]))
        y = X[:7] - X[:7].mean(0)
        assert_close(f(X[:7]), (np.cumsum(y, 0), np.maximum.accumulate(y, 0), y[1::3]), rtol=1e-11, atol=1e-11)


def test_explanation_names_what_is_whole():
    """What moves numbers along rows, and not what does so along the pixels of images."""

    def pooled(x, k):
        out = lax.conv_general_dilated(x, k, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return lax.reduce_window(out, -np.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID").mean()

    with group_of("devices", 3):
        moving = synk.function(CONSTRUCTS["two"], reduce="first", engine="jit")
        assert moving.explain(X[:7]).whole == ["cumsum", "cummax"]
        images, kernel = np.ones((13, 8, 8, 3), np.float32), np.ones((3, 3, 3, 2), np.float32)
        slopes = synk.function(jax.grad(pooled, 1), ["x"], reduce="mean", engine="jit")
        assert slopes.explain(images, kernel).whole == []
        # Each device has ceil(13 / 3) images.
        assert "[13,8,8,3]" not in str(slopes.compile(images, kernel).as_text())
