"""Hyperparameter sweep and ensemble: 20 trainings, of five learning rates and four seeds, at once on four devices.

    python examples/sweep.py    # needs the extra `examples`

A training is a row. `synk.map` runs each replica's share as one program, with no communication. The four seeds of the
best rate vote as an ensemble. Prints its accuracy beside the mean of its members, and the largest
difference of any weight from `jax.vmap` on one device.
"""

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import synk

TRAIN, VALID, STEPS, BATCH, SEEDS = 1000, 300, 60, 50, 4
RATES = np.array([0.01, 0.03, 0.1, 0.3, 1.0], np.float32)
x, y = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(x))
x, y = (x[order] / 16).astype(np.float32), y[order].astype(np.int32)


def network(weights, x):
    return jax.nn.relu(x @ weights["first"]) @ weights["last"]


def loss(weights, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(network(weights, x), y).mean()


def training(rate, seed, x, y):
    """Train one network, and return its weights and its accuracy on rows for validation."""
    key = jax.random.key(seed)
    weights = {"first": jax.random.normal(key, (64, 32)) / 8, "last": jax.random.normal(key, (32, 10)) / 6}

    def step(weights, key):
        rows = jax.random.randint(key, (BATCH,), 0, TRAIN)
        return jax.tree.map(lambda w, g: w - rate * g, weights, jax.grad(loss)(weights, x[rows], y[rows])), None

    weights, _ = jax.lax.scan(step, weights, jax.random.split(key, STEPS))
    return weights, (network(weights, x[TRAIN : TRAIN + VALID]).argmax(1) == y[TRAIN : TRAIN + VALID]).mean()


synk.init(4)
rates, seeds = np.repeat(RATES, SEEDS), np.tile(np.arange(SEEDS), len(RATES))
four, scores = jax.device_get(synk.map(training, inputs=["rate", "seed"])(rates, seeds, x, y))
one, _ = jax.device_get(jax.jit(jax.vmap(training, (0, 0, None, None)))(rates, seeds, x, y))

best = RATES[scores.reshape(len(RATES), SEEDS).mean(1).argmax()]
members = [jax.tree.map(lambda leaf, row=row: leaf[row], four) for row in np.flatnonzero(rates == best)]
test_x, test_y = x[TRAIN + VALID :], y[TRAIN + VALID :]
votes = np.array([jax.nn.softmax(network(weights, test_x)) for weights in members])
alone, together = (votes.argmax(2) == test_y).mean(), (votes.mean(0).argmax(1) == test_y).mean()
largest = max(np.abs(four[name] - one[name]).max() for name in four)
print(f"best rate {best:.2g}: test accuracy of its members {alone:.1%}, of the ensemble {together:.1%}")
assert together >= alone > 0.8 and largest < 1e-2
print(f"largest difference {largest:.0e}")
