"""Learners that are stacked twice, copies on each device, as Stoix's have them: by pmap of vmap, and by synk.

    python examples/pmap/stoix.py    # needs optax; DEVICES=8 for other than 4

Prints the largest difference of parameters, keys' draws, environments, losses and returns. Gradients are averaged over
the axis "batch" of vmap, then over "device". Only the line of pmap changes. Then synk plays 10 episodes.
"""

import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

import synk

DEVICES, COPIES, ENVIRONMENTS = int(os.environ.get("DEVICES", "4")), 2, 8
synk.init(DEVICES)
tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-3))
random = np.random.default_rng(0)
params = {"actor": 0.1 * random.normal(size=(2, 3)), "critic": np.zeros(2)}  # push left, not at all, right
params = jax.tree.map(np.float32, params)
places = random.normal(size=(DEVICES, COPIES, ENVIRONMENTS, 2)).astype(np.float32)


def move(params, state, key):
    logits = state @ params["actor"]
    action = jax.random.categorical(key, logits)
    chance = jnp.take_along_axis(jax.nn.log_softmax(logits), action[..., None], -1)[..., 0]
    speed = 0.9 * state[..., 1] + 0.1 * (action - 1)
    new = jnp.stack([state[..., 0] + 0.1 * speed, speed], -1)
    return new, (state, action, chance, -(new**2).sum(-1), state @ params["critic"])


def advantages(rewards, values):
    deltas = rewards + 0.99 * values[1:] - values[:-1]
    return jax.lax.scan(lambda sum, delta: (delta + 0.95 * sum,) * 2, 0 * deltas[0], deltas, reverse=True)[1]


def loss(params, state, action, old, advantage, target):
    chance = jnp.take_along_axis(jax.nn.log_softmax(state @ params["actor"]), action[:, None], 1)[:, 0]
    ratio = jnp.exp(chance - old)
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
    return 0.5 * jnp.mean((state @ params["critic"] - target) ** 2) - gain.mean()


def update(learner, _):  # of one copy
    params, opt_state, key, environments = learner
    key, for_moves, for_order = jax.random.split(key, 3)
    environments, played = jax.lax.scan(partial(move, params), environments, jax.random.split(for_moves, 8))
    state, action, chance, reward, value = played
    gained = advantages(reward, jnp.concatenate([value, (environments @ params["critic"])[None]]))
    data = [a.reshape(-1, *a.shape[2:]) for a in (state, action, chance, gained, gained + value)]

    def minibatch(carry, batch):
        params, opt_state = carry
        value, grads = jax.value_and_grad(loss)(params, *batch)
        value, grads = jax.lax.pmean(jax.lax.pmean((value, grads), "batch"), "device")
        updates, opt_state = tx.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), value

    order = jax.random.permutation(for_order, len(data[0])).reshape(4, -1)
    (params, opt_state), losses = jax.lax.scan(minibatch, (params, opt_state), [a[order] for a in data])
    return (params, opt_state, key, environments), (losses, reward.sum(0))


def learn(learner):  # the copies of one device
    return jax.lax.scan(jax.vmap(update, (0, None), axis_name="batch"), learner, None, 2)


def start():
    stacked = jax.tree.map(lambda a: jnp.broadcast_to(a, (DEVICES, COPIES, *jnp.shape(a))), (params, tx.init(params)))
    return *stacked, jax.random.split(jax.random.key(0), (DEVICES, COPIES)), places


def run(learn):
    learner, metrics = start(), []
    for _ in range(3):
        learner, metric = learn(learner)
        metrics.append(jax.tree.map(np.asarray, metric))
    params, _, keys, environments = learner
    draws = np.asarray(jax.vmap(jax.vmap(jax.random.normal))(jnp.asarray(keys)))
    return jax.tree.map(lambda a: np.asarray(a[0][0]), params), draws, np.asarray(environments), metrics


def with_pmap():
    return run(jax.pmap(learn, axis_name="device"))


def with_synk():
    trained, *others = run(synk.map(learn, axis_name="device"))
    play = synk.map(lambda params, state, key: move(params, state, key)[1][3], ["state", "key"])
    assert play(trained, places[0].reshape(-1, 2)[:10], jax.random.split(jax.random.key(9), 10)).shape == (10,)
    return trained, *others


if __name__ == "__main__":
    gaps = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - b).max()), with_pmap(), with_synk())
    print(f"largest difference {max(jax.tree.leaves(gaps)):.1e}")
    assert max(jax.tree.leaves(gaps)) < 1e-6
