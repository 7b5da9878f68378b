"""GAN: a generator and a critic, two optimizers in turn, on four devices as on one.

    python examples/gan.py    # needs the extra `examples`

Each step trains its own network and reads the other one's shared variable. Noise is drawn for each row, so it does not
depend on devices. Prints the mean radius of generated points, which should be that of a circle of radius 2, and the
largest difference of any weight from the same training on one device.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import synk
import synk.train

ROWS, BATCH, EPOCHS, SEED = 513, 57, 40, 0
rng = np.random.default_rng(SEED)
angles = rng.uniform(0, 2 * np.pi, ROWS)
real = (2 * np.stack([np.cos(angles), np.sin(angles)], 1)).astype(np.float32)
made = [rng.normal(0, m**-0.5, (m, n)).astype(np.float32) for m, n in ((4, 64), (64, 2))]
judge = [rng.normal(0, m**-0.5, (m, n)).astype(np.float32) for m, n in ((2, 64), (64, 1))]


def apply(weights, x):
    return jax.nn.leaky_relu(x @ weights[0]) @ weights[1]


def noise(key):
    return jax.vmap(lambda key: jax.random.normal(key, (4,)))(synk.row_keys(key))


def train(replicas):
    """Return both networks."""
    with synk.init(replicas):
        generator, critic = synk.shared(made, name="generator"), synk.shared(judge, name="critic")

        def critic_loss(weights, real, key):
            fake = apply(generator.value, noise(key))
            return jnp.mean(jax.nn.softplus(-apply(weights, real)) + jax.nn.softplus(apply(weights, fake)))

        def generator_loss(weights, real, key):
            return jnp.mean(jax.nn.softplus(-apply(critic.value, apply(weights, noise(key)))))

        train_critic = synk.train.step(critic_loss, critic, optax.adam(5e-3, b1=0.5), inputs=["real"])
        train_generator = synk.train.step(generator_loss, generator, optax.adam(5e-3, b1=0.5), inputs=["real"])
        for number, batch in enumerate(synk.minibatches(ROWS, BATCH, epochs=EPOCHS)):
            train_critic(real, jax.random.key(2 * number), batch=batch)
            train_generator(real, jax.random.key(2 * number + 1), batch=batch)
        return jax.device_get((generator.value, critic.value))


four, one = train(4), train(1)
radius = float(jnp.linalg.norm(apply(four[0], rng.normal(size=(1000, 4)).astype(np.float32)), axis=1).mean())
largest = max(jax.tree.leaves(jax.tree.map(lambda a, b: np.abs(a - b).max(), four, one)))
print(f"mean radius {radius:.2f}, of the data 2.00")
assert abs(radius - 2) < 0.3 and largest < 1e-2
print(f"largest difference {largest:.0e}")
