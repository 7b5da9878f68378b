"""BlackJAX: eight chains of NUTS on four devices, each with its own warm-up, checked against the exact moments.

    python examples/blackjax_chains.py    # needs the extra `chains`

A chain is a function of one key and one start, as for `jax.vmap`. `synk.map` runs any number of them. The target is a
normal distribution of two correlated dimensions.
"""

import synk

synk.init(4)  # before blackjax, which asks JAX for its devices

import blackjax
import jax
import jax.numpy as jnp
import numpy as np

CHAINS, WARM_UP, DRAWS = 8, 200, 400
MEAN = np.array([1.0, -2.0], np.float32)
COVARIANCE = np.array([[1.0, 0.8], [0.8, 2.0]], np.float32)


def log_density(position):
    off = position - MEAN
    return -0.5 * off @ np.linalg.inv(COVARIANCE) @ off


def chain(key, start):
    warm, draw = jax.random.split(key)
    adapt = blackjax.window_adaptation(blackjax.nuts, log_density)
    (state, found), _ = adapt.run(warm, start, WARM_UP)
    kernel = blackjax.nuts(log_density, **found)

    def step(state, key):
        state, info = kernel.step(key, state)
        return state, (state.position, info.num_integration_steps)

    return jax.lax.scan(step, state, jax.random.split(draw, DRAWS))[1]


keys = jax.random.split(jax.random.key(0), CHAINS)
starts = np.asarray(10 * jax.random.normal(jax.random.key(1), (CHAINS, 2)))
draws, steps = synk.map(chain)(keys, starts)
assert draws.shape == (CHAINS, DRAWS, 2)

print("Leapfrog steps of each chain:", *np.asarray(steps).sum(1))
flat = np.asarray(draws).reshape(-1, 2)
r_hat = jnp.max(blackjax.rhat(draws))
off = np.abs(flat.mean(0) - MEAN).max()
assert off < 0.15 and np.abs(np.cov(flat.T) - COVARIANCE).max() < 0.25 and r_hat < 1.02
print(f"{CHAINS} chains: r_hat {r_hat:.3f}; means are {off:.3f} off, at most")
