"""Diffusion model (DDPM): denoising score matching trains it, 50 steps back from noise sample it, on any devices alike.

    python examples/ddpm.py    # needs the extra `examples`

Rows draw times and noise by `synk.row_keys`; each sample is a chain, by `synk.map`. Prints how far samples are from the
nearest data point, in the mean, and the largest difference of any parameter or sample from one device.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import make_moons

import synk
import synk.train

ROWS, BATCH, EPOCHS, TIMES, SAMPLES, SEED = 1001, 143, 40, 50, 301, 0
x = np.subtract(make_moons(ROWS, noise=0.05, random_state=SEED)[0], [0.5, 0.25]).astype(np.float32)
betas = np.linspace(1e-4, 0.15, TIMES, dtype=np.float32)
kept = np.cumprod(1 - betas)  # of a row's variance at each time
start = [np.random.default_rng(m).normal(0, m**-0.5, (m, n)).astype(np.float32) for m, n in ((10, 128), (128, 2))]


def network(params, x, t):  # the noise in one row at time t
    return jax.nn.silu(jnp.concatenate([x, jnp.cos(jnp.pi * jnp.arange(8) * t / TIMES)]) @ params[0]) @ params[1]


def loss(params, x, key):
    def of_row(x, key):
        t, noise = jax.random.randint(key, (), 0, TIMES), jax.random.normal(jax.random.fold_in(key, 1), (2,))
        at_t = jnp.sqrt(jnp.asarray(kept)[t]) * x + jnp.sqrt(jnp.asarray(1 - kept)[t]) * noise
        return jnp.sum((network(params, at_t, t) - noise) ** 2)

    return jax.vmap(of_row)(x, synk.row_keys(key)).mean()


def sample(key, params):
    def back(x, step):
        t, beta, left, key = step
        x = (x - beta / jnp.sqrt(1 - left) * network(params, x, t)) / jnp.sqrt(1 - beta)
        return x + jnp.sqrt(beta) * (t > 0) * jax.random.normal(key, (2,)), None

    steps = np.arange(TIMES), betas, kept, jax.random.split(jax.random.fold_in(key, 1), TIMES)
    return jax.lax.scan(back, jax.random.normal(key, (2,)), steps, reverse=True)[0]


def train(replicas):
    with synk.init(replicas):
        step = synk.train.step(loss, start, optax.adam(5e-3), inputs=["x"])
        batches, key, draw = synk.minibatches(ROWS, BATCH, epochs=EPOCHS), jax.random.key(1), synk.map(sample, ["key"])
        list(step.iterate(x, synk.each(synk.row_keys(key, len(batches))), batches=batches))
        return jax.device_get((step.params.value, draw(jax.random.split(key, SAMPLES), step.params.value)))


four, one = train(4), train(1)
off = np.linalg.norm(four[1][:, None] - x, axis=2).min(1).mean()
largest = max(jax.tree.leaves(jax.tree.map(lambda a, b: np.abs(a - b).max(), four, one)))
assert off < 0.25 and largest < 2e-2
print(f"largest difference {largest:.0e}; samples are {off:.2f} from the nearest point, in the mean")
