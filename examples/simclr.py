"""SimCLR: a contrastive loss, whose rows see one another, on four devices as on one.

    python examples/simclr.py    # needs the extra `examples`

The loss is written for one device: two noisy views of each row of a batch, and each view has to find the other among
all. With `engine="jit"` it sees the whole batch, also one that four does not divide; XLA divides the scores among the
devices. One key draws the noise of all rows by their shape, so it is the noise of one device, bit for bit. The last
line is the largest difference of losses and weights from plain JAX on one device.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import synk
import synk.train

ROWS, BATCH, TEMPERATURE, SEED = 1130, 128, 0.5, 0


def loss(params, x, key):
    """Return the loss of SimCLR (arXiv 2002.05709, equation 1) over all rows of x."""
    views = jnp.concatenate([x, x]) + 0.2 * jax.random.normal(key, (2 * len(x), x.shape[1]))
    z = jax.nn.relu(views @ params["first"]) @ params["last"]
    z = z / jnp.linalg.norm(z, axis=1, keepdims=True)
    scores = jnp.where(jnp.eye(len(z), dtype=bool), -jnp.inf, z @ z.T / TEMPERATURE)
    other = jnp.roll(jnp.arange(len(z)), len(x))
    return optax.softmax_cross_entropy_with_integer_labels(scores, other).mean()


@jax.jit
def alone(params, opt_state, x, key):
    """The same step in plain JAX, on one device."""
    value, grads = jax.value_and_grad(loss)(params, x, key)
    updates, opt_state = sgd.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value


synk.init(4)
x = (load_digits().data[:ROWS] / 16).astype(np.float32)
rng = np.random.default_rng(SEED)
params = {"first": rng.normal(size=(64, 128)) / 8, "last": rng.normal(size=(128, 32)) / 11}
params = jax.tree.map(np.float32, params)
sgd, batches = optax.sgd(1.0), list(synk.minibatches(ROWS, BATCH, seed=SEED))
keys = jax.random.split(jax.random.key(SEED), len(batches))

step = synk.train.step(loss, params, sgd, inputs=["x"], engine="jit")
losses = [float(value) for value in step.iterate(x, synk.each(keys), batches=batches)]

opt_state, expected = sgd.init(params), []
for batch, key in zip(batches, keys, strict=True):
    params, opt_state, value = alone(params, opt_state, x[batch], key)
    expected.append(float(value))

found = (losses, step.params.value)
gaps = jax.tree.map(lambda a, b: np.max(np.abs(np.asarray(a) - b)), found, (expected, params))
largest = max(jax.tree.leaves(gaps))
assert largest < 1e-4 and losses[-2] < losses[0]
print(f"{len(batches)} steps, the last of {len(batches[-1])} rows: loss {losses[0]:.3f}, then {losses[-2]:.3f}")
print(f"largest difference {largest:.0e}")
