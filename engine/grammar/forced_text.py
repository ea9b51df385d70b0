"""How long a text a grammar may force: places one after the other at which it allows one byte only.

The library tokenizes all that is forced from a place on, anew for each token of it, in the loop that computes: 100,000
forced bytes cost it 20 ms a token. A pure function of the grammar's text, so that every process decides alike.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

from engine.messages import Grammar, GrammarKind

# Below it a token costs less than 1 ms. No output can use more of a longer text than its own length.
MOST_FORCED_CHARS: Final = 4096
# Of a repetition the fewest count: after these it may go on, or not. In Lark it is also written with a tilde.
_COUNT: Final = re.compile(r"(?:\{|~\s*)(\d{1,9})")


def may_force_too_much(grammar: Grammar) -> bool:
    """Whether the text that a grammar forces may be longer than ``MOST_FORCED_CHARS``; True is said in doubt."""
    text = grammar.text
    try:
        if grammar.kind is GrammarKind.JSON_SCHEMA:
            return _forced_by_schema(json.loads(text)) > MOST_FORCED_CHARS
        if grammar.kind is GrammarKind.CHOICE:
            return max(map(len, json.loads(text)), default=0) > MOST_FORCED_CHARS
    except (ValueError, TypeError, RecursionError):
        return False  # It is none, which is told elsewhere.
    line = max(map(len, text.splitlines()), default=0) if grammar.kind is GrammarKind.EBNF else len(text)
    return line * _repeated(text) > MOST_FORCED_CHARS


def _repeated(text: str) -> int:
    """The product of all counts: they may be inside one another."""
    product = 1
    for found in _COUNT.finditer(text):
        product *= max(1, int(found[1]))
        if product > MOST_FORCED_CHARS:
            break
    return product


def _forced_by_schema(schema: Any) -> int:
    """What constants force together, with the longest name and pattern, as often as lists must have entries."""
    chars, longest, entries = 0, 0, 1
    for name, value in _fields_of(schema):
        longest = max(longest, len(name))
        if name == "const" or (name == "enum" and isinstance(value, list) and len(value) == 1):
            chars += len(json.dumps(value))
        elif name == "enum" and isinstance(value, list):
            longest = max(longest, *(len(json.dumps(one)) for one in value), 0)
        elif name == "pattern" and isinstance(value, str):
            longest = max(longest, len(value) * _repeated(value))
        elif name == "minItems" and isinstance(value, int) and value > 1:
            entries = min(entries * value, MOST_FORCED_CHARS + 1)
    return (chars + longest) * entries


def _fields_of(schema: Any) -> Iterator[tuple[str, Any]]:
    """Every field of every object in a schema, by its name. Without recursion: it may be as deep as a client likes."""
    open_parts = [schema]
    while open_parts:
        part = open_parts.pop()
        if isinstance(part, dict):
            yield from part.items()
            open_parts += part.values()
        elif isinstance(part, list):
            open_parts += part
