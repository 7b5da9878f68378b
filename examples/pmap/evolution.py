"""Evolution strategies over a population that is dealt to devices, as evojax simulates it: by pmap, and by synk.

    python examples/pmap/evolution.py    # needs optax; DEVICES=8 for other than 4

Prints the largest difference of scores, of the centre of the population and of what is known of observations. Then
synk evaluates 30 members, which pmap refuses.
"""

import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

import synk

DEVICES, MEMBERS, EPISODES, STEPS = int(os.environ.get("DEVICES", "4")), 32, 2, 20
synk.init(DEVICES)
tx = optax.adam(5e-2)
center = jnp.zeros(5)  # weights and bias of a policy that balances a pole
known = {"count": jnp.float32(1), "sum": jnp.zeros(4), "squares": jnp.ones(4)}


def reset(key):
    return 0.1 * jax.random.normal(key, (EPISODES * MEMBERS, 4))


def push(state, force):
    place, speed, angle, turn = state.T
    faster, turning = (force + angle) / 5, 2 * angle - force
    return jnp.stack([place + 0.1 * speed, speed + 0.1 * faster, angle + 0.1 * turn, turn + 0.1 * turning], 1)


def rollout(states, members, known, steps):
    """Return scores, all observations and masks, with time on axis 0, of so many members; None falls twice."""
    mean = known["sum"] / known["count"]
    deviation = jnp.sqrt(jnp.maximum(known["squares"] / known["count"] - mean**2, 1e-2))

    def step(carry, _):
        states, scores, alive = carry
        seen = (states - mean) / deviation
        new = push(states, jnp.tanh((seen * members[:, :4]).sum(1) + members[:, 4]))
        alive = alive * (jnp.abs(new[:, 2]) < 0.5)
        return (new, scores + alive, alive), (states, alive)

    ones = jnp.ones(len(members))
    (_, scores, _), (seen, masks) = jax.lax.scan(step, (states, 0 * ones, ones), None, steps)
    return scores, seen, masks


def ask(center, key):
    noise = jax.random.normal(key, (MEMBERS // 2, 5))
    return jnp.concatenate([center + 0.1 * noise, center - 0.1 * noise])


@jax.jit
def tell(center, opt_state, members, scores):
    ranks = jnp.argsort(jnp.argsort(scores)) / (MEMBERS - 1) - 0.5
    updates, opt_state = tx.update(-ranks @ (members - center), opt_state)
    return center + updates, opt_state


@jax.jit
def learn(known, seen, masks):
    seen, masks = seen.reshape(-1, 4), masks.reshape(-1, 1)
    new = {"count": masks.sum(), "sum": (seen * masks).sum(0), "squares": (seen**2 * masks).sum(0)}
    return jax.tree.map(jnp.add, known, new)


def evolve(simulate):
    state, opt_state, observed, history = center, tx.init(center), known, []
    for i in range(4):
        for_members, for_tasks = jax.random.split(jax.random.key(i))
        members = ask(state, for_members)
        scores, seen, masks = simulate(reset(for_tasks), jnp.repeat(members, EPISODES, axis=0), observed)
        observed = learn(observed, seen, masks)
        scores = scores.reshape(MEMBERS, EPISODES).mean(1)
        state, opt_state = tell(state, opt_state, members, scores)
        history.append(scores)
    return history, state, jax.tree.map(lambda a: a / observed["count"], observed)


def with_pmap():
    p_rollout = jax.pmap(partial(rollout, steps=STEPS), in_axes=(0, 0, None))

    def simulate(states, members, known):
        # By way of the host: since JAX 0.10 pmap refuses arrays that were computed from its results.
        dealt = (np.stack(np.split(np.asarray(a), DEVICES)) for a in (states, members))
        scores, seen, masks = p_rollout(*dealt, known)
        return scores.ravel(), *(a.swapaxes(0, 1).reshape(STEPS, -1, *a.shape[3:]) for a in (seen, masks))

    return evolve(simulate)


def with_synk():
    @synk.function(inputs={"known": "broadcast"}, outputs="concat")
    def s_rollout(states, members, known):
        scores, seen, masks = rollout(states, members, known, STEPS)
        return scores, seen.swapaxes(0, 1), masks.swapaxes(0, 1)  # rows on axis 0

    def simulate(states, members, known):
        scores, *others = s_rollout(states, members, known)
        return scores, *(a.swapaxes(0, 1) for a in others)

    states, members = reset(jax.random.key(9))[:30], ask(center, jax.random.key(8))[:30]
    assert np.array_equal(simulate(states, members, known)[0], rollout(states, members, known, STEPS)[0])
    return evolve(simulate)


if __name__ == "__main__":
    gaps = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - b).max()), with_pmap(), with_synk())
    print(f"largest difference {max(jax.tree.leaves(gaps)):.1e}")
    assert max(jax.tree.leaves(gaps)) < 1e-6
