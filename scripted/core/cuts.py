"""Finds the text that a mutant cuts in the source of a function, at any indentation."""

from __future__ import annotations

import difflib
import re
import textwrap
from typing import NamedTuple

# How many source lines an error shows for a text that does not occur.
_SHOWN = 3


class Cut(NamedTuple):
    """The place of a text in a source, from ``start`` to ``end``.

    ``becomes``: the candidates to put there; the first that compiles is used.
    """

    start: int
    end: int
    becomes: tuple[str, ...]


def places_of(source: str, cut: str, becomes: str) -> list[Cut]:
    """Return every occurrence of the text: verbatim or, failing that, line by line at any indentation."""
    spans = [found.span() for found in re.finditer(re.escape(cut), source)]
    if spans:
        return [Cut(start, end, _put_at(source, start, becomes)) for start, end in spans]
    lines = cut.strip("\n").rstrip().split("\n")
    pattern = r"\n[ \t]*".join(re.escape(line.strip()) for line in lines)
    # A text that starts with indentation matches only at the start of a line.
    before = r"^[ \t]*" if lines[0][:1].isspace() else ""
    spans = [found.span(1) for found in re.finditer(f"{before}({pattern})", source, re.MULTILINE) if pattern]
    return [Cut(start, end, (_indented(becomes, _indent_at(source, start)),)) for start, end in spans]


def _put_at(source: str, place: int, becomes: str) -> tuple[str, ...]:
    """Return the text as it is and indented; indented first, if both it and the source indent its first line."""
    indented = _indented(becomes, _indent_at(source, place))
    before = source[source.rfind("\n", 0, place) + 1 : place]
    # As it is, it would belong to the block above.
    is_twice = before and before.isspace() and becomes[:1].isspace() and "\n" in becomes
    return (indented, becomes) if is_twice else (becomes, indented)


def _indent_at(source: str, place: int) -> str:
    line = source[source.rfind("\n", 0, place) + 1 : place]
    return line[: len(line) - len(line.lstrip())]


def _indented(text: str, indent: str) -> str:
    """Indent a text for its place in the source; its first line may lack indentation."""
    first, *rest = text.strip("\n").rstrip().split("\n")
    if first[:1].isspace():
        first, *rest = textwrap.dedent("\n".join((first, *rest))).split("\n")
    else:
        deeper = "    " if first.endswith(":") else ""
        rest = [deeper + line for line in textwrap.dedent("\n".join(rest)).split("\n")] if rest else []
    return f"\n{indent}".join((first, *rest))


def nearest_lines(source: str, cut: str) -> str:
    """Return the source lines most similar to the text, as the end of an error; empty if none is close."""
    lines = [line.strip() for line in source.split("\n") if line.strip()]
    wanted = next((line.strip() for line in cut.split("\n") if line.strip()), "")
    near = [line for line in lines if wanted and wanted in line][:_SHOWN]
    near = near or difflib.get_close_matches(wanted, lines, n=_SHOWN, cutoff=0.4)
    return "; the nearest lines are " + ", ".join(map(repr, near)) if near else ""
