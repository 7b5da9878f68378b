"""Equinox: a perceptron whose loss is weighted by the labels that are known, its state in shards, evaluated exactly.

    python examples/equinox_mlp.py    # needs the extra `examples`, and equinox

An Equinox model is a tree with functions among its leaves; synk wants arrays. So it is cut once, by `eqx.partition`,
and put together in the loss. On scikit-learn's 1,797 digits, of which a third has no label: the loss is the mean over
those that have one, however many a replica meets. `shard_optimizer=True` keeps a quarter of Adam's state of each large
leaf on a replica.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import synk
import synk.train

EPOCHS, BATCH, SEED = 15, 128, 0

x, y = load_digits(return_X_y=True)
rng = np.random.default_rng(SEED)
order = rng.permutation(len(x))
x, y = (x[order] / 16).astype(np.float32), y[order].astype(np.int32)
is_known = rng.random(len(x)) < 2 / 3
train, test = slice(0, 1500), slice(1500, None)

synk.init(4)
params, rest = eqx.partition(eqx.nn.MLP(64, 10, 192, 2, key=jax.random.key(SEED)), eqx.is_array)


def loss(params, x, y, is_known):
    scores = jax.vmap(eqx.combine(params, rest))(x)
    each = optax.softmax_cross_entropy_with_integer_labels(scores, y)
    count = is_known.sum()
    return synk.Weighted((each * is_known).sum() / count, count)


step = synk.train.step(loss, params, optax.adamw(2e-3), clip=1.0, shard_optimizer=True)


@synk.function(outputs={"matrix": "merge", "right": "mean"})
def evaluate(x, y):
    found = jax.vmap(eqx.combine(step.params.value, rest))(x).argmax(1)
    return {"matrix": synk.stats.confusion(y, found, 10), "right": (found == y).mean()}


step.check(x[train], y[train], is_known[train], batch=101)
batches = synk.minibatches(1500, BATCH, seed=SEED, epochs=EPOCHS)
losses = list(step.iterate(x[train], y[train], is_known[train], batches=batches))
print(f"Loss {losses[-1]:.3f} after {len(batches)} steps")

found = evaluate.over(x[test], y[test], batches=synk.minibatches(len(x[test]), 64))
model = eqx.combine(step.params.value, rest)
alone = np.asarray(jax.vmap(model)(jnp.asarray(x[test])).argmax(1))
matrix = np.zeros((10, 10), int)
np.add.at(matrix, (y[test], alone), 1)
np.testing.assert_array_equal(found["matrix"], matrix)
print(f"Test accuracy {100 * float(found['right']):.1f} %, confusion matrix as NumPy's")
