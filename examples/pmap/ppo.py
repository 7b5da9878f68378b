"""A learner of reinforcement learning that communicates in two nested scans, as brax's PPO: by pmap, and by synk.

    python examples/pmap/ppo.py    # needs optax; DEVICES=8 for other than 4

Prints the largest difference of parameters, statistics, environments and metrics. Only the wrapper and the loop change;
environments must divide. Then synk plays 10 episodes, which need not.
"""

import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

import synk

DEVICES = int(os.environ.get("DEVICES", "4"))
synk.init(DEVICES)
tx = optax.adam(3e-3)
params = {"mean": np.zeros((2, 1), np.float32), "value": np.zeros((2, 1), np.float32)}
training = (
    params,
    tx.init(params),
    {"count": np.float32(1), "mean": np.zeros(2, np.float32), "var": np.ones(2, np.float32)},
)
environments = np.random.default_rng(0).normal(size=(32, 2)).astype(np.float32)  # place and speed of a mass


def act(params, statistics, state, key):
    seen = (state - statistics["mean"]) / jnp.sqrt(statistics["var"] + 1e-3)
    action = seen @ params["mean"] + jax.random.normal(key, (*state.shape[:-1], 1))
    speed = 0.9 * state[..., 1:] + 0.1 * action
    new = jnp.concatenate([state[..., :1] + 0.1 * speed, speed], -1)
    return new, (state, seen, action, -(new**2).sum(-1))


def loss(params, seen, action, reward, old):
    gain = reward - (seen @ params["value"])[..., 0]
    ratio = jnp.exp((old - (action - seen @ params["mean"]) ** 2)[..., 0] / 2)
    clipped = jnp.clip(ratio, 0.8, 1.2) * jax.lax.stop_gradient(gain)
    return -jnp.minimum(ratio * jax.lax.stop_gradient(gain), clipped).mean() + 0.5 * (gain**2).mean()


def learn(training, states, key):
    params, opt_state, statistics = training
    states, (visited, *data) = jax.lax.scan(partial(act, params, statistics), states, jax.random.split(key, 8))
    seen, action, reward = (a.reshape(-1, *a.shape[2:]) for a in data)
    data = seen, action, reward, (action - seen @ params["mean"]) ** 2

    def minibatch(carry, batch):
        params, opt_state = carry
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, opt_state = tx.update(jax.lax.pmean(grads, "i"), opt_state)
        return (optax.apply_updates(params, updates), opt_state), value

    def epoch(carry, key):
        order = jax.random.permutation(key, len(seen)).reshape(4, -1)
        return jax.lax.scan(minibatch, carry, [a[order] for a in data])

    (params, opt_state), losses = jax.lax.scan(epoch, (params, opt_state), jax.random.split(key, 2))
    visited = visited.reshape(-1, 2)
    count = jax.lax.psum(jnp.float32(len(visited)), "i")
    mean, total = jax.lax.psum(visited.sum(0), "i") / count, statistics["count"] + count
    var = jax.lax.psum(((visited - mean) ** 2).sum(0), "i") / count
    merge = partial(jax.tree.map, lambda old, new: old + (new - old) * count / total)
    moments = merge({"mean": statistics["mean"], "var": statistics["var"]}, {"mean": mean, "var": var})
    return (params, opt_state, {"count": total, **moments}), states, {"loss": losses.mean(), "reward": reward.mean()}


def with_pmap():
    @partial(jax.pmap, axis_name="i")
    def epoch(training, states, key):
        training, states, metrics = learn(training, states, key)
        return training, states, jax.lax.pmean(metrics, "i")

    state, states = jax.tree.map(lambda a: jnp.stack([a] * DEVICES), training), environments.reshape(DEVICES, -1, 2)
    for i in range(3):
        state, states, metrics = epoch(state, states, jax.random.split(jax.random.key(i), DEVICES))
    return *jax.tree.map(lambda a: a[0], (state, metrics)), states.reshape(-1, 2)


def with_synk():
    @synk.function(inputs=["states"], outputs=("same", "scatter", "mean"), axis_name="i")
    def epoch(training, states, keys):
        return learn(training, states, keys[synk.rank()])

    state, states = training, environments
    for i in range(3):
        state, states, metrics = epoch(state, states, jax.random.split(jax.random.key(i), DEVICES))
    play = synk.map(lambda state, start, key: act(state[0], state[2], start, key)[1][3], ["start", "key"])
    assert play(state, environments[:10], jax.random.split(jax.random.key(9), 10)).shape == (10,)
    return state, metrics, states.array


if __name__ == "__main__":
    gaps = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - b).max()), with_pmap(), with_synk())
    print(f"largest difference {max(jax.tree.leaves(gaps)):.1e}")
    assert max(jax.tree.leaves(gaps)) < 1e-6
