"""Stream: training on what a loader gives, beside the time of computing alone and the loader's own loop.

    python bench/stream.py [--replicas 2] [--rounds 9] [--steps 30] [--json OUT]

LeNet, Adam, batches of 256 rows, by a generator and, where PyTorch is installed, by its DataLoader. "Alone" takes the
same steps on batches that lie on the devices already. Claim: at most 1.02 x that where loading is quicker. Ways in
turn; medians.
"""

import argparse
from statistics import median
from time import perf_counter

import jax
from record import about, cpu_devices, heading, save

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json")
    options = parser.parse_args()
    cpu_devices(options.replicas)

import numpy as np
import optax
from small import lenet

import synk
import synk.train

ROWS = 256
RANDOM = np.random.default_rng(0)


def weights(*shape):
    return (RANDOM.normal(size=shape) * 0.1).astype(np.float32), np.zeros(shape[-1], np.float32)


PARAMS = [weights(5, 5, 1, 8), weights(5, 5, 8, 16), weights(784, 64), weights(64, 10)]


def loss(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(lenet(params, x), y).mean()


def ways_of(step):
    """What takes all steps, by name; each returns the last loss."""
    count = options.steps
    x = RANDOM.normal(size=(ROWS * count, 28, 28, 1)).astype(np.float32)
    y = RANDOM.integers(0, 10, ROWS * count).astype(np.int32)
    placed = list(synk.prefetch((x[:ROWS], y[:ROWS]) for _ in range(4)))

    def generator():
        for i in range(count):
            yield x[i * ROWS : (i + 1) * ROWS], y[i * ROWS : (i + 1) * ROWS]

    ways = {
        "alone": lambda: [step(*placed[i % 4]) for i in range(count)][-1],
        "generator, own loop": lambda: [step(*item) for item in generator()][-1],
        "generator, stream": lambda: list(step.stream(generator()))[-1],
    }
    try:
        import torch  # type: ignore[import]  # if installed
    except ImportError:
        return ways
    data = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    loader = torch.utils.data.DataLoader(data, batch_sampler=torch.utils.data.BatchSampler(
        torch.utils.data.SequentialSampler(data), ROWS, False))  # fmt: skip
    return ways | {
        "DataLoader, own loop": lambda: [step(*(tensor.numpy() for tensor in item)) for item in loader][-1],
        "DataLoader, stream": lambda: list(step.stream(loader))[-1],
        "DataLoader, loading alone": lambda: [item for item in loader][-1],
    }


def main():
    found = about("stream") | {"replicas": options.replicas, "rounds": options.rounds, "results": {}}
    print(f"{heading(found)}; {options.replicas} replicas, {options.steps} steps, medians of {options.rounds} turns")
    with synk.init(options.replicas):
        step = synk.train.step(loss, PARAMS, optax.adam(1e-3))
        ways = ways_of(step)
        times = {name: [] for name in ways}
        for turn in range(options.rounds + 1):
            for name, take in ways.items():
                start = perf_counter()
                take()
                jax.block_until_ready(step.params.get_value(0, borrow=True))
                if turn:
                    times[name].append(1e3 * (perf_counter() - start) / options.steps)
    for name, each in times.items():
        ratio = median(each) / median(times["alone"])
        found["results"][name] = {"ms": median(each), "ratio": ratio}
        print(f"{name}: {median(each):.2f} ms a step, {ratio:.3f} x")
    save(options.json, found)


if __name__ == "__main__":
    main()
