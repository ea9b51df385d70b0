"""The format in which the served model writes tool calls and reasoning.

Owns the selection of both parsers, from the settings or the chat template, the parsing options of a request, and the
order of the parsers. A process has one dialect, and a parser for each choice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from engine.frontend.text.reasoning import (
    BEGIN,
    END,
    END_MESSAGE,
    CallArguments,
    CallBegun,
    CallEnded,
    Content,
    Part,
    PartReader,
    ReasoningSplitter,
    ReasoningStart,
    reasoning_of_template,
    reasoning_start,
)
from engine.frontend.text.tools.call_grammar import CallForm
from engine.frontend.text.tools.families import FAMILIES, CallParser, GptOssParser, family_of_template
from engine.process.settings import ServerSettings


class AnswerParser:
    """Splits an output into reasoning, content and calls. Without ``parallel``, calls after the first are dropped."""

    def __init__(self, reasoning: PartReader | None, calls: CallParser | None, *, parallel: bool) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._parallel = parallel
        self._begun = 0

    def push(self, text: str) -> list[Part]:
        if self._reasoning is None:
            return self._shown(self._called(text))
        return self._shown(self._split(self._reasoning.push(text)))

    def flush(self, *, stopped: bool = False) -> list[Part]:
        """End the text; return the remaining parts. ``stopped``: the model ended it, rather than a limit."""
        rest = [] if self._reasoning is None else self._split(self._reasoning.flush())
        if self._calls is not None:
            rest += self._calls.flush(stopped=stopped)
        return self._shown(rest)

    def _split(self, parts: Iterable[Part]) -> list[Part]:
        """Return the parts with calls parsed out of the content."""
        found: list[Part] = []
        for part in parts:
            found += self._called(part.text) if isinstance(part, Content) else [part]
        return found

    def _called(self, text: str) -> list[Part]:
        if self._calls is not None:
            return self._calls.push(text)
        return [Content(text)] if text else []

    def _shown(self, parts: Iterable[Part]) -> list[Part]:
        shown: list[Part] = []
        for part in parts:
            self._begun += isinstance(part, CallBegun)
            of_call = isinstance(part, CallBegun | CallArguments | CallEnded)
            if self._parallel or not of_call or self._begun == 1:
                shown.append(part)
        return shown


AUTO = "auto"
NONE = "none"


class Parsing(msgspec.Struct, frozen=True, kw_only=True):
    """Parsing options for the outputs of one request.

    ``tools`` are the names of the tools that the model may call; None if it has none. ``named``: the client named the
    tool to call. ``properties`` are the argument schemas of each tool.
    """

    tools: tuple[str, ...] | None = None
    parallel: bool = True
    named: bool = False
    reasoning: ReasoningStart | None = None
    properties: dict[str, dict[str, dict[str, Any]]] = {}


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """``family`` is the format of calls, ``reasoning`` the reasoning parser; each None if the model has none.

    ``form`` is the form of calls that a grammar enforces.
    """

    family: type[CallParser] | None = None
    reasoning: str | None = None
    form: CallForm | None = None

    @classmethod
    def of(cls, settings: ServerSettings, template: str) -> Dialect:
        """Select the dialect from the settings, or from the chat template for ``auto``."""
        family = FAMILIES.get(settings.tool_call_parser)
        if settings.tool_call_parser == AUTO:
            family = family_of_template(template)
        reasoning: str | None = settings.reasoning_parser
        if reasoning == AUTO:
            reasoning = reasoning_of_template(template)
        elif reasoning == NONE:
            reasoning = None
        return cls(family=family, reasoning=reasoning, form=None if family is None else family.form_of(template))

    def about(self) -> dict[str, str]:
        """Return the parsers' names for the startup summary."""
        return {
            "tool_call_parser": NONE if self.family is None else self.family.name,
            "reasoning_parser": self.reasoning or NONE,
        }

    def start_after(self, prompt: str) -> ReasoningStart | None:
        """Return how the output after a prompt begins; None if it has no reasoning."""
        return None if self.reasoning is None else reasoning_start(self.reasoning, prompt)

    def parser(self, parsing: Parsing) -> AnswerParser:
        has_channels = parsing.reasoning is ReasoningStart.CHANNELS
        if has_channels and self.family is GptOssParser:
            whole = GptOssParser(parsing.tools or (), parsing.properties)
            return AnswerParser(None, whole, parallel=parsing.parallel)
        calls = None if parsing.tools is None or self.family is None else self.family(parsing.tools, parsing.properties)
        if has_channels:
            return AnswerParser(GptOssParser(()), calls, parallel=parsing.parallel)
        endings = () if calls is None else calls.ends_reasoning
        reasoning = None if parsing.reasoning is None else ReasoningSplitter(parsing.reasoning, endings)
        return AnswerParser(reasoning, calls, parallel=parsing.parallel)

    @staticmethod
    def end_of_reasoning(start: ReasoningStart) -> str:
        """Return the marker at the end of the reasoning of an output that begins so."""
        return END_MESSAGE if start is ReasoningStart.CHANNELS else END

    def new_call_id(self) -> str:
        return (self.family or CallParser).new_id()

    def markers(self, parsing: Parsing) -> tuple[str, ...]:
        """Return the markers that must appear in the text even if they are special tokens."""
        markers: tuple[str, ...] = () if parsing.reasoning is None else (BEGIN, END)
        if parsing.reasoning is ReasoningStart.CHANNELS:
            markers = GptOssParser.markers
        return markers if parsing.tools is None or self.family is None else markers + self.family.markers


# Neither calls nor reasoning.
PLAIN = Dialect()
