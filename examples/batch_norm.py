"""A ResNet with batch norm, trained on four devices as on one, down to the last batch of 106 rows.

    python examples/batch_norm.py    # needs the extra `examples`

Batch norm makes rows see one another. flax's `BatchNorm` stands here without an axis name, as in a program for one
device: with `engine="jit"` the loss sees the whole batch, and XLA divides its work among the devices. 1,130 of
scikit-learn's digits are 8 batches of 128 and one of 106, which 4 does not divide. Beside it runs plain JAX on one
device; the last line is the largest difference of any loss, parameter or running average, relative to its array.
"""

import jax
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits

import synk
import synk.train

ROWS, BATCH, SEED = 1130, 128, 0


class Block(nn.Module):
    """Two convolutions with batch norm, and what they add to."""

    features: int

    @nn.compact
    def __call__(self, x, train):
        y = nn.relu(nn.BatchNorm(not train)(nn.Conv(self.features, (3, 3), use_bias=False)(x)))
        y = nn.BatchNorm(not train)(nn.Conv(self.features, (3, 3), use_bias=False)(y))
        return nn.relu(y + nn.Conv(self.features, (1, 1))(x))


class ResNet(nn.Module):
    """Two blocks, and scores of ten digits."""

    @nn.compact
    def __call__(self, x, train):
        x = Block(8)(x, train)
        x = Block(16)(nn.avg_pool(x, (2, 2), (2, 2)), train)
        return nn.Dense(10)(x.mean((1, 2)))


def loss(params, state, x, y):
    """The mean loss of a batch, and new running averages."""
    scores, new = net.apply({"params": params, **state}, x, True, mutable=["batch_stats"])
    return optax.softmax_cross_entropy_with_integer_labels(scores, y).mean(), new


@jax.jit
def alone(params, state, opt_state, x, y):
    """The same step in plain JAX, on one device."""
    (value, state), grads = jax.value_and_grad(loss, has_aux=True)(params, state, x, y)
    updates, opt_state = sgd.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), state, opt_state, value


def gap(found, expected):
    """Return the largest difference of two arrays, relative to the largest number."""
    return np.max(np.abs(np.asarray(found) - expected)) / np.max(np.abs(expected))


synk.init(4)
x, y = load_digits(return_X_y=True)
x, y = (x[:ROWS].reshape(-1, 8, 8, 1) / 16).astype(np.float32), y[:ROWS].astype(np.int32)
net, sgd = ResNet(), optax.sgd(0.1)
variables = net.init(jax.random.key(SEED), x[:1], False)
params, state = variables.pop("params"), variables
batches = list(synk.minibatches(ROWS, BATCH, seed=SEED))

step = synk.train.step(loss, params, sgd, state=state, engine="jit")
losses = [float(value) for value in step.iterate(x, y, batches=batches)]

opt_state, expected = sgd.init(params), []
for batch in batches:
    params, state, opt_state, value = alone(params, state, opt_state, x[batch], y[batch])
    expected.append(float(value))

gaps = jax.tree.map(gap, (losses, step.params.value, step.state.value), (expected, params, state))
largest = max(jax.tree.leaves(gaps))
assert largest < 1e-3 and losses[-1] < losses[0]
print(f"{len(batches)} steps, the last of {len(batches[-1])} rows: loss {losses[0]:.3f} to {losses[-1]:.3f}")
print(f"largest difference {largest:.0e}")
