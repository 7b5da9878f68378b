"""Kalman filter, parallel in time: 1,003 noisy positions on four devices, by an associative scan.

    python examples/kalman_filter.py

In a loop each step waits for the one before. As an associative operation (Särkkä and García-Fernández, arXiv
1905.13002) the filter is a prefix: by `synk.contrib.scan` each replica filters its own times, and passes one total on.
Prints the errors of what was measured and filtered, and the largest difference from the loop in NumPy.
"""

import jax.numpy as jnp
import numpy as np

import synk

TIMES, DT, NOISE = 1003, 0.1, 1.0
F, H, R = np.array([[1, DT], [0, 1]]), np.array([[1.0, 0.0]]), np.array([[NOISE**2]])
Q = 0.25 * np.array([[DT**3 / 3, DT**2 / 2], [DT**2 / 2, DT]])
rng = np.random.default_rng(0)
pushes = rng.multivariate_normal([0, 0], Q, TIMES).cumsum(0)
positions = pushes[:, :1] + DT * pushes[:, 1:].cumsum(0)
seen = positions + NOISE * rng.normal(size=(TIMES, 1))


def element(y, P, A):
    """Return what a measurement, whose prediction spreads by P, does to a mean and a covariance."""
    S = np.linalg.inv(H @ P @ H.T + R)
    rest, y = np.eye(2) - P @ H.T @ S @ H, y[:, None]
    return rest @ A, P @ H.T @ S @ y, rest @ P, A.T @ H.T @ S @ y, A.T @ H.T @ S @ H @ A


def then(first, second):
    """Combine maps a, and those that come after them, b."""
    (A, m, C, e, J), (B, n, D, f, K) = first, second
    turned = jnp.linalg.inv(jnp.eye(2) + C @ K)
    back = A.mT @ turned.mT
    return (
        B @ turned @ A,
        B @ turned @ (m + C @ f) + n,
        B @ turned @ C @ B.mT + D,
        back @ (f - K @ m) + e,
        back @ K @ A + J,
    )


elements = [element(y, Q, F) for y in seen]
elements[0] = element(seen[0], F @ F.T + Q, 0 * F)  # the first has a prior of mean 0 and covariance 1
rows = [np.stack(leaf).astype(np.float32) for leaf in zip(*elements, strict=True)]
synk.init(4)
means = np.asarray(synk.contrib.scan(then, tuple(rows))[1])[..., 0]

mean, spread, expected = np.zeros(2), np.eye(2), []
for y in seen:
    mean, spread = F @ mean, F @ spread @ F.T + Q
    gain = spread @ H.T @ np.linalg.inv(H @ spread @ H.T + R)
    mean, spread = mean + gain @ (y - H @ mean), spread - gain @ H @ spread
    expected.append(mean)
errors, largest = [np.std(found - positions) for found in (seen, means[:, :1])], np.abs(means - expected).max()
print(f"errors of what was measured {errors[0]:.2f}, filtered {errors[1]:.2f}")
assert errors[1] < errors[0] / 2 and largest < 1e-2
print(f"largest difference {largest:.0e}")
