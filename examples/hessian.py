"""Hessian of a loss, Newton's method and the largest curvature, with rows on four devices as on one.

    python examples/hessian.py    # needs the extra `examples`

A logistic regression on 569 rows. Gradient and Hessian are means over rows, and `then` takes Newton's step by them. A
synk function composes too: `jax.hessian` of it is the same matrix, and a Hessian-vector product by `jax.jvp` of its
gradient finds the largest curvature by power iteration. Prints the largest difference from NumPy's answers.
"""

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_breast_cancer

import synk

PENALTY, STEPS = 0.01, 8
x, y = load_breast_cancer(return_X_y=True)
x = ((x - x.mean(0)) / x.std(0)).astype(np.float32)
y = y.astype(np.float32)


def loss(w, x, y):
    return jnp.mean(jax.nn.softplus(x @ w) - y * (x @ w)) + PENALTY / 2 * w @ w


synk.init(4)
w = synk.shared(np.zeros(x.shape[1], np.float32), name="w")


@synk.function(reduce="mean")
def newton(x, y):
    return jax.grad(loss)(w.value, x, y), jax.hessian(loss)(w.value, x, y)


@newton.then
def newton(gradient, hessian):
    w.value -= jnp.linalg.solve(hessian, gradient)
    return jnp.linalg.norm(gradient)


norms = [float(newton(x, y)) for _ in range(STEPS)]
print("norm of the gradient:", *(f"{norm:.0e}" for norm in norms))

parallel = synk.function(loss, inputs=["x", "y"], reduce="mean")
found = jax.jit(jax.hessian(parallel))(w.value, x, y)
v = jnp.ones(x.shape[1])
for _ in range(50):
    v = jax.jvp(lambda w: jax.grad(parallel)(w, x, y), (w.value,), (v / jnp.linalg.norm(v),))[1]

p = 1 / (1 + np.exp(-x @ np.asarray(w.value, np.float64)))
expected = (x.T * (p * (1 - p))) @ x / len(x) + PENALTY * np.eye(x.shape[1])
largest = max(np.abs(found - expected).max(), abs(float(jnp.linalg.norm(v)) - np.linalg.eigvalsh(expected).max()))
print(f"largest curvature {float(jnp.linalg.norm(v)):.4f}")
assert norms[-1] < 1e-4 and largest < 1e-3
print(f"largest difference {largest:.0e}")
