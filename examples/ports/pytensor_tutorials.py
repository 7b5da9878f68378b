"""Theano's deep-learning tutorials, in PyTensor, on several devices: softmax regression, perceptron, LeNet, LSTM.

    python examples/ports/pytensor_tutorials.py    # needs the extras `examples` and `pytensor`

Each graph is as the tutorial has it, but that rows come first. `pytensor.function` trains one copy of it on one device,
`synk.contrib.pytensor.function` another on four, by the same batches, of which the last is smaller. Then their
parameters are compared, and PyTensor's own function evaluates what synk has trained. The digits are scikit-learn's, of
8 x 8 pixels; the LSTM reads them row by row, and of some it sees the upper rows alone, as its mask says.
"""

import os

os.environ.setdefault("PYTENSOR_FLAGS", "floatX=float32")  # as the tutorials say; and JAX keeps to 32 bits

import jax
import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.link.jax.ops import JAXOp
from sklearn.datasets import load_digits

import synk
import synk.contrib.pytensor

rng = np.random.default_rng(0)


def parameter(name, *shape):
    scale = np.sqrt(6 / sum(shape[-2:])) if len(shape) > 1 else 0
    return pytensor.shared(rng.uniform(-scale, scale, shape).astype("float32"), name)


def log_likelihood(p_y, y):
    return pt.mean(pt.log(p_y)[pt.arange(y.shape[0]), y])


def softmax(x, W, b):
    return pt.special.softmax(x @ W + b, axis=1)


def softmax_regression():
    x = pt.matrix("x")
    W, b = parameter("W", 64, 10), parameter("b", 10)
    return [x], softmax(x, W, b), [W, b], 0.0


def perceptron():
    """One hidden layer, and a penalty on the weights."""
    x = pt.matrix("x")
    W1, b1, W2, b2 = parameter("W1", 64, 100), parameter("b1", 100), parameter("W2", 100, 10), parameter("b2", 10)
    penalty = 1e-4 * (pt.sum(W1**2) + pt.sum(W2**2))
    return [x], softmax(pt.tanh(x @ W1 + b1), W2, b2), [W1, b1, W2, b2], penalty


# PyTensor has no convolution of many images any more: JAX's, as expressions of any shape.
MANY_IMAGES = pt.TensorType("float32", (None,) * 4)
convolve = JAXOp(
    [MANY_IMAGES] * 2,
    [MANY_IMAGES],
    lambda images, filters: (jax.lax.conv(images, filters, (1, 1), "SAME"),),
)
max_pool = JAXOp(
    [MANY_IMAGES],
    [MANY_IMAGES],
    lambda images: (jax.lax.reduce_window(images, -np.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID"),),
)


def lenet():
    x = pt.matrix("x")
    F1, c1, F2, c2 = parameter("F1", 8, 1, 3, 3), parameter("c1", 8), parameter("F2", 16, 8, 3, 3), parameter("c2", 16)
    W1, b1, W2, b2 = parameter("W1", 64, 50), parameter("b1", 50), parameter("W2", 50, 10), parameter("b2", 10)
    images = x.reshape((x.shape[0], 1, 8, 8))
    for filters, bias in ((F1, c1), (F2, c2)):
        images = pt.tanh(max_pool(convolve(images, filters)) + bias[:, None, None])
    hidden = pt.tanh(images.reshape((x.shape[0], 64)) @ W1 + b1)
    return [x], softmax(hidden, W2, b2), [F1, c1, F2, c2, W1, b1, W2, b2], 0.0


def lstm():
    """The mean of what an LSTM says along each sequence, as far as that goes."""
    x, mask = pt.matrix("x"), pt.matrix("mask")  # mask: (rows, 8)
    size = 32
    W, U, b = parameter("W", 8, 4 * size), parameter("U", size, 4 * size), parameter("b", 4 * size)
    V, c = parameter("V", size, 10), parameter("c", 10)

    def one(m, x, h_before, c_before):
        gates = x @ W + h_before @ U + b
        i, f, o = (pt.sigmoid(gates[:, k * size : (k + 1) * size]) for k in range(3))
        c = f * c_before + i * pt.tanh(gates[:, 3 * size :])
        c = m[:, None] * c + (1 - m)[:, None] * c_before
        h = o * pt.tanh(c)
        return m[:, None] * h + (1 - m)[:, None] * h_before, c

    steps = x.reshape((x.shape[0], 8, 8)).dimshuffle(1, 0, 2)
    zeros = pt.zeros((x.shape[0], size), dtype="float32")
    h, _ = pytensor.scan(one, sequences=[mask.T, steps], outputs_info=[zeros, zeros], return_updates=False)
    mean = (h * mask.T[:, :, None]).sum(0) / mask.sum(1)[:, None]
    return [x, mask], softmax(mean, V, c), [W, U, b, V, c], 0.0


MODELS = {"softmax regression": softmax_regression, "perceptron": perceptron, "LeNet": lenet, "LSTM": lstm}


def graph(model):
    """Inputs, cost, predictions, parameters and their gradients; of Theano's momentum the updates."""
    inputs, p_y, params, penalty = MODELS[model]()
    y, rate = pt.ivector("y"), pt.scalar("rate")
    cost = -log_likelihood(p_y, y) + penalty
    grads = pt.grad(cost, params)
    updates = []
    for w, g in zip(params, grads, strict=True):
        velocity = pytensor.shared(np.zeros_like(w.get_value()), f"{w.name}_velocity")
        new = np.float32(0.9) * velocity - rate * g
        updates += [(velocity, new), (w, w + new)]
    return [*inputs, y, rate], cost, pt.argmax(p_y, axis=1), params, grads, updates


def digits(model):
    """The rows of training and of test."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(1).permutation(len(images))
    images, labels = (images[order] / 16).astype("float32"), labels[order].astype("int32")
    lengths = np.random.default_rng(2).integers(6, 9, len(images))
    mask = (np.arange(8) < lengths[:, None]).astype("float32")
    rows = [images, mask, labels] if model == "LSTM" else [images, labels]
    return [r[:1500] for r in rows], [r[1500:] for r in rows]


def train(model, epochs=3, rate=0.1, devices=4):
    train, test = digits(model)
    seen = rng.bit_generator.state
    inputs, cost, _, params, _, updates = graph(model)
    one = pytensor.function(inputs, cost, updates=updates, mode="FAST_COMPILE")

    rng.bit_generator.state = seen  # the same weights
    inputs, cost, found, others, grads, updates = graph(model)
    synk.init(devices)
    many = synk.contrib.pytensor.function(
        inputs, cost, broadcast=inputs[-1:], updates=updates, combine=[(g, "mean") for g in grads], name="train"
    )

    batches = list(synk.minibatches(1500, 128, seed=3, epochs=epochs))
    costs = list(many.iterate(*train, rate, batches=batches))
    alone = [one(*[r[rows] for r in train], np.float32(rate)) for rows in batches]
    np.testing.assert_allclose(costs, alone, atol=1e-4)
    gap = max(np.abs(a.get_value() - b.get_value()).max() for a, b in zip(params, others, strict=True))
    right = (pytensor.function(inputs[:-2], found, mode="FAST_COMPILE")(*test[:-1]) == test[-1]).mean()
    print(f"{model:18s}  cost {costs[-1]:.4f}  largest difference {gap:.0e}  test accuracy {100 * right:.1f} %")
    return gap


if __name__ == "__main__":
    gaps = [train(model, **({"epochs": 10, "rate": 0.2} if model == "LSTM" else {})) for model in MODELS]
    print(f"{sum(gap < 1e-5 for gap in gaps)} of {len(gaps)} as on one device")
