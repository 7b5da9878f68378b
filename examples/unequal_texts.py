"""Texts of unequal length: a language model, batches under a budget of tokens, four devices as on one.

    python examples/unequal_texts.py    # needs the extra `examples`

A batch has texts of like length, cut to their bucket, and as many as a budget of tokens allows. The loss is a mean over
tokens by `synk.Weighted`, so an epoch has the loss that padded batches of any sizes have. Prints the real tokens a
second beside those of batches of fixed rows, and the largest difference of any weight from one device.
"""

from time import perf_counter

import jax
import jax.numpy as jnp
import numpy as np
import optax

import synk
import synk.train

TEXTS, LETTERS, SIZE, BUDGET, FIXED = 300, 32, 32, 2048, 20
rng = np.random.default_rng(0)
length = np.clip(rng.lognormal(3.5, 0.8, TEXTS), 8, 256).astype(np.int32)
text = (
    np.cumsum(rng.integers(1, 3, (TEXTS, 257)), 1).astype(np.int32) % LETTERS
)  # each letter is 1 or 2 behind the last


def loss(params, text, length):
    given, wanted = text[:, :-1], text[:, 1:]
    is_token = jnp.arange(given.shape[1]) < length[:, None]
    hidden = jax.nn.silu(params["letters"][given] @ params["first"])
    before = jnp.cumsum(hidden, 1) / (1 + jnp.arange(given.shape[1])[:, None])  # of all letters so far
    scores = jnp.concatenate([hidden, before], -1) @ params["last"]
    each = optax.softmax_cross_entropy_with_integer_labels(scores, wanted)
    return synk.Weighted((each * is_token).sum() / is_token.sum(), is_token.sum().astype(jnp.float32))


def train(replicas, order, padded_to):
    """Return the weights, the loss of each batch, and the seconds of an epoch that has compiled everything before."""
    shapes = {"letters": (LETTERS, SIZE), "first": (SIZE, 4 * SIZE), "last": (8 * SIZE, LETTERS)}
    params = {name: np.random.default_rng(1).normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}
    with synk.init(replicas):
        step, losses = synk.train.step(loss, params, optax.adam(0.01)), []
        for _ in range(3):
            start = perf_counter()
            batches = ((text[rows, : padded_to(rows) + 1], length[rows]) for rows in order)
            losses += [float(value) for value in step.stream(batches)]
        return jax.device_get(step.params.value), losses, perf_counter() - start


order = synk.minibatches(TEXTS, cost=length, budget=BUDGET, buckets=[64, 256], drop_last=True)
(four, losses, seconds), (one, _, _) = train(4, order, order.longest), train(1, order, order.longest)
_, _, fixed = train(4, synk.minibatches(TEXTS, FIXED), lambda rows: 256)
largest = max(np.abs(four[name] - one[name]).max() for name in four)
tokens = order.stats.real_cost
print(f"{order.stats.shapes} shapes, {tokens / order.stats.padded_cost:.0%} of the tokens are real")
print(f"real tokens a second: {tokens / seconds:,.0f}; padded to the longest {tokens / fixed:,.0f}")
assert losses[-1] < losses[0] / 2 and largest < 1e-3
print(f"largest difference {largest:.0e}")
