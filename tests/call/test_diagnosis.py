"""What `f.check` says is the cause, of functions whose cause is known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import synk

from ..helpers import group_of, slow

KEY = jax.random.key(0)
W = np.linspace(-1, 1, 4).astype(np.float32)


def centred(x):
    return (x - x.mean(0, keepdims=True)) / x.std(0, keepdims=True)


def dropped(x):
    return jnp.where(jax.random.bernoulli(KEY, 0.5, x.shape), x, 0)


def contrastive(x):
    return -jnp.diag(jax.nn.log_softmax(x @ x.T)).mean()


# name: (function, op, what the message must hold: None where the law holds)
CASES = {
    "mean loss": (lambda x: (x**2).mean(), "mean", None),
    "rows": (jnp.tanh, "concat", None),
    "mean loss summed": (lambda x: (x**2).mean(), "sum", '"mean" would have matched'),
    "sum averaged": (lambda x: (x**2).sum(), "mean", '"sum" would have matched'),
    "maximum summed": (lambda x: x.max(0), "sum", '"max" would have matched'),
    "minimum averaged": (lambda x: x.min(), "mean", '"min" would have matched'),
    "gradient of a mean, summed": (lambda x: jax.grad(lambda w: ((x @ w) ** 2).mean())(W), "sum", '"mean" would have matched'),
    "batch norm, rows": (centred, "concat", "the other rows"),
    "batch norm, loss": (lambda x: jnp.tanh(centred(x)).std() + jnp.tanh(centred(x) ** 2).mean(), "mean", "a statistic across rows"),
    "softmax over rows": (lambda x: jax.nn.softmax(x, axis=0), "concat", "the other rows"),
    "std": (lambda x: x.std(), "mean", "a statistic across rows"),
    "variance of columns": (lambda x: x.var(0), "mean", "a statistic across rows"),
    "median": (lambda x: jnp.sort(x, axis=0)[x.shape[0] // 2], "mean", "across rows"),
    "contrastive": (contrastive, "mean", "rows"),
    "root of the mean square": (lambda x: jnp.sqrt((x**2).mean()), "mean", "a statistic across rows"),
    "ratio of sums": (lambda x: (x[:, 0] ** 2).sum() / (x[:, 2] ** 4).sum(), "mean", "a statistic across rows"),
    "correlation": (lambda x: jnp.corrcoef(x[:, 0], x[:, 1])[0, 1], "mean", "a statistic across rows"),
    "distances of rows": (lambda x: ((x[:, None] - x[None]) ** 2).sum(-1).mean(), "mean", "a statistic across rows"),
    "distance of all": (lambda x: jnp.abs(x.sum()), "sum", "rows"),
    "dropout by shape, rows": (dropped, "concat", "where the row stands"),
    "dropout by shape, loss": (lambda x: dropped(x).mean(), "mean", "order of the rows"),
    "prefix sums": (lambda x: jnp.cumsum(x, 0), "concat", "where the row stands"),
    "weights by place": (lambda x: (x[:, 0] * jnp.arange(len(x), dtype=np.float32)).sum(), "sum", "order of the rows"),
    "penalty summed": (lambda x: (x**2).sum() + 3.0, "sum", "added once a part"),
    "penalty of parameters summed": (lambda x: (x @ W).sum() + 0.5 * (W**2).sum(), "sum", "added once a part"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, ("simulated", 3)) for name in CASES] + [slow(name, ("devices", 8)) for name in list(CASES)[::3]],
)
def test_causes(name, kind):
    """Right of each; what is coupled is never told to be combined by an op."""
    fn, op, words = CASES[name]
    x = np.random.default_rng(0).normal(size=(61, 4)).astype(np.float32)
    f = synk.function(fn, reduce=op, name="f")
    with group_of(*kind):
        for _ in range(2):
            if words is None:
                f.check(x)
                continue
            with pytest.raises(synk.LawError) as caught:
                f.check(x)
            assert words in str(caught.value)
            if "would have matched" not in words:
                assert "no op would have matched" in str(caught.value)
                assert "Likely cause" in str(caught.value)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
def test_few_rows(rows):
    """Of few rows nothing is told rather than something wrong; the error is still the law's."""
    f = synk.function(lambda x: x.std(), reduce="mean")
    with synk.simulate(2):
        try:
            f.check(np.arange(rows, dtype=np.float32))
        except synk.LawError as error:
            assert "no op would have matched" in str(error)
