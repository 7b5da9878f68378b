"""Variables in shards, as programs use them: the answers are those of whole variables."""

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
