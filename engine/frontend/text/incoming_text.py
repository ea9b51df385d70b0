"""Text that arrives in pieces, for a reader that is written as if it were all there.

A reader is a generator. It yields where it needs more text to decide, so its decisions depend on the text alone and
never on where that was cut. Owns the text that was not read yet, or that may have to be given back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from engine.frontend.text.answer import partial_length

Result = TypeVar("Result")
# A part of a reader: it yields until there is enough text, and returns what it found.
Reading = Generator[None, None, Result]
Emit = Callable[[str], None]


# Longer than any tag of a family: in other text no more than this is held back.
_TAG = re.compile(r"<[^<>\n]{0,48}>?")


def dropped(text: str) -> None:
    """Take text and do nothing with it."""


class IncomingText:
    """The text, and how far it was read."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._mark: int | None = None
        self._ended = False
        self._stopped = False

    def feed(self, text: str) -> None:
        kept = self._at if self._mark is None else self._mark
        self._text = self._text[kept:] + text
        self._at -= kept
        if self._mark is not None:
            self._mark = 0

    def end(self, *, stopped: bool = False) -> None:
        """Note that no more text comes. ``stopped``: the model ended it, so that it is not cut."""
        self._ended = True
        self._stopped = stopped

    @property
    def has_stopped(self) -> bool:
        """Whether the model has ended the text. Closers that are missing then were forgotten."""
        return self._stopped

    def mark(self, *, back: int = 0) -> None:
        """Keep what is read from here on, or from ``back`` characters before, until ``unmark``."""
        self._mark = self._at - back

    def unmark(self) -> str:
        """What was read since the mark, which is kept no longer; empty without a mark."""
        text = "" if self._mark is None else self._text[self._mark : self._at]
        self._mark = None
        return text

    def rewind(self) -> None:
        """Go back to the mark, which is kept no longer."""
        assert self._mark is not None, "only a mark can be gone back to"
        self._at, self._mark = self._mark, None

    def step_back(self, count: int) -> None:
        self._at -= count
        assert self._at >= 0, f"{count} characters must still be there"

    def take(self, count: int) -> str:
        """Read characters that are known to be there."""
        text = self._text[self._at : self._at + count]
        assert len(text) == count, f"{count} characters must be there, got {text!r}"
        self._at += count
        return text

    def peek(self) -> Reading[str]:
        """The next character, which is not read; empty at the end."""
        while self._at == len(self._text) and not self._ended:
            yield
        return self._text[self._at : self._at + 1]

    def run(self, pattern: re.Pattern[str], emit: Emit = dropped) -> Reading[None]:
        """Read on while characters match a pattern such as ``[abc]*``, which looks at each by itself."""
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
        """Read on as ``run`` does; the characters that were read."""
        read: list[str] = []
        yield from self.run(pattern, read.append)
        return "".join(read)

    def marker(self, markers: Sequence[str]) -> Reading[str | None]:
        """Read the marker that stands here, if one does. No marker begins with another one."""
        found = yield from self.sees(markers)
        if found is not None:
            self._at += len(found)
        return found

    def sees(self, markers: Sequence[str]) -> Reading[str | None]:
        """The marker that stands here, which is not read."""
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
        """The tag that stands here, damaged or not, which is not read; empty where none begins."""
        while True:
            found = _TAG.match(self._text, self._at)
            if self._ended or (self._at < len(self._text) and found is None):
                return "" if found is None else found.group()
            if found is not None and (found.end() < len(self._text) or found.group().endswith(">")):
                return found.group()
            yield

    def until(self, markers: Sequence[str], emit: Emit) -> Reading[str | None]:
        """Read up to the next marker and read that too; None when the text ended without one."""
        while True:
            found = [(at, marker) for marker in markers if (at := self._text.find(marker, self._at)) >= 0]
            at, marker = min(found, default=(len(self._text), ""))
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
