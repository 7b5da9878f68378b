"""A metric that each rank has averaged already: what pads the last batch cannot be taken out of it any more.

    python examples/compare/metrics_of_ranks.py    # needs accelerate and torch

Prints the mean of ten numbers, in batches of four on each of four ranks, by NumPy, by Accelerate's
`gather_for_metrics` (of rows, where it is right, and of the mean of each rank's batch), and by synk.
"""

import subprocess
import sys

import numpy as np

ROWS, BATCH, RANKS = 10, 4, 4


def rank():
    """What each of Accelerate's processes does."""
    import torch  # type: ignore[import]  # where it is installed
    from accelerate import Accelerator  # type: ignore[import]
    from torch.utils.data import DataLoader  # type: ignore[import]

    accelerator = Accelerator(cpu=True)
    rows, means = [], []
    for x in accelerator.prepare(DataLoader(torch.arange(float(ROWS)), batch_size=BATCH)):
        rows.append(accelerator.gather_for_metrics(x))
        means.append(accelerator.gather_for_metrics(x.mean()))
    if accelerator.is_main_process:
        print(float(torch.cat(rows).mean()), float(torch.cat(means).mean()))
    accelerator.wait_for_everyone()
    accelerator.end_training()


def compare():
    import accelerate  # type: ignore[import]

    import synk

    x = np.arange(ROWS, dtype=np.float32)
    print(f"NumPy: {x.mean()}")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(RANKS), __file__, "rank"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    of_rows, of_means = map(float, printed.split())
    print(f"accelerate {accelerate.__version__}, gather_for_metrics of rows: {of_rows}; of means: {of_means}")

    synk.init(RANKS)
    found = float(synk.function(lambda x: x.mean(), reduce="mean").over(x, batches=synk.minibatches(ROWS, BATCH)))
    print(f"synk: {found}")
    assert found == x.mean() == of_rows != of_means


if __name__ == "__main__":
    rank() if "rank" in sys.argv else compare()
