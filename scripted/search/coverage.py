"""Coverage of a search: which kind of event met a request in which state at which position of the pipeline.

A cell is counted when an action is applied, from what the machine says of itself. It never judges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from scripted.core.run import Cell

_NO_BREAK = "\N{NO-BREAK SPACE}"
# With the names of events beside it, no wider than 100 columns.
_STATES_WIDTH_COLUMNS = 70


class Coverage:
    """Cells and how often each was reached, over many runs."""

    def __init__(self) -> None:
        self.counts: Counter[Cell] = Counter()

    def add(self, cells: Iterable[Cell]) -> None:
        self.counts.update(cells)

    def merge(self, other: Iterable[tuple[Cell, int]]) -> None:
        for cell, count in other:
            self.counts[cell] += count

    def table(self) -> Table:
        """A row for each kind of event: the states that it met, with positions of the pipeline and times in all."""
        legend = "'running 2 (7)': met a running request 7 times in all, with the pipeline at 2 different positions"
        table = Table(title="what each event met", title_justify="left", caption=legend, caption_justify="left")
        table.add_column("event", no_wrap=True)
        table.add_column("states", overflow="fold", max_width=_STATES_WIDTH_COLUMNS)
        for kind in sorted({cell.kind for cell in self.counts}):
            table.add_row(kind, Text(", ".join(self._states_of(kind))))
        return table

    def _states_of(self, kind: str) -> list[str]:
        """One state at a time, simple ones first; each is kept in one piece."""
        states = sorted({cell.state for cell in self.counts if cell.kind == kind}, key=lambda s: (s.count("+"), s))
        return [self._cell_text(kind, state).replace(" ", _NO_BREAK) for state in states]

    def _cell_text(self, kind: str, state: str) -> str:
        found = [count for cell, count in self.counts.items() if cell.kind == kind and cell.state == state]
        return f"{state} {len(found)} ({sum(found)})"
