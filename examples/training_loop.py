"""Training loop: validation after each epoch, logging for TensorBoard or wandb, a tqdm bar, early stopping.

    python examples/training_loop.py    # needs the extra `examples`

Losses stay on the devices until a log is due, so the loop seldom waits. The best parameters are saved, and loaded at
the end. Give a log to `wandb.log`, or its numbers to TensorBoard's `add_scalar`. Prints the last log, and the largest
difference of any number logged.
"""

import tempfile

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits
from tqdm import tqdm

import synk
import synk.train

TRAIN, BATCH, EPOCHS, EVERY, PATIENCE = 1188, 99, 30, 4, 2
x, y = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(x))
x, y = (x[order] / 16).astype(np.float32), y[order].astype(np.int32)
start = [np.random.default_rng(m).normal(0, m**-0.5, (m, n)).astype(np.float32) for m, n in ((64, 64), (64, 10))]


def loss(weights, x, y):
    scores = jax.nn.relu(x @ weights[0]) @ weights[1]
    return optax.softmax_cross_entropy_with_integer_labels(scores, y).mean()


def train(replicas):
    """Return all that was logged, and the number of the best step."""
    logs, best, waited = [], np.inf, 0
    with synk.init(replicas), tempfile.TemporaryDirectory() as folder:
        step = synk.train.step(loss, start, optax.adam(0.02), log=lambda grads, *_: optax.tree.norm(grads))
        valid = synk.function(lambda x, y: loss(step.params.value, x, y), reduce="mean")
        batches = synk.minibatches(TRAIN, BATCH, epochs=EPOCHS)
        bar = tqdm(step.iterate(x[:TRAIN], y[:TRAIN], batches=batches), leave=False, disable=None)
        for number, (value, norm) in enumerate(bar, 1):
            if number % EVERY == 0:
                logs.append({"step": number, "loss": float(value), "gradient": float(norm)})
                bar.set_postfix(logs[-1])
            if number % batches.per_epoch == 0:
                error = float(valid(x[TRAIN:], y[TRAIN:]))
                logs.append({"step": number, "valid": error})
                best, waited = (error, 0) if error < best else (best, waited + 1)
                if waited == PATIENCE:
                    break
                if waited == 0:
                    synk.save(folder, step.variables, step=number)
        return logs, synk.load(folder, step.variables)[0]


(four, number), (one, _) = train(4), train(1)
largest = max(abs(a[name] - b[name]) for a, b in zip(four, one, strict=True) for name in a)
print(four[-1], "best at step", number)
assert largest < 1e-3
print(f"largest difference {largest:.0e}")
