"""Gradients accumulated over parts with different numbers of tokens: the mean of means is another gradient.

    python examples/compare/accumulated_tokens.py    # needs optax

Four texts of 2 to 12 tokens, whose loss is the mean over all tokens. Prints its gradient by NumPy, as
`optax.MultiSteps` accumulates it over the texts, and by synk in two slices on each of two replicas.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import synk

synk.init(2)
tokens = np.random.default_rng(0).normal(size=(4, 12)).astype(np.float32)
mask = np.arange(12) < np.array([[2], [12], [3], [7]])


def mean_loss(w, tokens, mask):
    return (((w - tokens) ** 2) * mask).sum() / mask.sum()


exact = float((2 * (1 - tokens) * mask).sum() / mask.sum())
print(f"NumPy: {exact:.5f}")

steps = optax.MultiSteps(optax.sgd(1.0), every_k_schedule=4)
state, w = steps.init(jnp.float32(1)), jnp.float32(1)
for i in range(4):
    updates, state = steps.update(jax.grad(mean_loss)(w, tokens[i], mask[i]), state, w)
accumulated = -float(updates)
print(f"optax {optax.__version__}, MultiSteps: {accumulated:.5f}")


@synk.function(inputs=["tokens", "mask"], reduce="mean")
def gradient(w, tokens, mask):
    return synk.Weighted(jax.grad(mean_loss)(w, tokens, mask), mask.sum())


found = float(gradient(np.float32(1), tokens, mask, num_slices=2))
print(f"synk: {found:.5f}")
assert np.isclose(found, exact, rtol=1e-5) and not np.isclose(accumulated, exact, rtol=1e-2)
