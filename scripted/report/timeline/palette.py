"""Which colour, label and number a request has: the same in every run of a page.

A rid keeps its colour from run to run. Where runs made up different rids, the first request of one run has
the colour of the first of the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

from scripted.core.phrases import common_start, printable, short_rid
from scripted.report.step_log import ShownStep
from scripted.report.trace import Trace

# A rid of this many characters is its own label; "scripted-1" is one.
_CHARACTERS: Final = 10
_HEAD: Final = 3
_TAIL: Final = 5
# Of the part in which rids with the same head and tail differ.
_MIDDLE: Final = 5


def labels_of(rids: Iterable[str]) -> dict[str, str]:
    """A label for every rid, printable and distinct."""
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
    """Labels for rids with the same head and tail: what lies between what all of them begin and end with."""
    names = [printable(rid) for rid in rids]
    begin = common_start(names)
    end = common_start([name[begin:][::-1] for name in names])
    middles = [name[begin : len(name) - end][:_MIDDLE] for name in names]
    return [f"{name[:_HEAD]}..{middle}" for name, middle in zip(names, middles, strict=True)]


def _free(label: str, taken: set[str]) -> str:
    """The label, with a number when it is taken."""
    numbered, number = label, 1
    while numbered in taken:
        number += 1
        numbered = f"{label}~{number}"
    return numbered


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
