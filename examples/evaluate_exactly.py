"""Exact evaluation: 1,003 rows on 4 replicas, equal to scikit-learn on one process: prints `largest gap 0.00%`.

Accuracy, top-5 accuracy, confusion matrix, a loss weighted by tokens, and R2. Beside them, what is usual where rows do
not divide: the mean of each batch's mean, and a last batch filled up with rows seen before. Both are off, by percents.

    python examples/evaluate_exactly.py
"""

import jax
import jax.numpy as jnp
import numpy as np
from sklearn import datasets, metrics

import synk

ROWS, BATCH, TOKENS, WORDS, SEED = 1003, 250, 12, 8, 0


@synk.function(
    outputs={
        "correct": "mean",
        "top5": "mean",
        "confusion": "sum",
        "token_loss": "mean",
        "residual": "sum",
        "y": "sum",
    },
    inputs=["scores", "digit", "value", "logits", "words", "lengths"],
)
def evaluate(scores, digit, value, logits, words, lengths):
    """On each replica, with its rows."""
    above = (scores > jnp.take_along_axis(scores, digit[:, None], 1)).sum(1)  # how many classes are rated higher
    mask = jnp.arange(TOKENS) < lengths[:, None]
    tokens = mask.sum()
    nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), words[..., None], 2)[..., 0]
    return {
        "correct": jnp.mean(above == 0),
        "top5": jnp.mean(above < 5),
        "confusion": jnp.zeros((10, 10), int).at[digit, scores.argmax(1)].add(1),
        "token_loss": synk.Weighted((nll * mask).sum() / tokens, tokens),  # a mean of tokens, not of rows
        "residual": jnp.sum((digit - value) ** 2),
        "y": {"sum": jnp.sum(digit), "squares": jnp.sum(digit**2), "rows": len(digit)},
    }


@evaluate.then
def evaluate(total):
    """On the sums and means of all rows: R2 is no mean of anything, but made of sums."""
    residual, y = total.pop("residual"), total.pop("y")
    return total | {"r2": 1 - residual / (y["squares"] - y["sum"] ** 2 / y["rows"])}


def by_sklearn(scores, digit, value, logits, words, lengths):
    """The same on one process, with all rows at once."""
    mask = np.arange(TOKENS) < lengths[:, None]
    likely = np.exp(logits[mask]) / np.exp(logits[mask]).sum(-1, keepdims=True)
    guess = scores.argmax(1)
    return {
        "correct": metrics.accuracy_score(digit, guess),
        "top5": metrics.top_k_accuracy_score(digit, scores, k=5, labels=range(10)),
        "confusion": metrics.confusion_matrix(digit, guess, labels=range(10)),
        "token_loss": metrics.log_loss(words[mask], likely, labels=range(WORDS)),
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
    exact, want = evaluate(*rows, num_slices=2), by_sklearn(*rows)
    print(f"{'':12}{'scikit-learn':>14}" + "".join(f"{way:>18}" for way in ("synk", "mean of means", "padded")))
    gaps = {"synk": exact, "mean of means": by_means(*rows), "padded": padded(*rows)}
    for name, value in want.items():
        shown = f"{value:>14.4f}" if np.ndim(value) == 0 else f"{'':14}"
        print(f"{name:12}{shown}" + "".join(f"{f'off {gap(got[name], value):.2%}':>18}" for got in gaps.values()))
    largest = {way: max(gap(got[name], value) for name, value in want.items()) for way, got in gaps.items()}
    print(f"largest gap {largest['synk']:.2%}; of means {largest['mean of means']:.0%}, padded {largest['padded']:.0%}")
    assert largest["synk"] < 1e-5 and min(largest["mean of means"], largest["padded"]) > 0.02
    assert np.array_equal(exact["confusion"], want["confusion"])
