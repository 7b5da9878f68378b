"""The site: its blocks run and print what they say, every public name has a place, and it builds without a warning."""

import importlib
import inspect
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import jax
import pytest

import synk

from .helpers import slow
from .test_readme import BLOCK, run_blocks

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
MODULES = (
    "synk",
    "synk.errors",
    "synk.train",
    "synk.contrib",
    "synk.stats",
    "synk.typing",
    "synk.orbax",
    *["synk.contrib.pytensor"] * (find_spec("pytensor") is not None),
)


@pytest.fixture(autouse=True)
def as_users_have_it():
    """JAX's own rules for dtypes and shapes, and the group of before afterwards."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"), synk.group():
        yield


@pytest.mark.parametrize(
    "page",
    ["index.md", slow("contrib.md"), *(slow(f"guides/{path.name}") for path in sorted((DOCS / "guides").glob("*.md")))],
)
def test_blocks_run_and_print_what_they_say(page, capsys):
    """One after the other, as a reader would."""
    if page == "contrib.md":
        pytest.importorskip("pytensor", reason='install the extra "pytensor"')
    checked = run_blocks(DOCS / page, capsys)
    assert checked == sum(
        kind == "text" and "──" not in body for kind, body in BLOCK.findall((DOCS / page).read_text())
    )


def test_code_fits_its_column():
    """At 1280 px 88 characters do (`docs/stylesheets/extra.css`); nobody should have to scroll for a comment."""
    wide = [
        f"{path.relative_to(DOCS)}: {line}"
        for path in DOCS.rglob("*.md")
        for kind, body in BLOCK.findall(path.read_text())
        if kind != "console"  # what a terminal prints may be wide
        for line in body.splitlines()
        if len(line) > 88
    ]
    assert not wide, "\n".join(wide)


def test_every_public_name_has_a_place():
    """In the reference or on contrib's page, once; and nothing there is not public."""
    public = {f"{name}.{each}" for name in MODULES for each in importlib.import_module(name).__all__}
    public -= {f"synk.errors.{each}" for each in synk.__all__}
    placed = [
        name
        for page in (DOCS / "contrib.md", *(DOCS / "reference").glob("*.md"))
        for name in re.findall(r"^::: (\S+)$", page.read_text(), re.M)
        if name.rpartition(".")[0] in MODULES
    ]
    assert sorted(placed) == sorted(public)


# Words that people type into the search, and the page that answers.
WORDS = {
    "OOM": "guides/slices", "kfold": "guides/recipes", "grad_accum": "guides/recipes", "stencil": "guides/rows",
    "halo": "guides/rows", "boundary": "guides/rows", "FSDP": "guides/larger_models", "crash": "guides/resume",
    "Ctrl-C": "guides/resume", "L-BFGS": "guides/libraries", "NUTS": "guides/independent", "Fisher": "guides/libraries",
    "straggler": "when_wrong", "group_by_length": "guides/unequal_rows", "budget of tokens": "guides/unequal_rows",
    "packing": "guides/unequal_rows", "ragged": "guides/unequal_rows", "segment ids": "guides/unequal_rows", "bucket": "guides/unequal_rows",
    "stragglers": "guides/unequal_rows", "SLURM array": "processes", "which loop": "guides/rows",
}  # fmt: skip


@pytest.mark.parametrize("word", WORDS)
def test_a_word_finds_its_page(word):
    """The page has the word that people type."""
    assert word.lower() in (DOCS / f"{WORDS[word]}.md").read_text().lower()


def test_every_page_is_in_the_menu():
    """And what the menu names is there."""
    named = re.findall(r"([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(named) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def test_versions_agree():
    """Of the package, of the citation, and the newest of the changes."""
    for name, pattern in (("CITATION.cff", r"^version: (\S+)$"), ("CHANGELOG.md", r"^## ([\d.]+)")):
        assert re.search(pattern, (ROOT / name).read_text(), re.M).group(1) == synk.__version__, name


def test_workflows_call_what_there_is():
    """Whatever a workflow runs is a target of the Makefile, or a file."""
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        for command in re.findall(r"- run: (.+)", path.read_text()):
            program, *arguments = command.split()
            assert arguments[0] in targets if program == "make" else os.access(ROOT / program, os.X_OK), command


@pytest.mark.slow
@pytest.mark.skipif(find_spec("mkdocs") is None, reason="needs the extra docs")
def test_it_builds(tmp_path):
    """Strictly: a dead link or a name that is not found is an error. Nothing is loaded from elsewhere."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "true"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "search" / "search_index.js").exists()  # which a page that is opened from disk can read
    pages = [tmp_path / "contrib.html", *(tmp_path / "reference").glob("*.html")]
    reference = "".join(page.read_text() for page in pages)
    public = {
        f"{name}.{each}": getattr(importlib.import_module(name), each)
        for name in MODULES
        for each in importlib.import_module(name).__all__
        if name != "synk.errors" or each not in synk.__all__
    }
    members = [
        f"{name}.{member}"
        for name, value in public.items()
        if inspect.isclass(value) and not issubclass(value, Exception)
        for member, _ in inspect.getmembers(value, inspect.isfunction)
        if not member.startswith(("_", "tree_"))  # `tree_flatten` is for JAX
    ]
    assert [name for name in (*public, *members) if f'id="{name}"' not in reference] == []
    shim = tmp_path / "javascripts" / "iframe-worker-shim.js"
    for page in tmp_path.rglob("*.html"):
        text = page.read_text()
        loaded = re.findall(r"<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=\"?([^\" >]+)", text)
        assert not [address for address in loaded if re.match(r"(https?:)?//", address)], page
        # Search starts its worker by this script, so it comes before the theme's own.
        (address,) = [address for address in loaded if "iframe-worker" in address]
        assert text.index(address) < text.index("assets/javascripts/bundle")
        # What a server shows for a missing page has addresses that begin at the root.
        assert (tmp_path / address[1:] if page.name == "404.html" else (page.parent / address).resolve()) == shim
    for sheet in tmp_path.rglob("*.css"):
        assert not re.search(r"(@import|url\()[^)]{0,9}//", sheet.read_text()), sheet
