"""Variational Monte Carlo with a gradient of its own that communicates, as ferminet's: by pmap, and by synk.

    python examples/pmap/ferminet.py    # needs optax; DEVICES=8 for other than 4

Prints the largest difference of energies, parameters and walkers. Local energies are clipped about the median of all
devices, by all_gather, in a custom_jvp with pmean. Then synk takes the energy of 30 walkers, which do not divide.
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
params = {"decay": np.float32(0.8), "bend": np.float32(0.1)}
walkers = np.random.default_rng(0).normal(size=(32, 3)).astype(np.float32)  # of one electron
tx = optax.adam(2e-2)


def log_psi(params, r):
    distance = jnp.linalg.norm(r)
    return -params["decay"] * distance / (1 + params["bend"] * distance)


def local_energy(params, r):
    log = partial(log_psi, params)
    gradient, laplacian = jax.grad(log)(r), jnp.trace(jax.hessian(log)(r))
    return -0.5 * (laplacian + gradient @ gradient) - 1 / jnp.linalg.norm(r)


local_energies = jax.vmap(local_energy, (None, 0))


@jax.custom_jvp
def energy(params, walkers):
    return jax.lax.pmean(local_energies(params, walkers).mean(), "qmc"), local_energies(params, walkers)


@energy.defjvp
def _(primals, tangents):
    mean, local = energy(*primals)
    median = jnp.median(jax.lax.all_gather(local, "qmc"))
    width = 5 * jax.lax.pmean(jnp.abs(local - median).mean(), "qmc")
    clipped = jnp.clip(local, median - width, median + width)
    difference = clipped - jax.lax.pmean(clipped.mean(), "qmc")
    _, tangent = jax.jvp(jax.vmap(log_psi, (None, 0)), primals, tangents)
    return (mean, local), (2 * difference @ tangent / len(local), jnp.zeros_like(local))


def move(params, walkers, key):
    def once(walkers, key):
        for_step, for_choice = jax.random.split(key)
        new = walkers + 0.5 * jax.random.normal(for_step, walkers.shape)
        log = jax.vmap(log_psi, (None, 0))
        accepted = jnp.log(jax.random.uniform(for_choice, walkers.shape[:1])) < 2 * (
            log(params, new) - log(params, walkers)
        )
        return jnp.where(accepted[:, None], new, walkers), accepted.mean()

    walkers, accepted = jax.lax.scan(once, walkers, jax.random.split(key, 10))
    return walkers, jax.lax.pmean(accepted.mean(), "qmc")


def step(params, opt_state, walkers, key):
    walkers, accepted = move(params, walkers, key)
    (mean, _), grads = jax.value_and_grad(energy, has_aux=True)(params, walkers)
    updates, opt_state = tx.update(jax.lax.pmean(grads, "qmc"), opt_state)
    return optax.apply_updates(params, updates), opt_state, walkers, (mean, accepted)


def with_pmap():
    p_step = jax.pmap(step, axis_name="qmc", donate_argnums=(0, 1, 2))
    state = (
        *jax.tree.map(lambda a: jnp.stack([a] * DEVICES), (params, tx.init(params))),
        walkers.reshape(DEVICES, -1, 3),
    )
    energies = []
    for i in range(5):
        *state, result = p_step(*state, jax.random.split(jax.random.key(i), DEVICES))
        energies.append(jax.tree.map(lambda a: a[0], result))
    return energies, jax.tree.map(lambda a: a[0], state[:2]), state[2].reshape(-1, 3)


def with_synk():
    @synk.function(inputs=["walkers"], outputs=("same", "same", "scatter", "same"), axis_name="qmc")
    def s_step(params, opt_state, walkers, keys):
        return step(params, opt_state, walkers, keys[synk.rank()])

    state, energies = (params, tx.init(params), walkers), []
    for i in range(5):
        *state, result = s_step(*state, jax.random.split(jax.random.key(i), DEVICES))
        energies.append(result)
    mean = synk.function(lambda p, r: local_energies(p, r).mean(), inputs=("broadcast", "scatter"), reduce="mean")
    assert abs(mean(params, walkers[:30]) - local_energies(params, walkers[:30]).mean()) < 1e-6
    return energies, state[:2], state[2].array


if __name__ == "__main__":
    gaps = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - b).max()), with_pmap(), with_synk())
    print(f"largest difference {max(jax.tree.leaves(gaps)):.1e}")
    assert max(jax.tree.leaves(gaps)) < 1e-6
