"""The page of the gallery: each mutant's bug, the test that catches it, and the search's time to find it.

Writes the gallery's page, and the figures of the gallery in the README and in its guide.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from lockstep.output_files import write_output
from scripted.script.loader import find_test
from scripted.search.mutant_search import ADDED, Found
from scripted_lockstep.mutants import ESCAPES, RACES, Mutant

_HEADING: Final = "### "
_SECTIONS: Final = (("Races of real engines", RACES), ("Found by review of this project's own suites", ESCAPES))
_FIRST_HEADING: Final = re.compile(r"^###? ", re.MULTILINE)
_RESULT: Final = re.compile(r"^### ([a-z0-9-]+)$(?:(?!^#).)*?^- Search: ([^\n]+)\.$", re.MULTILINE | re.DOTALL)
_WIDTH_COLUMNS: Final = 100
_README_ROW: Final = re.compile(r"^(\| `([a-z-]+)` \|.*\| )([^|]*) \|$", re.MULTILINE)
_COUNTS: Final = {
    "README.md": (
        r"\b\d+(?= races and scheduling bugs )",
        r"\b\d+(?= more were found by review )",
        r"\b\d+ of \d+(?= bugs, )",
        r"\b\d+(?= of them with one\sadded event)",
    ),
    "docs/gallery.md": (r"\b\d+ of the \d+(?=\sbugs, )", r"\b\d+(?= need one\sadded event)"),
}


def gallery_markdown(results: Mapping[str, str]) -> str:
    """Write the gallery as Markdown: origin, bug, test and search result of each mutant."""
    return "\n".join(_section(title, mutants, results) for title, mutants in _SECTIONS)


def results_on(page: str) -> dict[str, str]:
    """Read each mutant's search result from the entries of a page."""
    return dict(_RESULT.findall(page))


def write_gallery(page: Path, found: Iterable[Found]) -> None:
    """Write the page's entries. Keeps the text above the first entry, and the results of other mutants.

    A README two folders above the page gets the same figures in its table; it and ``docs/gallery.md`` beside it get the
    numbers of entries and of bugs that were found.
    """
    before = page.read_text(encoding="utf-8") if page.exists() else ""
    results = results_on(before) | {one.mutant: one.result for one in found}
    write_output(page, _FIRST_HEADING.split(before, maxsplit=1)[0] + gallery_markdown(results))
    root, (found_alone, found_added) = page.parent.parent.parent, _found_in(results)
    entries, found_at_all = len(RACES) + len(ESCAPES), found_alone + found_added
    figures = {
        "README.md": (len(RACES), len(ESCAPES), f"{found_at_all} of {entries}", found_added),
        "docs/gallery.md": (f"{found_alone} of the {entries}", found_added),
    }
    for name, counts in _COUNTS.items():
        if (file := root / name).exists():
            text = _README_ROW.sub(
                lambda row: f"{row[1]}{results.get(row[2], row[3])} |", file.read_text(encoding="utf-8")
            )
            for count, figure in zip(counts, figures[name], strict=True):
                text = re.sub(count, str(figure), text)
            file.write_text(text, encoding="utf-8")


def _found_in(results: Mapping[str, str]) -> tuple[int, int]:
    """Return how many mutants a workload shows by itself, and how many with one added event."""
    found = [result for result in results.values() if result.startswith("schedule ")]
    added = sum(result.endswith(ADDED) for result in found)
    return len(found) - added, added


def _section(title: str, mutants: Iterable[Mutant], results: Mapping[str, str]) -> str:
    entries = [_entry(mutant, results.get(mutant.name, "not searched for")) for mutant in mutants]
    return f"## {title}\n\n" + "\n".join(entries)


def _entry(mutant: Mutant, result: str) -> str:
    test = mutant.test.rpartition("/")[2].partition("::")[0]
    tiers = " and ".join(find_test(mutant.test).tiers)
    lines = [
        f"Origin: {mutant.origin}.",
        f"Bug: {mutant.bug}.",
        *([f"Mutant: {mutant.nearness}."] if mutant.nearness else []),
        f"Caught by `{test}` in {tiers}.",
        *([f"Targets: those of `{mutant.adapter}`."] if mutant.adapter else []),
        f"Search: {result}.",
    ]
    items = [textwrap.fill(line, _WIDTH_COLUMNS, initial_indent="- ", subsequent_indent="  ") for line in lines]
    return f"{_HEADING}{mutant.name}\n\n" + "\n".join(items) + "\n"
