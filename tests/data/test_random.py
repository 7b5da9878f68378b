"""Random numbers: noise per row does not depend on who runs the row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import synk

from ..helpers import assert_close, assert_same, group_of, numbers, slow


def dropped(x, keys):
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5))(keys)
    return x * keep.astype(x.dtype), keep.mean(dtype=jnp.float32)


@pytest.mark.parametrize("make", [jax.random.key, slow(jax.random.PRNGKey)])
def test_noise_per_row_is_the_same_for_any_group(make):
    """Over replicas, slices and batches every row keeps its own."""
    x, keys = np.arange(1.0, 10, dtype=np.float32), synk.row_keys(make(0), 9)
    f = synk.function(dropped, outputs=("concat", "mean"))
    want = jax.tree.map(np.asarray, dropped(x, keys))
    for kind, n, slices in [("devices", 1, 1), ("devices", 4, 1), ("devices", 4, 2), ("simulated", 8, 3)]:
        with group_of(kind, n):
            assert_close(f(x, keys, num_slices=slices), want)
            assert_close(f(x, keys, batch=[8, 1, 4, 1, 0])[0], want[0][[8, 1, 4, 1, 0]])


@pytest.mark.slow
@pytest.mark.smoke
def test_keys_of_a_part_are_those_of_its_rows():
    """Inside a function: as outside, warm and fresh, uneven, sliced, serially, under `jit`, of a batch its own rows."""
    x, key = np.arange(1.0, 10, dtype=np.float32), jax.random.key(4)
    f = synk.function(lambda x, key: dropped(x, synk.row_keys(key)), ["scatter", "broadcast"], ("concat", "mean"))
    want = jax.tree.map(np.asarray, dropped(x, synk.row_keys(key, 9)))
    assert_close(f.serial(x, key), want)
    for kind, n, slices in [("devices", 2, 1), ("devices", 4, 2), ("simulated", 3, 1)] * 2:
        with group_of(kind, n):
            assert_close(f(x, key, num_slices=slices), want)
            assert_close(jax.jit(f)(x, key), want)
            f.check(x, key, num_slices=slices)
            assert_close(f(x, key, batch=[8, 1, 4])[0], dropped(x[[8, 1, 4]], synk.row_keys(key, 3))[0])


def test_keys_of_so_many_rows_are_made_outside():
    """On a replica they would repeat; `then` has no rows, and may."""
    f = synk.function(lambda x, key: dropped(x, synk.row_keys(key, len(x)))[1], ["scatter", "broadcast"], "mean")
    with pytest.raises(ValueError, match=r"synk.row_keys\(key, \d\) gives the rows of every replica the same keys"):
        f(np.ones(4, np.float32), jax.random.key(0))
    with pytest.raises(synk.SynkError, match="there are rows only inside a synk function"):
        synk.row_keys(jax.random.key(0))
    with pytest.raises(synk.SynkError, match="it has no scattered input, so no rows"):
        synk.function(lambda key: synk.row_keys(key), ["broadcast"], "first")(jax.random.key(0))
    with pytest.raises(TypeError, match="give how many, at least 1, such as len"):
        synk.row_keys(jax.random.key(0), np.ones(3))
    last = synk.function(
        lambda x, key: x.sum(), ["scatter", "broadcast"], then=lambda total, key: synk.row_keys(key, 2)
    )
    assert last(np.ones(4, np.float32), jax.random.key(0)).shape == (2,)


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


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_keys_whose_draws_depend_on_others(four, impl):
    """Refused, typed and raw, inside and outside."""
    f = synk.function(lambda x, key: x + jax.vmap(jax.random.normal)(synk.row_keys(key)), ["x"], "concat")
    typed = jax.random.key(0, impl=impl)
    for call in (lambda: f(np.zeros(8, np.float32), typed), lambda: synk.row_keys(typed, 8)):
        with pytest.raises(ValueError, match=f"an {impl} key draws under jax.vmap depends .*threefry2x32"):
            call()
    with jax.default_prng_impl(impl), pytest.raises(ValueError, match="depends on the other rows"):
        synk.row_keys(jax.random.PRNGKey(0), 8)


def part_noise():
    """A number of noise for each part, in row order."""
    return synk.function(
        lambda x, key: jax.random.normal(synk.part_key(key), (1,)), ["x"], lambda parts: parts[:, 0], name="noise"
    )


@pytest.mark.parametrize("key", [jax.random.key(3), jax.random.PRNGKey(3)], ids=["typed", "raw"])
@pytest.mark.parametrize("slices", [1, 3])
def test_each_part_has_its_own_noise(group, key, slices):
    """No two parts, of any replica and slice, see the same noise."""
    noise = np.asarray(part_noise()(numbers(9 * synk.size()), key, num_slices=slices))
    assert len(np.unique(noise)) == slices * synk.size() == len(noise)


@pytest.mark.parametrize("slices", [1, 3])
def test_a_part_has_the_same_noise_again(group, slices):
    """Of another function, over other values, under jit: the noise depends on the key and the part."""
    f, key, rows = part_noise(), jax.random.key(0), 9 * synk.size()
    want = f(numbers(rows), key, num_slices=slices)
    assert_same(part_noise()(numbers(rows, seed=1), key, num_slices=slices), want)
    assert_same(jax.jit(lambda x, key: f(x, key, num_slices=slices))(numbers(rows), key), want)
    assert not np.any(f(numbers(rows), jax.random.key(1), num_slices=slices) == want)


def test_part_key_outside(group):
    """Outside a function there are no parts."""
    with pytest.raises(synk.SynkError, match="part_key"):
        synk.part_key(jax.random.key(0))
