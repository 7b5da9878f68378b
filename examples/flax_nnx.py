"""Flax NNX: a network with batch norm and dropout, trained with AdamW, saved, and resumed on other replicas.

    python examples/flax_nnx.py    # needs the extra `examples`

An NNX model is an object; synk wants trees of arrays. So it is split once: parameters, which are trained, and all else
that it keeps (running averages), which is the `state` of `synk.train.step`. The loss merges them, calls the model, and
gives back its new state. Dropout's key is an argument, of which each part of a batch makes its own: a key in the state
is the same for all parts, and so would be their masks. On scikit-learn's 1,797 digits, four replicas, then three.
"""

import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import synk
import synk.train

EPOCHS, BATCH, SEED = 12, 64, 0


class Net(nnx.Module):
    """Two layers, with batch norm and dropout between them."""

    def __init__(self, rngs):
        self.first = nnx.Linear(64, 128, rngs=rngs)
        self.norm = nnx.BatchNorm(128, rngs=rngs)
        self.dropout = nnx.Dropout(0.2)
        self.last = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x, rngs=None):
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x))), rngs=rngs))


def make_step(model):
    """A training step; its parameters and state are plain dictionaries of arrays."""
    graph, params, state = nnx.split(model, nnx.Param, ...)

    def loss(params, state, x, y, key):
        model = nnx.merge(graph, params, state, copy=True)  # of this trace
        model.train()
        scores = model(x, nnx.Rngs(dropout=synk.part_key(key)))
        value = optax.softmax_cross_entropy_with_integer_labels(scores, y).mean()
        return value, nnx.state(model, nnx.Not(nnx.Param))

    step = synk.train.step(loss, params, optax.adamw(2e-3), state=state, inputs=["x", "y"])

    @synk.function(reduce="mean")
    def accuracy(x, y):
        model = nnx.merge(graph, step.params.value, step.state.value, copy=True)
        model.eval()
        return (model(x).argmax(1) == y).mean()

    return step, accuracy


x, y = load_digits(return_X_y=True)
order = np.random.default_rng(SEED).permutation(len(x))
x, y = (x[order] / 16).astype(np.float32), y[order].astype(np.int32)
train, test = slice(0, 1500), slice(1500, None)

synk.init(4)
step, accuracy = make_step(Net(nnx.Rngs(SEED)))
folder = tempfile.mkdtemp()
batches = synk.minibatches(1500, BATCH, seed=SEED, epochs=EPOCHS)
keys = jax.random.split(jax.random.key(SEED), len(batches))
steps = step.iterate(x[train], y[train], synk.each(keys), batches=batches)
for number, _ in enumerate(steps, 1):
    if number == len(batches) // 2:
        synk.save(folder, step.variables, step=number)
print(f"On four replicas: {100 * float(accuracy(x[test], y[test])):.1f} % of {len(x[test])}")

with synk.simulate(3):  # another number of replicas, from the checkpoint on
    resumed, its_accuracy = make_step(Net(nnx.Rngs(SEED + 1)))
    start, _ = synk.load(folder, resumed.variables)
    rest = synk.minibatches(1500, BATCH, seed=SEED, epochs=EPOCHS, start=start)
    for _ in resumed.iterate(x[train], y[train], synk.each(keys), batches=rest):
        pass
    found = 100 * float(its_accuracy(x[test], y[test]))

# As an object again, on one device.
graph, *_ = nnx.split(Net(nnx.Rngs(SEED)), nnx.Param, ...)
model = nnx.merge(graph, resumed.params.value, resumed.state.value)
model.eval()
alone = 100 * float((model(jnp.asarray(x[test])).argmax(1) == y[test]).mean())
assert abs(alone - found) < 1e-4
print(f"Test accuracy {found:.1f} % on three replicas, resumed after {start} of {len(batches)} steps")
