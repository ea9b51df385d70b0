"""A mkdocs hook that adds the tables written by commands to the documentation's site.

The tables are beside the benchmarks that make them, outside the folder that mkdocs reads. Links between the two are
right on disk; on the site both have the same root.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

__all__ = ["on_files", "on_page_markdown"]

_ROOT = Path(__file__).parents[1]
_TABLES = "benchmarks/tables"


def on_files(files: Files, config: Any) -> Files:
    """Add the pages and pictures in ``benchmarks/tables``."""
    for path in sorted((_ROOT / _TABLES).iterdir()):
        if path.suffix in {".md", ".svg"}:
            name = path.relative_to(_ROOT).as_posix()
            files.append(File(name, str(_ROOT), config["site_dir"], config["use_directory_urls"]))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links for the site, whose root is ``docs`` and includes ``benchmarks``."""
    if page.file.src_uri.startswith(_TABLES):
        return markdown.replace("](../../docs/", "](../../")
    return re.sub(r"\]\(\.\./((?:\.\./)?)benchmarks/", r"](\1benchmarks/", markdown)
