"""Grain loads, shuffles and augments the rows of a training step on four devices as on one.

    python examples/grain_loader.py    # needs the extras `examples` and `loaders`

`step.stream` takes the loader as it is: its batches are dictionaries, by the names of the loss's parameters. Noise
belongs to a row: Grain gives each its own generator. Prints the accuracy, and the largest difference from one device.
"""

import grain  # type: ignore[import]  # where it is installed
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import synk
import synk.train

BATCH, EPOCHS = 128, 3
x, y = load_digits(return_X_y=True)
x, y = (x / 16).astype(np.float32), y.astype(np.int32)


def noisy(row, rng):
    return row | {"x": row["x"] + rng.normal(0, 0.1, 64).astype(np.float32)}


def loss(weights, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(x @ weights, y).mean()


def train(replicas):
    """Return the weights and the accuracy."""
    rows = grain.MapDataset.source([{"x": a, "y": b} for a, b in zip(x, y, strict=True)]).seed(0)
    loader = rows.shuffle().random_map(noisy).repeat(EPOCHS).batch(BATCH)
    with synk.init(replicas):
        step = synk.train.step(loss, np.zeros((64, 10), np.float32), optax.sgd(0.5, momentum=0.9))
        accuracy = synk.function(lambda x, y: ((x @ step.params.value).argmax(1) == y).mean(), reduce="mean")
        for _ in step.stream(loader.to_iter_dataset()):
            pass
        return jax.device_get(step.params.value), float(accuracy(x, y))


(four, accuracy), (one, _) = train(4), train(1)
largest = np.abs(four - one).max()
print(f"accuracy {accuracy:.1%}")
assert accuracy > 0.9 and largest < 1e-4
print(f"largest difference {largest:.0e}")
