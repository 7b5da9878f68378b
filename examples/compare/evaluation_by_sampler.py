"""Evaluation over a distributed sampler: it pads by repeating rows, which are then counted twice.

    python examples/compare/evaluation_by_sampler.py    # needs torch

Prints the accuracy on ten rows, nine of them right, by NumPy, by PyTorch's DistributedSampler on four ranks as
evaluation loops use it (with and without drop_last), and by synk.
"""

import numpy as np
import torch  # type: ignore[import]  # where it is installed
from torch.utils.data.distributed import DistributedSampler  # type: ignore[import]

import synk

is_right = np.array([False] + [True] * 9)
print(f"NumPy: {is_right.mean()}")
others = {}
for drop_last in (False, True):
    samplers = [DistributedSampler(is_right, 4, rank, shuffle=False, drop_last=drop_last) for rank in range(4)]
    seen = [is_right[list(sampler)] for sampler in samplers]  # what each rank evaluates
    right, count = sum(part.sum() for part in seen), sum(len(part) for part in seen)  # as an all-reduce adds them up
    others[drop_last] = right / count
    print(f"torch {torch.__version__}, drop_last={drop_last}: {others[drop_last]:.4f}, of {count} rows")

synk.init(4)
accuracy = synk.function(lambda is_right: is_right.astype(np.float32).mean(), reduce="mean")
found = float(accuracy.over(is_right, batches=synk.minibatches(10, 4)))
print(f"synk: {found:.4f}, of 10 rows")
assert np.isclose(found, 0.9) and not np.isclose(list(others.values()), 0.9).any()
