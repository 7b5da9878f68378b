"""Knowledge distillation: a small student learns from a teacher's soft targets, four devices as on one.

    python examples/distillation.py    # needs the extra `examples`

The teacher never changes, so the loss closes over its weights: each device has them once. Prints the test accuracy of
teacher and student, and the largest difference of any weight from the same training on one device.
"""

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import synk
import synk.train

TRAIN, BATCH, EPOCHS, TEMPERATURE, SEED = 1485, 99, 8, 3.0, 0
x, y = load_digits(return_X_y=True)
order = np.random.default_rng(SEED).permutation(len(x))
x, y = (x[order] / 16).astype(np.float32), y[order].astype(np.int32)


def network(weights, x):
    return jax.nn.relu(x @ weights[0]) @ weights[1]


def of_labels(weights, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(network(weights, x), y).mean()


def of_teacher(weights, x, y):
    """Return the mean of the loss by labels and of that by the teacher's softened opinion."""
    wanted = jax.nn.softmax(network(teacher, x) / TEMPERATURE)
    soft = optax.softmax_cross_entropy(network(weights, x) / TEMPERATURE, wanted).mean()
    return (of_labels(weights, x, y) + TEMPERATURE**2 * soft) / 2


def trained(loss, units, replicas):
    rng = np.random.default_rng(SEED)
    start = [rng.normal(0, m**-0.5, (m, n)).astype(np.float32) for m, n in ((64, units), (units, 10))]
    with synk.init(replicas):
        step = synk.train.step(loss, start, optax.adam(5e-3))
        for _ in step.iterate(x[:TRAIN], y[:TRAIN], batches=synk.minibatches(TRAIN, BATCH, epochs=EPOCHS)):
            pass
        return jax.device_get(step.params.value)


def accuracy(weights):
    return np.mean(network(weights, x[TRAIN:]).argmax(1) == y[TRAIN:])


teacher = trained(of_labels, 256, 4)
four, one = trained(of_teacher, 16, 4), trained(of_teacher, 16, 1)
largest = max(np.abs(a - b).max() for a, b in zip(four, one, strict=True))
print(f"test accuracy: teacher {accuracy(teacher):.1%}, student {accuracy(four):.1%}")
assert accuracy(four) > 0.9 and largest < 1e-3
print(f"largest difference {largest:.0e}")
