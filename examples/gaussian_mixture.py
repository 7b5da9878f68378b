"""Gaussian mixture by EM (expectation maximisation) over rows on four devices, as scikit-learn's on one.

    python examples/gaussian_mixture.py    # needs the extra `examples`

The expectation step runs on each replica's rows and returns sums: how much of each component they are, their first and
second moments. The maximisation step is `then`, on the sums of all rows. Prints the mean log-likelihood and the largest
difference of any mean, covariance or weight.
"""

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.mixture import GaussianMixture

import synk

ROWS, ROUNDS = 1003, 200
rng = np.random.default_rng(0)
middles = np.array([[0, 0], [4, 1], [1, 4]])
x = (middles[rng.integers(0, 3, ROWS)] + rng.normal(size=(ROWS, 2))).astype(np.float32)
means = x[:3]
start = {"weights": np.full(3, 1 / 3), "means": means, "covariances": np.tile(np.eye(2), (3, 1, 1))}

synk.init(4)
mixture = synk.shared(jax.tree.map(np.float32, start), name="mixture")


@synk.function
def em(x):
    now = mixture.value
    density = jax.vmap(jax.scipy.stats.multivariate_normal.logpdf, (None, 0, 0), 1)
    joint = density(x, now["means"], now["covariances"]) + jnp.log(now["weights"])
    share = jax.nn.softmax(joint, axis=1)
    first = jnp.einsum("nk,nd->kd", share, x)
    second = jnp.einsum("nk,nd,ne->kde", share, x, x)
    return share.sum(0), first, second, jax.nn.logsumexp(joint, axis=1).sum()


@em.then
def em(count, first, second, likelihood):
    means = first / count[:, None]
    covariances = second / count[:, None, None] - means[:, :, None] * means[:, None]
    mixture.value = {"weights": count / count.sum(), "means": means, "covariances": covariances}
    return likelihood / count.sum()


rows = synk.data(x, place="scatter", name="rows")  # sent once
likelihoods = [em(rows) for _ in range(ROUNDS)]

options = dict(means_init=means, weights_init=start["weights"], precisions_init=start["covariances"])
expected = GaussianMixture(3, max_iter=10_000, tol=1e-9, reg_covar=0, **options).fit(x.astype(np.float64))
found = mixture.value
largest = max(np.abs(value - getattr(expected, f"{name}_")).max() for name, value in found.items())
print(f"mean log-likelihood {likelihoods[0]:.4f}, then {likelihoods[-1]:.4f}, by scikit-learn {expected.score(x):.4f}")
assert largest < 1e-2
print(f"largest difference {largest:.0e}")
