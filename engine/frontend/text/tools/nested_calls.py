"""Finds the end of a value that holds tags of calls itself, such as documentation or code about tool calls.

Pairs opening and closing tags in one pass over the text, however many values ask. Reads nothing for good.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Final, NamedTuple

from engine.frontend.text.incoming_text import IncomingText, Reading
from engine.frontend.text.tools.closing_tags import is_closer
from engine.frontend.text.tools.json_values import SPACE

# At most this much text is held back to find the end of one value.
MOST_SEARCHED: Final = 1 << 16
BEFORE_TAG = re.compile(r"[^<]*")
# More than an opening of a call with its name, and than a tag.
_LONGEST_OPENING: Final = 256
_LONGEST_TAG: Final = 40


class TagPair(NamedTuple):
    """The beginnings of the tags that open a part of a call, and the tag that closes it."""

    openers: tuple[str, ...]
    closer: str


class CallOpening:
    """Recognizes the opening of a call: of a known tool, or of any in JSON.

    ``pattern`` matches the tags of an opening, and the group ``object`` or ``name`` after them.
    """

    def __init__(self, pattern: re.Pattern[str], tools: Collection[str]) -> None:
        self._pattern = pattern
        self._tools = tools

    def follows(self, text: IncomingText) -> Reading[bool]:
        """Return whether a call begins at this position."""
        return bool((yield from text.judged(self._judged, _LONGEST_OPENING)))

    def _judged(self, ahead: str, more: bool) -> bool | None:
        found = self._pattern.match(ahead)
        rest = ahead[found.end() :] if found else ahead
        is_tag_cut = rest[:1] == "<" and ">" not in rest and len(rest) < _LONGEST_TAG
        if more and (not rest or is_tag_cut):
            return None
        return found is not None and (bool(found["object"]) or found["name"] in self._tools)


class Meaning(NamedTuple):
    """How a family of models reads the tags of calls in a text.

    ``named`` reads on after a tag that opens a part of a call, and returns the name of the tool or the argument that it
    names, if any. ``accepts`` returns whether a text is an argument of a tool; None for the text asks for the name.
    """

    opening: CallOpening
    named: Callable[[str], Reading[tuple[str | None, str | None]]]
    accepts: Callable[[str, str, str | None], bool]


class NestedCalls:
    """Pairs the tags of one output.

    ``pairs`` are the tags of a family, the outermost first and those of a value last. ``followers`` begin other tags
    that may come after a value.

    If the value that the search began with has no closing tag left, either its call has lost its own, or a call in the
    value is only half there. The latter is certain if that call could not be made: if it begins within a line although
    calls have lines of their own, if a value in it is none of its tool's, or if an argument of the call around follows.
    Without any of these signs the text is the same, to the character, as that of two calls of which the first has lost
    its closing tags. It is read as those, because models forget tags more often than they write half a call in a value.
    """

    def __init__(
        self, text: IncomingText, pairs: Sequence[TagPair], meaning: Meaning, followers: Sequence[str] = ()
    ) -> None:
        self._text = text
        self._pairs = pairs
        self._meaning = meaning
        self._value = len(pairs) - 1
        self._openers = tuple(opener for pair in pairs for opener in pair.openers)
        self._calls = tuple(opener for pair in pairs[:-1] for opener in pair.openers)
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
        # The tool of the call around that value, and whether its tags are on lines of their own.
        self._outer = ""
        self._has_lines = False
        # The last tool and argument that were named, and whether that call began in a line.
        self._tool = ""
        self._key = ""
        self._is_inline = False
        # The text since the last value was opened, None after the end of one, and where that was.
        self._since: list[str] | None = None
        self._is_line_start = True
        self._last_end: int | None = None
        # Where that value ends if a call in it is only half there.
        self._half_end: int | None = None

    def enter(self, tool: str, *, has_lines: bool) -> None:
        """Take the tool of the call whose values are read next, and whether its tags are on lines of their own."""
        self._outer, self._has_lines = tool, has_lines

    def end_of(self, start: int, tag: str, at_line_start: bool) -> Reading[int | None]:
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
            self._last_end = self._half_end = None
            self._tool, self._is_inline = "", False
            self._since, self._is_line_start = None, at_line_start
        text.mark()
        text.take(self._searched - first)
        while start in self._unclosed and text.place < first + MOST_SEARCHED:
            if not (yield from self._read_tag()):
                break
        self._searched = text.place
        is_cut = start in self._unclosed and not (yield from text.peek()) and not text.has_stopped
        text.rewind()
        end = self._half_end if start == self._bottom and self._half_end is not None else first
        end = self._searched if is_cut and tag.startswith(self._calls) else self._ends.get(start, end)
        return end if end > first else None

    def _read_tag(self) -> Reading[bool]:
        """Read through the next tag; False if there is none."""
        text = self._text
        yield from text.run(BEFORE_TAG, self._pass)
        tag, place = (yield from text.tag()), text.place
        kind = next((kind for kind, pair in enumerate(self._pairs) if tag.startswith(pair.openers)), None)
        is_end = self._has_left and tag.startswith(self._followers) and (yield from self._is_next(tag))
        text.take(len(tag))
        if is_end:
            self._unclosed.clear()
            return True
        if kind == 0:
            self._is_inline = self._has_lines and not self._is_line_start
        if tag.startswith(self._followers):
            tool, key = yield from self._meaning.named(tag)
            self._tool, self._key = tool or self._tool, key or self._key
        if kind is not None:
            self._open[kind].append(text.place)
            if kind == self._value:
                self._begin_value(text.place)
        if not tag.startswith(self._pairs[self._value].openers):
            self._pass(tag)
        if kind is None and (closed := self._kind_closed_by(tag)) is not None:
            yield from self._close(tag, closed, place)
        return bool(tag)

    def _pass(self, text: str) -> None:
        if self._since is not None:
            self._since.append(text)
        if line := text.rstrip(" \t"):
            self._is_line_start = line.endswith("\n")

    def _begin_value(self, place: int) -> None:
        """Begin a value, which shows that a call before it is only half there if the call around it has its name."""
        self._unclosed.add(place)
        self._since = []
        is_outer = not self._accepts(self._tool) and self._accepts(self._outer)
        if is_outer and self._half_end is None:
            self._half_end = self._last_end

    def _accepts(self, tool: str, written: str | None = None) -> bool:
        return self._meaning.accepts(tool, self._key, written)

    def _kind_closed_by(self, tag: str) -> int | None:
        kinds = range(len(self._pairs))
        return next((kind for kind in kinds if is_closer(tag, self._pairs[kind].closer, self._openers)), None)

    def _close(self, tag: str, kind: int, place: int) -> Reading[None]:
        """Close the last open tag of a kind. Only a part of the call follows the value that the search began with."""
        opened = self._open[kind]
        if opened and opened[-1] > self._bottom:
            if tag == self._pairs[kind].closer:
                self._pop(kind, place)
                if kind == self._value:
                    yield from self._end_inner(tag, place)
        elif opened and (yield from self._is_followed(kind)):
            self._has_left = kind != self._value
            if not self._has_left:
                self._pop(kind, place)

    def _is_next(self, tag: str) -> Reading[bool]:
        """Return whether an opening tag at this position begins what may follow a value: a call must be one."""
        return not tag.startswith(self._calls) or (yield from self._meaning.opening.follows(self._text))

    def _end_inner(self, tag: str, place: int) -> Reading[None]:
        """Take the end of a value in the value, which may be that of the value itself."""
        written = None if self._since is None else "".join(self._since).removesuffix(tag)
        self._since = None
        if not (yield from self._is_followed(self._value)):
            return
        self._last_end = place
        if self._is_inline or not self._accepts(self._tool, written):
            self._half_end = self._half_end or place

    def _is_followed(self, kind: int) -> Reading[bool]:
        """Return whether what may follow a closing tag of the call is at this position."""
        yield from self._text.run(SPACE, self._pass)
        after = yield from self._text.tag()
        if after.startswith(self._followers):
            return (yield from self._is_next(after))
        if not (yield from self._text.peek()):
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
