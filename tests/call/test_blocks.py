"""blocks=k: the same bits for any replicas, slices and batches, and in the serial run; and what does not go with it."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import synk
import synk.train
from synk import stats

from ..helpers import group_of, slow, slow_but

RANDOM = np.random.default_rng(5)
X = RANDOM.normal(size=(75, 24)).astype(np.float32)
Y = X[:, :4].argmax(1).astype(np.int32)
W = {"in": RANDOM.normal(size=(24, 40)).astype(np.float32), "out": RANDOM.normal(size=(40, 4)).astype(np.float32)}
GROUPS = [("devices", 1), ("devices", 2), ("simulated", 3), slow(("devices", 3)), slow(("devices", 5)), slow(("devices", 8)), slow(("simulated", 1)), slow(("simulated", 5))]  # fmt: skip


def digest(tree):
    """Of all bits."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    return hashlib.sha1(b"".join(leaf.tobytes() for leaf in leaves)).hexdigest()


def cross_entropy(params, x, y):
    scores = jnp.tanh(x @ params["in"]) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(scores, y).mean()


def outputs(x, y, params):
    loss, grads = jax.value_and_grad(cross_entropy)(params, x, y)
    weights = y.astype(jnp.float32)
    return {
        "loss": loss, "grads": grads, "sum": x.sum(0), "half": x.astype(jnp.bfloat16).sum(0), "max": x.max(0), "rows": x @ params["in"],
        "count": jnp.int32(len(x)), "weighted": synk.Weighted((x * weights[:, None]).sum(0) / weights.sum(), weights.sum()), "product": jnp.prod(x[:, :3], 0),
        "std": stats.std(x), "top": stats.top_k(x[:, 0], 2), "numbers": synk.row_numbers(), "any": (x > 2).any(0),
    }  # fmt: skip


OPS = {
    "loss": "mean", "grads": "mean", "sum": "sum", "half": "mean", "max": "max", "rows": "concat", "count": "sum",
    "weighted": "mean", "product": "prod", "std": "merge", "top": "merge", "numbers": "concat", "any": "any",
}  # fmt: skip
MAPPED = {block: synk.function(outputs, inputs=["x", "y"], outputs=OPS, blocks=block) for block in (None, 8, 32)}
BITS = {}  # of each kind of call, whichever group made it first


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("block", slow_but([8], [8, 32]))
def test_the_same_bits(group, block):
    """Of every op, for rows that make whole blocks and others, fewer than replicas, slices, batches; serially too."""
    f, plain = MAPPED[block], MAPPED[None]
    with group_of(*group):
        for rows in (75, 3):
            got = [f(X[:rows], Y[:rows], W, num_slices=k) for k in (1, 3)] + [f.serial(X[:rows], Y[:rows], W)]
            got += [f(X, Y, W, batch=rows), f(synk.data(X, place="broadcast"), Y, W, batch=slice(0, rows))]
            got.append(f(synk.data(X, place="scatter"), Y, W, batch=np.arange(rows)))
            found = {digest(each) for each in got}
            assert found == {BITS.setdefault((block, rows), digest(got[0]))}
            want = plain(X[:rows], Y[:rows], W)
            del want["half"], got[0]["half"]
            for a, b in zip(jax.tree.leaves(got[0]), jax.tree.leaves(want), strict=True):
                np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=2e-5, atol=2e-5)
        f.check(X, Y, W)


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
    """Parameters and the optimizer's state after steps of uneven batches."""
    ways = [(("devices", 1), 1), (("devices", 3), 3), (("simulated", 2), 1)]
    assert len({trained(name, optimizer, *way, steps=6) for way in ways}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", TRAINED)
def test_long_training(name, optimizer):
    """200 steps on six numbers of replicas, three numbers of slices, and simulated ones."""
    ways = [(("devices", n), k) for n in (1, 2, 3, 4, 5, 8) for k in (1, 2, 5)]
    ways += [(("simulated", n), 1) for n in (1, 2, 5)]
    assert len({trained(name, optimizer, *way, steps=200) for way in ways}) == 1


def test_variables_are_read_and_then_updates():
    """As without blocks; `part_key` is that of a block, wherever it runs."""
    scale = synk.shared(np.float32(1.5))

    @synk.function(inputs=["x"], blocks=4)
    def noisy(x, key):
        return (scale.value * x + jax.random.normal(synk.row_keys(key, len(x))[0], x.shape)).sum(0)

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


def test_only_rows_are_seen():
    """No block runs on rows that are not there, and none twice."""

    seen = []

    def see(x):
        jax.debug.callback(lambda rows: seen.append(len(rows)), x)
        return x.sum(0)

    f = synk.function(see, blocks=4)
    for group in (("devices", 2), ("simulated", 3)):
        with group_of(*group):
            jax.block_until_ready(f(X[:22]))
            jax.effects_barrier()
            assert sorted(seen) == [2, 4, 4, 4, 4, 4]
            seen.clear()


def test_nan_and_blame():
    """A row that is not finite is refused and named, as without blocks."""
    f = synk.function(lambda x: jnp.log(x).sum(0), blocks=4, nan="raise")
    x = np.abs(X[:21])
    with group_of("devices", 2):
        want = f(x)
        x[17, 3] = -1
        with pytest.raises(FloatingPointError, match="row 17"):
            f(x)
        x[17, 3] = np.abs(X[17, 3])
        assert digest(f(x)) == digest(want)


REFUSED = {
    "stack": (lambda: synk.function(lambda x: x.sum(), reduce="stack", blocks=4)(X), ValueError, "'stack' shows which replica"),
    "first": (lambda: synk.function(lambda x: x.sum(), reduce=None, blocks=4)(X), ValueError, "'first' shows which replica"),
    "callable": (lambda: synk.function(lambda x: x.sum(), reduce=jnp.median, blocks=4)(X), ValueError, "'callable' shows"),
    "scatter": (lambda: synk.function(lambda x: x, reduce="scatter", blocks=4)(X), ValueError, "'scatter' shows which"),
    "batch_s": (lambda: synk.function(jnp.sum, blocks=4)(synk.data(X, place="scatter"), batch_s=2), ValueError, "batch_s picks rows"),
    "over": (lambda: synk.function(jnp.sum, blocks=4).over(X, batches=[3, 4]), ValueError, "blocks=4 are blocks of one call"),
    "overlap": (
        lambda: synk.function(lambda x: x[1:-1], inputs={"x": synk.Overlap(1)}, reduce="concat", blocks=4)(X), ValueError, "neighbours",
    ),
    "jit": (lambda: jax.jit(synk.function(jnp.sum, blocks=4))(X), ValueError, "traced one cannot promise"),
    "communicating": (
        lambda: synk.function(lambda x: jax.lax.pmean(x.sum(), "replica"), blocks=4)(X), ValueError, "it communicates inside",
    ),
    "zero": (lambda: synk.function(jnp.sum, blocks=0), ValueError, "blocks is 0; give how many rows"),
    "a half": (lambda: synk.function(jnp.sum, blocks=0.5), TypeError, "blocks is 0.5; give how many rows"),
    "wire": (lambda: synk.function(jnp.sum, blocks=4, wire="int8"), ValueError, "wire='int8' rounds each replica's sum"),
    "a step": (
        lambda: synk.train.step(cross_entropy, W, optax.sgd(0.1), blocks=4, wire="bf16"), ValueError, "rounds each replica's sum",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_go_with_blocks(case):
    """Each says so before anything runs."""
    call, error, words = REFUSED[case]
    with group_of("devices", 2), pytest.raises(error, match=words):
        call()


def test_variables_that_differ():
    """Local updates, and rows that lie on the replicas."""
    total, rows = synk.shared(np.float32(0), name="total"), synk.shared(X, name="rows")

    @synk.function(blocks=4)
    def count(x):
        total.value = total.value + x.sum()

    held = synk.function(lambda: rows.value.sum(0), blocks=4, name="held")
    with group_of("devices", 2):
        with pytest.raises(ValueError, match="count: it updates total on each replica, but with blocks=4"):
            count(X)
        synk.scatter(rows, X)
        with pytest.raises(ValueError, match="held: rows holds rows, which lie where they are"):
            held()
        with pytest.raises(ValueError, match="rows"):
            synk.function(lambda x: (x + rows.value).sum(0), blocks=4)(X)


@pytest.mark.parametrize("steps", slow_but([2], [2, 9]))
def test_warm_as_fresh(steps):
    """After failures, in turns with other groups, with and without blocks."""
    f, exact = MAPPED[8], MAPPED[None]
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
