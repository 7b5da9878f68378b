"""Steps of a diffusion model in one scan, pmap(partial(scan, step)), as score_sde has them: by pmap, and by synk.

    python examples/pmap/score_sde.py    # needs optax; DEVICES=8 for other than 4

Prints the largest difference of losses, parameters and their moving average. Then one of synk's own steps, with noise
by rows, takes 30 rows, and is the step of one device.
"""

import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

import synk
import synk.train

DEVICES, STEPS = int(os.environ.get("DEVICES", "4")), 5
synk.init(DEVICES)
random = np.random.default_rng(0)
params = {"in": 0.3 * random.normal(size=(5, 16)), "out": 0.3 * random.normal(size=(16, 4))}
params = jax.tree.map(np.float32, params)
batches = random.normal(size=(3, STEPS, 32, 4)).astype(np.float32)
tx = optax.adam(1e-2)


def loss_of(params, x, t, noise):
    scale = jnp.exp(-t)[:, None]
    given = jnp.concatenate([scale * x + jnp.sqrt(1 - scale**2) * noise, t[:, None]], 1)
    return jnp.mean((jnp.tanh(given @ params["in"]) @ params["out"] + noise) ** 2)


def loss(params, key, x):
    for_time, for_noise = jax.random.split(key)
    t = jax.random.uniform(for_time, x.shape[:1], minval=1e-3)
    return loss_of(params, x, t, jax.random.normal(for_noise, x.shape))


def step(carry, x):
    key, state = carry
    key, used = jax.random.split(key)
    value, grads = jax.value_and_grad(loss)(state["params"], used, x)
    updates, opt_state = tx.update(jax.lax.pmean(grads, "batch"), state["opt_state"])
    params = optax.apply_updates(state["params"], updates)
    ema = jax.tree.map(lambda old, new: 0.99 * old + 0.01 * new, state["ema"], params)
    return (key, {"params": params, "opt_state": opt_state, "ema": ema}), jax.lax.pmean(value, "batch")


state = {"params": params, "opt_state": tx.init(params), "ema": params}


def with_pmap():
    p_steps = jax.pmap(partial(jax.lax.scan, step), axis_name="batch", donate_argnums=0)
    p_state, losses = jax.tree.map(lambda a: jnp.stack([a] * DEVICES), state), []
    for i, batch in enumerate(batches):
        keys = jax.random.split(jax.random.key(i), DEVICES)
        dealt = batch.reshape(STEPS, DEVICES, -1, 4).swapaxes(0, 1)  # (devices, steps, rows, ...)
        (_, p_state), values = p_steps((keys, p_state), dealt)
        losses.append(values[0])
    return losses, jax.tree.map(lambda a: a[0], p_state)


def with_synk():
    @synk.function(inputs=["rows"], outputs="same", axis_name="batch")
    def steps(state, keys, rows):
        (_, state), values = jax.lax.scan(step, (keys[synk.rank()], state), rows.swapaxes(0, 1))
        return state, values

    s_state, losses = state, []
    for i, batch in enumerate(batches):
        s_state, values = steps(s_state, jax.random.split(jax.random.key(i), DEVICES), batch.swapaxes(0, 1))
        losses.append(values)
    own_step(batches[0, 0, :30])
    return losses, s_state


def own_step(x):
    def by_rows(params, x, key):
        t, noise = jax.vmap(lambda key: (jax.random.uniform(key, minval=1e-3), jax.random.normal(key, (4,))))(
            synk.row_keys(key)
        )
        return loss_of(params, x, t, noise)

    own = synk.train.step(by_rows, params, tx, inputs=["x"], ema=0.99)
    own.check(x, jax.random.key(0))  # is it the step of one device?
    own(x, jax.random.key(0))


if __name__ == "__main__":
    gaps = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - b).max()), with_pmap(), with_synk())
    print(f"largest difference {max(jax.tree.leaves(gaps)):.1e}")
    assert max(jax.tree.leaves(gaps)) < 1e-6
