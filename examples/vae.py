"""Variational autoencoder (VAE): digits through two latent numbers, with noise that is the same on any devices.

    python examples/vae.py    # needs the extra `examples`

The reparametrisation trick draws noise for each row: `synk.row_keys` gives a row its key, so four devices draw what one
draws, and the evidence lower bound (ELBO) is the serial one. Batches of 99 rows are
25, 25, 25 and 24. Prints the negative ELBO of the first batch and of the last, and the largest difference of any
parameter from the same training on one device.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import synk
import synk.train

ROWS, BATCH, EPOCHS, LATENT, SEED = 1485, 99, 6, 2, 0
x = (load_digits().data[np.random.default_rng(SEED).permutation(1797)[:ROWS]] / 16).astype(np.float32)


def normal(*shape):
    return np.random.default_rng(SEED).normal(0, shape[0] ** -0.5, shape).astype(np.float32)


def network(weights, x):
    for weight in weights[:-1]:
        x = jax.nn.gelu(x @ weight)
    return x @ weights[-1]


def negative_elbo(params, x, key):
    """Return the mean over rows of the reconstruction error plus the KL divergence."""
    mean, log_var = jnp.split(network(params["encoder"], x), 2, axis=1)
    noise = jax.vmap(lambda key: jax.random.normal(key, (LATENT,)))(synk.row_keys(key))
    logits = network(params["decoder"], mean + jnp.exp(log_var / 2) * noise)
    error = optax.sigmoid_binary_cross_entropy(logits, x).sum(1)
    divergence = 0.5 * jnp.sum(jnp.exp(log_var) + mean**2 - 1 - log_var, 1)
    return jnp.mean(error + divergence)


def train(replicas):
    """Return the parameters and the losses of each batch."""
    encoder, decoder = [normal(64, 128), normal(128, 2 * LATENT)], [normal(LATENT, 128), normal(128, 64)]
    with synk.init(replicas):
        step = synk.train.step(negative_elbo, {"encoder": encoder, "decoder": decoder}, optax.adam(5e-3), inputs=["x"])
        batches = synk.minibatches(ROWS, BATCH, epochs=EPOCHS)
        keys = synk.row_keys(jax.random.key(SEED), len(batches))
        losses = [float(loss) for loss in step.iterate(x, synk.each(keys), batches=batches)]
        return jax.device_get(step.params.value), losses


(four, losses), (one, _) = train(4), train(1)
largest = max(jax.tree.leaves(jax.tree.map(lambda a, b: np.abs(a - b).max(), four, one)))
print(f"negative ELBO {losses[0]:.1f}, after {EPOCHS} epochs {losses[-1]:.1f}")
assert losses[-1] < losses[0] - 10 and largest < 1e-3
print(f"largest difference {largest:.0e}")
