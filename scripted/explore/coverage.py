"""Coverage of a search: which kind of event met a request in which state at which position of the pipeline.

A cell is counted when an action is applied, from the scheduler's own books. It never judges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec
from rich.table import Table

from engine.plan import ForwardMode
from engine.scheduler import Place, Scheduler
from engine.scheduler.books import Launched
from scripted.actions import Action

__all__ = ["Cell", "Coverage", "cell_of"]

_OUT_OF_REACH = "not alive"


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
        state = "+".join(places) or "nobody"
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
        """Kinds down, states across: positions of the pipeline that were met, and times in all."""
        kinds = sorted({cell.kind for cell in self.counts})
        states = sorted({cell.state for cell in self.counts}, key=lambda state: (state.count("+"), state))
        table = Table(title="event kind x request state: pipeline positions (times)", title_justify="left")
        table.add_column("event")
        for state in states:
            table.add_column(state.replace("+", "+\n"), justify="right")
        for kind in kinds:
            table.add_row(kind, *[self._cell_text(kind, state) for state in states])
        return table

    def _cell_text(self, kind: str, state: str) -> str:
        found = [count for cell, count in self.counts.items() if cell.kind == kind and cell.state == state]
        return f"{len(found)} ({sum(found)})" if found else "."
