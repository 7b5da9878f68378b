"""A torch DataLoader feeds a training step on four devices, and an exact evaluation, its last batch being short.

    python examples/torch_dataloader.py    # needs torch, and the extra `examples`

`step.stream` takes a batch as the loader makes it, a pair of tensors; `over(source=)` evaluates all rows. Workers of a
DataLoader need `multiprocessing_context="forkserver"`. Prints the accuracy, and the largest difference from one device.
"""

import jax
import numpy as np
import optax
import torch  # type: ignore[import]  # where it is installed
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset  # type: ignore[import]

import synk
import synk.train

BATCH, EPOCHS = 128, 3
x, y = load_digits(return_X_y=True)
dataset = TensorDataset(torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y))  # labels are int64


def loss(weights, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(x @ weights, y).mean()


def train(replicas):
    """Return the weights and the accuracy."""
    with synk.init(replicas):
        step = synk.train.step(loss, np.zeros((64, 10), np.float32), optax.sgd(0.5, momentum=0.9))
        accuracy = synk.function(lambda x, y: ((x @ step.params.value).argmax(1) == y).mean(), reduce="mean")
        torch.manual_seed(0)
        loader = DataLoader(dataset, BATCH, shuffle=True)
        for _ in range(EPOCHS):
            for _ in step.stream(loader):
                pass
        return jax.device_get(step.params.value), float(accuracy.over(source=DataLoader(dataset, 500)))


(four, accuracy), (one, _) = train(4), train(1)
largest = np.abs(four - one).max()
print(f"accuracy {accuracy:.1%}")
assert np.isclose(accuracy, np.mean((x / 16 @ four).argmax(1) == y)) and largest < 1e-4
print(f"largest difference {largest:.0e}")
