"""For the site: links to `../examples/x.py`, which work in the repository, lead to copies in the site."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parent.parent


def on_files(files: Files, *, config: Any) -> Files:
    """Add the examples, as they are."""
    for path in sorted((ROOT / "examples").rglob("*.py")):
        uri = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, uri, abs_src_path=str(path), inclusion=InclusionLevel.INCLUDED))
    return files


def on_page_markdown(markdown: str, **about: Any) -> str:
    """Take from each such link the step out of `docs`."""
    return re.sub(r"\]\(\.\./((?:\.\./)*examples/)", r"](\1", markdown)
