"""MAML: meta-learning sine waves; tasks are rows, each with a gradient step of its own inside, four devices as on one.

    python examples/maml.py    # needs the extra `examples`

The loss of a task is that of the weights after a step on five points of it, so the outer gradient has second
derivatives. Prints the error on new tasks after one step of plain and of meta-learned weights, and the largest
difference of any weight from one device.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import synk
import synk.train

TASKS, BATCH, EPOCHS, POINTS, RATE = 1001, 77, 12, 5, 0.1
rng = np.random.default_rng(0)
x = rng.uniform(-3, 3, (TASKS, 2 * POINTS, 1)).astype(np.float32)
height, shift = rng.uniform(0.5, 2, (TASKS, 1, 1)), rng.uniform(0, np.pi, (TASKS, 1, 1))
y = (height * np.sin(x + shift)).astype(np.float32)
start = [rng.normal(0, scale, shape).astype(np.float32) for scale, shape in ((1, (1, 40)), (1, (40,)), (0.15, (40, 1)))]


def error(weights, x, y):
    first, bias, last = weights
    return jnp.mean((jnp.tanh(x @ first + bias) @ last - y) ** 2)


def adapted(weights, x, y):
    """Return the error on the other points of a task, after a step on its first ones."""
    slopes = jax.grad(error)(weights, x[:POINTS], y[:POINTS])
    return error(jax.tree.map(lambda w, s: w - RATE * s, weights, slopes), x[POINTS:], y[POINTS:])


def loss(weights, x, y):
    return jax.vmap(adapted, (None, 0, 0))(weights, x, y).mean()


def train(replicas):
    """Return the weights to begin a task with."""
    with synk.init(replicas):
        step = synk.train.step(loss, start, optax.adam(3e-3))
        for _ in step.iterate(x[:-77], y[:-77], batches=synk.minibatches(TASKS - 77, BATCH, epochs=EPOCHS)):
            pass
        return jax.device_get(step.params.value)


four, one = train(4), train(1)
before, after = (float(loss(weights, x[-77:], y[-77:])) for weights in (start, four))
largest = max(np.abs(a - b).max() for a, b in zip(four, one, strict=True))
print(f"error on new tasks after one step: {before:.3f}, with MAML {after:.3f}")
assert after < before / 1.5 and largest < 1e-3
print(f"largest difference {largest:.0e}")
