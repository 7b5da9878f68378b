"""What `f.check` says is the cause, of functions whose cause is known."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import synk
import synk.train

from ..helpers import first_of, group_of, slow

KEY = jax.random.key(0)
W = np.linspace(-1, 1, 4).astype(np.float32)


def centred(x):
    return (x - x.mean(0, keepdims=True)) / x.std(0, keepdims=True)


def dropped(x):
    return jnp.where(jax.random.bernoulli(KEY, 0.5, x.shape), x, 0)


def masked(x, above=0.0, least=1):
    """The mean of those rows' numbers that are above a bound."""
    mask = (x[:, 1] > above).astype(np.float32)
    return (mask * (x[:, 0] + 3) ** 2).sum() / jnp.maximum(mask.sum(), least)


def clipped(gradient):
    return gradient / jnp.linalg.norm(gradient)


def contrastive(x):
    return -jnp.diag(jax.nn.log_softmax(x @ x.T)).mean()


def in_bfloat16(x):
    return jnp.tanh(x.astype(jnp.bfloat16) @ W.astype(jnp.bfloat16)).astype(jnp.float32) + 1


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
    "contrastive": (contrastive, "mean", "synk.contrib.pairs combines all pairs of rows"),
    "root of the mean square": (lambda x: jnp.sqrt((x**2).mean()), "mean", "a statistic across rows"),
    "ratio of sums": (lambda x: (x[:, 0] ** 2).sum() / (x[:, 2] ** 4).sum(), "mean", "synk.Weighted is missing"),
    "masked mean": (lambda x: masked(x), "mean", "return synk.Weighted(total / count, count)"),
    "masked mean, nothing in a part": (lambda x: masked(x, 1.0, 0), "mean", "synk.Weighted is missing"),
    "masked mean, of one row": (lambda x: masked(x, 1.6, 0), "mean", "across rows"),
    "masked mean, summed": (lambda x: masked(x), "sum", "synk.Weighted is missing"),
    "masked mean, weighted by rows": (lambda x: synk.Weighted(masked(x), len(x)), "mean", "synk.Weighted is missing"),
    "masked mean of each column": (lambda x: jnp.where(x > 0, x, 0).sum(0) / (x > 0).astype(np.float32).sum(0), "mean", "synk.Weighted is missing"),
    "gradient of a masked mean": (lambda x: jax.grad(lambda w: masked(x * w[None]))(W), "mean", "synk.Weighted is missing"),
    "clipped gradient": (lambda x: clipped(jax.grad(lambda w: ((x @ w - 1) ** 2).mean())(W)), "mean", "across rows"),
    "penalty summed beside both signs": (lambda x: x[:, 0].sum() + 3.0, "sum", "added once a part"),
    "correlation": (lambda x: jnp.corrcoef(x[:, 0], x[:, 1])[0, 1], "mean", "a statistic across rows"),
    "distances of rows": (lambda x: ((x[:, None] - x[None]) ** 2).sum(-1).mean(), "mean", "a statistic across rows"),
    "distance of all": (lambda x: jnp.abs(x.sum()), "sum", "rows"),
    "dropout by shape, rows": (dropped, "concat", "where the row stands"),
    "dropout by shape, loss": (lambda x: dropped(x).mean(), "mean", "order of the rows"),
    "prefix sums": (lambda x: jnp.cumsum(x, 0), "concat", "where the row stands"),
    "weights by place": (lambda x: (x[:, 0] * jnp.arange(len(x), dtype=np.float32)).sum(), "sum", "order of the rows"),
    "penalty summed": (lambda x: (x**2).sum() + 3.0, "sum", "added once a part"),
    "sums over counts": (lambda x: synk.Weighted((x[:, 0] + 3).sum(), len(x)), "mean", "return synk.Weighted(sum / weight, weight)"),
    "masked sums": (
        lambda x: synk.Weighted(jnp.where(x[:, 1] > 0, x[:, 0] + 3, 0).sum(), (x[:, 1] > 0).sum()), "mean", "its parts add up",
    ),
    "a sum of bfloat16s averaged": (lambda x: in_bfloat16(x).sum(), "mean", '"sum" would have matched'),
    "a spread in bfloat16": (lambda x: (in_bfloat16(x) ** 4).var(), "mean", "a statistic across rows"),
    "dropout in bfloat16": (lambda x: (in_bfloat16(dropped(x)) - 1).mean(), "mean", "order of the rows"),
    "penalty of parameters summed": (lambda x: (x @ W).sum() + 0.5 * (W**2).sum(), "sum", "added once a part"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, ("simulated", 3)) if i % 4 == 1 else slow(name, ("devices", 8) if i % 2 else ("simulated", 3))
        for i, name in enumerate(CASES)
    ],
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
            if "would have matched" not in words and "Weighted" not in words and "add up" not in words:
                assert "no op would have matched" in str(caught.value)
                assert "Likely cause" in str(caught.value)


@pytest.mark.parametrize("kind", first_of(("simulated", 3), ("devices", 1), ("devices", 4), ("devices", 8)))
def test_a_masked_loss_of_a_step(kind):
    """`Weighted` comes first, with the lines to write, once; and written so it is right."""

    def losses(w, x):
        return (x[:, 0] - w) ** 2, (x[:, 1] > 1).astype(np.float32)

    def wrong(w, x):
        loss, mask = losses(w, x)
        return (loss * mask).sum() / mask.sum()

    def right(w, x):
        loss, mask = losses(w, x)
        total, count = (loss * mask).sum(), mask.sum()
        return synk.Weighted(total / count, count)

    x = np.random.default_rng(0).normal(size=(61, 4)).astype(np.float32)
    with group_of(*kind):
        with pytest.raises(synk.LawError) as caught:
            synk.train.step(wrong, np.float32(0), optax.sgd(0.1)).check(x)
        message = str(caught.value)
        assert re.search(
            r"the loss: .*Likely cause: synk\.Weighted is missing.*\n +total, count = .*\n +return synk\.Wei", message
        )
        assert "the gradient of params" in message
        assert message.count("Likely cause") == message.count("synk.Weighted(total / count, count)") == 1
        synk.train.step(right, np.float32(0), optax.sgd(0.1)).check(x)


def mixed(w, x):
    """A loss as mixed precision has it: float32 parameters, bfloat16 inside, a float32 mean."""
    return jnp.mean(jnp.tanh(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32) ** 2)


@pytest.mark.parametrize("kind", [("simulated", 3), slow(("devices", 8))])
def test_mixed_precision(kind):
    """What bfloat16 inside rounds to is called that, by numbers that pass; of a step its updates are not told as well."""
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(61, 8)).astype(np.float32), rng.normal(size=(8, 16)).astype(np.float32)
    f = synk.function(jax.value_and_grad(mixed), inputs=["x"], reduce="mean", name="f")
    step = synk.train.step(mixed, w, optax.adam(0.1))
    with group_of(*kind), jax.numpy_dtype_promotion("standard"):
        for check in (lambda **options: f.check(w, x, **options), lambda **options: step.check(x, **options)):
            with pytest.raises(synk.LawError, match="bfloat16, in which it computes, may round by as much") as caught:
                check()
            message = str(caught.value)
            assert not re.search("no op|Likely cause|updated on replica", message)
            named = sorted(re.findall(r"(rtol|atol)=([\d.e-]+\d)", message), key=lambda pair: float(pair[1]))
            check(**{name: float(value) for name, value in named})  # the largest of each


def test_overflow_of_parts():
    """What float16 overflows in parts alone is called that; a difference of finite numbers is not."""
    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float16)

    def scaled_means(x, scale):
        # Only the last step is in float16, so it overflows on every kind of device; GPUs sum float16 in float32.
        return (x.astype(jnp.float32).mean(0) * scale).astype(jnp.float16)

    f = synk.function(scaled_means, inputs=["x"], reduce="mean")
    with synk.simulate(4):
        f.check(x, np.float32(2.0**12), num_slices=4)
        with pytest.raises(synk.LawError, match="Likely cause: overflow in float16") as caught:
            f.check(x, np.float32(2.0**16), num_slices=4)
        assert "statistic" not in str(caught.value)
        with pytest.raises(synk.LawError, match="a statistic across rows"):
            synk.function(lambda x: (x**4).var(), reduce="mean").check(x, num_slices=4)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
def test_few_rows(rows):
    """Of few rows nothing is told rather than something wrong; the error is still the law's."""
    f = synk.function(lambda x: x.std(), reduce="mean")
    with synk.simulate(2):
        try:
            f.check(np.arange(rows, dtype=np.float32))
        except synk.LawError as error:
            assert "no op would have matched" in str(error)
