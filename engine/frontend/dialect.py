"""How the served model writes what is not plain text: calls of tools, and reasoning.

Owns the choice of both parsers, by the settings or by the model's chat template, and what an answer's parsing is asked
to be. Made once a process; a request's state is its parser's.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine.frontend.answer_parser import AnswerParser
from engine.frontend.reasoning import (
    BEGIN,
    END,
    ReasoningSplitter,
    ReasoningStart,
    reasoning_of_template,
    reasoning_start,
)
from engine.frontend.tools.call_grammar import CallForm
from engine.frontend.tools.families import FAMILIES, Family, family_of_template, form_of_template, new_usual_id
from engine.settings import ServerSettings

__all__ = ["PLAIN", "Dialect", "Parsing"]

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

    family: Family | None = None
    reasoning: str | None = None
    form: CallForm | None = None

    @classmethod
    def of(cls, settings: ServerSettings, template: str) -> Dialect:
        """As the settings say, or as the chat template shows."""
        family, reasoning = FAMILIES.get(settings.tool_call_parser), settings.reasoning_parser
        if settings.tool_call_parser == AUTO:
            family = family_of_template(template)
        return cls(
            family=family,
            reasoning=reasoning_of_template(template)
            if reasoning == AUTO
            else None
            if reasoning == NONE
            else reasoning,
            form=None if family is None else form_of_template(family, template),
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
        """A parser for one answer."""
        calls = (
            None
            if parsing.tools is None or self.family is None
            else self.family.parser(parsing.tools, parsing.properties)
        )
        reasoning = None if parsing.reasoning is None else ReasoningSplitter(parsing.reasoning)
        return AnswerParser(reasoning, calls, parallel=parsing.parallel)

    @property
    def needs_properties(self) -> bool:
        """Whether the parser of calls needs the schemas of the tools' arguments."""
        return self.family is not None and self.family.parser.typed

    def new_call_id(self) -> str:
        """An id for a call of the model's."""
        return new_usual_id() if self.family is None else self.family.new_id()

    def markers(self, parsing: Parsing) -> tuple[str, ...]:
        """What the answer's text must show for that, though it may be special tokens."""
        markers = () if parsing.reasoning is None else (BEGIN, END)
        return markers if parsing.tools is None or self.family is None else markers + self.family.parser.markers


# Neither calls nor reasoning.
PLAIN = Dialect()
