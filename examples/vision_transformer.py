"""Vision transformer (ViT): patches, attention and a class token, on scikit-learn's digits, four devices as on one.

    python examples/vision_transformer.py    # needs the extra `examples`

Each digit of 8 x 8 pixels is 16 patches of 2 x 2. The loss is written for one device. Prints the test accuracy, 80 % or
more after six epochs, and the largest difference of any parameter from the same training on one device.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits

import synk
import synk.train

TRAIN, BATCH, EPOCHS, SIZE, SEED = 1500, 100, 6, 32, 0


class ViT(nn.Module):
    @nn.compact
    def __call__(self, x):
        patches = x.reshape(-1, 4, 2, 4, 2).swapaxes(2, 3).reshape(-1, 16, 4)
        x = nn.Dense(SIZE)(patches)
        token = self.param("token", nn.initializers.normal(0.02), (1, 1, SIZE))
        x = jnp.concatenate([jnp.broadcast_to(token, (len(x), 1, SIZE)), x], 1)
        x = x + self.param("places", nn.initializers.normal(0.02), (1, x.shape[1], SIZE))
        x = x + nn.MultiHeadDotProductAttention(num_heads=4, use_bias=False)(nn.LayerNorm()(x))
        x = x + nn.Dense(SIZE)(nn.gelu(nn.Dense(2 * SIZE)(nn.LayerNorm()(x))))
        return nn.Dense(10)(x[:, 0])


x, y = load_digits(return_X_y=True)
order = np.random.default_rng(SEED).permutation(len(x))
x, y = (x[order] / 16).astype(np.float32), y[order].astype(np.int32)
model = ViT()


def loss(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, x), y).mean()


def train(replicas):
    """Return the trained parameters."""
    with synk.init(replicas):
        params = jax.jit(model.init)(jax.random.key(SEED), x[:1])
        step = synk.train.step(loss, params, optax.adamw(5e-3))
        for _ in step.iterate(x[:TRAIN], y[:TRAIN], batches=synk.minibatches(TRAIN, BATCH, epochs=EPOCHS)):
            pass
        return jax.device_get(step.params.value)


four, one = train(4), train(1)
accuracy = np.mean(jax.jit(model.apply)(four, x[TRAIN:]).argmax(1) == y[TRAIN:])
largest = max(jax.tree.leaves(jax.tree.map(lambda a, b: np.abs(a - b).max(), four, one)))
print(f"test accuracy {accuracy:.1%}")
assert accuracy > 0.8 and largest < 1e-3
print(f"largest difference {largest:.0e}")
