"""Ray Train places the workers, and starts all again when one is killed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="install the extra `ray`, on Python 3.11")

pytestmark = pytest.mark.gang
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize(("example", "replicas"), [("ray_train.py", 2), ("ray_elastic.py", 1)])
def test_training_goes_on(example, replicas):
    """Training goes on from the last checkpoint, with as many workers or, if a machine is lost, with those that are left."""
    plain = {name: value for name, value in os.environ.items() if name not in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS")}
    done = subprocess.run([sys.executable, EXAMPLES / example], env=plain, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert f"; {replicas} replicas, " in next(line for line in done.stdout.splitlines() if "Went on from step " in line)
