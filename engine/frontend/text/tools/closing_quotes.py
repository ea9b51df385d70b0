"""Decides which quote ends a string in JSON whose inner quotes a model has not escaped."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

# What follows a quote is looked at for so many characters.
MOST_AHEAD: Final = 128
# A comment that ends here, and the beginning of any.
_WHOLE_COMMENT = re.compile(r"(?://|#)[^\n]*\n|/\*.*?\*/", re.DOTALL)
_COMMENT = re.compile(r"/(?:[/*]|\Z)|#")
_STRING = re.compile(r"""(["'])(?:(?!\1)[^\\]|\\.)*\1\s*(.?)""", re.DOTALL)
_BARE_KEY = re.compile(r"[A-Za-z_][\w-]*\s*(.?)", re.DOTALL)
_ITEM = re.compile(r"true|false|null|True|False|None|[+-]?[0-9][0-9_.eE+-]*")
_BEGUN_ITEM = re.compile(r"[\w.+-]*")
_CLOSERS = re.compile(r"[\s}\]]*")
_ANY_BRACKET = re.compile(r"[{}\[\]]")
_CALL = re.compile(r"""\{\s*(?:["'](\w*))?""")
_KEYS_OF_CALLS: Final = ("name", "function", "arguments", "parameters", "type", "id")
_QUOTES: Final = "\"'"
_BRACKETS: Final = "{[}]"
_BETWEEN_CALLS: Final = " \t\r\n,;]"
_AFTER_CALLS: Final = " \t\r\n;}]`"
# What may come before the key of the next value, even if the brackets between are missing.
_BEFORE_KEY: Final = (",", ";", "{")


class ClosingQuote:
    """Judges a quote inside a string by what follows it.

    ``due`` are the closing brackets of the value, the innermost last; ``enclosing`` is the number of objects around it;
    ``stops`` end a call. A string between three quotes on each side, as in Python, ends at three.
    """

    def __init__(self, quote: str, due: Sequence[str], *, enclosing: int, stops: tuple[str, ...]) -> None:
        self._quote = quote
        self._due = due
        self._in_object = due[-1] == "}"
        self._depth = len(due) + enclosing
        self._stops = stops
        self._is_tripled = False
        # The brackets that are open within the string.
        self._opened = 0

    def see(self, text: str) -> None:
        """Take a part of the string."""
        for bracket in _ANY_BRACKET.findall(text):
            self._opened = self._opened + 1 if bracket in "{[" else max(self._opened - 1, 0)

    def is_tripled(self, ahead: str, more: bool) -> bool | None:
        """Return whether two more quotes follow the opening one, and then a text rather than the next value."""
        pair = self._quote * 2
        if not ahead.startswith(pair):
            return None if more and pair.startswith(ahead) else False
        quotes, after = self._quotes_in(ahead)
        # Six are an empty text.
        if quotes < len(pair) + 3 and not after.strip():
            return None if more else False
        self._is_tripled = quotes >= len(pair) + 3 or after.lstrip()[0] not in ",:}]"
        return self._is_tripled

    def closes(self, ahead: str, more: bool) -> bool | None:
        """Return whether the quote closes its string. None if that depends on ``more`` text, which will come."""
        if self._is_tripled:
            return self._closes_tripled(ahead, more)
        found = self._judged(ahead)
        return found if found is not None or more else self._guessed(ahead)

    def _closes_tripled(self, ahead: str, more: bool) -> bool | None:
        """Judge a quote by the number of those that follow; fewer than two close the string if the call ends there."""
        quotes, after = self._quotes_in(ahead)
        if not after and more and quotes <= 2:
            return None
        if quotes >= 2:
            return quotes == 2
        rest = after.lstrip(_AFTER_CALLS)
        if more and (not rest or any(stop.startswith(rest) for stop in self._stops)):
            return None
        return not rest or rest.startswith(self._stops)

    def _quotes_in(self, ahead: str) -> tuple[int, str]:
        """Return the number of quotes at the beginning of a text, and the text after them."""
        after = ahead.lstrip(self._quote)
        return len(ahead) - len(after), after

    def _guessed(self, ahead: str) -> bool:
        """Judge at the end, or when too little is certain: without another quote this is the last one."""
        if len(ahead) < MOST_AHEAD:
            return True
        after = ahead.lstrip()
        return not after or (after[0] in ",}]" and _COMMENT.match(after[1:].lstrip()) is None)

    def _judged(self, ahead: str) -> bool | None:
        after = self._past_comments(ahead)
        if _COMMENT.match(after) and self._stop_in(after) < 0:
            return None
        if after[:1] in (",", ";"):
            following = self._past_comments(after[1:])
            while self._in_object and following[:1] == ",":
                following = self._past_comments(following[1:])
            # A semicolon before a bracket is in code, too.
            if after[0] == ";" and following[:1] in ("}", "]"):
                return self._ends_values(following)
            return self._is_next(following, in_object=self._in_object)
        if after[:1] and after[0] in "}]":
            return self._ends_values(after)
        if after[:1] == ":":
            return False
        return self._before_key(after if _COMMENT.match(ahead.lstrip()) else ahead) if after else None

    def _is_next(self, text: str, *, in_object: bool) -> bool | None:
        """Return whether a key or an item follows a comma, or the next call, if brackets are missing."""
        if not text or any(stop.startswith(text) for stop in self._stops):
            return None
        if _COMMENT.match(text):
            return True if self._stop_in(text) >= 0 else None
        if text.startswith(self._stops):
            return True
        if text[0] == "{" and in_object:
            return _begins_call(text)
        if text[0] in _BRACKETS:
            return True
        if text[0] in _QUOTES:
            return _is_string_before(":", text) if in_object else True
        if in_object and (key := _BARE_KEY.match(text)) and key[1] in ("", ":"):
            return True if key[1] else None
        if in_object:
            return False
        item = _ITEM.match(text)
        if item is None:
            # The beginning of a word may become one.
            begun = _BEGUN_ITEM.match(text)
            return None if begun and begun.end() == len(text) else False
        after = self._past_comments(text[item.end() :])
        if not after or _COMMENT.match(after) or any(stop.startswith(after) for stop in self._stops):
            return True if self._stop_in(after) >= 0 else None
        return after[0] in ",;]}" or after.startswith(self._stops)

    def _ends_values(self, after: str) -> bool | None:
        """Judge a quote before closing brackets, which may be a part of the string, too."""
        if after[0] not in self._due:
            return self._before_stop(after) if self._opened else self._before_key(after)
        closers, rest = self._past_closers(after)
        if not rest or (_COMMENT.match(rest) and self._stop_in(rest) < 0):
            return None
        if rest[0] == self._quote and not closers[-1].isspace():
            return False
        closed = sum(character in "}]" for character in closers)
        is_own = closed <= self._opened
        if closed >= self._depth:
            return self._before_end(rest) if is_own else True
        if rest[0] in ",;":
            around = self._due[-1 - closed] if closed < len(self._due) else "}"
            return self._is_next(self._past_comments(rest[1:]), in_object=around == "}")
        if is_own:
            return self._before_stop(rest)
        return True if rest[0] in "{[<`" else self._before_key(after)

    def _before_end(self, text: str) -> bool | None:
        """Judge a quote before as many brackets as the call has, or the string: another call may follow."""
        after = text.lstrip(_BETWEEN_CALLS)
        if not after:
            return None
        is_call = _begins_call(after) if after[0] == "{" else False
        return self._before_stop(text) if is_call is False else is_call

    def _before_stop(self, text: str) -> bool | None:
        """Judge a quote before brackets that the string has opened itself: the call must end before another quote."""
        at, stop = text.find(self._quote), self._stop_in(text)
        return None if at < 0 and stop < 0 else 0 <= stop < (at if at >= 0 else len(text))

    def _past_comments(self, text: str) -> str:
        """Return what follows spaces and comments; one in which the call ends is left."""
        text = text.lstrip()
        while (found := _WHOLE_COMMENT.match(text)) and self._stop_in(found[0]) < 0:
            text = text[found.end() :].lstrip()
        return text

    def _past_closers(self, text: str) -> tuple[str, str]:
        """Return closing brackets with the spaces between them, without comments, and what follows them."""
        closers = ""
        while (found := _CLOSERS.match(text)) and found.end():
            closers += found.group()
            text = text[found.end() :]
            if (past := self._past_comments(text)) != text:
                closers, text = closers + " ", past
        return closers, text

    def _stop_in(self, text: str) -> int:
        return min((place for stop in self._stops if (place := text.find(stop)) >= 0), default=-1)

    def _before_key(self, text: str) -> bool | None:
        """Judge a quote before other text. It closes the string if the call ends or a key comes before a quote."""
        at = text.find(self._quote)
        stop = self._stop_in(text)
        if stop >= 0 and (at < 0 or stop < at):
            return True
        if at < 0:
            return None
        before = text[:at]
        if before.rstrip().endswith(_BEFORE_KEY) or (before and before.isspace()):
            return _is_string_before(":" if self._in_object else ":,]", text[at:])
        return False


def _begins_call(text: str) -> bool | None:
    """Return whether an object here has a key of a call."""
    found = _CALL.match(text)
    if found is None or found.end() == len(text):
        return None
    return found[1] in _KEYS_OF_CALLS


def _is_string_before(what: str, text: str) -> bool | None:
    """Return whether a string is here that one of these characters follows."""
    found = _STRING.match(text)
    if found is None:
        return None
    return found[2] in what if found[2] else None
