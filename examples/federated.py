"""Federated averaging (FedAvg): 23 clients with data of their own and any number of rows, on four devices as on one.

    python examples/federated.py    # needs the extra `examples`

Clients are rows. Each takes local SGD steps from the server's weights, on its own padded examples; the server's new
weights are the mean over clients, weighted by their examples. Prints the test accuracy, and the largest difference.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import synk

CLIENTS, ROUNDS, LOCAL_STEPS, RATE, MOST = 23, 15, 5, 0.5, 100
rng = np.random.default_rng(0)
digits, labels = load_digits(return_X_y=True)
order = np.argsort(labels + rng.normal(0, 1.5, len(labels)))  # a client knows few digits well
test, mine = order[::5], np.delete(order, np.s_[::5])
cuts = np.sort(rng.choice(np.arange(20, len(mine) - 20, 25), CLIENTS - 1, replace=False))
x, y = np.zeros((CLIENTS, MOST, 64), np.float32), np.zeros((CLIENTS, MOST), np.int32)
count = np.zeros(CLIENTS, np.float32)
for number, rows in enumerate(np.split(mine, cuts)):
    count[number] = size = min(len(rows), MOST)
    x[number, :size], y[number, :size] = digits[rows[:size]] / 16, labels[rows[:size]]


def loss(weights, x, y, count):
    each = optax.softmax_cross_entropy_with_integer_labels(x @ weights, y)
    return jnp.sum(each * (jnp.arange(MOST) < count)) / count


def client(x, y, count, weights):
    """Return a client's weights after its own steps, weighted by its examples."""

    def step(weights, _):
        return weights - RATE * jax.grad(loss)(weights, x, y, count), None

    return synk.Weighted(jax.lax.scan(step, weights, length=LOCAL_STEPS)[0], count)


average = synk.map(client, inputs={"weights": "broadcast"}, outputs="mean")


def train(replicas):
    """Return the server's weights after all rounds."""
    with synk.init(replicas):
        weights = np.zeros((64, 10), np.float32)
        for _ in range(ROUNDS):
            weights = average(x, y, count, weights)
        return np.asarray(weights)


four, one = train(4), train(1)
accuracy, largest = np.mean((digits[test] @ four).argmax(1) == labels[test]), np.abs(four - one).max()
print(f"clients of {int(count.min())} to {int(count.max())} examples; test accuracy {accuracy:.1%}")
assert accuracy > 0.85 and largest < 1e-4
print(f"largest difference {largest:.0e}")
