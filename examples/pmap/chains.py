"""Chains of Hamiltonian Monte Carlo, which know nothing of one another, as blackjax runs them: by pmap, and by synk.

    python examples/pmap/chains.py    # DEVICES=8 for other than 4

Prints the largest difference of all samples: of one chain a device by `pmap(f)`, and of three by `pmap(vmap(f))`. Then
synk runs seven chains.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np

import synk

DEVICES = int(os.environ.get("DEVICES", "4"))
synk.init(DEVICES)
random = np.random.default_rng(0)
x = random.normal(size=(20, 2)).astype(np.float32)
y = (x @ np.array([1.0, -2.0]) + random.normal(size=20) > 0).astype(np.float32)
starts = random.normal(size=(3 * DEVICES, 2)).astype(np.float32)
keys = jax.random.split(jax.random.key(0), 3 * DEVICES)


def log_density(w):
    logits = x @ w
    return jnp.sum(y * jax.nn.log_sigmoid(logits) + (1 - y) * jax.nn.log_sigmoid(-logits)) - jnp.sum(w**2) / 2


def leapfrog(w, p, steps=5, size=0.2):
    def body(_, state):
        w, p = state
        p = p + size / 2 * jax.grad(log_density)(w)
        w = w + size * p
        return w, p + size / 2 * jax.grad(log_density)(w)

    return jax.lax.fori_loop(0, steps, body, (w, p))


def chain(key, start, num_samples):
    def sample(w, key):
        for_momentum, for_choice = jax.random.split(key)
        p = jax.random.normal(for_momentum, w.shape)
        new_w, new_p = leapfrog(w, p)
        gain = log_density(new_w) - new_p @ new_p / 2 - log_density(w) + p @ p / 2
        accepted = jnp.log(jax.random.uniform(for_choice)) < gain
        w = jnp.where(accepted, new_w, w)
        return w, (w, accepted)

    return jax.lax.scan(sample, start, jax.random.split(key, num_samples))[1]


def with_pmap():
    alone = jax.pmap(chain, static_broadcasted_argnums=2)(keys[:DEVICES], starts[:DEVICES], 50)
    three = jax.pmap(jax.vmap(lambda key, start: chain(key, start, 50)))
    dealt = three(keys.reshape(DEVICES, 3), starts.reshape(DEVICES, 3, 2))
    return alone, jax.tree.map(lambda a: a.reshape(3 * DEVICES, *a.shape[2:]), dealt)


def with_synk():
    chains = synk.map(chain, inputs={"num_samples": "static"})
    alone, three = chains(keys[:DEVICES], starts[:DEVICES], 50), chains(keys, starts, 50)
    seven = chains(keys[:7], starts[:7], 50)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: np.allclose(a, b[:7], atol=1e-4), seven, three)))
    return alone, three


if __name__ == "__main__":
    gaps = jax.tree.map(lambda a, b: float(np.abs(1.0 * np.asarray(a) - b).max()), with_pmap(), with_synk())
    print(f"largest difference {max(jax.tree.leaves(gaps)):.1e}")
    assert max(jax.tree.leaves(gaps)) < 1e-6
