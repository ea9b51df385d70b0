"""Parsed pages of timelines, and traces to render."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html.parser import HTMLParser

import msgspec
from race_records import LIMITS, PP4
from scripted_lockstep.configs import config_values
from scripted_lockstep.step_words import log_of

from engine.core.scheduler.ports import StepRecord
from scripted.report.step_log import ShownStep
from scripted.report.trace import Trace, TraceHeader

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Element(msgspec.Struct):
    tag: str
    attributes: dict[str, str | None]
    text: str = ""

    @property
    def classes(self) -> set[str]:
        return set((self.attributes.get("class") or "").split())

    @property
    def place(self) -> dict[str, float]:
        """The numbers of the style's variables, by name."""
        return {
            name: float(value) for name, value in re.findall(r"--(\w+):([\d.]+)", self.attributes.get("style") or "")
        }


class Document(HTMLParser):
    """The elements of a page in order; fails when tags do not nest."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[Element] = []
        self._open: list[Element] = []
        self.feed(html)
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), f"an attribute twice in {tag}: {attrs}"
        element = Element(tag, dict(attrs))
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(Element(tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.text += data

    def of_class(self, *names: str) -> list[Element]:
        return [element for element in self.elements if element.classes >= set(names)]

    def one(self, *names: str) -> Element:
        (element,) = self.of_class(*names)
        return element


def trace_of(records: Sequence[StepRecord], **header: object) -> Trace:
    fields = {"title": "t", "config": config_values(PP4), "outcome": "passed"} | header
    return Trace(TraceHeader(**fields), log_of(records, LIMITS))


def cut(trace: Trace, steps: Sequence[ShownStep]) -> Trace:
    return Trace(trace.header, msgspec.structs.replace(trace.log, steps=tuple(steps)), trace.notes)
