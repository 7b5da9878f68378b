"""Modules of flax, optax and equinox: normalisation over rows that do not divide, optimisers in then."""

import equinox
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import synk

from ..helpers import assert_close, numbers, parts_of


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("rows", [8, 17, 3])
def test_batch_norm_sees_real_rows_alone(four, rows, slices):
    """At 4n + 1 rows no part holds a filler: each is normalised by its own rows, and statistics combine by rows."""
    norm = nn.BatchNorm(use_running_average=False, momentum=0.0)
    x = numbers(rows)
    state = norm.init(jax.random.key(0), x)

    @synk.function(outputs=("concat", "mean"))
    def f(x):
        y, new = norm.apply(state, x, mutable=["batch_stats"])
        return y, new["batch_stats"]

    y, statistics = f(x, num_slices=slices)
    parts = [part for mine in parts_of(x, 4, slices) for part in mine]
    want = np.concatenate([(p - p.mean(0)) / np.sqrt(p.var(0) + 1e-5) for p in parts])
    assert_close(y, want, rtol=1e-4, atol=1e-4)
    weights = [len(p) for p in parts]
    assert_close(statistics["mean"], np.average([p.mean(0) for p in parts], axis=0, weights=weights))
    assert_close(statistics["var"], np.average([p.var(0) for p in parts], axis=0, weights=weights), rtol=1e-4)


def test_batch_norm_over_all_replicas(four):
    """With the axis "replica" the statistics are those of all rows, in forward and backward pass."""
    norm = nn.BatchNorm(use_running_average=False, axis_name="replica")
    x, t = numbers(8), numbers(8, seed=1)
    state = nn.BatchNorm(use_running_average=False).init(jax.random.key(0), x)

    def loss(params, norm, x, t):
        y, _ = norm.apply({**state, "params": params}, x, mutable=["batch_stats"])
        return jnp.mean((y - t) ** 2)

    f = synk.function(lambda x, t: jax.value_and_grad(loss)(state["params"], norm, x, t), reduce="mean")
    want = jax.value_and_grad(loss)(state["params"], nn.BatchNorm(use_running_average=False), x, t)
    assert_close(f(x, t), jax.tree.map(np.asarray, want), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [16, 17])
def test_flax_and_optax_train_as_serially(four, rows):
    """Parameters and the optimiser's state after three steps are those of one device."""
    model, tx = nn.Dense(3), optax.adam(1e-2)
    x, y = numbers(rows) / 8, np.arange(rows) % 3
    start = model.init(jax.random.key(0), x)
    params, state = synk.shared(start, name="params"), synk.shared(tx.init(start), name="state")

    def loss(params, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, x), y).mean()

    @synk.function(reduce="mean")
    def step(x, y):
        return jax.value_and_grad(loss)(params.value, x, y)

    @step.then
    def step(value, gradients):
        updates, state.value = tx.update(gradients, state.value, params.value)
        params.value = optax.apply_updates(params.value, updates)
        return value

    @jax.jit
    def by_jax(params, state):
        value, gradients = jax.value_and_grad(loss)(params, x, y)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    want = start, tx.init(start)
    for _ in range(3):
        value = step(x, y)
        *want, wanted = by_jax(*want)
        assert_close(value, wanted)
    assert_close(params.value, want[0], rtol=1e-4, atol=1e-5)
    assert_close(jax.tree.leaves(state.value), jax.tree.leaves(want[1]), rtol=1e-3, atol=1e-5)
    synk.check_replicas(params, state)


def test_equinox_modules(four):
    """A module is a tree of arrays; its functions stay outside, and the message says how."""
    model = equinox.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    with pytest.raises(TypeError, match=r"model\.activation.* equinox.partition"):
        synk.shared(model, name="model")
    arrays, static = equinox.partition(model, equinox.is_array)
    held = synk.shared(arrays, name="model")
    f = synk.function(lambda x: jax.vmap(equinox.combine(held.value, static))(x), reduce="concat")
    assert_close(f(numbers(9)), np.asarray(jax.vmap(model)(numbers(9))))


def test_nnx_modules_that_share_a_variables_arrays(four):
    """A merged model changes them in place, which would be lost; the message names nnx.merge with copy=True."""
    graph, state = nnx.split(nnx.Linear(2, 1, rngs=nnx.Rngs(0)))
    both = synk.shared({"model": state}, name="both")

    @synk.function(outputs="first")
    def train(x):
        model = nnx.merge(graph, both.value["model"])
        assert model.bias is not None
        model.bias.set_value(model.bias + 1)
        return model(x).sum()

    with pytest.raises(synk.SynkError, match=r"both.value\['model'\]\['bias'\].* nnx.merge\(.*, copy=True\)"):
        train(numbers(9))
