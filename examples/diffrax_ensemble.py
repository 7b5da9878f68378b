"""Diffrax: ten orbits on four devices, each with as many steps as it needs, checked after a whole turn.

    python examples/diffrax_ensemble.py    # needs the extra `chains`

A long orbit passes its sun fast, so its solver takes many more steps than that of a circle. Rows on one replica wait
for one another, as under `jax.vmap`; replicas wait for nobody. After a turn of 2 pi each planet is where it began.
"""

import diffrax
import jax
import jax.numpy as jnp
import numpy as np

import synk

ORBITS = 10
TURN = 2 * np.pi


def gravity(t, state, args):
    place, speed = state
    return speed, -place / jnp.linalg.norm(place) ** 3


@synk.map
def orbit(eccentricity):
    start = (
        jnp.stack([1 - eccentricity, jnp.zeros(())]),
        jnp.stack([jnp.zeros(()), jnp.sqrt((1 + eccentricity) / (1 - eccentricity))]),
    )
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(gravity),
        diffrax.Tsit5(),
        t0=0.0,
        t1=TURN,
        dt0=0.01,
        y0=start,
        stepsize_controller=diffrax.PIDController(rtol=1e-6, atol=1e-7),
    )
    place, _ = jax.tree.map(lambda leaf: leaf[-1], solution.ys)
    return {"off": jnp.linalg.norm(place - start[0]), "steps": solution.stats["num_steps"]}


synk.init(4)
eccentricities = np.linspace(0, 0.9, ORBITS, dtype=np.float32)
found = orbit(eccentricities)
print("Steps of each orbit:", *np.asarray(found["steps"]))
off = np.asarray(found["off"]).max()
assert found["off"].shape == (ORBITS,) and off < 0.01
print(f"{ORBITS} orbits: {off:.4f} from where they began, at most")
