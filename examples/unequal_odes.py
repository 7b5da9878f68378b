"""Stiff ODEs of unequal length: 96 rings of oscillators, each with its own steps, like beside like on four devices.

    python examples/unequal_odes.py

A ring of Van der Pol oscillators takes the more steps the stiffer it is. Rows that run together wait for the slowest,
so `cost=` deals like rows into slices, and gives each replica as much work. Results come in the order of the rows.
Prints the times, and the largest difference from one device.
"""

from time import perf_counter

import jax
import jax.numpy as jnp
import numpy as np

import synk

ROWS, RING, END, TOLERANCE = 96, 64, 1.0, 1e-3
stiffness = np.random.default_rng(0).lognormal(1.5, 1.2, ROWS).clip(0, 40).astype(np.float32)


def field(y, mu):
    pull = (jnp.roll(y[0], 1) + jnp.roll(y[0], -1) - 2 * y[0]) / 4
    return jnp.stack([y[1], mu * (1 - y[0] ** 2) * y[1] - y[0] + pull])


@synk.map
def solve(mu):
    """Steps of Heun's method, as long as the difference from Euler's allows."""

    def step(state):
        t, dt, y, steps = state
        slope = field(y, mu)
        heun = y + dt / 2 * (slope + field(euler := y + dt * slope, mu))
        error = jnp.abs(heun - euler).max() / TOLERANCE
        is_good = error < 1
        dt_next = dt * jnp.clip(0.9 / jnp.sqrt(error + 1e-6), 0.2, 5.0)
        t, y = jnp.where(is_good, t + dt, t), jnp.where(is_good, heun, y)
        return t, jnp.minimum(dt_next, END - t + 1e-6), y, steps + 1

    start = jnp.float32(0), jnp.float32(1e-3), jnp.stack([jnp.linspace(1, 2, RING), jnp.zeros(RING)]), jnp.int32(0)
    _, _, y, steps = jax.lax.while_loop(lambda state: state[0] < END, step, start)
    return y, steps


def seconds(**options):
    start = perf_counter() if solve(stiffness, **options) else 0.0  # which has compiled it
    np.asarray(solve(stiffness, **options)[0])
    return perf_counter() - start


with synk.init(1):
    one, steps = jax.device_get(solve(stiffness))
synk.init(4)
four, _ = jax.device_get(solve(stiffness, cost=1 + stiffness))  # a guess: the steps are known only afterwards
print(f"{steps.min()} to {steps.max()} steps; milliseconds {1e3 * seconds():.0f}", end=", ")
print(f"by cost {1e3 * seconds(cost=1 + stiffness):.0f}, by the steps of before {1e3 * seconds(cost=steps):.0f}")
largest = np.abs(four - one).max()
assert np.isfinite(four).all() and largest < 1e-2
print(f"largest difference {largest:.0e}")
