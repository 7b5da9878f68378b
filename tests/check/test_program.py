"""A check of any parallel program: faults are found and named, right programs pass, hostile ones end in words."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from time import monotonic, sleep

import pytest

import synk

from .. import harness

PAGE = (Path(__file__).parents[2] / "docs/check_a_program.md").read_text()
PROGRAMS = re.findall(r"```py\n(# (\w+\.py)\n.*?)```\n\n```console\n(.*?)```", PAGE, re.S)
MEAN = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

def one_step(rows):
    places = NamedSharding(jax.make_mesh((len(jax.devices()),), ("d",)), P("d"))
    return {"mean": jax.jit(jnp.mean)(jax.device_put(np.arange(rows, dtype=np.float32), places))}
"""


@pytest.fixture
def program(tmp_path):
    """Write a program, and return its path with the name of its function."""

    def write(text, name="train.py"):
        (tmp_path / name).write_text(textwrap.dedent(text))
        return f"{tmp_path / name}:one_step"

    return write


def test_a_right_program(program):
    """It may refuse rows that do not divide."""
    report = synk.check_program(program(MEAN), devices=[2])
    assert report.ok and [*report.refuses.values()] == [[2]]
    assert json.loads(report.json())["table"][0]["leaf"] == "['mean']"
    assert str(report).startswith("right: ")


@pytest.mark.slow
def test_a_mean_that_cancels(program):
    """What rounding leaves of a mean is told by its float64, in which JAX takes it too."""
    body = MEAN.replace("jnp.mean)(", "lambda x: jnp.mean(x * x) - 1e6)(").replace(
        "np.arange(rows, dtype=np.float32)", "(1000 + np.sin(np.arange(rows))).astype(np.float32)"
    )
    report = synk.check_program(program(body), devices=[8], rows=[1000])
    assert report.ok and "in float64" in report.notes[0]


@pytest.mark.slow
def test_what_few_rows_hide(program):
    """Where 24 rows are right and 23 are refused, 48 tell of a largest number that is in another part."""
    body = MEAN.replace("jax.jit(jnp.mean)(", "part(").replace(
        "np.arange(rows,", "-np.abs(np.arange(rows) - 30).astype("
    )
    part = "lambda x: x.addressable_shards[int(x.argmax()) // (rows // len(jax.devices()))].data.argmax()"
    body = body.replace("part(", f"({part})(").replace("astype( dtype=np.float32)", "astype(np.float32)")
    report = synk.check_program(program(body.replace("- 30", "- 30 * (rows > 24)")), devices=[2])
    assert [*report.wrong.values()] == [["['mean'] at 48 rows"]] and "a position in a device's part" in str(report)


@pytest.mark.slow
@pytest.mark.parametrize(("text", "name", "said"), PROGRAMS, ids=[name for _, name, _ in PROGRAMS])
def test_programs_of_the_guide(program, text, name, said):
    """Each says what the guide shows, and nothing is written beside the program."""
    target = program(text, name)
    report = synk.check_program(target, rows=[24, 23] if "zeros" in text else [24])
    assert str(report).startswith(said)
    assert os.listdir(Path(target).parent) == [name]


def has_process(word):
    """Tell whether a process has a word among its arguments."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if word in (folder / "cmdline").read_bytes():
                return True
    return False


HOSTILE = {
    "hangs": ("while True: pass", "it ran for more than 6 s"),
    "dies": ("import os; os.abort()", "its process died"),
    "ends": ("import sys; sys.exit(3)", "SystemExit: 3"),
    "takes all memory": ("import numpy as np; return [np.ones(1 << 31) for _ in range(99)]", "MemoryError"),
    "prints a gigabyte": ("for _ in range(1 << 14): print('x' * (1 << 16))", "File too large"),
    "forks": ("import subprocess; subprocess.Popen(['sleep', '77.7']); raise ValueError('no')", "ValueError: no"),
    "returns text": ("return 'loss'", "return a tree of arrays"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_programs(program, what):
    """Such a program ends in words and in time, and leaves no process."""
    body, said = HOSTILE[what]
    start = monotonic()
    with pytest.raises(synk.SynkError, match=re.escape(said)):
        synk.check_program(program(f"def one_step():\n    {body}\n"), devices=[2], timeout=6)
    assert monotonic() - start < 60
    assert not has_process(b"77.7")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no server without fork")
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_check(program, tmp_path, by):
    """It leaves no process and no folder."""
    target = program("""
        import pathlib, subprocess, time

        def one_step():
            subprocess.Popen(["sleep", "88.8"])
            pathlib.Path(__file__).with_name("begun").touch()
            time.sleep(88.8)
    """)
    (folder := tmp_path / "temporary").mkdir()
    command = [sys.executable, "-m", "synk", "check", target]
    check = subprocess.Popen(command, env=os.environ | {"TMPDIR": str(folder)}, stderr=subprocess.DEVNULL)
    until = monotonic() + 60
    while not (tmp_path / "begun").exists() and monotonic() < until:
        sleep(0.1)
    assert [*folder.iterdir()]
    check.send_signal(by)
    check.wait()
    while [*folder.iterdir()] and monotonic() < until:
        sleep(0.1)
    assert [*folder.iterdir()] == [] and not has_process(b"88.8")


@pytest.mark.parametrize(
    ("target", "error", "said"),
    [
        ("train.py", ValueError, 'give "FILE:FUNCTION"'),
        ("no_such.py:one_step", FileNotFoundError, "there is no file no_such.py"),
    ],
)
def test_targets_that_are_none(target, error, said):
    """What names no function raises before anything runs."""
    with pytest.raises(error, match=said):
        synk.check_program(target)


@pytest.mark.slow
def test_the_command(program):
    """Its exit code tells right from wrong, and from what cannot run."""
    # Of 0, 1, 2, ... the mean falls by as much for each row that is dropped, which has a law in n.
    curved = MEAN.replace("np.arange(rows, dtype=np.float32)", "np.sin(np.arange(rows, dtype=np.float32))")
    right = program(curved)
    wrong = program(curved.replace("rows, dtype", "rows // len(jax.devices()) * len(jax.devices()), dtype"), "wrong.py")
    ends = {
        target: harness.python("-m", "synk", "check", target, "--devices", "2,3,4")
        for target in (right, wrong, right.replace("one_step", "none"))
    }
    assert [ended.returncode for ended in ends.values()] == [0, 1, 2]
    assert "the last rows are dropped" in ends[wrong].stdout


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no server without fork")
def test_fresh_processes(program, monkeypatch):
    """Where no process can be forked, runs give the same."""
    target = program(MEAN)
    forked = synk.check_program(target, devices=[2])
    monkeypatch.setattr("synk._check.runs.HAS_FORK", False)
    assert str(synk.check_program(target, devices=[2])) == str(forked)
