"""Disasters: programs in `synk.resume` go on after what a seed draws, or end in words."""

import pytest

from .. import harness

pytestmark = pytest.mark.gang


def test_runs_end_with_the_numbers_of_an_undisturbed_one_whatever_happens():
    """Kills, signals, full disks and edited programs of 20 seeds: no row is lost or counted twice, and nothing hangs."""
    command = ["-m", "tests.distributed.disasters", "--seeds", "0:20", "--jobs", "2"]
    ended = harness.python(*command, cwd=harness.ROOT, deadline=None)
    assert ended.returncode == 0, ended.stdout + ended.stderr
