"""LoRA: fine-tuning a pretrained network, its layers frozen, by low-rank adapters, four devices as on one.

    python examples/lora.py    # needs the extra `examples`

A network that knows scikit-learn's digits meets them mirrored. Its weights stay as they are: the loss closes over them,
and no gradient or optimizer's state is made for them. What is trained, sent and saved is two thin matrices a layer.
Prints the test accuracy before and after, and the largest difference of any adapter from one device's.
"""

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import synk
import synk.train

TRAIN, BATCH, EPOCHS, RANK, SEED = 1485, 99, 8, 8, 0
x, y = load_digits(return_X_y=True)
order = np.random.default_rng(SEED).permutation(len(x))
x, y = (x[order] / 16).astype(np.float32), y[order].astype(np.int32)
mirrored = np.ascontiguousarray(x[:, ::-1])


def network(weights, x):
    for weight in weights[:-1]:
        x = jax.nn.relu(x @ weight)
    return x @ weights[-1]


def loss(weights, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(network(weights, x), y).mean()


def adapted(adapters):
    return [weight + a @ b for weight, (a, b) in zip(frozen, adapters, strict=True)]


def trained(loss, params, x, replicas=4):
    with synk.init(replicas):
        step = synk.train.step(loss, params, optax.adam(5e-3), name="step")
        for _ in step.iterate(x[:TRAIN], y[:TRAIN], batches=synk.minibatches(TRAIN, BATCH, epochs=EPOCHS)):
            pass
        return jax.device_get(step.params.value)


def normal(*shape):
    return np.random.default_rng(shape).normal(0, shape[0] ** -0.5, shape).astype(np.float32)


frozen = trained(loss, [normal(64, 128), normal(128, 128), normal(128, 10)], x)
adapters = [(normal(len(weight), RANK), np.zeros((RANK, weight.shape[1]), np.float32)) for weight in frozen]
four, one = (trained(lambda a, x, y: loss(adapted(a), x, y), adapters, mirrored, replicas) for replicas in (4, 1))
before, after = (np.mean(network(w, mirrored[TRAIN:]).argmax(1) == y[TRAIN:]) for w in (frozen, adapted(four)))
largest = max(jax.tree.leaves(jax.tree.map(lambda a, b: np.abs(a - b).max(), four, one)))
print(f"mirrored digits: test accuracy {before:.1%}, with adapters {after:.1%}")
assert before < 0.5 and after > 0.8 and largest < 1e-3
print(f"largest difference {largest:.0e}")
