"""Variables in shards, as programs use them: the answers are those of whole variables."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import synk

from ..helpers import group_of, slow

BITS = np.random.default_rng(3).integers(-(2**31), 2**31 - 1, (131, 131)).astype(np.int32)


@pytest.mark.parametrize("group", [("devices", 3), slow(("simulated", 3)), slow(("devices", 8))])
def test_reductions_by_bits(group):
    """Reductions of integers by `and`, `or` and `xor` are bit by bit, with no filler among the numbers."""
    with group_of(*group):
        w = synk.shared(BITS, sharded=True)
        ufuncs = jnp.bitwise_and, jnp.bitwise_or, jnp.bitwise_xor

        @synk.function(reduce="same")
        def reductions(x):
            return [ufunc.reduce(w.value | 0x0F0F0, axis=None) for ufunc in ufuncs] + [
                jnp.all(w.value),
                jnp.any(w.value < 0),
            ]

        wanted = [getattr(np, ufunc.__name__).reduce(BITS | 0x0F0F0, axis=None) for ufunc in ufuncs]
        assert [*map(int, reductions(np.ones(9, np.float32)))] == [*wanted, bool(BITS.all()), True]


def test_captured_arrays():
    """A function that reads a variable in shards may close over arrays, in a function that it calls too."""
    with group_of("devices", 2):
        w, table = synk.shared(np.eye(150, dtype=np.float32), sharded=True), jnp.arange(150.0)[None]
        f = synk.function(lambda x: jax.jit(lambda y: y * table)(x @ w.value) + table, reduce="concat")
        np.testing.assert_array_equal(f(np.ones((4, 150), np.float32)), np.tile(2 * np.arange(150.0), (4, 1)))


@pytest.mark.parametrize("group", [("devices", 2), slow(("simulated", 3))])
def test_branches_by_an_output_that_is_not_the_same(group):
    """A branch of `then` is one for all replicas, also where they disagree: none waits for a gather of the others."""
    matrix = np.eye(150, dtype=np.float32) * 3
    with group_of(*group):
        w = synk.shared(matrix, sharded=True)

        @synk.function(reduce="same")
        def step(x):
            return x.sum()

        @step.then
        def step(total):
            w.value = jax.lax.cond(total > 0, lambda v: v @ v, lambda v: v, w.value)

        step(np.array([1, 1, -1, -1, -1], np.float32))
        np.testing.assert_array_equal(w.value, matrix @ matrix)


def test_the_jit_engine_says_what_to_leave_out():
    """A variable in shards is refused, and the error names the option that made it so."""
    with group_of("devices", 2):
        w = synk.shared(np.ones((150, 150), np.float32), sharded=True)
        with pytest.raises(ValueError, match=r'shared_\d+: .* engine="jit" .* without sharded=True'):
            synk.function(lambda x: x @ w.value, reduce="concat", engine="jit")(np.ones((4, 150), np.float32))
