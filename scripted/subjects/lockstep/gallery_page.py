"""The gallery as a page: of each mutant the bug, the test that catches it, and how soon the search finds it.

The gallery's page and the figures in the README are made from this.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from engine.output_files import write_output
from scripted.explore.mutant_search import Found
from scripted.gallery import ESCAPES, RACES, Mutant
from scripted.script.loader import find_test

__all__ = ["gallery_markdown", "write_gallery"]

_HEADING: Final = "### "
_SECTIONS: Final = (("Races of real engines", RACES), ("Found by review of this project's own suites", ESCAPES))
_FIRST_HEADING: Final = re.compile(r"^###? ", re.MULTILINE)
_WIDTH_COLUMNS: Final = 100
_README_ROW: Final = re.compile(r"^(\| `([a-z-]+)` \|.*\| )([^|]*) \|$", re.MULTILINE)
_README_COUNTS: Final = (
    (re.compile(r"^\d+(?= races and scheduling bugs )", re.MULTILINE), len(RACES)),
    (re.compile(r"^\d+(?= more were found by review )", re.MULTILINE), len(ESCAPES)),
)


def gallery_markdown(found: Iterable[Found]) -> str:
    """The gallery as Markdown: of each mutant the origin, the bug, the test that catches it, what finding it took."""
    by_name = {one.mutant: one for one in found}
    return "\n".join(_section(title, mutants, by_name) for title, mutants in _SECTIONS)


def write_gallery(page: Path, found: Iterable[Found]) -> None:
    """Write the page's entries; what stands above the first heading of them stays.

    A README beside the page's folder gets the same figures, in the rows of its own table, and the numbers of entries.
    """
    found = list(found)
    above = _FIRST_HEADING.split(page.read_text(encoding="utf-8"), maxsplit=1)[0] if page.exists() else ""
    write_output(page, above + gallery_markdown(found))
    readme = page.parent.parent / "README.md"
    if readme.exists():
        results = {one.mutant: one.result for one in found}
        text = _README_ROW.sub(
            lambda row: f"{row[1]}{results.get(row[2], row[3])} |", readme.read_text(encoding="utf-8")
        )
        for number, count in _README_COUNTS:
            text = number.sub(str(count), text)
        readme.write_text(text, encoding="utf-8")


def _section(title: str, mutants: Iterable[Mutant], found: Mapping[str, Found]) -> str:
    return f"## {title}\n\n" + "\n".join(_entry(mutant, found.get(mutant.name)) for mutant in mutants)


def _entry(mutant: Mutant, found: Found | None) -> str:
    test = mutant.test.rpartition("/")[2].partition("::")[0]
    tiers = " and ".join(find_test(mutant.test).tiers)
    result = "not searched for" if found is None else found.result
    lines = [
        f"Origin: {mutant.origin}.",
        f"Bug: {mutant.bug}.",
        f"Caught by `{test}` in {tiers}.",
        f"Search: {result}.",
    ]
    items = [textwrap.fill(line, _WIDTH_COLUMNS, initial_indent="- ", subsequent_indent="  ") for line in lines]
    return f"{_HEADING}{mutant.name}\n\n" + "\n".join(items) + "\n"
