"""Elastic groups: processes die, freeze and leave, and those left end with the numbers of a run without that."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

import synk

from . import gang
from .disasters import Case, Fault, said
from .test_processes import alone  # noqa: F401  # pyright: ignore[reportUnusedImport]  # a fixture: one run at a time

DISASTERS = Path(__file__).with_name("disasters.py")


def disaster(*arguments):
    """Run `disasters.py`. Return whether all ended as it must be, and the output."""
    command = [sys.executable, str(DISASTERS), *arguments]
    # Without what tests turn off of XLA, which changes the bits of `blocks` from one number of processes to another.
    environment = gang.plain_environment(XLA_FLAGS="")
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return not ended.returncode, ended.stdout + ended.stderr


def run(*faults, program="steps", **more):
    """Run a program in three processes with faults."""
    case = Case(0, 3, program, 13, 1, None, faults=[Fault(*fault) for fault in faults], **more)
    return disaster("--case", json.dumps(asdict(case)))


def codes(output):
    """Return the exit codes of the launcher, and of the processes."""
    line = said(output)[-1]
    return line["launcher"], line["codes"]


@pytest.mark.gang
@pytest.mark.parametrize("process", [0, 1, 2])
def test_a_process_dies(process):
    """Whichever process dies inside a step, the others end well, with the values of one process."""
    is_well, output = run((process, "kill", "inside a program", 20, 2))
    assert is_well, output
    assert codes(output)[1][process] == -9


@pytest.mark.gang
def test_two_of_three_die():
    """One after the other, and the last one goes on alone."""
    is_well, output = run((0, "kill", "inside a program", 14, 0), (2, "kill", "before a launch", 20, 0))
    assert is_well, output
    assert codes(output)[1][:3:2] == [-9, -9]


@pytest.mark.gang
def test_a_process_freezes():
    """A process that is silent for the heartbeat is left behind and ended."""
    is_well, output = run((1, "freeze", "in the user's code", 10, 0))
    assert is_well, output
    assert "it has sent nothing for 3 s" in output and codes(output)[1][1] == -9


@pytest.mark.gang
def test_a_process_is_told_to_stop():
    """SIGTERM to one process lets it finish its call and leave; the others go on."""
    is_well, output = run((2, "terminate", "in the user's code", 10, 0))
    assert is_well, output
    assert codes(output)[1][2] == 128 + 15 and "it was told to stop (SIGTERM)" in output


@pytest.mark.gang
def test_too_few_are_left():
    """Below --min all raise PeerError, and end with the code that says so; the launcher ends with that of the first."""
    _, output = run((1, "kill", "inside a program", 20, 0), least=3)
    assert codes(output) == (128 + 9, [75, -9, 75])
    assert output.count("PeerError: the elastic group has come to its end: 2 left of the 3 processes that the") >= 2


@pytest.mark.gang
def test_one_exits_early():
    """An exit with a code is no good end: --min counts."""
    _, output = run(program="exits", least=3)
    assert codes(output) == (1, [75, 1, 75]), output
    assert output.count("2 left of the 3 processes") >= 2


@pytest.mark.gang
def test_calls_of_threads():
    """Threads that are not the main one could not make their calls again, so they raise."""
    is_well, output = run(program="threads")
    assert is_well and "lost" not in output, output


@pytest.mark.gang
def test_local_rows_are_lost():
    """Rows that the process alone held cannot be given again, so all raise PeerError."""
    _, output = run((1, "kill", "inside a program", 20, 0), program="local_rows")
    assert codes(output) == (128 + 9, [75, -9, 75])
    assert output.count("rows of a process that is gone are gone with it: process 1") >= 2


@pytest.mark.gang
@pytest.mark.parametrize("who", ["all", "each"])
def test_all_are_told_to_stop(who):
    """SIGTERM to the launcher, or to all processes too, makes `synk.preempted` say yes in all at the same step."""
    output = run((1, f"stop {who}", "in the user's code", 8, 0), program="until_stopped")[1]
    ends = [line["values"]["steps"]["digits"][0] for i in range(3) for line in said(output, i) if line["what"] == "end"]
    assert codes(output) == (0, [0, 0, 0]) and ends[0] == ends[1] == ends[2]
    assert 8 <= int(ends[0][0]) < 20


@pytest.mark.gang
def test_helpers_are_no_processes_of_the_group():
    """Processes that were forked are told to stop, and end, without a word to the launcher."""
    is_well, output = run(program="forks")
    assert is_well, output
    assert codes(output) == (0, [0, 0, 0]) and "lost" not in output


@pytest.mark.gang
def test_without_its_launcher():
    """The launcher keeps the list of processes, so `elastic=True` needs it."""
    with pytest.raises(ValueError, match="python -m synk launch --elastic"):
        synk.init(distributed=True, elastic=True)
    with pytest.raises(ValueError, match="elastic=True goes with distributed=True"):
        synk.init(elastic=True)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 60, 10))
def test_disasters(first):
    """Faults at points that seeds draw lose no row, and no survivor."""
    is_well, output = disaster("--seeds", f"{first}:{first + 10}")
    assert is_well, output
