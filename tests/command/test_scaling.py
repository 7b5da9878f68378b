"""`python -m synk bench`: a user's step by numbers of replicas, as one page."""

import re
from argparse import Namespace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from synk._command.bench import _page
from synk._command.bench import bench as scaling

from .. import harness

PROGRAM = """
import numpy as np, synk
synk.init(4)
print("what the file prints")
w = synk.shared(np.float32(1), name="w")

@synk.function(reduce="mean")
def slope(x):
    return (w.value * x).mean()

@slope.then
def step(mean):
    w.value = w.value - mean
    return mean

def bench():
    return step, np.ones((60, 4), np.float32)

def own_group():
    synk.init(1)
    return bench()

def few():
    return step, np.ones((3, 4), np.float32)

def fails():
    raise ZeroDivisionError("of the user's")
"""


def bench(folder, target, *options):
    """What the command prints, and its exit status."""
    return harness.python("-m", "synk", "bench", target, *options, cwd=folder, XLA_FLAGS="")


@pytest.fixture
def folder(tmp_path):
    """Where the user's program is."""
    (tmp_path / "train.py").write_text(PROGRAM)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(("more", "rows"), [([], ["20", "40", "60"]), (["--strong"], ["60"] * 3)])
def test_a_page_is_written(folder, more, rows):
    """Of each number its rows, rate, speed-up; a chart; what explain and info say."""
    short = ["--steps", "2", "--rounds", "1", "--replicas", "3,1,2", "--unit", "tokens", "--per-row", "128"]
    done = bench(folder, "train.py:bench", *short, *more)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^(\d) replicas?: (\d+) rows, .* tokens/s", done.stdout, re.M) == list(
        zip("123", rows, strict=True)
    )
    page = (folder / "scaling.html").read_text()
    assert len([ElementTree.fromstring(svg) for svg in re.findall("<svg.*?</svg>", page, re.S)]) == 1
    table = page.split("<h2>scaling</h2>")[1].split("</table>")[0]
    cells = [re.findall("<td>(.*?)</td>", row) for row in re.findall("<tr>(<td>.*?)</tr>", table)]
    assert [row[:2] for row in cells] == [[n, r] for n, r in zip("123", rows, strict=True)]
    assert cells[0][4:] == ["1.00", "100 %"]
    assert all(re.fullmatch(r"([\d.]+) \(\1 to \1\)", row[2]) for row in cells)  # of one round
    assert all(word in page for word in ("3 replicas", "slope", "jaxlib", "<h2>the machine</h2>"))
    assert "JAX_NUM_CPU_DEVICES" not in page and "8 cpu" not in page  # which the user has not set
    assert not re.search(r"Group\(.*</h|\b1 replicas|\(s\)", page)
    assert set(re.findall(r"https?://[\w.]+", page)) == {"http://www.w3.org"}  # the name of SVG; nothing is loaded


@pytest.mark.parametrize(("rate", "says"), [(2.15, False), (2.25, True)])
def test_an_efficiency_that_cannot_be(rate, says):
    """Above 110 % the page says that something disturbed the measurement."""
    results = [
        {
            "replicas": n,
            "rows": n,
            "seconds": [1, 1, 1],
            "rate": each,
            "platform": "gpu",
            "explained": {},
            "machine": {},
        }
        for n, each in ((1, 1.0), (2, rate))
    ]
    options = Namespace(target=(Path("train.py"), "bench"), rounds=1, steps=1, strong=False, unit="rows")
    assert ("<td>above 110 %</td>" in _page(options, results)) == says


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("train.py:own_group", "makes a group of its own, of 1 replicas instead of 2"),
        ("train.py:step", "is no function that returns a step and its arguments"),
        ("train.py:nothing", "is no function that returns a step and its arguments"),
        ("train.py:few", "train.py:few returns a call of 3 rows, for 4 replicas"),
        ("train.py:fails", "ZeroDivisionError: of the user's"),
        ("nowhere.py:bench", "is no FILE:NAME of a file that is there"),
    ],
)
def test_what_cannot_be_measured(folder, target, message):
    """It says why, and writes nothing."""
    done = bench(folder, target, "--replicas", "2,4")
    assert done.returncode and message in done.stdout + done.stderr
    assert not (folder / "scaling.html").exists()


@pytest.mark.parametrize(
    ("option", "given"), [("--replicas", "2,"), ("--replicas", "0"), ("--rounds", "0"), ("--steps", "-1")]
)
def test_wrong_numbers(folder, capsys, option, given):
    """They are named before anything runs."""
    with pytest.raises(SystemExit):
        scaling([f"{folder / 'train.py'}:bench", option, given])
    assert f"argument {option}: " in (said := capsys.readouterr().err) and "is no number of at least 1" in said


@pytest.mark.parametrize(
    ("option", "given"), [("--per-row", "-1"), ("--per-row", "nan"), ("--out", "nowhere/scaling.html")]
)
def test_options_that_would_lose_it(folder, capsys, option, given):
    """They are named before anything is measured."""
    with pytest.raises(SystemExit):
        scaling([f"{folder / 'train.py'}:bench", option, given])
    assert f"{option} is {given}" in capsys.readouterr().err
