"""A language model of characters: Flax, padded texts of any length, a perplexity that counts each token once.

    python examples/char_lm.py    # needs the extra `examples`

The texts are the paragraphs of the standard library's own sources, padded, in a memory-mapped file of bytes. The loss
is the mean over tokens, not over texts, however many a replica meets: `synk.Weighted`. The perplexity of all test texts
comes by `over` batches that do not divide, on four replicas, and is compared with one device's. Then it writes.
"""

import json
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import synk
import synk.train

LENGTH, SIZE, LAYERS, BATCH, STEPS, SEED = 64, 64, 1, 64, 120, 0


def texts():
    """(texts, LENGTH) bytes: one paragraph each, 2 before it and 0 after it."""
    sources = sorted(Path(json.__file__).parent.parent.glob("[a-d]*.py"))
    paragraphs = [p for path in sources for p in path.read_text(errors="replace").split("\n\n") if len(p) > 8]
    found = np.zeros((len(paragraphs), LENGTH), np.uint8)
    for row, paragraph in zip(found, paragraphs, strict=True):
        letters = paragraph.encode("ascii", "replace")[: LENGTH - 1]
        row[0], row[1 : 1 + len(letters)] = 2, np.frombuffer(letters, np.uint8)
    return found[np.random.default_rng(SEED).permutation(len(found))]


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(128, SIZE)(tokens) + nn.Embed(LENGTH, SIZE)(jnp.arange(tokens.shape[1]))
        mask = nn.make_causal_mask(tokens)
        for _ in range(LAYERS):
            x += nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x), mask=mask)
            x += nn.Dense(SIZE)(nn.gelu(nn.Dense(4 * SIZE)(nn.LayerNorm()(x))))
        return nn.Dense(128)(nn.LayerNorm()(x))


model = Transformer()


def token_loss(params, text):
    """The mean over the tokens of these texts, padding left out, weighted by how many there are."""
    given, wanted = text[:, :-1].astype(jnp.int32), text[:, 1:].astype(jnp.int32)
    each = optax.softmax_cross_entropy_with_integer_labels(model.apply(params, given), wanted)
    is_token = given > 0  # the 0 that ends a text is one to learn
    return synk.Weighted(jnp.sum(each * is_token) / is_token.sum(), is_token.sum())


path = Path(tempfile.mkdtemp()) / "texts.npy"
np.save(path, texts())
everything = np.load(path, mmap_mode="r")
train, test = synk.data(everything[500:], name="train"), everything[:500]
print(f"{len(train)} texts of {(train[:] > 0).sum()} letters")

synk.init(4)
params = model.init(jax.random.key(SEED), jnp.zeros((1, LENGTH - 1), jnp.int32))
schedule = optax.warmup_cosine_decay_schedule(0.0, 5e-3, 30, STEPS)
step = synk.train.step(token_loss, params, optax.adamw(schedule), clip=1.0, name="step")
epochs = -(-STEPS // (len(train) // BATCH))
batches = list(synk.minibatches(len(train), BATCH, seed=SEED, epochs=epochs))[:STEPS]
for number, loss in enumerate(step.iterate(train, batches=batches), 1):
    if number % 30 == 0:
        print(f"step {number:3d}  loss {loss:.3f}")

test_loss = synk.function(lambda text: token_loss(step.params.value, text), reduce="mean", name="test_loss")
found = float(test_loss.over(test, batches=synk.minibatches(len(test), 64)))
parts = [jax.jit(token_loss)(step.params.value, test[at : at + 100]) for at in range(0, 500, 100)]
weights = np.array([part.weight for part in parts], np.float64)
alone = float(np.average([part.value for part in parts], weights=weights))
assert abs(found - alone) < 1e-5, (found, alone)


@jax.jit
def letter(params, text, at, key):
    """The letter of place `at`, drawn."""
    scores = model.apply(params, text[None])[0, at - 1]
    return text.at[at].set(jax.random.categorical(key, scores / 0.7))


text = jnp.zeros(LENGTH - 1, jnp.int32).at[0].set(2)
start = b"    def __init__("
text = text.at[1 : 1 + len(start)].set(np.frombuffer(start, np.uint8))
for at in range(1 + len(start), LENGTH - 1):
    text = letter(step.params.value, text, at, jax.random.fold_in(jax.random.key(SEED), at))
print(bytes(np.asarray(text, np.uint8)[1:]).split(b"\0")[0].decode())
print(f"Perplexity {np.exp(found):.3f} of {int(weights.sum())} tokens, on one device {np.exp(alone):.3f}")
