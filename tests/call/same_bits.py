"""The same bits for any replicas, slices and batches, and in the serial run; run by test_blocks.py, as XLA compiles by default."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import synk
import synk.train
from synk import stats

from ..helpers import group_of
from .test_blocks import CONSTANT, RANDOM, W, X, Y, cross_entropy, digest

GROUPS = [(("devices", 5), 8), (("simulated", 3), 8)]  # with their blocks


def outputs(x, y, params):
    loss, grads = jax.value_and_grad(cross_entropy)(params, x, y)
    # What needs no row, and what XLA could compute beforehand.
    decay = jax.grad(
        lambda p: sum((q**2).sum() for q in jax.tree.leaves(p)) * 1e-2 + ((x @ p["in"]) @ CONSTANT).mean()
    )(params)
    weights = y.astype(jnp.float32)
    return {
        "loss": loss, "grads": grads, "decay": decay, "sum": x.sum(0), "half": jnp.abs(x).astype(jnp.bfloat16).mean(0), "max": x.max(0), "rows": x @ params["in"],
        "count": jnp.int32(len(x)), "weighted": synk.Weighted((x * weights[:, None]).sum(0) / y.sum().astype(jnp.float32), y.sum()), "product": jnp.prod(x[:, :3], 0),
        "std": stats.std(x), "top": stats.top_k(x[:, 0], 2), "numbers": synk.row_numbers(), "any": (x > 2).any(0),
    }  # fmt: skip


OPS = {
    "loss": "mean", "grads": "mean", "decay": "mean", "sum": "sum", "half": "mean", "max": "max", "rows": "concat", "count": "sum",
    "weighted": "mean", "product": "prod", "std": "merge", "top": "merge", "numbers": "concat", "any": "any",
}  # fmt: skip
MAPPED = {block: synk.function(outputs, inputs=["x", "y"], outputs=OPS, blocks=block) for block in (None, 8)}
BITS = {}  # of each kind of call, whichever group made it first


@functools.cache
def without_blocks():
    """To rounding the same, but for sums of 16 bits."""
    found = MAPPED[None].serial(X, Y, W)
    del found["half"]
    return found


@pytest.mark.parametrize(("group", "block"), GROUPS)
def test_the_same_bits(group, block):
    """Of every op, for rows that make whole blocks and others, fewer than replicas, slices, batches; serially too."""
    f = MAPPED[block]
    with group_of(*group):
        got = [f(X, Y, W), f(X, Y, W, num_slices=3)]
        if group == ("devices", 5):
            got += [f(synk.data(X, place="scatter"), Y, W, batch=np.arange(75)), f(X, Y, W, batch=75)]
            got.append(f(synk.data(X, place="broadcast"), Y, W, batch=slice(0, 75)))
            f.check(X, Y, W)
        got.append(f.serial(X, Y, W))
        found = {digest(each) for each in got}
        assert found == {BITS.setdefault(block, digest(got[0]))}
        want = without_blocks()
        del got[0]["half"]
        for a, b in zip(jax.tree.leaves(got[0]), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=2e-5, atol=2e-5)


def convolutional(params, x, y):
    kernel, out = params
    x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    x = jax.lax.reduce_window(jax.nn.relu(x), 0.0, jax.lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return optax.softmax_cross_entropy_with_integer_labels(x.reshape(len(x), -1) @ out, y).mean()


TRAINED = {
    "dense": (cross_entropy, W, X),
    "convolutional": (
        convolutional,
        [RANDOM.normal(size=(3, 3, 1, 6)).astype(np.float32), RANDOM.normal(size=(96, 4)).astype(np.float32) * 0.1],
        RANDOM.normal(size=(75, 8, 8, 1)).astype(np.float32),
    ),
}
OPTIMIZERS = {"sgd": optax.sgd(0.05, momentum=0.9), "adam": optax.adam(2e-3)}


def trained(name, optimizer, group, num_slices, steps):
    loss, params, x = TRAINED[name]
    rng = np.random.default_rng(1)
    with group_of(*group), jax.numpy_dtype_promotion("standard"):
        step = synk.train.step(loss, params, OPTIMIZERS[optimizer], blocks=8)
        for i in range(steps):
            step(x, Y, batch=rng.permutation(75)[: (64, 43, 5)[i % 3]], num_slices=num_slices)
        synk.check_replicas(step.params)
        return digest((step.params.value, step.opt_state.value))


@pytest.mark.parametrize(("name", "optimizer"), [("dense", "adam"), ("convolutional", "sgd")])
def test_training(name, optimizer):
    """Parameters and the optimizer's state after 30 steps of uneven batches, on many replicas, in slices or not."""
    ways = [(("devices", 1), 5), (("devices", 3), 1), (("simulated", 2), 2)]
    assert len({trained(name, optimizer, *way, steps=30) for way in ways}) == 1


def test_variables_are_read_and_then_updates():
    """As without blocks; `part_key` is that of a block, wherever it runs."""
    scale = synk.shared(np.float32(1.5))

    @synk.function(inputs=["x"], blocks=4)
    def noisy(x, key):
        return (scale.value * x + jax.random.normal(synk.row_keys(key)[0], x.shape)).sum(0)

    @noisy.then
    def noisy(total):
        scale.value = scale.value * 0.5
        return total

    found = []
    for group in (("devices", 2), ("simulated", 3)):
        with group_of(*group):
            scale = synk.shared(np.float32(1.5))
            for turn in range(2):
                serial = noisy.serial(X[:11], jax.random.key(turn))
                got = noisy(X[:11], jax.random.key(turn))
                assert digest(got) == digest(serial)
                found.append(digest(got))
            assert float(scale.value) == 0.375
    assert found[:2] == found[2:]


def test_warm_as_fresh(steps=3):
    """After failures, in turns with other groups, with and without blocks."""
    f, exact = [
        synk.function(
            lambda x, y, params: jax.value_and_grad(cross_entropy)(params, x, y), ["x", "y"], "mean", blocks=k
        )
        for k in (8, None)
    ]
    want = {}
    for turn in range(steps):
        for group in (("devices", 2), ("simulated", 3)):
            with group_of(*group):
                for rows in (43, 8):
                    with pytest.raises(ValueError, match="rows"):
                        f(X[:rows], Y[: rows - 1], W)
                    exact(X[:rows], Y[:rows], W)
                    got = digest(f(X[:rows], Y[:rows], W, num_slices=1 + turn % 2))
                    assert want.setdefault(rows, got) == got
    count = f.stats.compilations
    with group_of("devices", 2):
        f(X[:43], Y[:43], W)
    assert f.stats.compilations == count
