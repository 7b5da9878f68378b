"""Hidden Markov model (HMM): Baum-Welch over 301 sequences of different lengths, on four devices as on one.

    python examples/hmm.py

The forward algorithm runs along each padded sequence. The gradient of the log-likelihood by the log of a probability is
how often that is expected to be used: all that EM needs. Prints the largest difference of any probability.
"""

import jax
import jax.numpy as jnp
import numpy as np

import synk

ROWS, LENGTH, STATES, SYMBOLS, ROUNDS = 301, 40, 2, 6, 25
rng = np.random.default_rng(0)
move = np.array([[0.95, 0.05], [0.1, 0.9]])  # a fair die and a loaded one
emit = np.array([[1 / 6] * 6, [0.1] * 5 + [0.5]])
lengths, rolls = rng.integers(5, LENGTH + 1, ROWS), np.zeros((ROWS, LENGTH), np.int32)
state = rng.integers(0, STATES, ROWS)
for at in range(LENGTH):
    rolls[:, at] = (rng.random((ROWS, 1)) > emit[state].cumsum(1)).sum(1).clip(0, SYMBOLS - 1)
    state = (rng.random(ROWS) > move[state, 0]).astype(int)


def log_likelihood(logs, rolls, length):
    """Return that of one sequence, of which so many symbols count."""

    def step(alpha, at):
        now = jax.nn.logsumexp(alpha[:, None] + logs["move"], 0) + logs["emit"][:, rolls[at]]
        return jnp.where(at < length, now, alpha), None

    alpha = logs["start"] + logs["emit"][:, rolls[0]]
    return jax.nn.logsumexp(jax.lax.scan(step, alpha, jnp.arange(1, LENGTH))[0])


def learn(replicas):
    guess = {"start": [0.5, 0.5], "move": [[0.8, 0.2], [0.2, 0.8]], "emit": [[1 / 6] * 6, [0.15] * 5 + [0.25]]}
    with synk.init(replicas):
        logs = synk.shared({name: np.log(np.array(p, np.float32)) for name, p in guess.items()}, name="logs")

        @synk.function
        def em(rolls, lengths):
            of_all = lambda logs: jax.vmap(log_likelihood, (None, 0, 0))(logs, rolls, lengths).sum()  # noqa: E731
            return jax.value_and_grad(of_all)(logs.value)

        @em.then
        def em(total, counts):
            logs.value = jax.tree.map(lambda c: jnp.log(c / c.sum(-1, keepdims=True)), counts)
            return total

        totals = [float(em(rolls, lengths)) for _ in range(ROUNDS)]
        return jax.tree.map(np.exp, jax.device_get(logs.value)), totals


(four, totals), (one, _) = learn(4), learn(1)
largest = max(np.abs(four[name] - one[name]).max() for name in four)
print(f"log-likelihood a symbol {totals[0] / lengths.sum():.4f}, then {totals[-1] / lengths.sum():.4f}")
assert totals[-1] > totals[0] and abs(four["emit"][1, 5] - 0.5) < 0.05 and largest < 1e-3
print(f"largest difference {largest:.0e}")
