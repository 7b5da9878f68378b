"""Guards of JAX's against transfers: synk's are asked for, so that only guards against explicit ones forbid them."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import synk
import synk.train

from ..helpers import slow

X = np.arange(22, dtype=np.float32).reshape(11, 2)


def of_process(level):
    """The guard for every thread."""
    stack = contextlib.ExitStack()
    jax.config.update("jax_transfer_guard", level)
    stack.callback(jax.config.update, "jax_transfer_guard", None)
    return stack


@pytest.mark.smoke
@pytest.mark.parametrize("guard", [slow(jax.transfer_guard), of_process])
def test_everything_works_under_disallow(group, guard, tmp_path):
    """Fresh and warm: rows, indexes, numbers, slices, loops with a thread, variables, collectives, checkpoints, training."""
    w = synk.shared(np.float32(2), name="w")
    f = synk.function(lambda x, rate: (x * rate * w.value).sum(0), inputs=["x"])
    data = [X, synk.data(X), synk.data(X, place="scatter"), synk.data(X, place="broadcast"), jnp.asarray(X)]
    rates = (0.5, np.float32(0.5), jnp.float32(0.5))
    step = synk.train.step(lambda p, x: ((x @ p) ** 2).mean(), np.ones(2, np.float32), optax.sgd(0.001))
    for _ in range(2):
        with guard("disallow"):
            found = [f(x, rate) for x in data for rate in rates]
            picked = [f(x, 0.5, batch=[3, 1, 4], num_slices=2) for x in data]
            looped = list(f.iterate(X, 0.5, batches=[[1, 2], slice(3, 8)]))
            streamed = list(f.stream([(X[:4], 0.5), (X, np.float32(1))]))
            over = f.over(X, 0.5, batches=synk.minibatches(11, 4, shuffle=False))
            brought = [f(x, 0.5) for x in synk.prefetch([X[:4], X])]
            serial = f.serial(X, 0.5)
            f.check(X, 0.5)
            assert f.blame(X, 0.5) is None
            step(X)
            synk.all_reduce(w), synk.broadcast(w, np.float32(2)), synk.check_replicas(w, step.params)
            synk.save(tmp_path, {"w": w}, step=1)
            synk.load(tmp_path, {"w": w})
            gathered, value = synk.gather(w), w.value
        whole, few_rows = X.sum(0), X[[3, 1, 4]].sum(0)
        assert all((each == whole).all() for each in [*found, over, serial, brought[1]])
        assert all((each == few_rows).all() for each in picked)
        np.testing.assert_array_equal(looped, [X[[1, 2]].sum(0), X[3:8].sum(0)])
        np.testing.assert_array_equal(streamed, [X[:4].sum(0), 2 * whole])
        assert float(value) == 2 and (np.asarray(gathered) == 2).all()


def test_vmap_works_under_disallow(group):
    """Of NumPy's and JAX's arrays, fresh and warm. (What an eager grad or an outer jit transfers is JAX's own.)"""
    f = synk.function(lambda x, rate: (x * rate).sum(0), inputs=["x"])
    rates = jnp.arange(3, dtype=jnp.float32)
    there = jnp.asarray(X)
    for _ in range(2):
        with jax.transfer_guard("disallow"):
            mapped = [jax.vmap(lambda rate, x=x: f(x, rate))(rates) for x in (X, there)]
        for got in mapped:
            np.testing.assert_array_equal(got, np.arange(3)[:, None] * X.sum(0))


def test_explicit_ones_stay_forbidden(group):
    """JAX's own error, and nothing is lost."""
    w = synk.shared(np.zeros(2, np.float32), name="w")

    @synk.function(inputs=["x"])
    def total(x):
        return x.sum(0)

    @total.then
    def total(found):
        w.value = w.value + found

    total(X)
    for _ in range(2):
        with jax.transfer_guard("disallow_explicit"), pytest.raises(Exception, match="Disallowed host-to-device"):
            total(X)
    np.testing.assert_array_equal(w.value, X.sum(0))
    total(X)
    np.testing.assert_array_equal(w.value, 2 * X.sum(0))
