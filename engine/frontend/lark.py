"""Grammars in Lark, of the kind that the library of structured output reads: written piece by piece.

Owns how texts, special tokens, schemas and reasoning are spelled in them. Compiles nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from engine.frontend.reasoning import BEGIN, END, ReasoningStart
from engine.messages import Grammar, GrammarKind

__all__ = ["ANY_TEXT", "LarkRules", "after_reasoning", "rule_body", "spaced"]

HEADER = "%llguidance {}"
# A slash ends a regex in Lark, unless it is escaped already.
_ESCAPED_OR_SLASH = re.compile(r"\\.|/", re.DOTALL)
ANY_TEXT = r"TEXT: /(.|\n)*/"
# As models were trained to write JSON, and without room to lose one's way in whitespace.
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class LarkRules:
    """The rules of one grammar. ``special_ids`` are the special tokens of the vocabulary, which have no bytes there."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._special_ids = special_ids
        self._rules = [HEADER]

    def add(self, rule: str) -> None:
        """Add a rule, or another line."""
        self._rules.append(rule)

    def text(self, *pieces: str) -> str:
        """Pieces of text one after the other; one that is a special token is that token."""
        return " ".join(self._piece(piece) for piece in pieces if piece)

    def ending(self, piece: str) -> str | None:
        """What stands for a piece that is a special token, which ends any text; None for one that is text itself."""
        return self._piece(piece) if piece in self._special_ids else None

    def add_reasoning(self, start: ReasoningStart | None) -> str:
        """Add rules for reasoning; returns what stands for it before the answer, nothing where there is none."""
        if start is None:
            return ""
        end = self._special_ids.get(END)
        self.add(r"SPACE: /[ \n]{0,4}/")
        if end is None:
            self.add(rf"thought[suffix={json.dumps(END)}]: /(.|\n)*/")
        else:
            self.add(rf"thought: /(.|\n)*/ <[{end}]>")
        begin = self._piece(BEGIN)
        marked = f"{begin} thought SPACE"
        rule = {
            ReasoningStart.OPEN: "thought SPACE",
            ReasoningStart.MARKED: f"({marked})?",
            ReasoningStart.ASSUMED: f"{begin}? thought SPACE",
        }[start]
        self.add(f"reasoning: {rule}")
        return "reasoning "

    def grammar(self) -> Grammar:
        """All rules as one grammar."""
        return Grammar(GrammarKind.EBNF, "\n".join(self._rules))

    def _piece(self, piece: str) -> str:
        token_id = self._special_ids.get(piece)
        return json.dumps(piece, ensure_ascii=False) if token_id is None else f"<[{token_id}]>"


def after_reasoning(grammar: Grammar, start: ReasoningStart, special_ids: Mapping[str, int]) -> Grammar | None:
    """A grammar of the answer alone as one of the whole output; None for a kind that cannot be a part of another."""
    rules = LarkRules(special_ids)
    body = rule_body(grammar)
    if body is None:
        return None
    rules.add(f"start: {rules.add_reasoning(start)}answer")
    rules.add(f"answer: {body}")
    return rules.grammar()


def rule_body(grammar: Grammar) -> str | None:
    """A grammar as the body of a rule; None for a kind that cannot be a part of another."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return "%json " + json.dumps(spaced(json.loads(grammar.text)))
        case GrammarKind.REGEX:
            escaped = _ESCAPED_OR_SLASH.sub(lambda found: r"\/" if found[0] == "/" else found[0], grammar.text)
            return "/" + escaped.replace("\n", r"\n") + "/"
        case GrammarKind.CHOICE:
            return " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(grammar.text))
        case _:
            return None


def spaced(schema: Any) -> Any:
    """A schema whose JSON is spaced as models write it."""
    return {"x-guidance": SPACING, **schema} if isinstance(schema, dict) else schema
