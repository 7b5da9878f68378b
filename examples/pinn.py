"""PINN: a physics-informed network solves -u'' = pi^2 sin(pi x), by second derivatives at points on four devices.

    python examples/pinn.py    # needs the extra `examples`

Points are rows. The loss has two derivatives by the point inside, and the step one by the weights outside. Prints the
largest error of the solution u = sin(pi x), and the largest difference of any weight from one device.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import synk
import synk.train

POINTS, STEPS, SEED = 203, 300, 0
points = np.linspace(-1, 1, POINTS, dtype=np.float32)  # 51, 51, 51 and 50 of them


def u(weights, x):
    """Return the solution at one point; it is 0 at both ends."""
    hidden, shift, last = weights
    return (1 - x**2) * (jnp.tanh(x * hidden + shift) @ last)


def residual(weights, x):
    second = jax.grad(jax.grad(u, argnums=1), argnums=1)
    return -second(weights, x) - jnp.pi**2 * jnp.sin(jnp.pi * x)


def loss(weights, x):
    return jnp.mean(jax.vmap(residual, (None, 0))(weights, x) ** 2)


def solve(replicas):
    """Return the weights."""
    rng = np.random.default_rng(SEED)
    start = [rng.normal(0, scale, 32).astype(np.float32) for scale in (2, 1, 0.2)]
    with synk.init(replicas):
        step = synk.train.step(loss, start, optax.adam(optax.cosine_decay_schedule(0.03, STEPS)))
        rows = synk.data(points, place="scatter", name="points")  # sent once
        for _ in range(STEPS):
            step(rows)
        return jax.device_get(step.params.value)


four, one = solve(4), solve(1)
off = np.abs(jax.vmap(u, (None, 0))(four, points) - np.sin(np.pi * points)).max()
largest = max(np.abs(a - b).max() for a, b in zip(four, one, strict=True))
print(f"largest error of the solution {off:.4f}")
assert off < 0.02 and largest < 1e-2
print(f"largest difference {largest:.0e}")
