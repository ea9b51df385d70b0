"""The words of a schedule's line: clauses apart by ``;``, words by blanks, unless both are inside double quotes.

Owns the quoting, both ways. It knows no action and no configuration.
"""

from __future__ import annotations

import re
from typing import Final

from scripted.core.refusals import ScriptDefinitionError

_QUOTE: Final = '"'
_NEEDS_QUOTES: Final = re.compile(r"[\s;]|^$")
_CLAUSE: Final = re.compile(r'(?:[^;"]|"[^"]*")*')
_WORD: Final = re.compile(r'(?:[^\s"]|"[^"]*")+')


def quoted(value: object) -> str:
    """A value as a line has it. Raises ScriptDefinitionError for one that no line can have."""
    text = str(value)
    if _QUOTE in text:
        raise ScriptDefinitionError(
            f"a value with a double quote cannot be written in a schedule, got {text!r}; give the file another name"
        )
    return f"{_QUOTE}{text}{_QUOTE}" if _NEEDS_QUOTES.search(text) else text


def clauses_of(line: str) -> list[str]:
    """The clauses, the first of which is the configuration. Raises ScriptDefinitionError for quotes without an end."""
    if line.count(_QUOTE) % 2:
        raise ScriptDefinitionError(f"a double quote of a schedule has no second one in {line!r}; close it")
    clauses, at = [], 0
    while at <= len(line):
        found = _CLAUSE.match(line, at)
        assert found is not None, f"a clause may be empty, but none is at {at} of {line!r}"
        clauses.append(found.group())
        at = found.end() + 1
    return clauses


def words_of_clause(clause: str) -> list[str]:
    """The words of one clause, without the quotes around what is in them."""
    return [word.replace(_QUOTE, "") for word in _WORD.findall(clause)]
