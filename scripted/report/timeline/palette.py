"""Which colour, label and number a request has: the same in every run of a page.

A rid keeps its colour from run to run. Where runs made up different rids, the first request of one run has
the colour of the first of the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from scripted.core.phrases import short_rid
from scripted.report.step_log import ShownStep
from scripted.report.timeline.labels import labels_of
from scripted.report.trace import Trace

# As many as the style defines; further requests start again from the first.
COLOURS: Final = 8


class Palette(msgspec.Struct, frozen=True):
    """What tells the requests of a page apart: a colour, a label, and a number for the filter."""

    colours: dict[str, int]
    labels: dict[str, str]
    numbers: dict[str, int]

    @classmethod
    def of(cls, traces: Sequence[Trace]) -> Palette:
        rids = dict.fromkeys(rid for trace in traces for step in trace.log.steps for rid in _rids(step))
        return cls(colours_of(traces), labels_of(rids), {rid: number for number, rid in enumerate(rids)})

    def label(self, rid: str) -> str:
        """What the page calls a request; one that began before the traces has no label of its own."""
        return self.labels.get(rid) or short_rid(rid)

    def numbers_of(self, rids: Sequence[str]) -> tuple[int, ...]:
        return tuple(self.numbers[rid] for rid in rids if rid in self.numbers)


def colours_of(traces: Sequence[Trace]) -> dict[str, int]:
    """A palette index for every rid in the traces."""
    colours: dict[str, int] = {}
    for trace in traces:
        order = dict.fromkeys(rid for step in trace.log.steps for rid in _rids(step))
        for number, rid in enumerate(order):
            colours.setdefault(rid, number % COLOURS)
    return colours


def _rids(step: ShownStep) -> Iterator[str]:
    yield from (said.rid for said in step.arrived if said.rid is not None and said.kind == "event")
    yield from filter(None, (step.chunked, *step.waiting, *step.running))
    if step.launched is not None:
        yield from step.launched.rids
