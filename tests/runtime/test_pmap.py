"""`engine="pmap"`: the same programs through jax.pmap, equal bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import synk

from ..helpers import SERIAL, combined, group_of, numbers, slow

pytestmark = pytest.mark.smoke

OPS = ({op: op for op in SERIAL}, "mean")


def statistics(x):
    return combined(8 * jnp.sin(x)), synk.Weighted(jnp.sin(x).mean(), (x > 0).sum())


def same_bits(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)
    assert all(a.sharding == b.sharding for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


@pytest.mark.parametrize(("rows", "slices"), [(8, 1), slow(9, 1), slow(2, 1), (31, 3)])
def test_outputs(group, rows, slices):
    """Every op, rows that divide and others, whole and in slices."""
    both = [synk.function(statistics, outputs=OPS, engine=engine) for engine in ("shard_map", "pmap")]
    same_bits(*[f(numbers(rows), num_slices=slices) for f in both])


@pytest.mark.parametrize("rows", [8, 9])
def test_training(group, rows):
    """Gradients, variables updated in fn and in then, typed keys, donation."""
    results = []
    for engine in ("shard_map", "pmap"):
        w, key = synk.shared(np.ones(2, np.float32)), synk.shared(jax.random.key(0))
        own = synk.shared(np.float32(0))

        def step(x, y, own=own, w=w):
            own.value = own.value + x.sum()
            return jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w) - y) ** 2))(w.value)

        def then(loss, gradient, rate, w=w, key=key):
            key.value, noise = jax.random.split(key.value)
            w.value = w.value - rate * gradient + 0.1 * jax.random.normal(noise, (2,))
            return loss

        f = synk.function(lambda x, y, rate, step=step: step(x, y), ["x", "y"], reduce="mean", then=then, engine=engine)
        losses = [f(numbers(rows), numbers(rows)[:, 0], 0.1) for _ in range(3)]
        results.append([losses, w.value, jax.random.key_data(key.value), synk.gather(own)])
        assert f.stats.compilations == 1 or rows == 9
    same_bits(*results)


def test_stack_first_and_callables():
    """The ops without a law, too."""
    both = []
    with group_of("devices", 4):
        for engine in ("shard_map", "pmap"):
            ops = ("stack", None, lambda parts: jnp.median(parts))
            f = synk.function(lambda x: (jnp.sin(x).sum(), jnp.cos(x).sum(), x.mean()), outputs=ops, engine=engine)
            both.append([f(numbers(8)), f(numbers(9)), f(numbers(2))])
    same_bits(*both)


def test_rank_and_communication_inside():
    """The axis has the same name and the ranks the same order."""
    with group_of("devices", 4):
        f = synk.function(
            lambda x: synk.all_reduce(x.sum()) + synk.rank().astype(x.dtype), reduce="stack", engine="pmap"
        )
        np.testing.assert_allclose(f(numbers(8)), numbers(8).sum() / 4 + np.arange(4))


def test_under_an_outer_jit():
    """A composed call is the same operation for both engines."""
    with group_of("devices", 4):
        f = synk.function(lambda w, x: jnp.mean((x @ w) ** 2), {"w": "broadcast"}, "mean", engine="pmap")
        got = jax.jit(jax.grad(f))(jnp.ones(2), numbers(9))
    x = numbers(9)
    np.testing.assert_allclose(got, 2 * x.T @ (x @ np.ones(2)) / 9, rtol=1e-5)


def test_simulated():
    """On simulated replicas the engine makes no difference."""
    with group_of("simulated", 4):
        same_bits(
            *[synk.function(statistics, outputs=OPS, engine=engine)(numbers(9)) for engine in ("shard_map", "pmap")]
        )


def test_pmap_without_mapped_arguments():
    """The pmap engine runs what has no rows."""
    with synk.init(4):
        ranks = synk.function(lambda: synk.rank(), reduce="stack", engine="pmap")()
        np.testing.assert_array_equal(ranks, [0, 1, 2, 3])
