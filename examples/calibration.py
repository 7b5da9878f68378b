"""AUC, calibration error, Brier score and top-k of 1,003 predictions on four devices, as scikit-learn's on one.

    python examples/calibration.py    # needs the extra `examples`

The area under the ROC curve is how often a positive row scores above a negative one: `synk.contrib.pairs`, exact, with
ties. Calibration compares confidence and accuracy in ten bins, which are sums over rows. `evaluate.over` runs batches
that do not divide. Prints the numbers, and the largest difference from scikit-learn or NumPy.
"""

import jax
import jax.numpy as jnp
import numpy as np
from sklearn import metrics

import synk

ROWS, BATCH, BINS, CLASSES, K = 1003, 128, 10, 7, 3
rng = np.random.default_rng(0)
logit = rng.normal(size=ROWS)
label = (rng.random(ROWS) < 1 / (1 + np.exp(-logit))).astype(np.int32)
score = (1 / (1 + np.exp(-1.7 * logit))).round(2).astype(np.float32)  # too sure of itself, and with ties
classes = rng.integers(0, CLASSES, ROWS).astype(np.int32)
votes = rng.normal(size=(ROWS, CLASSES)).astype(np.float32) + 2 * np.eye(CLASSES, dtype=np.float32)[classes]


@synk.function(outputs={"bins": "sum", "brier": "mean", "top_k": "mean", "confusion": "merge"})
def evaluate(score, label, votes, classes):
    sums = jnp.stack([jnp.ones(len(score)), score, label], 1)
    own = jnp.take_along_axis(votes, classes[:, None], 1)
    return {
        "bins": jax.ops.segment_sum(sums, jnp.minimum(score * BINS, BINS - 1).astype(int), BINS),
        "brier": jnp.mean((score - label) ** 2),
        "top_k": jnp.mean((votes > own).sum(1) < K),
        "confusion": synk.stats.confusion(classes, votes.argmax(1), CLASSES),
    }


synk.init(4)
found = evaluate.over(score, label, votes, classes, batches=synk.minibatches(ROWS, BATCH))
count, confidence, right = np.asarray(found["bins"]).T
wins = synk.contrib.pairs(lambda p, n: (p > n) + 0.5 * (p == n), score[label == 1], score[label == 0], reduce="mean")
auc, ece = float(np.mean(wins)), float(np.abs(confidence - right).sum() / ROWS)

bins = np.minimum(score * BINS, BINS - 1).astype(int)
gaps = [(score[bins == b] - label[bins == b]).sum() for b in range(BINS)]
gap = {
    "AUC": abs(auc - metrics.roc_auc_score(label, score)),
    "ECE": abs(ece - np.abs(gaps).sum() / ROWS),
    "Brier": abs(float(found["brier"]) - metrics.brier_score_loss(label, score)),
    "top-k": abs(float(found["top_k"]) - metrics.top_k_accuracy_score(classes, votes, k=K)),
    "confusion": np.abs(found["confusion"] - metrics.confusion_matrix(classes, votes.argmax(1))).max(),
}
print(f"AUC {auc:.4f}, calibration error {ece:.4f}, Brier {found['brier']:.4f}, top-{K} {found['top_k']:.4f}")
assert max(gap.values()) < 1e-5, gap
print(f"largest difference {max(gap.values()):.0e}")
