"""DQN: a replay buffer, a target network and double Q-learning, on four devices as on one.

    python examples/dqn.py    # needs the extra `examples`

Sixteen players walk a corridor of eight cells to a prize at its end. Transitions go into NumPy arrays held by
`synk.data`; a batch is random rows of them. The target network is a shared variable: `target.value =
step.params.value`. Prints the value of each cell, which is 0.9 to the number of steps left, and the largest difference
of any weight from one device.
"""

import numpy as np
import optax

import synk
import synk.train

CELLS, PLAYERS, STEPS, BATCH, DISCOUNT, EVERY, ROOM = 8, 16, 400, 62, 0.9, 10, 1000
FIELDS = {"cell": np.int32, "action": np.int32, "reward": np.float32, "after": np.int32, "goes_on": np.float32}
start = np.ones((CELLS, 2), np.float32)  # the value of going left and right in each cell, hopefully


def play(replicas):
    """Return the values after all steps."""
    rng, cell = np.random.default_rng(0), np.arange(PLAYERS) % CELLS
    with synk.init(replicas):
        target = synk.shared(start, name="target")
        buffer = [synk.data(np.zeros(ROOM, dtype), name=name) for name, dtype in FIELDS.items()]

        def loss(q, cell, action, reward, after, goes_on):
            best = q[after].argmax(1)  # chosen by one network, valued by the other
            wanted = reward + DISCOUNT * goes_on * target.value[after, best]
            return optax.huber_loss(q[cell, action], wanted).mean()

        step = synk.train.step(loss, start, optax.adam(0.05))
        for number in range(STEPS):
            greedy = np.asarray(step.params.value)[cell].argmax(1)
            action = np.where(rng.random(PLAYERS) < 0.5, rng.integers(0, 2, PLAYERS), greedy)
            after = np.maximum(cell + 2 * action - 1, 0)
            is_there = after == CELLS
            seen = cell, action, is_there, after % CELLS, ~is_there
            for data, values in zip(buffer, seen, strict=True):
                data[(number * PLAYERS + np.arange(PLAYERS)) % ROOM] = values
            cell = np.where(is_there, rng.integers(0, CELLS, PLAYERS), after)
            step(*buffer, batch=rng.integers(0, min((number + 1) * PLAYERS, ROOM), BATCH))
            if number % EVERY == 0:
                target.value = step.params.value
        return np.asarray(step.params.value)


four, one = play(4), play(1)
largest = np.abs(four - one).max()
print("values of cells:", *four.max(1).round(2))
assert np.abs(four[:, 1] - DISCOUNT ** np.arange(CELLS)[::-1]).max() < 0.05 and largest < 1e-4
print(f"largest difference {largest:.0e}")
