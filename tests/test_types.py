"""What a checker of a user's program sees: the README's programs pass as they are, and misspelt ops do not."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from .test_readme import BLOCK, README

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("pyright") is None, reason='install the extra "lint"'),
]
WRONG = """
import numpy as np
import synk
import synk.train

synk.function(lambda x: x, reduce="men")
synk.all_reduce(synk.shared(np.ones(3)), op="concat")
synk.contrib.pairs(lambda a, b: a, np.ones(3), reduce="stack")
synk.function(lambda x: x, engine="pmp")
synk.stats.no_such_statistic
synk.train.no_such_step
synk.no_such_function
"""


def errors(folder, program):
    """The lines of a program, and what pyright says of them, as a user runs it."""
    path = folder / "program.py"
    path.write_text(program)
    (folder / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "basic", "include": ["program.py"]}))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, path.name]
    done = subprocess.run(command, cwd=folder, env=os.environ, capture_output=True, text=True, timeout=300)
    found = json.loads(done.stdout)["generalDiagnostics"]
    lines = program.splitlines()
    return [(lines[each["range"]["start"]["line"]], each["message"]) for each in found]


def test_programs_of_the_readme(tmp_path):
    """All blocks, one after the other."""
    program = "\n\n".join(body for kind, body in BLOCK.findall(README.read_text()) if kind == "python")
    assert errors(tmp_path, program) == []


def test_what_is_misspelt(tmp_path):
    """Each line that Python or synk would refuse only when it runs."""
    found = dict.fromkeys(line for line, _ in errors(tmp_path, WRONG))
    assert list(found) == WRONG.split("\n\n")[1].splitlines()
