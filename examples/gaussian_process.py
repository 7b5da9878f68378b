"""Gaussian process regression, which is kernel ridge regression with error bars, its kernel matrix on four devices.

    python examples/gaussian_process.py    # needs the extra `examples`

`synk.contrib.pairs` multiplies by the kernel matrix and never keeps it: rows go round the replicas. Conjugate gradients
solve with it, for the mean at new points and for the variance at some of them. Prints the largest difference from
scikit-learn's `GaussianProcessRegressor` and `KernelRidge`, on one device in float64.
"""

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF
from sklearn.kernel_ridge import KernelRidge

import synk

ROWS, NEW, LENGTH, NOISE = 1003, 5, 0.5, 0.1
rng = np.random.default_rng(0)
x, new = (rng.uniform(-2, 2, (rows, 2)).astype(np.float32) for rows in (ROWS, NEW))
y = (np.sin(3 * x[:, 0]) * np.cos(x[:, 1]) + 0.1 * rng.normal(size=ROWS)).astype(np.float32)


def kernel(a, b):
    return jnp.exp(-0.5 * jnp.sum((a - b) ** 2) / LENGTH**2)


def times(rows, columns, vectors):
    """Return the kernel matrix of rows and columns times vectors, one on each of axis 1."""
    return synk.contrib.pairs(lambda a, b: kernel(a, b[0]) * b[1], rows, (columns, vectors))


@jax.jit
def regress(x, y, new):
    """Return means and variances at the new points."""
    cross = synk.contrib.pairs(kernel, x, new, reduce="concat")  # (ROWS, NEW)
    wanted = jnp.concatenate([y[:, None], cross], 1)
    solved, _ = jax.scipy.sparse.linalg.cg(lambda v: times(x, x, v) + NOISE * v, wanted, tol=1e-6)
    return cross.T @ solved[:, 0], 1 - jnp.sum(cross * solved[:, 1:], 0)


synk.init(4)
mean, variance = regress(x, y, new)

process = GaussianProcessRegressor(RBF(LENGTH), alpha=NOISE, optimizer=None).fit(x.astype(np.float64), y)
ridge = KernelRidge(alpha=NOISE, kernel="rbf", gamma=0.5 / LENGTH**2).fit(x.astype(np.float64), y)
expected, spread = process.predict(new, return_std=True)
largest = max(
    np.abs(mean - expected).max(), np.abs(mean - ridge.predict(new)).max(), np.abs(variance - np.square(spread)).max()
)
print("means", *np.round(np.asarray(mean), 3), "+-", *np.round(np.sqrt(np.asarray(variance)), 3))
assert largest < 1e-3
print(f"largest difference {largest:.0e}")
