"""An evaluation loss on two processes: `transformers`' Trainer takes a filled-up last batch for rows, and is 18 % off.

    python examples/compare/trainer_last_batch.py    # needs transformers, accelerate and torch

Prints the mean of ten losses, in batches of four on each of two ranks, by NumPy, by `Trainer.evaluate` on one process
and on two, and by synk on two devices. The last batch is filled up with rows from the beginning, and their mean is
taken for that of the two rows that were left.
"""

import subprocess
import sys
import tempfile

import numpy as np

losses = np.arange(10, dtype=np.float32)


def rank():
    """What each of the Trainer's processes does."""
    import torch  # type: ignore[import]  # where it is installed
    from transformers import Trainer, TrainingArguments  # type: ignore[import]

    class Model(torch.nn.Module):  # type: ignore[misc]
        def forward(self, labels):  # of a model that is only its losses
            return {"loss": labels.mean(), "logits": labels}

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, per_device_eval_batch_size=4, use_cpu=True, report_to=[])
        trainer = Trainer(Model(), arguments, eval_dataset=[{"labels": loss} for loss in losses])
        found = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print("\nevaluated", found, flush=True)


def evaluated(*launcher):
    printed = subprocess.run([sys.executable, *launcher, __file__, "rank"], capture_output=True, text=True, check=True)
    (line,) = [line for line in printed.stdout.splitlines() if line.startswith("evaluated")]
    return float(line.split()[1])


def compare():
    import transformers  # type: ignore[import]

    import synk

    print(f"NumPy: {losses.mean()}")
    one, two = evaluated(), evaluated("-m", "torch.distributed.run", "--nproc_per_node", "2")
    print(f"transformers {transformers.__version__}, Trainer: on one process {one:.2f}, on two {two:.2f}")

    synk.init(2)
    found = float(synk.function(lambda x: x.mean(), reduce="mean").over(losses, batches=synk.minibatches(10, 4)))
    print(f"synk: {found}")
    assert found == losses.mean() == one and abs(two / found - 1) > 0.1


if __name__ == "__main__":
    rank() if "rank" in sys.argv else compare()
