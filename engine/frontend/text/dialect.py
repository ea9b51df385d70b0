"""How the served model writes what is not plain text: calls of tools, and reasoning.

Owns the choice of both parsers, by the settings or by the model's chat template, what an answer's parsing is asked to
be, and the order of the two parsers. A dialect is made once a process, a parser for each choice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from engine.frontend.text.reasoning import (
    BEGIN,
    END,
    CallArguments,
    CallBegun,
    CallEnded,
    Content,
    Part,
    ReasoningSplitter,
    ReasoningStart,
    reasoning_of_template,
    reasoning_start,
)
from engine.frontend.text.tools.call_grammar import CallForm
from engine.frontend.text.tools.families import FAMILIES, CallParser, family_of_template
from engine.process.settings import ServerSettings


class AnswerParser:
    """Without ``reasoning`` or ``calls`` there is none to look for. Without ``parallel`` later calls are left out."""

    def __init__(self, reasoning: ReasoningSplitter | None, calls: CallParser | None, *, parallel: bool) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._parallel = parallel
        self._begun = 0

    def push(self, text: str) -> list[Part]:
        if self._reasoning is None:
            return self._shown(self._called(text))
        return self._shown(self._split(self._reasoning.push(text)))

    def flush(self, *, stopped: bool = False) -> list[Part]:
        """The rest, once it is known that no more text comes; ``stopped``: because the model ended it."""
        rest = [] if self._reasoning is None else self._split(self._reasoning.flush())
        if self._calls is not None:
            rest += self._calls.flush(stopped=stopped)
        return self._shown(rest)

    def _split(self, parts: Iterable[Part]) -> list[Part]:
        """The same with the content looked through for calls."""
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
    """What the answers to one request are looked through for.

    ``tools`` are the names of the tools that the model may call; None: it may call none. ``named`` says that the client
    named the one that it has to call. ``properties`` are the schemas of their arguments, where the parser needs them.
    """

    tools: tuple[str, ...] | None = None
    parallel: bool = True
    named: bool = False
    reasoning: ReasoningStart | None = None
    properties: dict[str, dict[str, dict[str, Any]]] = {}


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """``family`` writes calls, ``reasoning`` is the parser of reasoning; None for a model that does neither.

    ``form`` is how it has to write calls that are asked for.
    """

    family: type[CallParser] | None = None
    reasoning: str | None = None
    form: CallForm | None = None

    @classmethod
    def of(cls, settings: ServerSettings, template: str) -> Dialect:
        """As the settings say, or as the chat template shows."""
        family = FAMILIES.get(settings.tool_call_parser)
        if settings.tool_call_parser == AUTO:
            family = family_of_template(template)
        reasoning: str | None = settings.reasoning_parser
        if reasoning == AUTO:
            reasoning = reasoning_of_template(template)
        elif reasoning == NONE:
            reasoning = None
        return cls(
            family=family,
            reasoning=reasoning,
            form=None if family is None else family.form_of(template),
        )

    def about(self) -> dict[str, str]:
        """What an operator wants to see at the start."""
        return {
            "tool_call_parser": NONE if self.family is None else self.family.name,
            "reasoning_parser": self.reasoning or NONE,
        }

    def start_after(self, prompt: str) -> ReasoningStart | None:
        """How an answer begins after a prompt; None where there is no reasoning to look for."""
        return None if self.reasoning is None else reasoning_start(self.reasoning, prompt)

    def parser(self, parsing: Parsing) -> AnswerParser:
        calls = None if parsing.tools is None or self.family is None else self.family(parsing.tools, parsing.properties)
        reasoning = None if parsing.reasoning is None else ReasoningSplitter(parsing.reasoning)
        return AnswerParser(reasoning, calls, parallel=parsing.parallel)

    @property
    def needs_properties(self) -> bool:
        """Whether the parser of calls needs the schemas of the tools' arguments."""
        return self.family is not None and self.family.typed

    def new_call_id(self) -> str:
        return (self.family or CallParser).new_id()

    def markers(self, parsing: Parsing) -> tuple[str, ...]:
        """What the answer's text must show for that, though it may be special tokens."""
        markers = () if parsing.reasoning is None else (BEGIN, END)
        return markers if parsing.tools is None or self.family is None else markers + self.family.markers


# Neither calls nor reasoning.
PLAIN = Dialect()
