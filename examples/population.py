"""Population-based training (PBT): ten models on four devices; the worst copy the best and change their learning rate.

    python examples/population.py    # needs the extra `examples`

Models are rows, so devices need not communicate while they train: `synk.map` runs a model's steps. Between rounds the
loop reads the errors, and picks rows of parameters as NumPy does. Prints the best error, and the largest difference of
any model from `jax.vmap` on one device.
"""

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_diabetes

import synk

MODELS, ROUNDS, STEPS, WORST = 10, 6, 20, 3
x, y = load_diabetes(return_X_y=True)
x, y = np.divide(x, np.std(x, 0)).astype(np.float32), (np.subtract(y, np.mean(y)) / np.std(y)).astype(np.float32)
train, test = slice(0, 342), slice(342, None)


def error(weights, x, y):
    return jnp.mean((jnp.tanh(x @ weights["first"]) @ weights["last"] - y) ** 2)


def steps(weights, rate, x, y, test_x, test_y):
    """Train one model for a round, and return it with its test error."""

    def body(weights, _):
        return jax.tree.map(lambda w, g: w - rate * g, weights, jax.grad(error)(weights, x, y)), None

    weights, _ = jax.lax.scan(body, weights, length=STEPS)
    return weights, error(weights, test_x, test_y)


def evolve(run):
    """Return all models and their errors, after rounds of `run(models, rates)`."""
    rng = np.random.default_rng(0)
    models = {"first": rng.normal(0, 0.3, (MODELS, 10, 16)), "last": rng.normal(0, 0.1, (MODELS, 16))}
    models, rates = jax.tree.map(np.float32, models), np.geomspace(1e-4, 0.3, MODELS, dtype=np.float32)
    for _ in range(ROUNDS):
        models, errors = jax.device_get(run(models, rates, x[train], y[train], x[test], y[test]))
        order = np.argsort(errors)
        rows = np.arange(MODELS)
        rows[order[-WORST:]] = order[:WORST]  # exploit
        changed = rng.choice([0.8, 1.25], MODELS).astype(np.float32)
        rates = np.where(rows == np.arange(MODELS), rates, rates[rows] * changed)  # explore
        models = {name: leaf[rows] for name, leaf in models.items()}
    return models, errors


synk.init(4)
four, errors = evolve(synk.map(steps, inputs=["weights", "rate"]))
one, _ = evolve(jax.jit(jax.vmap(steps, (0, 0, None, None, None, None))))
largest = max(np.abs(four[name] - one[name]).max() for name in four)
print(f"best test error {errors.min():.3f}, worst {errors.max():.3f}")
assert errors.min() < 0.6 and largest < 1e-3
print(f"largest difference {largest:.0e}")
