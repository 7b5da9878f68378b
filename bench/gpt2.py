"""GPT-2 small in flax (Radford et al. 2019): 124 million parameters in float32, which computes in bfloat16."""

import jax
import jax.numpy as jnp
from flax import linen as nn

WIDTH, HEADS, LAYERS, VOCABULARY, TEXT = 768, 12, 12, 50257, 1024
DTYPE = jnp.bfloat16


class Layer(nn.Module):
    """Attention and a perceptron, each after a normalisation and beside a way around it."""

    @nn.compact
    def __call__(self, x):
        y = nn.Dense(3 * WIDTH, dtype=DTYPE)(nn.LayerNorm(dtype=DTYPE)(x))
        q, k, v = (part.reshape(*x.shape[:2], HEADS, WIDTH // HEADS) for part in jnp.split(y, 3, axis=-1))
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        x = x + nn.Dense(WIDTH, dtype=DTYPE)(y)
        y = nn.gelu(nn.Dense(4 * WIDTH, dtype=DTYPE)(nn.LayerNorm(dtype=DTYPE)(x)))
        return x + nn.Dense(WIDTH, dtype=DTYPE)(y)


class Gpt2(nn.Module):
    """Tokens (rows, length) to logits (rows, length, 50,257); the last layer shares the embedding of the first."""

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(VOCABULARY, WIDTH, dtype=DTYPE)
        positions = self.param("positions", nn.initializers.normal(0.02), (TEXT, WIDTH), jnp.float32)
        x = embed(tokens) + positions[None, : tokens.shape[1]].astype(DTYPE)
        for _ in range(LAYERS):
            x = Layer()(x)
        return embed.attend(nn.LayerNorm(dtype=DTYPE)(x)).astype(jnp.float32)
