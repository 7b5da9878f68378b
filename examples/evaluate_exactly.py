"""Exact evaluation: an epoch of 1,003 rows on 4 replicas, equal to scikit-learn's on one: prints `largest gap 0.00%`.

Accuracy, top-5 accuracy, confusion matrix, perplexity by tokens, AUC by a histogram and R2, by one `evaluate.over`
whose last batch is short. Beside them, what is usual where rows do not divide: the mean of each batch's mean, and a
last batch filled up with rows seen before. Both are off, by percents.

    python examples/evaluate_exactly.py
"""

import jax
import jax.numpy as jnp
import numpy as np
from sklearn import datasets, metrics

import synk
from synk import stats

ROWS, BATCH, TOKENS, WORDS, SEED = 1003, 250, 12, 8, 0
BINS = 200  # of the scores of a digit, which are rounded to them


@synk.function(
    outputs={
        "correct": "mean", "top5": "mean", "confusion": "merge", "nll": "mean", "even": "merge", "odd": "merge",
        "residual": "mean", "spread": "merge",
    }
)  # fmt: skip
def evaluate(scores, digit, value, logits, words, lengths):
    """On each replica, with its rows of each batch."""
    above = (scores > jnp.take_along_axis(scores, digit[:, None], 1)).sum(1)  # how many classes are rated higher
    mask = jnp.arange(TOKENS) < lengths[:, None]
    tokens = mask.sum()
    nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), words[..., None], 2)[..., 0]
    bins = jnp.round(value * 10).astype(int) + BINS // 4
    return {
        "correct": jnp.mean(above == 0),
        "top5": jnp.mean(above < 5),
        "confusion": stats.confusion(digit, scores.argmax(1), 10),
        "nll": synk.Weighted((nll * mask).sum() / tokens, tokens),  # a mean of tokens, not of rows
        "even": stats.bincount(jnp.where(digit < 5, bins, -1), BINS),
        "odd": stats.bincount(jnp.where(digit < 5, -1, bins), BINS),
        "residual": jnp.mean((digit - value) ** 2),
        "spread": stats.var(digit.astype(jnp.float32)),
    }


def finished(found):
    """What is no mean of anything, but made of means and counts."""
    lower, higher = found.pop("even"), found.pop("odd")
    below = jnp.cumsum(lower) - lower / 2  # of each score, pairs in which the lower digit has less; half of a tie
    found["auc"] = (higher * below).sum() / (lower.sum() * higher.sum())
    found["r2"] = 1 - found.pop("residual") / found.pop("spread")
    return found | {"perplexity": jnp.exp(found.pop("nll"))}


def by_sklearn(scores, digit, value, logits, words, lengths):
    """The same on one process, with all rows at once."""
    mask = np.arange(TOKENS) < lengths[:, None]
    likely = np.exp(logits[mask]) / np.exp(logits[mask]).sum(-1, keepdims=True)
    guess = scores.argmax(1)
    return {
        "correct": metrics.accuracy_score(digit, guess),
        "top5": metrics.top_k_accuracy_score(digit, scores, k=5, labels=range(10)),
        "confusion": metrics.confusion_matrix(digit, guess, labels=range(10)),
        "perplexity": np.exp(metrics.log_loss(words[mask], likely, labels=range(WORDS))),
        "auc": metrics.roc_auc_score(digit >= 5, np.round(value * 10)) if len(set(digit >= 5)) > 1 else 0.5,
        "r2": metrics.r2_score(digit, value),
    }


def by_means(*rows):
    """The mean of what each batch gives, the last of three rows: what a loop over a loader does."""
    each = [by_sklearn(*[array[i : i + BATCH] for array in rows]) for i in range(0, ROWS, BATCH)]
    return {name: sum(one[name] for one in each) / (1 if name == "confusion" else len(each)) for name in each[0]}


def padded(*rows):
    """With the first rows once more, until the last batch is full: what equal parts ask for."""
    return by_sklearn(*[np.concatenate([array, array[: -ROWS % BATCH]]) for array in rows])


def predictions():
    """What a model said of the digits (sorted, as they often come), and of sentences of 1 to 12 words."""
    rng = np.random.default_rng(SEED)
    x, digit = datasets.load_digits(return_X_y=True)
    train, test = np.split(rng.permutation(len(x)), [len(x) - ROWS])
    test = test[np.argsort(digit[test], kind="stable")]
    means = np.array([x[train][digit[train] == k].mean(0) for k in range(10)])
    scores = -((x[test][:, None] - means) ** 2).sum(-1)
    value = x[test] @ np.linalg.lstsq(x[train], digit[train], rcond=None)[0]
    lengths, words = rng.integers(1, TOKENS + 1, ROWS), rng.integers(0, WORDS, (ROWS, TOKENS))
    sure = (TOKENS - lengths)[:, None, None] / 4  # short sentences are easier
    logits = rng.normal(size=(ROWS, TOKENS, WORDS)) + sure * np.eye(WORDS)[words]
    floats = [array.astype(np.float32) for array in (scores, value, logits)]
    return floats[0], digit[test].astype(np.int32), *floats[1:], words.astype(np.int32), lengths.astype(np.int32)


def gap(one, other):
    return float(np.abs(np.asarray(one) - np.asarray(other)).max() / np.abs(np.asarray(other)).max())


if __name__ == "__main__":
    synk.init(4)
    rows = predictions()
    batches = synk.minibatches(ROWS, BATCH, seed=SEED)
    exact, want = finished(evaluate.over(*rows, batches=batches)), by_sklearn(*rows)
    print(f"{'':12}{'scikit-learn':>14}" + "".join(f"{way:>18}" for way in ("synk", "mean of means", "padded")))
    gaps = {"synk": exact, "mean of means": by_means(*rows), "padded": padded(*rows)}
    for name, value in want.items():
        shown = f"{value:>14.4f}" if np.ndim(value) == 0 else f"{'':14}"
        print(f"{name:12}{shown}" + "".join(f"{f'off {gap(got[name], value):.2%}':>18}" for got in gaps.values()))
    largest = {way: max(gap(got[name], value) for name, value in want.items()) for way, got in gaps.items()}
    print(f"largest gap {largest['synk']:.2%}; of means {largest['mean of means']:.0%}, padded {largest['padded']:.0%}")
    assert largest["synk"] < 1e-5 and min(largest["mean of means"], largest["padded"]) > 0.02
    assert np.array_equal(exact["confusion"], want["confusion"])
