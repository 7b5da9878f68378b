"""A small GPT in shards: each of four devices keeps a quarter of parameters, gradients and Adam's state.

    python examples/gpt_in_shards.py    # needs the extra `examples`

Its layers lie stacked, so that a scan gathers one after the other, in the forward and in the backward pass; the loss
knows nothing of it. Four devices train and save a checkpoint. Three load it and go on, with batches of 16 rows, which
do not divide by 3. Losses and parameters are those of one device, which holds the whole.
"""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import synk
import synk.train

LAYERS, WIDTH, HEADS, LENGTH, ROWS, BATCH, SEED = 4, 72, 4, 25, 160, 16, 0
SIZES = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}

text = np.frombuffer(Path(tempfile.__file__).read_bytes(), np.uint8)[: ROWS * LENGTH].reshape(ROWS, LENGTH)
batches = list(synk.minibatches(ROWS, BATCH, seed=SEED))

rng = np.random.default_rng(SEED)
shapes = {"letters": (256, WIDTH), "places": (LENGTH - 1, WIDTH)} | {name: (LAYERS, *SIZES[name]) for name in SIZES}
start = {name: rng.normal(0, 0.05, shape).astype(np.float32) for name, shape in shapes.items()}


@jax.checkpoint
def layer(x, p):
    q, k, v = jnp.split((jax.nn.standardize(x) @ p["qkv"]).reshape(*x.shape[:2], 3 * HEADS, -1), 3, 2)
    x += jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ p["out"]
    return x + jax.nn.gelu(jax.nn.standardize(x) @ p["up"]) @ p["down"], None


def loss(params, text):
    x = params["letters"][text[:, :-1].astype(jnp.int32)] + params["places"]
    x, _ = jax.lax.scan(layer, x, {name: params[name] for name in SIZES})
    scores = jax.nn.standardize(x) @ params["letters"].T
    return optax.softmax_cross_entropy_with_integer_labels(scores, text[:, 1:].astype(jnp.int32)).mean()


losses, params, folder = {}, {}, tempfile.mkdtemp()
for devices, first, last in ((4, 0, 6), (3, 6, 10), (1, 0, 10)):
    synk.init(devices)
    step = synk.train.step(loss, start, optax.adam(1e-3, eps=1e-5), clip=1.0, shard_params=devices > 1)
    if first:
        synk.load(folder, step.variables)
    losses[devices] = [float(each) for each in step.iterate(text, batches=batches[first:last])]
    synk.save(folder, step.variables, step=last)
    params[devices] = step.params.get_value(borrow=True)
    print(f"steps {first + 1} to {last} on {devices}: loss {losses[devices][0]:.4f} to {losses[devices][-1]:.4f}")

np.testing.assert_allclose(losses[4] + losses[3], losses[1], rtol=1e-5)
gap = max(float(np.abs(params[3][name] - params[1][name]).max()) for name in start)
print(f"largest difference of parameters {gap:.0e}")
assert gap < 1e-6
