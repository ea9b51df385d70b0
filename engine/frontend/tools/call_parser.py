"""What the parsers of all families share: text in, parts out, and calls that are JSON objects.

Owns what becomes of text that announces a call and is none, malformed or cut: it is content, as it was written. Total:
every text has parts, and none raises.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import ClassVar

from engine.frontend.incoming_text import IncomingText, Reading
from engine.frontend.parts import Part
from engine.frontend.tools.argument_values import Properties
from engine.frontend.tools.call_object import CallObject
from engine.frontend.tools.call_parts import CallParts
from engine.frontend.tools.json_text import SPACE

__all__ = ["CallParser"]

# After a call: what separates calls in some families, and a brace too many, which models often write.
_BETWEEN = re.compile(r"[\s,;}]*")


class CallParser(ABC):
    """Finds the calls in one answer's text. What comes out does not depend on how the text is cut.

    ``tools`` are the names of the tools that the model was given, ``properties`` the schemas of each one's arguments.
    """

    markers: ClassVar[tuple[str, ...]]
    """What the family writes around its calls; a tokenizer may have it as special tokens."""
    closes: ClassVar[bool] = False
    """True when a marker closes each call."""
    typed: ClassVar[bool] = False
    """True when it depends on the schemas of the arguments what a model has written."""

    def __init__(self, tools: Collection[str], properties: Mapping[str, Properties] | None = None) -> None:
        self._tools = frozenset(tools)
        self._properties = properties or {}
        self._text = IncomingText()
        self._parts = CallParts()
        self._reader = self._read()

    def push(self, text: str) -> list[Part]:
        """Take text in, give the parts that are certain out."""
        self._text.feed(text)
        next(self._reader, None)
        return self._parts.take()

    def flush(self) -> list[Part]:
        """The rest, once it is known that no more text comes."""
        self._text.end()
        next(self._reader, None)
        self._parts.close()
        return self._parts.take()

    @abstractmethod
    def _read(self) -> Reading[None]:
        """Read everything there is, in the family's format."""

    def _read_objects(self, *, bare: bool = False) -> Reading[None]:
        """Read calls that are objects: one, several, or a list of them. What was marked is given back if none is.

        ``bare``: nothing announced them.
        """
        text = self._text
        yield from text.run(SPACE)
        listed = (yield from text.peek()) == "[" and (yield from text.sees(self.markers)) is None
        if listed:
            text.take(1)
            yield from text.run(SPACE)
        found = False
        while (yield from text.peek()) == "{":
            if not (yield from CallObject(text, self._parts, self.markers, self._tools if bare else None).read()):
                break
            found = True
            yield from self._read_between()
            text.mark()
        if listed and found and (yield from text.peek()) == "]":
            text.take(1)
            text.unmark()
            yield from self._read_between()
        self._give_back()

    def _read_between(self) -> Reading[None]:
        """Read what separates calls. Of that, whitespace may be content where no marker closes a call."""
        between = yield from self._text.word(_BETWEEN)
        if not self.closes:
            self._parts.say("".join(character for character in between if character.isspace()))

    def _give_back(self) -> None:
        """What was held is no call: it is content."""
        self._parts.say(self._text.unmark())
