"""Writes benchmarks/tables/defects.md: ``python -m benchmarks.defects_page``.

Each adapter's table of defects is a section of the page, between hand-written sections, which stay.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from lockstep.interruption import interruptible
from scripted.core.defects import Defect, DefectTable, read_defects
from scripted.core.edits import Edit

__all__ = ["main", "page_of", "tables"]

_ROOT: Final = Path(__file__).parents[1]
_PAGE: Final = _ROOT / "benchmarks/tables/defects.md"
_ADAPTERS: Final = ("vllm", "sglang", "transformers")
_HEADS: Final = ("defect", "versions", "found by", "who causes it", "how often", "upstream", "report", "fix")


def tables() -> list[DefectTable]:
    """Return the tables of all adapters."""
    return [read_defects(_ROOT / f"adapters/scripted_{name}/defects.toml") for name in _ADAPTERS]


def page_of(before: str) -> str:
    """Return the page with the tables' sections rewritten."""
    for table in tables():
        section = "\n\n".join(_section(table)) + "\n"
        old = re.search(rf"(?ms)^## {re.escape(table.title)}\n.*?(?=^## |\Z)", before)
        above, below = (before[: old.start()], before[old.end() :]) if old else (f"{before}\n", "")
        before = f"{above}{section}\n{below}"
    return before.rstrip("\n") + "\n"


def _section(table: DefectTable) -> Iterator[str]:
    yield f"## {table.title}"
    if table.before:
        yield table.before.strip()
    yield "\n".join([f"| {' | '.join(_HEADS)} |", "| --- " * len(_HEADS) + "|", *map(_row, table.defect)])
    for defect in table.defect:
        yield f"### {defect.title}"
        yield defect.text.strip().replace("{schedule}", _command(defect))
        if defect.fix:
            yield "Fix, with which the schedules pass:"
            yield "```diff\n" + "\n".join(_lines(defect.fix)) + "\n```"
    if table.after:
        yield table.after.strip()


def _row(defect: Defect) -> str:
    anchor = re.sub(r"[^a-z0-9 -]", "", defect.title.lower()).replace(" ", "-")
    reach = defect.reach
    often = f"{reach.failing} of {reach.workloads}" if reach.workloads else ""
    cells = [f"[{defect.title}](#{anchor})", ", ".join(defect.versions), defect.found, reach.who, often]
    cells.append(", ".join(map(str, defect.upstream)) or "no report found")
    cells.append(f"[{Path(defect.file).stem}](../../{defect.file})" if defect.file else "")
    cells.append("yes" if defect.fix else "")
    return f"| {' | '.join(cells)} |"


def _command(defect: Defect) -> str:
    return f"```console\n$ scripted replay '{defect.schedules[0]}'\n```" if defect.schedules else ""


def _lines(fix: Iterable[Edit]) -> Iterator[str]:
    """Yield a fix as a diff, each edit under its function."""
    for edit in fix:
        before, after = (text.strip("\n").rstrip().split("\n") for text in (edit.cut, edit.becomes))
        _, _, _, *changed = difflib.unified_diff(before, after, n=max(len(before), len(after)), lineterm="")
        yield from (f"@@ {edit.target} @@", *(line.rstrip() for line in changed))


def main() -> None:
    """Write the page."""
    _PAGE.write_text(page_of(_PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    with interruptible("benchmarks.defects_page"):
        main()
