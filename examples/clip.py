"""CLIP: images and captions in one space, by a contrastive loss over all pairs of a batch, four devices as on one.

    python examples/clip.py    # needs the extra `examples`

Two encoders, one of pixels and one of letters. The loss compares each image with every caption of the batch, so it is
written for one device and runs by `engine="jit"`. Prints the zero-shot accuracy on test images, whose label is the
nearest caption, and the largest difference of any weight from plain JAX on one device.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import synk
import synk.train

TRAIN, BATCH, EPOCHS, SIZE, SEED = 1485, 99, 6, 32, 0
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
captions = np.array([[word.count(chr(97 + i)) for i in range(26)] for word in WORDS], np.float32)  # letters
x, y = load_digits(return_X_y=True)
order = np.random.default_rng(SEED).permutation(len(x))
x, y = (x[order] / 16).astype(np.float32), y[order]
rng = np.random.default_rng(SEED)
shapes = {"image": ((64, 128), (128, SIZE)), "text": ((26, 64), (64, SIZE))}
start = {name: [rng.normal(0, m**-0.5, (m, n)).astype(np.float32) for m, n in each] for name, each in shapes.items()}
start["scale"] = np.float32(np.log(10))


def encode(weights, x):
    z = jax.nn.gelu(x @ weights[0]) @ weights[1]
    return z / jnp.linalg.norm(z, axis=1, keepdims=True)


def loss(params, image, text):
    scores = jnp.exp(params["scale"]) * encode(params["image"], image) @ encode(params["text"], text).T
    by_image, by_text = jax.nn.log_softmax(scores, 1), jax.nn.log_softmax(scores, 0)
    return -(jnp.diag(by_image) + jnp.diag(by_text)).mean() / 2


@jax.jit
def alone(params, state, image, text):  # the same step in plain JAX
    updates, state = adam.update(jax.grad(loss)(params, image, text), state, params)
    return optax.apply_updates(params, updates), state


synk.init(4)
adam, texts, batches = optax.adam(3e-3), captions[y], list(synk.minibatches(TRAIN, BATCH, epochs=EPOCHS))
step = synk.train.step(loss, start, adam, engine="jit")
for _ in step.iterate(x, texts, batches=batches):
    pass
one, state, four = start, adam.init(start), jax.device_get(step.params.value)
for batch in batches:
    one, state = alone(one, state, x[batch], texts[batch])
found = (encode(four["image"], x[TRAIN:]) @ encode(four["text"], captions).T).argmax(1)
largest = max(jax.tree.leaves(jax.tree.map(lambda a, b: np.abs(a - b).max(), four, one)))
print(f"zero-shot accuracy {np.mean(found == y[TRAIN:]):.1%}")
assert np.mean(found == y[TRAIN:]) > 0.8 and largest < 1e-3
print(f"largest difference {largest:.0e}")
