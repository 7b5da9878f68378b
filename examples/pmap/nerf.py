"""A radiance field that renders images in chunks of rays, as jaxnerf trains it: by pmap, and by synk.

    python examples/pmap/nerf.py    # needs optax; DEVICES=8 for other than 4

Prints the largest difference of losses, decibels, parameters and an image of 50 rays, in chunks of 16. pmap pads the
last chunk, gathers on all devices and cuts; synk does not. synk trains on 30 rays too.
"""

import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

import synk
import synk.train

DEVICES, SAMPLES = int(os.environ.get("DEVICES", "4")), 8
synk.init(DEVICES)
random = np.random.default_rng(0)
params = {"in": 0.5 * random.normal(size=(12, 16)), "out": 0.3 * random.normal(size=(16, 4))}
params = jax.tree.map(np.float32, params)
rays = random.normal(size=(178, 2, 3)).astype(np.float32)  # origins and directions
pixels = (0.5 + 0.5 * np.sin(rays[:, 0] + rays[:, 1])).astype(np.float32)
batches = [{"rays": rays[i : i + 32], "pixels": pixels[i : i + 32]} for i in range(0, 128, 32)]
tx = optax.scale_by_adam()
rates = [5e-3 * 0.1 ** (i / 4) for i in range(4)]


def render(params, rays, key=None):
    depth = jnp.broadcast_to(jnp.linspace(0.1, 2, SAMPLES), (len(rays), SAMPLES))
    if key is not None:  # jittered, so that no depth is special
        depth = depth + 0.2 * jax.random.uniform(key, depth.shape)
    points = rays[:, None, 0] + depth[..., None] * rays[:, None, 1]
    encoded = jnp.concatenate([f(2**i * points) for i in range(2) for f in (jnp.sin, jnp.cos)], -1)
    *color, density = jnp.moveaxis(jax.nn.relu(encoded @ params["in"]) @ params["out"], -1, 0)
    through = jnp.exp(-0.25 * jax.nn.softplus(density))
    weight = jnp.cumprod(jnp.concatenate([jnp.ones_like(through[:, :1]), through[:, :-1]], 1), 1) * (1 - through)
    return (weight[..., None] * jax.nn.sigmoid(jnp.stack(color, -1))).sum(1)


def loss(params, batch, key):
    value = jnp.mean((render(params, batch["rays"], key) - batch["pixels"]) ** 2)
    return value, {"decibels": -10 * jnp.log10(value)}


def with_pmap():
    @partial(jax.pmap, axis_name="batch", in_axes=(0, 0, 0, 0, None), donate_argnums=(1, 2))
    def train_step(key, params, opt_state, batch, rate):
        key, used = jax.random.split(key)
        result, grads = jax.value_and_grad(loss, has_aux=True)(params, batch, used)
        result, grads = jax.lax.pmean((result, grads), "batch")
        updates, opt_state = tx.update(grads, opt_state)
        return key, optax.apply_updates(params, jax.tree.map(lambda u: -rate * u, updates)), opt_state, result

    shard = partial(jax.tree.map, lambda a: a.reshape(DEVICES, -1, *a.shape[1:]))
    gather = jax.pmap(lambda *args: jax.lax.all_gather(render(*args), "batch"), "batch", in_axes=(None, 0))
    keys = jax.random.split(jax.random.key(0), DEVICES)
    state, results = jax.tree.map(lambda a: jnp.stack([a] * DEVICES), (params, tx.init(params))), []
    for batch, rate in zip(batches, rates, strict=True):
        keys, *state, result = train_step(keys, *state, shard(batch), rate)
        results.append(jax.tree.map(lambda a: a[0], result))
    trained, image = jax.tree.map(lambda a: a[0], state[0]), []
    for start in range(128, 178, 16):
        chunk = rays[start : start + 16]
        padded = np.pad(chunk, ((0, -len(chunk) % DEVICES), (0, 0), (0, 0)), mode="edge")
        image.append(gather(trained, shard(padded))[0].reshape(-1, 3)[: len(chunk)])
    return results, trained, np.concatenate(image)


def with_synk():
    def loss_of_rank(params, batch, keys):
        return loss(params, batch, keys[synk.rank()])

    decayed = optax.chain(tx, optax.scale_by_learning_rate(lambda i: 5e-3 * 0.1 ** (i / 4)))
    train_step = synk.train.step(loss_of_rank, params, decayed, inputs=["batch"], aux="mean")
    render_rays = synk.function(render, inputs=["rays"], outputs="concat")
    keys, results = jax.random.split(jax.random.key(0), DEVICES), []
    for batch in batches:
        keys, used = jax.vmap(jax.random.split)(keys).T
        results.append(train_step(batch, used))
    trained = train_step.params.value
    image = np.concatenate([render_rays(trained, rays[i : i + 16]) for i in range(128, 178, 16)])
    train_step({"rays": rays[:30], "pixels": pixels[:30]}, keys)  # rays that do not divide
    return results, trained, image


if __name__ == "__main__":
    gaps = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - b).max()), with_pmap(), with_synk())
    print(f"largest difference {max(jax.tree.leaves(gaps)):.1e}")
    assert max(jax.tree.leaves(gaps)) < 1e-6
