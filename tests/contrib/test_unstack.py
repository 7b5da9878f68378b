"""Stacked states of pmap."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import synk

from ..helpers import assert_same, needs_devices

pytestmark = pytest.mark.smoke


def state(stack):
    return {
        "w": stack(np.arange(6, dtype=np.float32).reshape(2, 3)),
        "n": stack(np.int32(3)),
        "b": (stack(np.ones(1, jnp.bfloat16)),),
    }


def test_a_state_on_the_host():
    """One entry of each leaf, of its own dtype; keys stay keys."""
    assert_same(synk.contrib.unstack(state(lambda leaf: np.stack([leaf] * 4))), state(lambda leaf: leaf))
    keys = jnp.stack([jax.random.key(3)] * 2)
    assert_same(
        jax.random.key_data(synk.contrib.unstack({"key": keys})["key"]),
        np.asarray(jax.random.key_data(jax.random.key(3))),
    )


@needs_devices(4)
def test_a_state_of_pmap():
    """As jax.pmap returns it, which lies on its devices; a training step takes it from there."""
    stacked = jax.pmap(
        lambda i: state(lambda leaf: jnp.asarray(leaf) + 0 * i.astype(leaf.dtype)), devices=jax.devices()[:4]
    )(jnp.arange(4))
    plain = synk.contrib.unstack(stacked)
    assert_same(plain, state(lambda leaf: leaf))
    with synk.init(2):
        assert_same(synk.shared(plain).value, state(lambda leaf: leaf))
    differing = jax.pmap(lambda i: {"w": jnp.zeros(3), "i": i}, devices=jax.devices()[:4])(jnp.arange(4))
    with pytest.raises(ValueError, match=r"entries of leaf\['i'\] differ"):
        synk.contrib.unstack(differing)
    assert int(synk.contrib.unstack(differing, check=False)["i"]) == 0


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"a": np.ones((4, 2)), "b": np.ones((3, 2))}, r"leaf\['b'\] has 3 entries on axis 0, \['a'\] 4"),
        ({"a": np.ones((4, 2)), "b": np.float32(1)}, r"leaf\['b'\] has no axis 0"),
        (np.ones((0, 2)), "leaf has 0 entries"),
        ([np.array([0.0, -0.0], np.float32)], r"entries of leaf\[0\] differ"),
    ],
)
def test_what_is_no_stacked_state(tree, words):
    """The error names the leaf."""
    with pytest.raises(ValueError, match=words):
        synk.contrib.unstack(tree)


def test_nan_is_equal_to_itself():
    """Bits are compared."""
    assert np.isnan(synk.contrib.unstack(np.full((3, 1), np.nan, np.float32))[0])
