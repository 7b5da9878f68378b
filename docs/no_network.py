"""A hook of MkDocs: pages load nothing from elsewhere, not even what the plugin `offline` would add to them."""

import re
from typing import Any


def on_post_page(output: str, **about: Any) -> str:
    """The page without the script that old browsers need to search from disk, which lies in the network."""
    return re.sub(r"<script src=\"?https?://[^>]*iframe-worker[^>]*></script>", "", output)


def on_post_template(output_content: str, **about: Any) -> str:
    """The same of pages that the theme brings."""
    return on_post_page(output_content)
