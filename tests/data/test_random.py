"""Random numbers: noise per row does not depend on who runs the row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import synk

from ..helpers import assert_close, group_of


def dropped(x, keys):
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5))(keys)
    return x * keep.astype(x.dtype), keep.mean(dtype=jnp.float32)


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_noise_per_row_is_the_same_for_any_group(make):
    """Over replicas, slices and batches every row keeps its own."""
    x, keys = np.arange(1.0, 10, dtype=np.float32), synk.row_keys(make(0), 9)
    f = synk.function(dropped, outputs=("concat", "mean"))
    want = jax.tree.map(np.asarray, dropped(x, keys))
    for kind, n, slices in [("devices", 1, 1), ("devices", 4, 1), ("devices", 4, 2), ("simulated", 8, 3)]:
        with group_of(kind, n):
            assert_close(f(x, keys, num_slices=slices), want)
            assert_close(f(x, keys, batch=[8, 1, 4, 1, 0])[0], want[0][[8, 1, 4, 1, 0]])


def test_keys_do_not_depend_on_how_many():
    """Row i has one key, however many rows there are; no two rows share one."""
    few, many = synk.row_keys(jax.random.key(3), 5), synk.row_keys(jax.random.key(3), 50)
    assert (few == many[:5]).all()
    assert len(np.unique(jax.random.key_data(many), axis=0)) == 50


def test_a_broadcast_key_gives_every_replica_the_same_noise(four):
    """And `fold_in` with the rank gives each its own, which depends on how many there are."""
    same = synk.function(lambda key: jax.random.uniform(key), ["broadcast"], "stack")
    own = synk.function(lambda key: jax.random.uniform(jax.random.fold_in(key, synk.rank())), ["broadcast"], "stack")
    key = jax.random.key(0)
    assert len(set(same(key).tolist())) == 1
    assert_close(own(key), np.stack([jax.random.uniform(jax.random.fold_in(key, rank)) for rank in range(4)]))


def test_rank_and_size_inside(four):
    """`rank` is a traced int32, `size` a number; the serial program has rank 0 of 1."""
    f = synk.function(lambda x: (synk.rank(), x.sum() * synk.size()), outputs=("stack", "sum"))
    for rows in (8, 9):
        ranks, total = f(np.ones(rows, np.float32))
        assert (ranks.dtype, ranks.tolist(), float(total)) == (jnp.int32, [0, 1, 2, 3], 4 * rows)
        assert_close(f.serial(np.ones(rows, np.float32)), (np.array([0]), float(rows)))
    assert synk.size() == 4
