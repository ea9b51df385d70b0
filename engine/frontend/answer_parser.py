"""One answer's text as parts: its reasoning first, then content and calls of tools.

Owns the order of the two parsers, and how many calls a client takes. Each choice has a parser of its own.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.frontend.parts import CallArguments, CallBegun, CallEnded, Content, Part
from engine.frontend.reasoning import ReasoningSplitter
from engine.frontend.tools.call_parser import CallParser

__all__ = ["AnswerParser"]


class AnswerParser:
    """Without ``reasoning`` or ``calls`` there is none to look for. Without ``parallel`` later calls are left out."""

    def __init__(self, reasoning: ReasoningSplitter | None, calls: CallParser | None, *, parallel: bool) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._parallel = parallel
        self._begun = 0

    def push(self, text: str) -> list[Part]:
        """Take text in, give the parts that are certain out."""
        if self._reasoning is None:
            return self._shown(self._called(text))
        return self._shown(self._split(self._reasoning.push(text)))

    def flush(self) -> list[Part]:
        """The rest, once it is known that no more text comes."""
        rest = [] if self._reasoning is None else self._split(self._reasoning.flush())
        if self._calls is not None:
            rest += self._calls.flush()
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
