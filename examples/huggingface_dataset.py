"""A Hugging Face dataset (`datasets`) feeds a training step on four devices, columns by name.

    python examples/huggingface_dataset.py    # needs the extras `examples` and `loaders`

Batches are read from Arrow's files as the loop comes to them. The names of the columns are the names of the parameters;
the short last batch counts by its rows. Prints the accuracy, and the largest difference from one device.
"""

import jax
import numpy as np
import optax
from datasets import Dataset  # type: ignore[import]  # where it is installed
from sklearn.datasets import load_digits

import synk
import synk.train

BATCH, EPOCHS = 128, 3
x, y = load_digits(return_X_y=True)
dataset = Dataset.from_dict({"image": (x / 16).astype(np.float32), "label": y}).with_format("numpy")


def loss(weights, image, label):
    return optax.softmax_cross_entropy_with_integer_labels(image.astype(np.float32) @ weights, label).mean()


def train(replicas):
    """Return the weights and the accuracy."""
    with synk.init(replicas):
        step = synk.train.step(loss, np.zeros((64, 10), np.float32), optax.sgd(0.5, momentum=0.9))
        right = synk.function(
            lambda image, label: ((image @ step.params.value).argmax(1) == label).mean(), reduce="mean", name="right"
        )
        for epoch in range(EPOCHS):
            for _ in step.stream(dataset.shuffle(seed=epoch).iter(batch_size=BATCH)):
                pass
        return jax.device_get(step.params.value), float(right.over(source=dataset.iter(batch_size=500)))


(four, accuracy), (one, _) = train(4), train(1)
largest = np.abs(four - one).max()
print(f"accuracy {accuracy:.1%}")
assert accuracy > 0.9 and largest < 1e-4
print(f"largest difference {largest:.0e}")
