"""Guides as notebooks, in a kernel where JAX has started before, and what cells show there."""

from pathlib import Path

import jax
import pytest

from . import harness
from .test_readme import BLOCK

GUIDES = Path(__file__).resolve().parent.parent / "docs" / "guides"
# PyTensor sets its floats by an environment that a kernel has from its start.
PAGES = ["checkpoints.md", "evaluate.md", "notebook.md", "resume.md", "small_steps.md", "variables.md"]
# A later cell gives a name of an earlier one to something else, so they run in order alone.
ONE_WAY = ("evaluate.md",)
JAX_STARTS = "import jax\nassert len(jax.devices()) == 1"

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


class Kernel:
    """A kernel that runs cells; use it in `with`."""

    def __init__(self, folder):
        nbclient = pytest.importorskip("nbclient", reason="install the extra `notebooks`")
        self.made = pytest.importorskip("nbformat").v4
        where = {"metadata": {"path": str(folder)}}
        self.client = nbclient.NotebookClient(self.made.new_notebook(), timeout=300, resources=where)
        names = (
            "compilation_cache_dir",
            "persistent_cache_min_compile_time_secs",
            "persistent_cache_min_entry_size_bytes",
        )
        options = {f"JAX_{name.upper()}": str(getattr(jax.config, f"jax_{name}")) for name in names}
        self.environment = harness.plain_environment(**options if jax.config.jax_compilation_cache_dir else {})

    def __enter__(self):
        self.setup = self.client.setup_kernel(env=self.environment)
        self.setup.__enter__()
        return self

    def __exit__(self, *error):
        self.setup.__exit__(*error)

    def run(self, code, **metadata):
        """Return the outputs of a cell."""
        cells = self.client.nb.cells
        cells.append(self.made.new_code_cell(code, metadata=metadata))
        return self.client.execute_cell(cells[-1], len(cells) - 1).outputs

    def printed(self, code):
        """Return what a cell prints."""
        return "".join(output.text for output in self.run(code) if output.get("name") == "stdout")


@pytest.mark.parametrize("page", PAGES)
def test_pages(page, tmp_path):
    """Run in order each cell prints what the page says, all run backwards, and in order again they print the same."""
    blocks = [block for block in BLOCK.findall((GUIDES / page).read_text()) if block[0] in ("python", "text")]
    said = {
        i: blocks[i + 1][1] for i, (kind, _) in enumerate(blocks[:-1]) if (kind, blocks[i + 1][0]) == ("python", "text")
    }
    cells = {i: code for i, (kind, code) in enumerate(blocks) if kind == "python"}
    with Kernel(tmp_path) as kernel:
        kernel.run(JAX_STARTS)
        if "synk.init(" not in cells[0]:
            kernel.run("import synk\nsynk.init(8)")
        for order in (cells, reversed(cells) if page not in ONE_WAY else (), cells):
            printed = {i: kernel.printed(cells[i]) for i in order}
            assert order is not cells or {i: printed[i] for i in said} == said


def test_what_cells_show(tmp_path):
    """`synk.info()` as text, an explanation as a drawing, and of an error the user's lines and the message."""
    with Kernel(tmp_path) as kernel:
        kernel.run(JAX_STARTS)
        kernel.run("import jax.numpy as jnp, numpy as np, synk\ngroup, f = synk.init(3), synk.function(jnp.mean)")
        (info,) = kernel.run("synk.info()")
        assert info.data["text/plain"].startswith("synk: ") and "devices: 3 cpu" in info.data["text/plain"]
        (drawn,) = kernel.run("f.explain(np.ones(7))")
        assert "<svg" in drawn.data["text/html"] and drawn.data["text/plain"].startswith("function: mean")
        (error,) = kernel.run("f.check(np.arange(7.0))", tags=["raises-exception"])
        assert error.ename == "LawError" and '"mean" would have matched' in error.evalue
        assert "synk/_check" not in "".join(error.traceback)
