"""Ray Train places the workers, and starts all again when one is killed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="install the extra `ray`, on Python 3.11")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_a_worker_is_killed():
    """The second attempt goes on from a checkpoint of the first."""
    plain = {name: value for name, value in os.environ.items() if name not in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS")}
    done = subprocess.run(
        [sys.executable, EXAMPLES / "ray_train.py"], env=plain, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "Went on from step " in done.stdout.splitlines()[-1]
