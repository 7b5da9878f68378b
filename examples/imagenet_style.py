"""A folder of images, as ImageNet comes: read and augmented by threads, streamed, with EMA and a schedule.

    python examples/imagenet_style.py [FOLDER]    # needs the extra `examples`

FOLDER has a folder of images for each class, of any sizes. Without one, scikit-learn's digits are written as PNG files.
A generator hands out batches; threads open, crop and turn the images; `step.stream` sends the next batches while one is
computed. Then the averaged parameters are evaluated exactly, and the history is drawn.
"""

import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import linen as nn
from PIL import Image
from sklearn.datasets import load_digits

import synk
import synk.train

SIZE, BATCH, EPOCHS, SEED = 16, 64, 6, 0
OUT = Path(__file__).resolve().parent.parent / "out"


def digits():
    """A folder of 1,797 PNG files, of 30 to 36 pixels a side."""
    folder = Path(tempfile.mkdtemp())
    rng = np.random.default_rng(SEED)
    for number, (pixels, label) in enumerate(zip(*load_digits(return_X_y=True), strict=True)):
        (folder / str(label)).mkdir(exist_ok=True)
        side = int(rng.integers(30, 37))
        image = Image.fromarray((pixels.reshape(8, 8) * 255 / 16).astype(np.uint8)).resize((side, side))
        image.save(folder / str(label) / f"{number}.png")
    return folder


def read(path, rng=None):
    """One image, (SIZE, SIZE, 1) bytes: its middle, or with `rng` a part of it somewhere, turned a little."""
    with Image.open(path) as image:
        image = image.convert("L").resize((SIZE + 4, SIZE + 4))
        if rng is not None:
            image = image.rotate(rng.uniform(-12, 12), Image.Resampling.BILINEAR)
        left, upper = (2, 2) if rng is None else rng.integers(0, 5, 2)
        return np.asarray(image.crop((left, upper, left + SIZE, upper + SIZE)))[..., None]


def batches(paths, labels, pool):
    """Images and labels, each epoch in another order; the last batch of an epoch is smaller."""
    for number, rows in enumerate(synk.minibatches(len(paths), BATCH, seed=SEED, epochs=EPOCHS)):
        rngs = [np.random.default_rng((SEED, number, i)) for i in range(len(rows))]
        yield np.stack(list(pool.map(read, paths[rows], rngs))), labels[rows]


class Block(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x, train):
        y = x
        for _ in range(2):
            y = nn.relu(nn.BatchNorm(use_running_average=not train)(nn.Conv(self.features, (3, 3))(y)))
        return nn.max_pool(y + nn.Conv(self.features, (1, 1))(x), (2, 2), (2, 2))


class Net(nn.Module):
    classes: int

    @nn.compact
    def __call__(self, x, train):
        for features in (12, 24, 48):
            x = Block(features)(x, train)
        return nn.Dense(self.classes)(x.mean((1, 2)))


folder = Path(sys.argv[1]) if len(sys.argv) > 1 else digits()
names = sorted(path.name for path in folder.iterdir() if path.is_dir())
paths = np.array(sorted(folder.glob("*/*")))
labels = np.array([names.index(path.parent.name) for path in paths], np.int32)
order = np.random.default_rng(SEED).permutation(len(paths))
test, train = order[: len(order) // 6], order[len(order) // 6 :]

synk.init(4)
net = Net(len(names))


def scaled(x):
    return x.astype(jnp.float32) / 128 - 1  # images travel as bytes


def loss(params, state, x, y):
    scores, state = net.apply({"params": params, **state}, scaled(x), train=True, mutable=["batch_stats"])
    return optax.softmax_cross_entropy_with_integer_labels(scores, y).mean(), state


state = net.init(jax.random.key(SEED), jnp.zeros((1, SIZE, SIZE, 1)), train=False)
params = state.pop("params")
steps = EPOCHS * -(-len(train) // BATCH)
schedule = optax.warmup_cosine_decay_schedule(0.0, 0.01, steps // 10, steps)
step = synk.train.step(loss, params, optax.adamw(schedule), state=state, ema=0.95)


@synk.function(reduce="mean")
def accuracy(x, y):
    scores = net.apply({"params": step.ema.value, **step.state.value}, scaled(x), train=False)
    return (scores.argmax(1) == y).mean()


with ThreadPoolExecutor(4) as pool:
    history = [float(value) for value in step.stream(batches(paths[train], labels[train], pool), prefetch=3)]
    x_test = np.stack(list(pool.map(read, paths[test])))
assert len(history) == steps
found = float(accuracy.over(x_test, labels[test], batches=synk.minibatches(len(test), 128)))

plt.switch_backend("Agg")
_, axis = plt.subplots()
axis.plot(history)
axis.set(xlabel="step", ylabel="loss", yscale="log")
axis.twinx().plot([schedule(i) for i in range(steps)], "C1--")
OUT.mkdir(exist_ok=True)
plt.savefig(OUT / "imagenet_style.png")
print(f"Loss and learning rate: {OUT / 'imagenet_style.png'}")
print(f"Test accuracy {100 * found:.1f} % of {len(test)} images, by averaged parameters")
