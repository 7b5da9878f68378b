"""Disasters: programs in `synk.resume` go on after what a seed draws, or end in words."""

import subprocess
import sys
from pathlib import Path

import pytest

from . import gang

pytestmark = pytest.mark.gang


def test_runs_end_with_the_numbers_of_an_undisturbed_one_whatever_happens():
    """Kills, signals, full disks and edited programs of 60 seeds: no row is lost or counted twice, and nothing hangs."""
    driver = Path(__file__).with_name("disasters.py")
    command = [sys.executable, driver, "--seeds", "0:60", "--jobs", "2"]
    ended = subprocess.run(command, env=gang.plain_environment(), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
