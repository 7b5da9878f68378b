"""A classifier with batch norm over all devices, as flax's example of ImageNet trains it: by pmap, and by synk.

    python examples/pmap/imagenet.py    # needs optax; DEVICES=8 for other than 4

Prints the largest difference of losses, parameters, statistics and accuracy. synk evaluates 50 rows, pmap 48.
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
x, y = random.normal(size=(306, 8)).astype(np.float32), random.integers(3, size=306)
params = {"first": 0.3 * random.normal(size=(8, 16)), "last": 0.3 * random.normal(size=(16, 3))}
params = jax.tree.map(np.float32, params)
stats = {"mean": np.zeros(16, np.float32), "var": np.ones(16, np.float32)}
batches = [{"x": x[i : i + 64], "y": y[i : i + 64]} for i in range(0, 256, 64)]
tx = optax.sgd(0.1, momentum=0.9)


def model(params, stats, x, train):
    hidden = x @ params["first"]
    if train:  # batch norm by the statistics of all devices' rows
        mean = jax.lax.pmean(hidden.mean(0), "batch")
        batch = {"mean": mean, "var": jax.lax.pmean(((hidden - mean) ** 2).mean(0), "batch")}
        stats, used = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, stats, batch), batch
    else:
        used = stats
    return jax.nn.relu((hidden - used["mean"]) / jnp.sqrt(used["var"] + 1e-5)) @ params["last"], stats


def loss(params, stats, batch):
    logits, stats = model(params, stats, batch["x"], train=True)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), stats


def accuracy(state, batch):
    return jnp.mean(jnp.argmax(model(*state, batch["x"], train=False)[0], 1) == batch["y"])


def with_pmap():
    @partial(jax.pmap, axis_name="batch")
    def train_step(params, stats, opt_state, batch):
        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(params, stats, batch)
        value, grads = jax.lax.pmean((value, grads), "batch")
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), stats, opt_state, value

    evaluate = jax.pmap(lambda *args: jax.lax.pmean(accuracy(*args), "batch"), "batch", in_axes=(None, 0))
    shard = partial(jax.tree.map, lambda a: a.reshape(DEVICES, -1, *a.shape[1:]))
    state = jax.tree.map(lambda a: jnp.stack([a] * DEVICES), (params, stats, tx.init(params)))  # replicate
    losses = []
    for batch in batches:
        *state, value = train_step(*state, shard(batch))
        losses.append(value[0])
    state = jax.tree.map(lambda a: a[0], state[:2])  # unreplicate
    return losses, state, evaluate(tuple(state), shard({"x": x[256:304], "y": y[256:304]}))[0]


def with_synk():
    step = synk.train.step(loss, params, tx, state=stats, axis_name="batch")
    evaluate = synk.function(accuracy, inputs=["batch"], reduce="mean")
    losses = [step(batch) for batch in batches]
    state = step.params.value, step.state.value
    all_rows = {"x": x[256:], "y": y[256:]}
    assert evaluate(state, all_rows) == np.float32(accuracy(state, all_rows))
    return losses, list(state), evaluate(state, {"x": x[256:304], "y": y[256:304]})


if __name__ == "__main__":
    gaps = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - b).max()), with_pmap(), with_synk())
    print(f"largest difference {max(jax.tree.leaves(gaps)):.1e}")
    assert max(jax.tree.leaves(gaps)) < 1e-6
