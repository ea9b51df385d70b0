"""Writes benchmarks/tables/defects.md: ``python -m benchmarks.defects_page``.

Each adapter's table of defects is a section of the page, between hand-written sections, which stay.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from lockstep.interruption import interruptible
from scripted.core.defects import Defect, DefectTable, read_defects

__all__ = ["main", "page_of", "tables"]

_ROOT: Final = Path(__file__).parents[1]
_PAGE: Final = _ROOT / "benchmarks/tables/defects.md"
_ADAPTERS: Final = ("vllm", "sglang", "transformers")
_HEADS: Final = ("defect", "versions", "found by", "who causes it", "how often", "upstream", "report")


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
    if table.after:
        yield table.after.strip()


def _row(defect: Defect) -> str:
    anchor = re.sub(r"[^a-z0-9 -]", "", defect.title.lower()).replace(" ", "-")
    reach = defect.reach
    often = f"{reach.failing} of {reach.workloads}" if reach.workloads else ""
    cells = [f"[{defect.title}](#{anchor})", ", ".join(defect.versions), defect.found, reach.who, often]
    cells.append(", ".join(map(str, defect.upstream)) or "no report found")
    cells.append(f"[{Path(defect.file).stem}](../../{defect.file})" if defect.file else "")
    return f"| {' | '.join(cells)} |"


def _command(defect: Defect) -> str:
    return f"```console\n$ scripted replay '{defect.schedules[0]}'\n```" if defect.schedules else ""


def main() -> None:
    """Write the page."""
    _PAGE.write_text(page_of(_PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    with interruptible("benchmarks.defects_page"):
        main()
