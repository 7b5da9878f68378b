"""AlexNet on two replicas, after Theano-AlexNet: prints a validation error of 25 % or less.

Each replica trains on its half of a batch with momentum, and after every batch parameters and momentum are averaged.
There, a process for each GPU passed them by hand, and one more loaded; here it is `every=1`, and `synk.prefetch` loads,
crops, mirrors and sends the next batches from files while the replicas run. With momentum such averages are the
synchronous step, as the first steps show.

The network has all its layers, groups and normalisation, for 128 pixels, but an eighth of its width and four classes.

    python examples/ports/theano_alexnet.py
"""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits

import synk
import synk.train

RAW, CROP, NARROW, BATCH, EPOCHS, RATE, SEED = 144, 128, 8, 30, 4, 0.02, 0
TRAIN, VALID = 600, 120  # of four digits


class AlexNet(nn.Module):
    @nn.compact
    def __call__(self, x, keys=None):
        for features, size, stride, groups, pools, normalises in (
            (96, 11, 4, 1, True, True),
            (256, 5, 1, 2, True, True),
            (384, 3, 1, 1, False, False),
            (384, 3, 1, 2, False, False),
            (256, 3, 1, 2, True, False),
        ):
            padding = "VALID" if stride > 1 else "SAME"
            x = nn.Conv(features // NARROW, (size, size), stride, padding, feature_group_count=groups, kernel_init=HE)(
                x
            )
            x = nn.relu(x)
            x = nn.max_pool(x, (3, 3), (2, 2)) if pools else x
            x = local_response(x) if normalises else x
        x = x.reshape(len(x), -1)
        for layer in (6, 7):
            x = dropout(nn.relu(nn.Dense(4096 // NARROW, kernel_init=HE)(x)), keys, layer)
        return nn.Dense(4, kernel_init=nn.initializers.normal(0.01))(x)


HE = nn.initializers.he_normal()


def local_response(x):
    """Each channel is divided by what its four neighbours and itself amount to."""
    squares = jnp.pad(x**2, [(0, 0)] * 3 + [(2, 2)])
    around = sum(squares[..., i : i + x.shape[-1]] for i in range(5))
    return x / (2 + 1e-4 * around) ** 0.75


def dropout(x, keys, layer):
    if keys is None:
        return x
    kept = jax.vmap(lambda key: jax.random.bernoulli(jax.random.fold_in(key, layer), 0.5, x.shape[1:]))(keys)
    return jnp.where(kept, 2 * x, 0)


def loss(params, x, y, seeds):
    logits = AlexNet().apply(params, x, jax.vmap(jax.random.key)(seeds))
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def optimizer(steps):
    """Momentum; weights decay, biases learn twice as fast, and both ten times slower for the last quarter."""
    schedule = optax.piecewise_constant_schedule(RATE, {steps * 3 // 4: 0.1})
    decayed = optax.masked(optax.add_decayed_weights(0.0005), lambda tree: jax.tree.map(lambda w: w.ndim > 1, tree))
    doubled = optax.masked(optax.scale(2.0), lambda tree: jax.tree.map(lambda w: w.ndim == 1, tree))
    return optax.chain(decayed, doubled, optax.sgd(schedule, momentum=0.9))


def write_batches(folder):
    """Files of images and labels, as preprocessing leaves them; and the mean image."""
    x, y = load_digits(n_class=4, return_X_y=True)
    order = np.random.default_rng(SEED).permutation(len(x))
    images = np.kron(x[order].reshape(-1, 8, 8), np.ones((RAW // 8, RAW // 8))).astype(np.uint8)
    files = []
    for start in range(0, TRAIN + VALID, BATCH):
        files.append(Path(folder) / f"{start:04}.npz")
        rows = slice(start, start + BATCH)
        np.savez(files[-1], images=images[rows], labels=y[order[rows]].astype(np.int32))
    return files[: TRAIN // BATCH], files[TRAIN // BATCH :], images[:TRAIN].mean(0)


def loader(mean, rng=None):
    """Make what crops and mirrors each batch: at random, or in the middle where there is no `rng`."""

    def load(file):
        batch = np.load(file)
        images = (batch["images"] - mean)[..., None] / 8
        cuts = rng.integers(0, RAW - CROP, (BATCH, 2)) if rng else np.full((BATCH, 2), (RAW - CROP) // 2)
        images = [image[top:, left:][:CROP, :CROP] for image, (top, left) in zip(images, cuts, strict=True)]
        mirrored = [image[:, ::-1] if rng and rng.integers(2) else image for image in images]
        seeds = rng.integers(2**32, size=BATCH, dtype=np.uint32) if rng else np.zeros(BATCH, np.uint32)
        return np.repeat(np.stack(mirrored), 3, -1).astype(np.float32), batch["labels"], seeds

    return load


def gap(one, other):
    return max(jax.tree.leaves(jax.tree.map(lambda a, b: np.abs(np.asarray(a) - np.asarray(b)).max(), one, other)))


def main():
    synk.init(2)
    params = AlexNet().init(jax.random.key(SEED), np.zeros((1, CROP, CROP, 3), np.float32))
    with tempfile.TemporaryDirectory() as folder:
        files, valid_files, mean = write_batches(folder)
        steps = EPOCHS * len(files)
        train = synk.contrib.local_steps(loss, params, optimizer(steps), every=1)
        together = synk.train.step(loss, params, optimizer(steps))

        @synk.function(reduce="mean")
        def validate(x, y, seeds):
            return jnp.mean(AlexNet().apply(train.params.value, x).argmax(-1) != y)

        for epoch in range(EPOCHS):
            rng, losses = np.random.default_rng(epoch), []
            for batch in synk.prefetch(rng.permutation(files), size=2, transform=loader(mean, rng)):
                losses.append(train(*batch))
                if train.steps <= 3:
                    together(*batch)
                    apart = gap(train.params.value, together.params.value)
            errors = [validate(*batch) for batch in synk.prefetch(valid_files, transform=loader(mean))]
            print(f"epoch {epoch + 1}: training loss {np.mean(losses):.3f}, validation error {np.mean(errors):.1%}")
    print(
        f"Validation error {np.mean(errors):.1%} after {steps} averages; the first 3 were synchronous to {apart:.0e}."
    )
    assert np.mean(errors) <= 0.25 and apart < 1e-5


if __name__ == "__main__":
    main()
