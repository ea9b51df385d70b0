"""A buffer for text that arrives in pieces, for readers that are written as if the whole text were present.

A reader is a generator that yields when it needs more text, so its result depends on the text and never on how the text
is split. Owns the text that is unread or may have to be reread.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from engine.frontend.text.answer import partial_length

Result = TypeVar("Result")
# A part of a reader: yields until there is enough text, then returns its result.
Reading = Generator[None, None, Result]
Emit = Callable[[str], None]


# More than the longest tag of any family: in other text at most this much is held back.
_TAG = re.compile(r"<[^<>\n]{0,48}>?")


@functools.cache
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern that finds the first of some markers in one pass, whichever of them the text lacks."""
    return re.compile("|".join(map(re.escape, markers)) or "(?!)")


def dropped(text: str) -> None:
    """Discard text."""


class IncomingText:
    """The buffered text and the read position."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        # The number of characters before the buffered text.
        self._dropped = 0
        self._mark: int | None = None
        self._ended = False
        self._stopped = False

    def feed(self, text: str) -> None:
        kept = self._at if self._mark is None else self._mark
        self._text = self._text[kept:] + text
        self._at -= kept
        self._dropped += kept
        if self._mark is not None:
            self._mark = 0

    def end(self, *, stopped: bool = False) -> None:
        """Mark the end of the text. ``stopped``: the model ended it, rather than a limit."""
        self._ended = True
        self._stopped = stopped

    @property
    def has_stopped(self) -> bool:
        """True if the model ended the text itself, so that missing closing tags were forgotten."""
        return self._stopped

    def mark(self, *, back: int = 0) -> None:
        """Keep the text read from here, or from ``back`` characters earlier, until ``unmark``."""
        self._mark = self._at - back

    def unmark(self) -> str:
        """Drop the mark; return the text read since, empty without a mark."""
        text = "" if self._mark is None else self._text[self._mark : self._at]
        self._mark = None
        return text

    @property
    def place(self) -> int:
        """The number of characters read so far."""
        return self._dropped + self._at

    def rewind(self) -> None:
        """Return to the mark and drop it."""
        assert self._mark is not None, "a rewind needs a mark"
        self._at, self._mark = self._mark, None

    def step_back(self, count: int) -> None:
        self._at -= count
        assert self._at >= 0, f"{count} characters must still be buffered"

    def take(self, count: int) -> str:
        """Read characters that are known to be buffered."""
        text = self._text[self._at : self._at + count]
        assert len(text) == count, f"{count} characters must be buffered, got {text!r}"
        self._at += count
        return text

    def peek(self) -> Reading[str]:
        """Return the next character without reading it; empty at the end."""
        while self._at == len(self._text) and not self._ended:
            yield
        return self._text[self._at : self._at + 1]

    def run(self, pattern: re.Pattern[str], emit: Emit = dropped) -> Reading[None]:
        """Read while characters match a pattern such as ``[abc]*``, which tests each character alone."""
        while True:
            found = pattern.match(self._text, self._at)
            assert found is not None, f"the pattern must match the empty text, got {pattern.pattern}"
            self._at = found.end()
            if found.group():
                emit(found.group())
            if self._at < len(self._text) or self._ended:
                return
            yield

    def word(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Read as ``run`` does; return the characters."""
        read: list[str] = []
        yield from self.run(pattern, read.append)
        return "".join(read)

    def marker(self, markers: Sequence[str]) -> Reading[str | None]:
        """Read a marker at this position, if any. No marker is a prefix of another."""
        found = yield from self.sees(markers)
        if found is not None:
            self._at += len(found)
        return found

    def sees(self, markers: Sequence[str]) -> Reading[str | None]:
        """Return the marker at this position without reading it."""
        longest = max(map(len, markers), default=0)
        while True:
            ahead = self._text[self._at : self._at + longest]
            for marker in markers:
                if ahead.startswith(marker):
                    return marker
            if self._ended or not any(marker.startswith(ahead) for marker in markers):
                return None
            yield

    def tag(self) -> Reading[str]:
        """Return the tag at this position, intact or damaged, without reading it; empty if there is none."""
        while True:
            found = _TAG.match(self._text, self._at)
            if self._ended or (self._at < len(self._text) and found is None):
                return "" if found is None else found.group()
            if found is not None and (found.end() < len(self._text) or found.group().endswith(">")):
                return found.group()
            yield

    def judged(self, judge: Callable[[str, bool], Result | None], most: int) -> Reading[Result | None]:
        """Show ``judge`` the text at this position until it decides, and return what it says.

        It gets up to ``most`` characters, and whether more may come; without more it must decide.
        """
        while True:
            ahead = self._text[self._at : self._at + most]
            is_all = self._ended or len(ahead) == most
            verdict = judge(ahead, not is_all)
            if verdict is not None or is_all:
                return verdict
            yield

    def until(self, markers: Sequence[str], emit: Emit) -> Reading[str | None]:
        """Read through the next marker and return it; None if the text ends first."""
        while True:
            found = _any_of(tuple(markers)).search(self._text, self._at)
            at, marker = (found.start(), found.group()) if found else (len(self._text), "")
            safe = at if found or self._ended else at - partial_length(self._text[self._at :], markers)
            if safe > self._at:
                emit(self._text[self._at : safe])
                self._at = safe
            if found:
                self._at += len(marker)
                return marker
            if self._ended:
                return None
            yield
