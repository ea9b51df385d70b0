"""Grammars of the simulated pipeline: which tokens may come at each place of an output.

A regular expression of literals and classes with counts, such as ``[a-c]{5}x``, means what it says, and so does a
grammar of one that goes on with a rule that needs itself: ``DEAD_END``. Any other is of some length that its text makes
up. Pure: equal grammars allow the same in every process.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from typing import Final

from engine.messages import Grammar, GrammarKind
from scripted.core.tokens import FIRST_TOKEN, TOKENS

_MADE_UP_PLACES: Final = 6
_MADE_UP_TOKENS: Final = 9
_ATOM: Final = re.compile(r"(?:\[([!-~]-[!-~])\]|([A-Za-z0-9_#]))(?:\{(\d{1,5})\})?")
_REGEX: Final = re.compile(rf"(?:{_ATOM.pattern})+")
# In Lark: what follows can begin, but never be complete. No compiler says so, as far as it does not look ahead.
DEAD_END: Final = "start: /{regex}/ more\nmore: more"
_DEAD_END: Final = re.compile(re.escape(DEAD_END).replace(r"\{regex\}", "(.+)"))


class SimulatedGrammar:
    """One grammar. ``ends`` are the tokens that end an output."""

    def __init__(self, grammar: Grammar, ends: Sequence[int]) -> None:
        regex = regex_before_dead_end(grammar)
        self._ends = None if regex is not None else tuple(ends)
        self._parts = _parts_of(grammar if regex is None else Grammar(GrammarKind.REGEX, regex))

    def allowed(self, said: Sequence[int]) -> tuple[int, ...] | None:
        """What may follow an output: only an end where it is complete, nothing after one that the grammar forbids.

        None where an output that it allows cannot go on.
        """
        place = 0
        for tokens, count in self._parts:
            here = said[place : place + count]
            if not set(here) <= set(tokens):
                return ()
            if len(here) < count:
                return tokens
            place += count
        return self._ends if len(said) == place else ()


def regex_before_dead_end(grammar: Grammar) -> str | None:
    """What an output can match before a grammar leads nowhere; None for a grammar that is no ``DEAD_END``."""
    found = _DEAD_END.fullmatch(grammar.text) if grammar.kind is GrammarKind.EBNF else None
    return None if found is None else found[1]


def _parts_of(grammar: Grammar) -> list[tuple[tuple[int, ...], int]]:
    """Neighbouring places with the same tokens: the tokens, and how many places there are."""
    if grammar.kind is GrammarKind.REGEX and _REGEX.fullmatch(grammar.text):
        return [_part_of(*match.groups()) for match in _ATOM.finditer(grammar.text)]
    value = zlib.crc32(f"{grammar.kind}:{grammar.text}".encode())
    parts = []
    for place in range(1 + value % _MADE_UP_PLACES):
        first = value // (place + 7)
        tokens = [FIRST_TOKEN + (first + offset) % TOKENS for offset in range(_MADE_UP_TOKENS)]
        parts.append((tuple(sorted(tokens)), 1))
    return parts


def _part_of(span: str | None, literal: str | None, count: str | None) -> tuple[tuple[int, ...], int]:
    first, last = (span[0], span[2]) if span is not None else (literal or "", literal or "")
    return tuple(range(ord(first), ord(last) + 1)), 1 if count is None else int(count)
