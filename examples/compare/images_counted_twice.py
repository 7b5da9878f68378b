"""Validation on two devices counts 22 images of 21: Lightning's loader repeats one, and every metric sees it twice.

    python examples/compare/images_counted_twice.py    # needs lightning

Prints how many of 21 images are counted, and the share of them that is right, by NumPy, by Lightning on two processes,
and by synk on two devices. Lightning warns, and recommends one device; a detector has counted so in its releases
(roboflow/rf-detr#1507).
"""

import subprocess
import sys

import numpy as np

is_right = np.ones(21, np.float32)
is_right[0] = 0


def rank():
    """What each of Lightning's processes does."""
    import lightning  # type: ignore[import]  # where it is installed
    import torch  # type: ignore[import]

    class Validation(lightning.LightningModule):  # type: ignore[misc]
        counts = 0.0

        def validation_step(self, batch, number):
            self.counts = self.counts + torch.stack([torch.tensor(float(len(batch))), batch.sum()])

        def on_validation_epoch_end(self):
            counts = self.all_gather(self.counts).sum(0)
            if self.global_rank == 0:
                print("counted", *counts.tolist(), flush=True)

    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_progress_bar=False)
    trainer.validate(Validation(), torch.utils.data.DataLoader(torch.tensor(is_right), batch_size=4))


def compare():
    import lightning  # type: ignore[import]

    import synk

    print(f"NumPy: {is_right.sum():.0f} of {len(is_right)}, {is_right.mean():.4f}")
    printed = subprocess.run([sys.executable, __file__, "rank"], capture_output=True, text=True, check=True).stdout
    (line,) = [line for line in printed.splitlines() if line.startswith("counted")]
    count, right = map(float, line.split()[1:])
    print(f"lightning {lightning.__version__}: {right:.0f} of {count:.0f}, {right / count:.4f}")

    synk.init(2)
    evaluate = synk.function(
        lambda is_right: (len(is_right), is_right.sum(), is_right.mean()), outputs=["sum", "sum", "mean"]
    )
    count_here, right_here, share = evaluate.over(is_right, batches=synk.minibatches(len(is_right), 4))
    print(f"synk: {right_here:.0f} of {count_here:.0f}, {share:.4f}")
    assert count_here == len(is_right) != count and np.isclose(share, is_right.mean())


if __name__ == "__main__":
    rank() if "rank" in sys.argv else compare()
