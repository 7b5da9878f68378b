"""Which argument is scattered, broadcast or a constant, whatever is wrapped around the function."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import synk

from ..helpers import group_of

DATA = np.arange(4, dtype=np.float32)
X = np.arange(4, dtype=np.float32) / 4


def of_row(x, data):
    """A row, and what is the same for all rows."""
    return x + data.sum()


def of_rows(x, data, scale=1.0):
    return (x + data.sum()) * scale


def passed_on(fn):
    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        return fn(*args, **kwargs)

    return wrapper


class Model:
    def __init__(self, data):
        self.method = functools.partial(self.of_rows, data=data)

    def of_rows(self, x, data):
        return x + data.sum()

    def __call__(self, x, scale=2.0):
        return x * scale


row, rows = functools.partial(of_row, data=DATA), functools.partial(of_rows, data=DATA)
WAYS = {
    "partial": rows,
    "partial of partial": functools.partial(rows, scale=2.0),
    "by position": functools.partial(lambda data, x: x + data.sum(), DATA),
    "vmap": jax.vmap(row),
    "jit": jax.jit(rows),
    "jit of vmap": jax.jit(jax.vmap(row)),
    "vmap of jit": jax.vmap(jax.jit(row)),
    "checkpoint": jax.checkpoint(rows),
    "wraps": passed_on(rows),
    "wraps of vmap": passed_on(jax.vmap(row)),
    "vmap of wraps": jax.vmap(passed_on(row)),
    "partial of jit": functools.partial(jax.jit(of_rows), data=DATA),
    "partial of wraps": functools.partial(passed_on(of_rows), data=DATA),
    "jit of partial of jit": jax.jit(functools.partial(jax.jit(of_rows), data=DATA, scale=3.0)),
    "method": Model(DATA).method,
    "jit of a method": jax.jit(Model(DATA).method),
    "object": Model(DATA),
    "filter_jit": eqx.filter_jit(rows),
    "filter_vmap": eqx.filter_vmap(row),
    "nnx.jit": nnx.jit(rows),
    "named_call": jax.named_call(rows, name="rows"),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_a_partial_has_bound_is_a_constant(way):
    """As many numbers as rows, or not; called, serially, in slices and under jit."""
    fn = WAYS[way]
    with group_of("devices", 2):
        f = synk.function(fn, reduce="concat")
        for x in (X, X[:3], X):
            wanted = fn(x)
            for got in (f(x), f.serial(x), f(x, num_slices=2), jax.jit(f)(x)):
                np.testing.assert_allclose(got, wanted)
        f.check(X)


def test_defaults_behind_a_wrapper_are_as_the_wrapper_has_them():
    """jax.vmap does not map a default; one of jax.jit is dealt out as that of the function itself."""

    def of_row(x, data=DATA):
        return x + data.sum()

    def of_rows(x, y=DATA):
        return x * y

    with group_of("devices", 2):
        f = synk.function(jax.vmap(of_row), reduce="concat")
        np.testing.assert_allclose(f(X), X + 6)
        f.check(X)
        for fn in (of_rows, jax.jit(of_rows)):
            f = synk.function(fn, reduce="concat")
            np.testing.assert_allclose(f(X), X * DATA)
            f.check(X)


def test_parameters_named_like_options_come_by_position():
    """The keyword is the option's; items of a loader name parameters."""
    with group_of("devices", 2):

        @synk.function(inputs=["batch"], reduce="concat")
        def train_step(state, batch, rtol=2.0):
            return batch["x"] * state * rtol

        batch = {"x": X}
        np.testing.assert_allclose(train_step(1.0, batch), X * 2)
        np.testing.assert_allclose(train_step(1.0, batch, batch=[3, 0, 1]), X[[3, 0, 1]] * 2)
        train_step.check(1.0, batch, batch=3)
        np.testing.assert_allclose(train_step.serial(1.0, batch, 3.0, batch=slice(1, 4)), X[1:] * 3)
        items = [{"state": 2.0, "batch": batch}, {"state": 1.0, "batch": {"x": X[:3]}}]
        for got, wanted in zip(train_step.stream(items), (X * 4, X[:3] * 2), strict=True):
            np.testing.assert_allclose(got, wanted)
        with pytest.raises(
            TypeError, match=r"missing a required argument: 'batch'.* batch comes by position; batch= is"
        ):
            train_step(1.0, batch=batch)
        with pytest.raises(TypeError, match="num_slices is an option of other ways"):
            train_step.serial(1.0, batch, num_slices=2)
        only = synk.function(lambda batch, /: jnp.sum(batch))
        assert float(only(X)) == X.sum()
        with pytest.raises(ValueError, match="'batch' comes by keyword alone"):
            synk.function(lambda x, *, batch: x)
