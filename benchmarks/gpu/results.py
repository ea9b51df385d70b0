"""Results of a run's parts: tables with captions, as JSON and as Markdown.

A part that failed or timed out is a result too. Owns the file format; measures nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

import msgspec

__all__ = ["PartResult", "Report", "Status", "Table", "as_markdown", "read_report", "write_report"]

Cell = str | float | int


class Status(StrEnum):
    """How a part ended."""

    DONE = "done"
    FAILED = "failed"
    OUT_OF_TIME = "out of time"


class Table(msgspec.Struct, kw_only=True):
    """Rows under columns. ``needs`` names what this machine lacks for the empty cells."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[Cell | None, ...]] = []
    needs: str = ""


class PartResult(msgspec.Struct, kw_only=True):
    """One part: its status, its seconds, its tables, and the reason of a failure."""

    name: str
    status: Status
    seconds: float
    tables: list[Table] = []
    notes: list[str] = []
    error: str = ""


class Report(msgspec.Struct, kw_only=True):
    """The parts run on one machine, by name. ``machine`` names GPU, driver and versions."""

    machine: dict[str, str]
    dry_run: bool
    parts: dict[str, PartResult] = {}


def read_report(path: Path, machine: dict[str, str], *, dry_run: bool) -> Report:
    """Return the report to add to: the file's if it is from the same machine, otherwise an empty one."""
    if path.is_file():
        try:
            found = msgspec.json.decode(path.read_bytes(), type=Report)
        except msgspec.DecodeError:
            found = None
        if found is not None and found.machine == machine and found.dry_run is dry_run:
            return found
    return Report(machine=machine, dry_run=dry_run)


def write_report(report: Report, folder: Path) -> tuple[Path, Path]:
    """Write gpu.json and gpu.md into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers, page = folder / "gpu.json", folder / "gpu.md"
    numbers.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    page.write_text(as_markdown(report), encoding="ascii", errors="replace")
    return numbers, page


def as_markdown(report: Report) -> str:
    """Format the report as a page."""
    lines = [f"# {'A dry run on the CPU: no number here says anything' if report.dry_run else 'On a GPU'}", ""]
    lines += [f"- {name}: {value}" for name, value in report.machine.items()]
    for part in report.parts.values():
        lines += ["", f"## {part.name}: {part.status}, {part.seconds:.0f} s"]
        if part.error:
            lines += ["", "```", part.error.strip(), "```"]
        for note in part.notes:
            lines += ["", note]
        for table in part.tables:
            lines += ["", f"**{table.title}**", "", *_table_lines(table)]
            if table.needs:
                lines += ["", f"Empty cells need {table.needs}."]
    return "\n".join(lines) + "\n"


def _table_lines(table: Table) -> list[str]:
    kinds = [
        "---:" if any(isinstance(row[place], int | float) for row in table.rows) else "---"
        for place in range(len(table.columns))
    ]
    return [_line(table.columns), _line(kinds), *[_line([_shown(cell) for cell in row]) for row in table.rows]]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _shown(cell: Cell | None) -> str:
    if cell is None:
        return ""
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.3g}"
    return str(cell)
