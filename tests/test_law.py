"""The law: for any rows, replicas, slices and batch the parallel answer is the serial one. The oracle is NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import synk

from .helpers import GROUPS, SERIAL, assert_close, calls, chosen, few, group_of, numbers, parts_of, slow
from .helpers import combined as by_op

pytestmark = pytest.mark.smoke

MORE = [("devices", 4), ("simulated", 8)]
everywhere = pytest.mark.parametrize(("kind", "n"), [*GROUPS, *(slow(*which) for which in MORE)])


@functools.partial(synk.function, outputs={**{op: op for op in SERIAL}, "weighted": "mean"})
def statistics(x):
    weight = (x[:, 1] > 0).sum().astype(jnp.float32)
    masked = jnp.where(x[:, 1] > 0, x[:, 0], 0).sum()
    return {**by_op(x), "weighted": synk.Weighted(masked / weight, weight)}


def by_numpy(x):
    """The same statistics of all rows at once."""
    positive = x[x[:, 1] > 0, 0]
    return {**by_op(x), "weighted": positive.mean() if len(positive) else np.nan}


@everywhere
@given(data=st.data())
@few(12)
def test_values(kind, n, data):
    """Every op gives what NumPy gives for the selected rows."""
    rows, batch, slices = data.draw(calls(n))
    x = numbers(rows)
    with group_of(kind, n):
        got = statistics(x, batch=batch, num_slices=slices)
    assert_close(got, by_numpy(chosen(x, batch).astype(np.float64)))


@functools.partial(synk.function, inputs={"w": "broadcast"}, outputs=("mean", {"w": "mean", "x": "concat"}))
def loss_and_gradients(w, x, y):
    def loss(w, x):
        return jnp.mean((x @ w - y) ** 2)

    value, (to_w, to_x) = jax.value_and_grad(loss, (0, 1))(w, x)
    return value, {"w": to_w, "x": to_x * len(x)}  # of each row's own loss


@everywhere
@given(data=st.data())
@few(6)
def test_gradients_inside(kind, n, data):
    """A gradient taken in the function, by inputs and by broadcast values, is that of all rows' mean loss."""
    rows, batch, slices = data.draw(calls(n))
    w, x, y = np.array([0.5, -1], np.float32), numbers(rows) / 16, numbers(rows, 1, seed=1)[:, 0] / 16
    with group_of(kind, n):
        got = loss_and_gradients(w, x, y, batch=batch, num_slices=slices)
    x, y = chosen(x, batch).astype(np.float64), chosen(y, batch)
    off = x @ w - y
    assert_close(got, (np.mean(off**2), {"w": 2 * off @ x / len(x), "x": 2 * off[:, None] * w}))


@functools.partial(synk.function, inputs={"w": "broadcast"}, outputs=("sum", "mean", "max", "min", "prod", "concat"))
def combined(w, x):
    z = x * w[None]
    return z.sum(), z.mean(), z.max(), z.min(), (1 + z / 64).prod(), z


@everywhere
@given(data=st.data())
@few(3)
def test_gradients_through(kind, n, data):
    """A gradient taken through the call, by every op at once, reaches rows and broadcast values as in NumPy."""
    rows, batch, slices = data.draw(calls(n))
    w, x = np.array([0.5, -1], np.float32), numbers(rows)
    factors = np.arange(2.0 * len(chosen(x, batch)), dtype=np.float32).reshape(-1, 2) / 64

    def loss(w, x):
        *values, z = combined(w, x, batch=batch, num_slices=slices)
        return sum(c * v for c, v in zip((1.0, 2.0, 3.0, 4.0, 5.0), values, strict=True)) + jnp.sum(factors * z)

    with group_of(kind, n):
        to_w, to_x = jax.grad(loss, (0, 1))(jnp.asarray(w), jnp.asarray(x))
    part = chosen(x, batch).astype(np.float64)
    z = part * w
    by_z = 1 + 2 / z.size + 3 * ties(z, z.max()) + 4 * ties(z, z.min()) + factors
    by_z = by_z + 5 / 64 * (1 + z / 64).prod() / (1 + z / 64)
    by_x = np.zeros(x.shape)
    np.add.at(by_x, chosen(np.arange(rows), batch), by_z * w)
    assert_close(to_w, (by_z * part).sum(0), rtol=1e-4, atol=1e-4)
    assert_close(to_x.sum(0), by_x.sum(0), rtol=1e-4, atol=1e-4)
    if len(np.unique(part, axis=0)) == len(part):  # how equal rows share the gradient of max depends on who runs them
        assert_close(to_x, by_x, rtol=1e-4, atol=1e-4)


def ties(z, extreme):
    """Where z has its extreme, in equal shares."""
    return (z == extreme) / (z == extreme).sum()


SLICES = ("mean", "max", "min", "last", "add")


@functools.cache
def trainer(kind, n):
    """A function of one group that updates a variable in then, and one for each way to combine slices in fn."""
    total = synk.shared(np.zeros(2, np.float32), name="total")
    own = {slices: synk.shared(np.ones(2, np.float32), name=slices) for slices in SLICES}

    @synk.function(reduce="mean")
    def step(x):
        for slices, variable in own.items():
            variable.update(variable.value * 0.5 + x.sum(0), slices=slices)
        return x.mean(0) - total.value

    @step.then
    def step(mean):
        total.value = total.value * 0.5 + mean
        return total.value

    return step, total, own


def slices_by_numpy(parts, old, slices):
    """One replica's new value, given its slices' rows."""
    new = [old * 0.5 + part.sum(0) for part in parts]
    if not new:
        return old
    return {
        "mean": lambda: np.average(new, axis=0, weights=[len(part) for part in parts]),
        "max": lambda: np.max(new, 0),
        "min": lambda: np.min(new, 0),
        "last": lambda: new[-1],
        "add": lambda: old + sum(value - old for value in new),
    }[slices]()


@everywhere
@given(data=st.data())
@few(7)
def test_updates(kind, n, data):
    """Updates in then are those of all rows on every replica; those in fn, of each replica's own slices."""
    rows, batch, slices = data.draw(calls(n))
    x, old = numbers(rows), np.array([1, -2], np.float32)
    with group_of(kind, n):
        step, total, own = trainer(kind, n)
        synk.broadcast([total, *own.values()], [old] * 6)
        written = step(x, batch=batch, num_slices=slices)
        part = chosen(x, batch).astype(np.float64)
        assert_close(written, part.mean(0) - old * 0.5)
        assert_close(total.value, written)
        synk.check_replicas(total)
        for rank, parts in enumerate(parts_of(part, n, slices)):
            for name, variable in own.items():
                assert_close(variable.get_value(rank), slices_by_numpy(parts, old, name))
