"""What an answer consists of beside plain text, and the reasoning that a model writes before it.

Owns the types of parts: they come in the order of the text, and no other part stands between the pieces of a call. And
where reasoning begins, which the end of the prompt decides, and ends; the whitespace around its markers belongs to
neither text. What stands inside is reasoning whatever it looks like, calls of tools too.
"""

from __future__ import annotations

import enum
import re
from abc import ABC, abstractmethod

import msgspec

from engine.frontend.text.incoming_text import IncomingText, Reading


class Reasoning(msgspec.Struct, frozen=True):
    text: str


class Content(msgspec.Struct, frozen=True):
    text: str


class CallBegun(msgspec.Struct, frozen=True):
    """The model calls a tool. ``id`` is the one that it gave the call, if its family does that."""

    name: str
    id: str | None = None


class CallArguments(msgspec.Struct, frozen=True):
    """The next piece of the call's arguments, as the model wrote them: JSON text."""

    text: str


class CallEnded(msgspec.Struct, frozen=True):
    """The call's arguments are complete. A call that was cut has no end."""


Part = Reasoning | Content | CallBegun | CallArguments | CallEnded


def appended(parts: list[Part], part: Part) -> None:
    """Add a part to a list; text that goes on with the last part's text becomes one part with it."""
    last = parts[-1] if parts else None
    match part, last:
        case (
            (Content(text), Content(before))
            | (Reasoning(text), Reasoning(before))
            | (
                CallArguments(text),
                CallArguments(before),
            )
        ):
            parts[-1] = type(part)(before + text)
        case (Content(""), _) | (Reasoning(""), _) | (CallArguments(""), _):
            return
        case _:
            parts.append(part)


BEGIN = "<think>"
END = "</think>"
QWEN3 = "qwen3"
DEEPSEEK_R1 = "deepseek-r1"
REASONING_PARSERS = (QWEN3, DEEPSEEK_R1)
# What opens the assistant's turn in DeepSeek's templates, with its full-width bars.
_DEEPSEEK_TURN = "<\uff5cAssistant\uff5c>"
_SPACE = re.compile(r"\s*")


class ReasoningStart(enum.Enum):
    """What the end of the prompt says about the beginning of the answer."""

    OPEN = "open"
    """The template opened the block: the answer begins inside."""
    MARKED = "marked"
    """There is reasoning if the answer begins with the marker."""
    ASSUMED = "assumed"
    """The answer begins with reasoning, marked or not."""


def reasoning_of_template(template: str) -> str | None:
    """The parser for the models that have this template; None for those that do not reason."""
    if END not in template:
        return None
    return DEEPSEEK_R1 if _DEEPSEEK_TURN in template else QWEN3


def reasoning_start(parser: str, prompt: str) -> ReasoningStart | None:
    """How the answer to a prompt begins; None when the template closed the block, so that there is no reasoning."""
    end = prompt.rstrip()
    if end.endswith(BEGIN):
        return ReasoningStart.OPEN
    if end.endswith(END):
        return None
    return ReasoningStart.ASSUMED if parser == DEEPSEEK_R1 else ReasoningStart.MARKED


class PartReader(ABC):
    """Finds the parts of one answer's text. What comes out does not depend on how the text is cut."""

    def __init__(self) -> None:
        self._text = IncomingText()
        # Those that are certain, since the last call.
        self._found: list[Part] = []
        self._reader = self._read()

    def push(self, text: str) -> list[Part]:
        """Take text in, give the parts that are certain out."""
        self._text.feed(text)
        return self._advance()

    def flush(self) -> list[Part]:
        """The rest, once it is known that no more text comes."""
        self._text.end()
        return self._advance()

    def _advance(self) -> list[Part]:
        next(self._reader, None)
        found = self._found.copy()
        self._found.clear()
        return found

    @abstractmethod
    def _read(self) -> Reading[None]:
        """Read everything there is."""


class ReasoningSplitter(PartReader):
    """Splits reasoning from what comes after it."""

    def __init__(self, start: ReasoningStart) -> None:
        super().__init__()
        self._start = start
        self._held = ""

    def _read(self) -> Reading[None]:
        text = self._text
        before: list[str] = []
        yield from text.run(_SPACE, before.append)
        marked = (yield from text.marker((BEGIN,))) is not None
        if marked or self._start is not ReasoningStart.MARKED:
            yield from text.run(_SPACE)
            yield from text.until((END,), self._reason)
            yield from text.run(_SPACE)
        else:
            self._say("".join(before))
        yield from text.until((), self._say)

    def _reason(self, text: str) -> None:
        """Give reasoning out, but no whitespace before it is known that more reasoning follows."""
        text = self._held + text
        shown = text.rstrip()
        self._held = text[len(shown) :]
        appended(self._found, Reasoning(shown))

    def _say(self, text: str) -> None:
        appended(self._found, Content(text))
