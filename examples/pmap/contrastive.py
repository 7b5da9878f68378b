"""Two towers whose loss needs every device's embeddings, as big_vision trains them: by pmap, and by synk.

    python examples/pmap/contrastive.py    # needs optax; DEVICES=8 for other than 4

Prints the largest difference of losses, accuracies, parameters and retrieval. Gradients go back through all_gather.
50 pairs are embedded: pmap pads them and needs a mask, synk neither.
"""

import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

import synk
import synk.train

DEVICES = int(os.environ.get("DEVICES", "4"))
synk.init(DEVICES)
random = np.random.default_rng(0)
shared = random.normal(size=(178, 4))  # what an image and its text have in common
images = (shared @ random.normal(size=(4, 12)) + 0.1 * random.normal(size=(178, 12))).astype(np.float32)
texts = (shared @ random.normal(size=(4, 6)) + 0.1 * random.normal(size=(178, 6))).astype(np.float32)
params = {"image": 0.3 * random.normal(size=(12, 8)), "text": 0.3 * random.normal(size=(6, 8)), "scale": np.log(10.0)}
params = jax.tree.map(np.float32, params)
batches = [slice(i, i + 32) for i in range(0, 128, 32)]
tx = optax.adam(1e-2)


def embed(tower, x):
    z = x @ tower
    return z / jnp.linalg.norm(z, axis=-1, keepdims=True)


def one_way(z, others, scale):
    others = jnp.roll(jax.lax.all_gather(others, "batch"), -jax.lax.axis_index("batch"), axis=0)  # own ones come first
    logits = scale * z @ others.reshape(-1, z.shape[1]).T
    hits = jnp.argmax(logits, 1) == jnp.arange(len(z))
    return jnp.mean(jax.nn.logsumexp(logits, 1) - jnp.diag(logits)), hits.mean()


def loss(params, image, text):
    z_image, z_text, scale = embed(params["image"], image), embed(params["text"], text), jnp.exp(params["scale"])
    to_text, text_hits = one_way(z_image, z_text, scale)
    to_image, image_hits = one_way(z_text, z_image, scale)
    return jax.lax.pmean((to_text + to_image) / 2, "batch"), {"to text": text_hits, "to image": image_hits}


def recall(z_image, z_text):
    return np.mean(np.argmax(z_image @ z_text.T, 1) == np.arange(len(z_image)))


def with_pmap():
    @partial(jax.pmap, axis_name="batch", donate_argnums=(0, 1))
    def update(params, opt_state, image, text):
        (value, hits), grads = jax.value_and_grad(loss, has_aux=True)(params, image, text)
        value, hits, grads = jax.lax.pmean((value, hits, grads), "batch")
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, (value, hits)

    @partial(jax.pmap, axis_name="batch", in_axes=(None, 0, 0, 0))
    def embed_all(params, image, text, mask):
        return jax.lax.all_gather((embed(params["image"], image), embed(params["text"], text), mask), "batch")

    shard = partial(jax.tree.map, lambda a: a.reshape(DEVICES, -1, *a.shape[1:]))
    state, results = jax.tree.map(lambda a: jnp.stack([a] * DEVICES), (params, tx.init(params))), []
    for rows in batches:
        *state, result = update(*state, *shard((images[rows], texts[rows])))
        results.append(jax.tree.map(lambda a: a[0], result))
    trained, missing = jax.tree.map(lambda a: a[0], state[0]), -50 % DEVICES
    padded = [np.pad(a[128:], ((0, missing), (0, 0))) for a in (images, texts)]
    gathered = embed_all(trained, *shard((*padded, np.arange(50 + missing) < 50)))
    *z, mask = (np.asarray(a[0]).reshape(50 + missing, *a.shape[3:]) for a in gathered)
    return results, trained, recall(*(a[mask] for a in z))


def with_synk():
    step = synk.train.step(loss, params, tx, aux="mean", axis_name="batch")
    results = [step(images[rows], texts[rows]) for rows in batches]

    @synk.function(inputs=["image", "text"], outputs="concat")
    def embed_all(params, image, text):
        return embed(params["image"], image), embed(params["text"], text)

    trained = step.params.value
    return results, trained, recall(*embed_all(trained, images[128:], texts[128:]))


if __name__ == "__main__":
    gaps = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - b).max()), with_pmap(), with_synk())
    print(f"largest difference {max(jax.tree.leaves(gaps)):.1e}")
    assert max(jax.tree.leaves(gaps)) < 1e-6
