"""A classifier with dropout, logged norms and padded evaluation, as scenic trains it: by pmap, and by synk.

    python examples/pmap/classification.py    # needs optax; DEVICES=8 for other than 4

Prints the largest difference of losses, norms, parameters and the exact accuracy of 50 rows, in batches of 16. For
that pmap needs padding, a mask and sums; synk neither, and it trains on a last batch of 30 rows too.
"""

import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

import synk
import synk.train

DEVICES = int(os.environ.get("DEVICES", "4"))
synk.init(DEVICES)
random = np.random.default_rng(0)
x, y = random.normal(size=(242, 8)).astype(np.float32), random.integers(3, size=242)
params = {"first": 0.3 * random.normal(size=(8, 16)), "last": 0.3 * random.normal(size=(16, 3))}
params = jax.tree.map(np.float32, params)
key, batches = jax.random.key(1), [slice(i, i + 48) for i in range(0, 192, 48)]
tx = optax.MultiSteps(optax.adamw(1e-2), every_k_schedule=2)


def model(params, x, key=None):
    hidden = jax.nn.gelu(x @ params["first"])
    if key is not None:
        hidden = jnp.where(jax.random.bernoulli(key, 0.8, hidden.shape), hidden / 0.8, 0)
    return hidden @ params["last"]


def loss(params, x, y, key):
    return optax.softmax_cross_entropy_with_integer_labels(model(params, x, key), y).mean()


def right(params, x, y):
    return jnp.argmax(model(params, x), 1) == y


def with_pmap():
    @partial(jax.pmap, axis_name="batch", in_axes=(0, 0, 0, 0, None))
    def train_step(params, opt_state, x, y, key):
        key = jax.random.fold_in(key, jax.lax.axis_index("batch"))
        value, grads = jax.value_and_grad(loss)(params, x, y, key)
        value, grads = jax.lax.pmean((value, grads), "batch")
        updates, opt_state = tx.update(grads, opt_state, params)
        norms = {"gradients": optax.tree.norm(grads), "updates": optax.tree.norm(updates)}
        return optax.apply_updates(params, updates), opt_state, (value, norms)

    @partial(jax.pmap, axis_name="batch")
    def evaluate(params, x, y, mask):
        return jax.lax.psum((jnp.sum(right(params, x, y) * mask), mask.sum()), "batch")

    shard = partial(jax.tree.map, lambda a: a.reshape(DEVICES, -1, *a.shape[1:]))
    state = jax.tree.map(lambda a: jnp.stack([a] * DEVICES), (params, tx.init(params)))
    logs, hits, count = [], 0, 0
    for i, rows in enumerate(batches):
        *state, log = train_step(*state, *shard((x[rows], y[rows])), jax.random.fold_in(key, i))
        logs.append(jax.tree.map(lambda a: a[0], log))
    for start in range(192, 242, 16):
        part, labels = x[start : start + 16], y[start : start + 16]
        missing = 16 - len(part)
        padded = np.pad(part, ((0, missing), (0, 0))), np.pad(labels, (0, missing)), np.arange(16) < 16 - missing
        sums = evaluate(state[0], *shard(padded))
        hits, count = hits + int(sums[0][0]), count + int(sums[1][0])
    return logs, jax.tree.map(lambda a: a[0], state[0]), hits / count


def with_synk():
    def log(grads, updates, params):
        return {"gradients": optax.tree.norm(grads), "updates": optax.tree.norm(updates)}

    def loss_of_rank(params, x, y, key):
        return loss(params, x, y, jax.random.fold_in(key, synk.rank()))

    step = synk.train.step(loss_of_rank, params, tx, inputs=["x", "y"], log=log)
    evaluate = synk.function(lambda params, x, y: right(params, x, y).mean(), ["x", "y"], reduce="mean")
    logs = [step(x[rows], y[rows], jax.random.fold_in(key, i)) for i, rows in enumerate(batches)]
    trained = step.params.value
    exact = evaluate.over(trained, x[192:], y[192:], batches=synk.minibatches(50, 16))
    step(x[:30], y[:30], key)  # rows that do not divide
    return logs, trained, exact


if __name__ == "__main__":
    gaps = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - b).max()), with_pmap(), with_synk())
    print(f"largest difference {max(jax.tree.leaves(gaps)):.1e}")
    assert max(jax.tree.leaves(gaps)) < 1e-6
