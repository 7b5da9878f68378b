"""The README tells the truth: its Python blocks run one after another, and print what it says they print."""

import re
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_blocks_run_and_print_what_they_say(capsys):
    """A `text` block after a `python` block is what that one prints."""
    text = README.read_text()
    names, printed, checked = {"__name__": "readme"}, "", 0
    for block in BLOCK.finditer(text):
        kind, body = block.groups()
        if kind == "python":
            # Lines keep their numbers, so that a traceback points into the README.
            before = "\n" * (text[: block.start()].count("\n") + 1)
            exec(compile(before + body, README, "exec"), names)
            printed = capsys.readouterr().out
        elif kind == "text":
            assert printed == body
            checked += 1
    assert checked >= 2


def test_length_and_first_screen():
    """Short enough to be read, and a whole program with its answer on the first screen."""
    lines = README.read_text().splitlines()
    assert len(lines) <= 220
    assert "```text" in lines[:30]
