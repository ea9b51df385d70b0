"""The lines of README, the docs and the skill that install this project, as they stand there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (
    *(ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "skills").rglob("*.md")),
)
# In a line of code, or between backticks, where a line may break.
_LINE = re.compile(r"^ *(?:\$ )?(pip install [^#\n]*[^#\s])", re.MULTILINE)
_SPAN = re.compile(r"`(pip install [^`]*)`")

# Stands on the pages for the reader's own package.
_READERS_PACKAGE = "my-scheduler"


def install_lines() -> Iterator[tuple[str, str]]:
    """Each line with its page, once."""
    seen = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for line in (*_LINE.findall(text), *_SPAN.findall(text)):
            found = (page.name, " ".join(line.split()))
            if found not in seen and _READERS_PACKAGE not in line:
                seen.add(found)
                yield found
