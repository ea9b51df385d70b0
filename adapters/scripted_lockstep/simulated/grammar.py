"""Grammars of the simulated pipeline: the tokens allowed at each place of an output, and when one is ready.

A regular expression of literals and classes with counts, such as ``[a-c]{5}x``, is interpreted, and so is ``DEAD_END``,
such an expression before a rule that needs itself. Any other grammar gets a form and length derived from its text.
Pure: equal grammars allow the same tokens in every process.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from typing import Final

from engine.core.messages import Grammar, GrammarKind, GrammarReady
from scripted.core.tokens import FIRST_TOKEN, TOKENS
from scripted_lockstep.simulated.held_orders import HeldOrders

_MADE_UP_PLACES: Final = 6
_MADE_UP_TOKENS: Final = 9
# In a class: a range, or one character.
_ITEM: Final = "[!-Z_-~]-[!-Z_-~]|[A-Za-z0-9_#]"
_ATOM: Final = re.compile(rf"(?:\[((?:{_ITEM})+)\]|([A-Za-z0-9_#]))(?:\{{(\d{{1,5}})\}})?")
_REGEX: Final = re.compile(rf"(?:{_ATOM.pattern})+")
# In Lark: no text matches both terminals. The check of rules misses it, because it does not compare terminals.
DEAD_END: Final = "start: /{regex}/ MORE\nMORE: /x/ & /y/"
_DEAD_END: Final = re.compile(re.escape(DEAD_END).replace(r"\{regex\}", "(.+)"))


class SimulatedGrammar:
    """One grammar. ``ends`` are the tokens that end an output."""

    def __init__(self, grammar: Grammar, ends: Sequence[int]) -> None:
        regex = regex_before_dead_end(grammar)
        self._ends = None if regex is not None else tuple(ends)
        self._parts = _parts_of(grammar if regex is None else Grammar(GrammarKind.REGEX, regex))

    def allowed(self, output: Sequence[int]) -> tuple[int, ...] | None:
        """Return the tokens that may follow an output: end tokens if it is complete, none if it is forbidden.

        Returns None at a dead end.
        """
        place = 0
        for tokens, count in self._parts:
            here = output[place : place + count]
            if not set(here) <= set(tokens):
                return ()
            if len(here) < count:
                return tokens
            place += count
        return self._ends if len(output) == place else ()


class HeldGrammars(HeldOrders):
    """The unanswered orders to compile a grammar. ``failed`` counts the answers that became errors."""

    def __init__(self) -> None:
        super().__init__()
        self._fails = False
        self.failed = 0

    def answer(self, ready: GrammarReady) -> GrammarReady:
        """Return the last stage's answer, or an error in its place if the next answer is to fail."""
        if not self._fails:
            return ready
        self._fails = False
        self.failed += 1
        why = f"grammar {ready.grammar_id} failed as it was told to"
        return GrammarReady(grammar_id=ready.grammar_id, error=why)

    def fail_next(self) -> None:
        self._fails = True

    def spare_next(self) -> None:
        """Cancel a failure that has not happened yet."""
        self._fails = False

    def start_over(self) -> None:
        super().start_over()
        self._fails = False
        self.failed = 0


def regex_before_dead_end(grammar: Grammar) -> str | None:
    """Return the regex before a dead end; None for a grammar that is no ``DEAD_END``."""
    found = _DEAD_END.fullmatch(grammar.text) if grammar.kind is GrammarKind.EBNF else None
    return None if found is None else found[1]


def _parts_of(grammar: Grammar) -> list[tuple[tuple[int, ...], int]]:
    """Split a grammar into runs of positions with the same tokens: the tokens, and the number of positions."""
    if grammar.kind is GrammarKind.REGEX and _REGEX.fullmatch(grammar.text):
        return [_part_of(*match.groups()) for match in _ATOM.finditer(grammar.text)]
    value = zlib.crc32(f"{grammar.kind}:{grammar.text}".encode())
    parts = []
    for place in range(1 + value % _MADE_UP_PLACES):
        first = value // (place + 7)
        tokens = [FIRST_TOKEN + (first + offset) % TOKENS for offset in range(_MADE_UP_TOKENS)]
        parts.append((tuple(sorted(tokens)), 1))
    return parts


def _part_of(items: str | None, literal: str | None, count: str | None) -> tuple[tuple[int, ...], int]:
    found = re.findall(_ITEM, items or literal or "")
    tokens = {token for item in found for token in range(ord(item[0]), ord(item[-1]) + 1)}
    return tuple(sorted(tokens)), 1 if count is None else int(count)
