"""k-means on a million rows that live on 4 replicas, with exact statistics: prints `largest gap 0.00%`.

Each step is one call: sums and counts of the clusters, the mean loss, the ten rows farthest from every center, by
number, a histogram of distances, and the standard deviation of values near 10,000, where sums of squares in float32
have no digit left. Rows are dealt out once and stay. The last step is compared with NumPy in float64, and with what is
usual: E[x^2] - E[x]^2 in float32.

    python examples/exact_statistics.py
"""

import jax
import jax.numpy as jnp
import numpy as np

import synk
from synk import stats

ROWS, CLUSTERS, STEPS, OFFSET, SEED = 1_000_003, 8, 6, 10_000.0, 0
EDGES = np.linspace(0, 8, 17)


def measured(x, centers):
    """The nearest center of each row, and how far it is."""
    apart = ((x[:, None] - centers[None]) ** 2).sum(-1)
    return apart.argmin(1), jnp.sqrt(apart.min(1))


@synk.function(
    inputs=["x"], outputs={"sums": "sum", "counts": "merge", "loss": "mean", "known": "merge", "squares": "mean"}
)
def step(x, centers):
    """On each replica, with its rows."""
    nearest, far = measured(x, centers)
    members = jax.nn.one_hot(nearest, CLUSTERS, dtype=x.dtype)
    return {
        "sums": members.T @ (x - OFFSET),
        "counts": stats.bincount(nearest, CLUSTERS),
        "loss": jnp.mean(far**2),
        "known": {"std": stats.std(x), "worst": stats.top_k(far, 10), "histogram": stats.histogram(far, EDGES)},
        "squares": {"x": x.mean(0), "x^2": (x**2).mean(0)},
    }


def by_numpy(x, centers):
    """The same with all rows at once, in float64."""
    parts = [map(np.asarray, measured(part, centers)) for part in np.array_split(x, 50)]
    nearest, far = (np.concatenate(each) for each in zip(*parts, strict=True))
    return {
        "counts": np.bincount(nearest, minlength=CLUSTERS),
        "loss": np.mean(far.astype(float) ** 2),
        "std": x.std(0, dtype=float),
        "worst": np.argsort(-far, kind="stable")[:10],
        "histogram": np.histogram(far, EDGES)[0],
    }


def rounded(x):
    """To 1/16, so that distances are the same to the bit whoever computes them."""
    return (np.round(16 * np.asarray(x)) / 16).astype(np.float32)


if __name__ == "__main__":
    synk.init(4)
    rng = np.random.default_rng(SEED)
    middles = rng.normal(scale=3, size=(CLUSTERS, 2))
    x = rounded(OFFSET + middles[rng.integers(0, CLUSTERS, ROWS)] + rng.normal(size=(ROWS, 2)))
    centers, rows = x[:CLUSTERS], synk.data(x, place="scatter")
    for _ in range(STEPS):
        last, found = centers, step(rows, centers)
        centers = rounded(OFFSET + np.asarray(found["sums"]) / np.maximum(found["counts"], 1)[:, None])
        print(f"loss {found['loss']:.4f}")
    known, wanted = found["known"], by_numpy(x, last)
    exact = {"counts": found["counts"], "worst": known["worst"][1], "histogram": known["histogram"][0]}
    for name, value in exact.items():
        assert np.array_equal(value, wanted[name]), name
    gaps = [abs(found["loss"] / wanted["loss"] - 1), *abs(known["std"] / wanted["std"] - 1)]
    means = found["squares"]
    usual = np.sqrt(np.abs(means["x^2"] - means["x"] ** 2))
    off = max(abs(usual / wanted["std"] - 1))
    print(f"farthest rows {exact['worst'][:3].tolist()}; by squares the deviation is off by {off:.0%}")
    print(f"largest gap {float(max(gaps)):.2%} of {ROWS:,} rows; {', '.join(exact)} are equal")
    assert max(gaps) < 1e-4
