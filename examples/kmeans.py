"""k-means clustering (Lloyd's algorithm) over rows on four devices: centres and labels are scikit-learn's on one.

    python examples/kmeans.py    # needs the extra `examples`

Each replica adds up its rows by their nearest centre; the sums and counts of all replicas make new centres, in `then`.
A count of 0 leaves a centre where it is. Prints the inertia and the largest difference of any centre.
"""

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.cluster import KMeans
from sklearn.datasets import load_digits

import synk

CLUSTERS, ROUNDS = 10, 30
x = (load_digits().data / 16).astype(np.float32)  # 1,797 rows: 450, 449, 449 and 449
start = x[np.random.default_rng(0).choice(len(x), CLUSTERS, replace=False)]

synk.init(4)
centres = synk.shared(start, name="centres")


def distances(x):
    return ((x[:, None] - centres.value) ** 2).sum(2)


@synk.function
def lloyd(x):
    squared = distances(x)
    nearest = squared.argmin(1)
    sums = jax.ops.segment_sum(x, nearest, CLUSTERS)
    return sums, jax.ops.segment_sum(jnp.ones(len(x)), nearest, CLUSTERS), squared.min(1).sum()


@lloyd.then
def lloyd(sums, counts, inertia):
    counts = counts[:, None]
    centres.value = jnp.where(counts > 0, sums / jnp.maximum(counts, 1), centres.value)
    return inertia


labels = synk.function(lambda x: distances(x).argmin(1), reduce="concat")
rows = synk.data(x, place="scatter", name="rows")  # sent once
for _ in range(ROUNDS):
    inertia = lloyd(rows)

expected = KMeans(CLUSTERS, init=start, n_init=1, max_iter=ROUNDS, tol=0, algorithm="lloyd").fit(x)
largest = np.abs(centres.value - expected.cluster_centers_).max()
print(f"inertia {float(inertia):.2f}, by scikit-learn {expected.inertia_:.2f}")
assert (labels(rows) == expected.labels_).all() and largest < 1e-4
print(f"largest difference {largest:.0e}")
