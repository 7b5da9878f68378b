"""blocks=k: the same bits wherever it runs, and what does not go with it."""

import hashlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import synk
import synk.train

from .. import harness
from ..helpers import group_of, slow

RANDOM = np.random.default_rng(5)
X = RANDOM.normal(size=(75, 24)).astype(np.float32)
Y = X[:, :4].argmax(1).astype(np.int32)
W = {"in": RANDOM.normal(size=(24, 40)).astype(np.float32), "out": RANDOM.normal(size=(40, 4)).astype(np.float32)}
CONSTANT = RANDOM.normal(size=(40, 7)).astype(np.float32)
GROUPS = [("devices", 1), ("devices", 2), ("simulated", 3), slow(("devices", 3)), slow(("devices", 5)), slow(("devices", 8)), slow(("simulated", 1)), slow(("simulated", 5))]  # fmt: skip


def digest(tree):
    """Of all bits."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    return hashlib.sha1(b"".join(leaf.tobytes() for leaf in leaves)).hexdigest()


def cross_entropy(params, x, y):
    scores = jnp.tanh(x @ params["in"]) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(scores, y).mean()


@pytest.mark.slow
def test_the_same_bits():
    """same_bits.py in a process of its own: what tests turn off of XLA, so that they compile in less time, changes bits."""
    here = Path(__file__).parent
    command = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", here / "same_bits.py"]
    done = harness.python(*command, cwd=harness.ROOT, XLA_FLAGS="")
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.smoke
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


@pytest.mark.smoke
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
    "batch_s": (lambda: synk.function(jnp.sum, blocks=4)(synk.data(X, place="scatter"), batch_s=2), ValueError, "not go with over, batch_s"),
    "over": (lambda: synk.function(jnp.sum, blocks=4).over(X, batches=[3, 4]), ValueError, "blocks=4 are blocks of one call"),
    "overlap": (
        lambda: synk.function(lambda x: x[1:-1], inputs={"x": synk.Overlap(1)}, reduce="concat", blocks=4)(X), ValueError, "not go with .* synk.Overlap",
    ),
    "jit": (lambda: jax.jit(synk.function(jnp.sum, blocks=4))(X), ValueError, "blocks= cannot enter jit"),
    "communicating": (
        lambda: synk.function(lambda x: jax.lax.pmean(x.sum(), "replica"), blocks=4)(X), ValueError,
        "it communicates inside .* or leave out blocks",
    ),
    "zero": (lambda: synk.function(jnp.sum, blocks=0), ValueError, "blocks is 0; give how many rows"),
    "a half": (lambda: synk.function(jnp.sum, blocks=0.5), TypeError, "blocks is 0.5; give how many rows"),
    "wire": (lambda: synk.function(jnp.sum, blocks=4, wire="int8"), ValueError, "wire='int8' rounds each replica's sum"),
    "a step": (
        lambda: synk.train.step(cross_entropy, W, optax.sgd(0.1), blocks=4, wire="bf16"), ValueError, "works on each replica's sums",
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
        with pytest.raises(ValueError, match="rows holds rows, which lie where they are"):
            synk.function(lambda x: (x + rows.value).sum(0), blocks=4)(X)


def test_what_shows_replicas():
    """In functions: who runs it, how many there are, variables that differ; and calls without rows."""
    w = synk.shared(np.float32(2), name="w")
    told = synk.function(lambda x: x.sum(0) * (1 + synk.rank()), blocks=4, name="told")
    sized = synk.function(lambda x: x.sum(0) * synk.size(), blocks=4, name="sized")
    reads = synk.function(lambda x: x.sum(0) * w.value, blocks=4, name="reads")
    with group_of("devices", 2):
        for call, what in ((told, r"synk\.rank\(\)"), (sized, r"synk\.size\(\)")):
            with pytest.raises(synk.SynkError, match=f"asks for {what}, but with blocks=4"):
                call(X)
        want = reads(X)
        w.set_value(np.float32(3), rank=1)
        with pytest.raises(synk.errors.DivergedError, match="w: its replicas may hold different values"):
            reads(X)
        w.value = np.float32(2)
        assert digest(reads(X)) == digest(want)
        with pytest.raises(ValueError, match="no argument of this call is scattered"):
            synk.function(lambda c: c * 2, inputs={"c": "broadcast"}, blocks=4)(2.0)


def test_check_and_explain():
    """A wrong op and coupled rows are found as without blocks; explain counts the work of the longest replica."""
    with group_of("devices", 2):
        with pytest.raises(synk.LawError, match='"mean" would have matched'):
            synk.function(lambda x: x.mean(0), blocks=4).check(X)
        with pytest.raises(synk.LawError, match="depends on the other rows"):
            synk.function(lambda x: x - x.mean(0, keepdims=True), reduce="concat", blocks=4).check(X)
        e = synk.function(lambda x, w: x @ w, inputs=["x"], reduce="concat", blocks=4).explain(X[:29], W["in"])
        assert e.lengths == (16, 13)
        assert e.flops == 2 * 16 * 24 * 40
