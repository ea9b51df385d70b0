"""The parts of an output, and the split between reasoning and the content after it.

Owns the part types. Parts are in text order, and the pieces of a call are consecutive. The end of the prompt decides
where reasoning begins. Whitespace around its markers belongs to neither text, and everything inside is reasoning,
including tool calls.
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
    """The start of a tool call. ``id`` is set for families whose models write ids."""

    name: str
    id: str | None = None


class CallArguments(msgspec.Struct, frozen=True):
    """The next piece of the call's arguments: JSON text."""

    text: str


class CallEnded(msgspec.Struct, frozen=True):
    """The end of a call whose arguments are a complete JSON object. A truncated call has no end."""


Part = Reasoning | Content | CallBegun | CallArguments | CallEnded


def appended(parts: list[Part], part: Part) -> None:
    """Append a part, merging it with the last part if both are text of the same kind."""
    last = parts[-1] if parts else None
    match part, last:
        case (
            (Content(text), Content(before))
            | (Reasoning(text), Reasoning(before))
            | (CallArguments(text), CallArguments(before))
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
GPT_OSS = "gpt-oss"
REASONING_PARSERS = (QWEN3, DEEPSEEK_R1, GPT_OSS)
# The markers of gpt-oss, whose outputs are messages.
START_MESSAGE = "<|start|>"
CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
END_MESSAGE = "<|end|>"
# Opens the assistant's turn in DeepSeek's templates, with full-width bars.
_DEEPSEEK_TURN = "<\uff5cAssistant\uff5c>"
_SPACE = re.compile(r"\s*")


class ReasoningStart(enum.Enum):
    """The beginning of an output, which the end of the prompt determines."""

    OPEN = "open"
    """The template opened the block: the answer begins with reasoning."""
    MARKED = "marked"
    """The answer has reasoning if it begins with the marker."""
    ASSUMED = "assumed"
    """The answer begins with reasoning, with or without the marker."""
    CHANNELS = "channels"
    """The answer consists of messages, each of which names its channel."""


def reasoning_of_template(template: str) -> str | None:
    """Return the reasoning parser for a chat template; None for models that do not reason."""
    if CHANNEL in template:
        return GPT_OSS
    if END not in template:
        return None
    return DEEPSEEK_R1 if _DEEPSEEK_TURN in template else QWEN3


def reasoning_start(parser: str, prompt: str) -> ReasoningStart | None:
    """Return how the output after a prompt begins; None if the template has closed the block: no reasoning."""
    if parser == GPT_OSS:
        # A prompt that ends inside a message has the model continue it.
        return None if MESSAGE in prompt.rpartition(START_MESSAGE)[2] else ReasoningStart.CHANNELS
    end = prompt.rstrip()
    if end.endswith(BEGIN):
        return ReasoningStart.OPEN
    if end.endswith(END):
        return None
    return ReasoningStart.ASSUMED if parser == DEEPSEEK_R1 else ReasoningStart.MARKED


class PartReader(ABC):
    """Finds the parts of one output's text, independently of how the text is split."""

    def __init__(self) -> None:
        self._text = IncomingText()
        # Parts found since the last call.
        self._found: list[Part] = []
        self._reader = self._read()

    def push(self, text: str) -> list[Part]:
        """Add text; return the parts that are certain."""
        self._text.feed(text)
        return self._advance()

    def flush(self) -> list[Part]:
        """End the text; return the remaining parts."""
        self._text.end()
        return self._advance()

    def _advance(self) -> list[Part]:
        next(self._reader, None)
        found = self._found.copy()
        self._found.clear()
        return found

    @abstractmethod
    def _read(self) -> Reading[None]:
        """Read the whole text."""


class ReasoningSplitter(PartReader):
    """Splits reasoning from the answer after it. ``endings`` are markers of the answer, which end it, too."""

    def __init__(self, start: ReasoningStart, endings: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._start = start
        self._endings = endings
        self._held = ""

    def _read(self) -> Reading[None]:
        text = self._text
        before: list[str] = []
        yield from text.run(_SPACE, before.append)
        marked = (yield from text.marker((BEGIN,))) is not None
        if marked or self._start is not ReasoningStart.MARKED:
            yield from text.run(_SPACE)
            found = yield from text.until((END, *self._endings), self._reason)
            text.step_back(len(found) if found in self._endings else 0)
            yield from text.run(_SPACE)
        else:
            self._say("".join(before))
        yield from text.until((), self._say)

    def _reason(self, text: str) -> None:
        """Emit reasoning, holding back trailing whitespace until more reasoning follows."""
        text = self._held + text
        shown = text.rstrip()
        self._held = text[len(shown) :]
        appended(self._found, Reasoning(shown))

    def _say(self, text: str) -> None:
        appended(self._found, Content(text))
