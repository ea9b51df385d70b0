"""The parts of one answer with calls in it, as its parser finds them.

Owns the whitespace beside calls: it is content only between two texts, so that an answer of calls alone has none.
"""

from __future__ import annotations

from engine.frontend.parts import CallArguments, CallBegun, CallEnded, Content, Part, appended

__all__ = ["CallParts"]


class CallParts:
    """Collects parts until they are taken."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._space = ""
        self._said = False
        self._called = False

    def take(self) -> list[Part]:
        """The parts that are certain, since the last call."""
        parts, self._parts = self._parts, []
        return parts

    def say(self, text: str) -> None:
        """Add content. Whitespace at its end waits for what follows."""
        text = self._space + text
        if self._called and not self._said:
            text = text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._said = True
            appended(self._parts, Content(shown))

    def begin(self, name: str, call_id: str | None = None) -> None:
        """Add the beginning of a call."""
        self._called = True
        self._parts.append(CallBegun(name, call_id))

    def argue(self, text: str) -> None:
        """Add a piece of the call's arguments."""
        appended(self._parts, CallArguments(text))

    def end(self) -> None:
        """Add the end of a call whose arguments are complete."""
        self._parts.append(CallEnded())

    def close(self) -> None:
        """No more text follows: whitespace at the end is content if there was no call."""
        if not self._called:
            appended(self._parts, Content(self._space))
