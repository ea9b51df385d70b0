"""Coverage of a search: which kind of event met a request in which state at which position of the pipeline.

A cell is counted when an action is applied, from the scheduler's own books. It never judges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec
from rich.table import Table
from rich.text import Text

from engine.plan import ForwardMode
from engine.scheduler import Place, Scheduler
from engine.scheduler.books import Launched
from scripted.actions import Action

__all__ = ["Cell", "Coverage", "cell_of"]

_OUT_OF_REACH = "not alive"
_NO_BREAK = "\N{NO-BREAK SPACE}"
# With the names of events beside it, no wider than 100 columns.
_STATES_WIDTH_COLUMNS = 70


class Cell(msgspec.Struct, frozen=True):
    """``state`` is the target's place, or all places that are occupied when the action has no target."""

    kind: str
    state: str
    pipeline: str


def cell_of(action: Action, scheduler: Scheduler) -> Cell:
    """The cell of an action that the next step will see."""
    rid = action.target_rid
    if rid is None:
        places = sorted({request.place.value for request in scheduler.books.live()})
        state = "+".join(places) or "no request"
    else:
        request = scheduler.find_request(rid)
        state = _OUT_OF_REACH if request is None else request.place.value
    return Cell(action.kind, state, _pipeline(scheduler))


def _pipeline(scheduler: Scheduler) -> str:
    """Empty, full, or the kinds of what is in flight; a last chunk is what a first token comes from."""
    flights = scheduler.books.in_flight
    if not flights:
        return "empty"
    kinds = {_kind(launched) for launched in flights}
    full = "full: " if len(flights) >= scheduler.limits.depth else ""
    return full + "+".join(sorted(kinds))


def _kind(launched: Launched) -> str:
    mode = launched.microbatch.mode
    if mode is not ForwardMode.PREFILL:
        return mode.value
    return "last chunk" if launched.requests[0].place is Place.DISPATCHED else "chunk"


class Coverage:
    """Cells and how often each was reached, over many runs."""

    def __init__(self) -> None:
        self.counts: Counter[Cell] = Counter()

    def add(self, cells: Iterable[Cell]) -> None:
        """Count the cells of one run."""
        self.counts.update(cells)

    def merge(self, other: Iterable[tuple[Cell, int]]) -> None:
        """Add the counts of another process."""
        for cell, count in other:
            self.counts[cell] += count

    def table(self) -> Table:
        """A row for each kind of event: the states that it met, with positions of the pipeline and times in all."""
        table = Table(title="what each event met: state, pipeline positions (times)", title_justify="left")
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
