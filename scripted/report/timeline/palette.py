"""Gives each request a colour, a label and a number, the same in every run of a page.

A rid keeps its colour from run to run. If rids are generated, the first request of each run gets the same colour.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

from scripted.core.phrases import common_start, printable, short_rid
from scripted.report.step_log import ShownStep
from scripted.report.trace import Trace

# A rid of up to this many characters, such as "scripted-1", is its own label.
_CHARACTERS: Final = 10
_HEAD: Final = 3
_TAIL: Final = 5
# How many characters to show of the part in which rids with the same head and tail differ.
_MIDDLE: Final = 5


def labels_of(rids: Iterable[str]) -> dict[str, str]:
    """Return a printable, distinct label for every rid."""
    alike: dict[str, list[str]] = {}
    for rid in dict.fromkeys(rids):
        alike.setdefault(_head_and_tail(printable(rid)), []).append(rid)
    labels: dict[str, str] = {}
    taken = {label for label, group in alike.items() if len(group) == 1}
    for label, group in alike.items():
        for rid, wanted in zip(group, [label] if len(group) == 1 else _with_middles(group), strict=True):
            labels[rid] = wanted if len(group) == 1 else _free(wanted, taken)
            taken.add(labels[rid])
    return labels


def _head_and_tail(name: str) -> str:
    return name if len(name) <= _CHARACTERS else f"{name[:_HEAD]}..{name[-_TAIL:]}"


def _with_middles(rids: Sequence[str]) -> list[str]:
    """Label rids that have the same head and tail by the part between their common beginning and end."""
    names = [printable(rid) for rid in rids]
    begin = common_start(names)
    end = common_start([name[begin:][::-1] for name in names])
    middles = [name[begin : len(name) - end][:_MIDDLE] for name in names]
    return [f"{name[:_HEAD]}..{middle}" for name, middle in zip(names, middles, strict=True)]


def _free(label: str, taken: set[str]) -> str:
    """Return the label, with a number if it is taken."""
    numbered, number = label, 1
    while numbered in taken:
        number += 1
        numbered = f"{label}~{number}"
    return numbered


# As many as the style defines; further requests start over.
COLOURS: Final = 8


class Palette(msgspec.Struct, frozen=True):
    """The colours, labels and filter numbers of a page's requests, by rid."""

    colours: dict[str, int]
    labels: dict[str, str]
    numbers: dict[str, int]

    @classmethod
    def of(cls, traces: Sequence[Trace]) -> Palette:
        rids = dict.fromkeys(rid for trace in traces for step in trace.log.steps for rid in _rids(step))
        return cls(colours_of(traces), labels_of(rids), {rid: number for number, rid in enumerate(rids)})

    def label(self, rid: str) -> str:
        """Return a request's label, or its short rid if it began before the traces."""
        return self.labels.get(rid) or short_rid(rid)

    def numbers_of(self, rids: Sequence[str]) -> tuple[int, ...]:
        return tuple(self.numbers[rid] for rid in rids if rid in self.numbers)


def colours_of(traces: Sequence[Trace]) -> dict[str, int]:
    """Return a palette index for every rid in the traces."""
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
