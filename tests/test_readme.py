"""The README and the pages tell the truth: Python blocks run one after another, and print what they say they print."""

import re
from pathlib import Path

import jax
import pytest

from .helpers import needs_plugin

README = Path(__file__).resolve().parent.parent / "README.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def run_blocks(path, capsys):
    """Run a page's blocks, and compare what each prints with the `text` block after it; how many were compared."""
    text = path.read_text()
    names, printed, checked = {"__name__": path.stem}, "", 0
    for block in BLOCK.finditer(text):
        kind, body = block.groups()
        if kind == "python":
            # Lines keep their numbers, so that a traceback points into the page.
            before = "\n" * (text[: block.start()].count("\n") + 1)
            exec(compile(before + body, path, "exec"), names)
            printed = capsys.readouterr().out
        elif kind == "text":
            assert printed == body
            checked += 1
    return checked


def test_blocks_run_and_print_what_they_say(capsys):
    """A `text` block after a `python` block is what that one prints."""
    assert run_blocks(README, capsys) >= 2


def test_before_you_rent(capsys):
    """What needs no plugin, everywhere."""
    before = "import jax.numpy as jnp, numpy as np, synk\n"
    exec(before, names := {})
    text = (README.parent / "docs" / "before_you_rent.md").read_text()
    *_, (_, code), (_, printed) = BLOCK.findall(text)
    exec(code, names)
    assert capsys.readouterr().out == printed


def test_when_wrong(capsys):
    """Its first block names the row."""
    (_, code), *_ = BLOCK.findall((README.parent / "docs" / "when_wrong.md").read_text())
    exec(code, {"__name__": "__main__"})
    assert capsys.readouterr().out.startswith("f: row 777 makes it not finite, on replica 3, slice 0")


def test_coming_from_pmap(capsys):
    """The blocks of synk's run, on batches that do not divide."""
    with jax.numpy_dtype_promotion("standard"):
        run_blocks(README.parent / "docs" / "coming_from_pmap.md", capsys)


@pytest.mark.slow
def test_on_the_wire(capsys):
    """Losses by each wire are nearly one, with a state in shards one; bits of blocks are."""
    names = {"__name__": "__main__"}
    with jax.numpy_dtype_promotion("standard"):
        for _, code in BLOCK.findall((README.parent / "docs" / "on_the_wire.md").read_text()):
            exec(code, names)
    *wires, whole, shards, bits = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in wires] == ["None", "bf16", "int8", "PowerSGD(rank=2)"]
    assert len({line.split()[1] for line in wires}) <= 2
    assert whole.removeprefix("whole") == shards.removeprefix("in shards")
    assert bits == "1"


@needs_plugin
def test_before_you_rent_with_the_plugin(capsys, tmp_path, monkeypatch):
    """All of the page."""
    monkeypatch.chdir(tmp_path)  # where it writes
    with jax.numpy_dtype_promotion("standard"):  # as users have it
        assert run_blocks(README.parent / "docs" / "before_you_rent.md", capsys) == 1
    assert (tmp_path / "step.html").exists()


def test_length_and_first_screen():
    """Short enough to be read, and a whole program with its answer on the first screen."""
    lines = README.read_text().splitlines()
    assert len(lines) <= 120
    assert "```text" in lines[:30]
