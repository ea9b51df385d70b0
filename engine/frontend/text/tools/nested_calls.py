"""Finds the end of a value that holds tags of calls itself, such as documentation or code about tool calls.

Pairs opening and closing tags in one pass over the text, however many values ask. Reads nothing for good.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from engine.frontend.text.incoming_text import IncomingText, Reading
from engine.frontend.text.tools.closing_tags import is_closer
from engine.frontend.text.tools.json_values import SPACE

# At most this much text is held back to find the end of one value.
MOST_SEARCHED: Final = 1 << 16
BEFORE_TAG = re.compile(r"[^<]*")


class TagPair(NamedTuple):
    """The beginnings of the tags that open a part of a call, and the tag that closes it."""

    openers: tuple[str, ...]
    closer: str


class NestedCalls:
    """Pairs the tags of one output.

    ``pairs`` are the tags of a family, the outermost first and those of a value last. ``followers`` begin other tags
    that may come after a value.
    """

    def __init__(self, text: IncomingText, pairs: Sequence[TagPair], followers: Sequence[str] = ()) -> None:
        self._text = text
        self._pairs = pairs
        self._value = len(pairs) - 1
        self._openers = tuple(opener for pair in pairs for opener in pair.openers)
        self._followers = (*self._openers, *followers)
        # Up to where tags were paired, and from which value on.
        self._searched = 0
        self._bottom = 0
        # Whether the call around that value seems to have ended, unless the value's closing tag follows.
        self._has_left = False
        # The places after the tags that are open there, by kind; the values among them; and where others end.
        self._open: list[list[int]] = []
        self._unclosed: set[int] = set()
        self._ends: dict[int, int] = {}

    def end_of(self, start: int, tag: str) -> Reading[int | None]:
        """Return the place of the closing tag that pairs with the opening tag of a value.

        The value began at ``start``, and ``tag`` is at this position. None if that tag belongs to no call, or if the
        value's closing tag is missing. If the text was cut inside a call in the value, that is its end.
        """
        text = self._text
        if not tag.startswith(self._followers) and self._kind_closed_by(tag) is None:
            return None
        first = text.place
        if self._searched <= first:
            # A value is inside one tag of each kind.
            self._open = [[start] for _ in self._pairs]
            self._unclosed = {start}
            self._searched, self._bottom, self._has_left = first, start, False
        text.mark()
        text.take(self._searched - first)
        while start in self._unclosed and text.place < first + MOST_SEARCHED:
            if not (yield from self._read_tag()):
                break
        self._searched = text.place
        is_cut = start in self._unclosed and not (yield from text.peek()) and not text.has_stopped
        text.rewind()
        begins_call = tag.startswith(tuple(opener for pair in self._pairs[:-1] for opener in pair.openers))
        end = self._searched if is_cut and begins_call else self._ends.get(start, first)
        return end if end > first else None

    def _read_tag(self) -> Reading[bool]:
        """Read through the next tag; False if there is none."""
        text = self._text
        yield from text.run(BEFORE_TAG)
        tag, place = (yield from text.tag()), text.place
        text.take(len(tag))
        kind = next((kind for kind, pair in enumerate(self._pairs) if tag.startswith(pair.openers)), None)
        if self._has_left and tag.startswith(self._followers):
            self._unclosed.clear()
        elif kind is not None:
            self._open[kind].append(text.place)
            if kind == self._value:
                self._unclosed.add(text.place)
        elif (kind := self._kind_closed_by(tag)) is not None:
            yield from self._close(tag, kind, place)
        return bool(tag)

    def _kind_closed_by(self, tag: str) -> int | None:
        kinds = range(len(self._pairs))
        return next((kind for kind in kinds if is_closer(tag, self._pairs[kind].closer, self._openers)), None)

    def _close(self, tag: str, kind: int, place: int) -> Reading[None]:
        """Close the last open tag of a kind. Only a part of the call follows the value that the search began with."""
        opened = self._open[kind]
        if opened and opened[-1] > self._bottom:
            if tag == self._pairs[kind].closer:
                self._pop(kind, place)
        elif opened and (yield from self._is_followed(kind)):
            self._has_left = kind != self._value
            if not self._has_left:
                self._pop(kind, place)

    def _is_followed(self, kind: int) -> Reading[bool]:
        """Return whether what may follow a closing tag of the call is at this position."""
        yield from self._text.run(SPACE)
        after = yield from self._text.tag()
        if after.startswith(self._followers) or not (yield from self._text.peek()):
            return True
        return any(is_closer(after, pair.closer, self._openers) for pair in self._pairs[: max(kind, 1)])

    def _pop(self, kind: int, place: int) -> None:
        """Take the last open tag of a kind, and those inside it, which have no closing tags."""
        opened = self._open[kind].pop()
        if kind == self._value:
            self._ends[opened] = place
        for places in self._open:
            while places and places[-1] > opened:
                self._unclosed.discard(places.pop())
        self._unclosed.discard(opened)
