"""Which colour a request has: the same in every run of a page.

A rid keeps its colour from run to run. Where runs made up different rids, the first request of one run has
the colour of the first of the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from engine.messages import Generate
from engine.scheduler.ports import StepRecord
from scripted.report.trace import Trace

__all__ = ["COLOURS", "colours_of"]

# As many as the style defines; further requests start again from the first.
COLOURS: Final = 8


def colours_of(traces: Sequence[Trace]) -> dict[str, int]:
    """A palette index for every rid in the traces."""
    colours: dict[str, int] = {}
    for trace in traces:
        order = dict.fromkeys(rid for record in trace.records for rid in _rids(record))
        for number, rid in enumerate(order):
            colours.setdefault(rid, number % COLOURS)
    return colours


def _rids(record: StepRecord) -> Iterator[str]:
    for event in record.events:
        if isinstance(event, Generate):
            yield event.rid
    if record.chunked is not None:
        yield record.chunked
    yield from record.waiting_rids
    yield from record.running_rids
    if record.microbatch is not None:
        yield from record.microbatch.rids
