"""Parsers of answers, driven as a stream and in one, and what comes out in a form that is easy to compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Protocol

from hypothesis import strategies as st

from engine.frontend.text.reasoning import CallArguments, CallBegun, CallEnded, Content, Part, Reasoning, appended


class Parser(Protocol):
    def push(self, text: str) -> list[Part]: ...

    def flush(self) -> list[Part]: ...


class CallParser(Protocol):
    def push(self, text: str) -> list[Part]: ...

    def flush(self, *, stopped: bool) -> list[Part]: ...


def parsed(parser: Parser, pieces: Iterable[str]) -> list[Part]:
    """Every part, neighbours of one kind joined."""
    return _joined(parser.push, pieces, parser.flush)


def parsed_calls(parser: CallParser, pieces: Iterable[str], *, stopped: bool = True) -> list[Part]:
    """The same of a parser of calls. ``stopped``: the model ended the text, rather than a limit."""
    return _joined(parser.push, pieces, lambda: parser.flush(stopped=stopped))


def _joined(push: Callable[[str], list[Part]], pieces: Iterable[str], flush: Callable[[], list[Part]]) -> list[Part]:
    found: list[Part] = []
    for piece in pieces:
        for part in push(piece):
            appended(found, part)
    for part in flush():
        appended(found, part)
    return found


def shown(parts: Sequence[Part]) -> list[tuple[str, ...]]:
    """Parts in few words: a call is ('call', name, arguments), or ('cut', name, arguments) without an end."""
    found: list[tuple[str, ...]] = []
    for part in parts:
        match part:
            case Content(text):
                found.append(("content", text))
            case Reasoning(text):
                found.append(("reasoning", text))
            case CallBegun(name):
                found.append(("cut", name, ""))
            case CallArguments(text):
                found[-1] = (*found[-1][:2], found[-1][2] + text)
            case CallEnded():
                found[-1] = ("call", *found[-1][1:])
    return found


def in_one_and_by_character(make: Callable[[], Parser], text: str) -> list[tuple[str, ...]]:
    """Parse a text at once and character by character, and return the one result of both."""
    whole = parsed(make(), [text])
    assert parsed(make(), text) == whole
    return shown(whole)


def cut(text: str, places: Sequence[int]) -> list[str]:
    bounds = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[start:end] for start, end in pairwise(bounds)]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(st.text(max_size=6), json_values, max_size=3)
places = st.lists(st.integers(0, 400), max_size=12)
