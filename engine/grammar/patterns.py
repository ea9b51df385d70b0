"""Whether a schema's pattern matches in the name of a property, by the library's regular expressions.

Python's regular expressions may backtrack without limit and hold the interpreter meanwhile; the library's take linear
time. The front end's event loop calls this with patterns and names that a client wrote.
"""

from __future__ import annotations

import functools
import json
from typing import Any, Final

# Cached patterns and results: a schema is checked several times.
_REMEMBERED_PATTERNS: Final = 64
_REMEMBERED_ANSWERS: Final = 4096
# The library's log level: the default writes a line to stderr for each grammar that hits a limit.
QUIET: Final = 0


@functools.lru_cache(_REMEMBERED_ANSWERS)
def is_found(pattern: str, name: str) -> bool | None:
    """Return whether a pattern matches in a name; None for a pattern that the library rejects."""
    try:
        matcher = _matcher_of(pattern)
        if matcher is None:
            return None
        text = list(json.dumps(name, ensure_ascii=False).encode())
        matcher = matcher.deep_copy()
        is_taken = matcher.try_consume_tokens(text) == len(text) and matcher.is_accepting()
        return None if matcher.is_error() else bool(is_taken)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # noqa: BLE001 - a panic of the library is no Exception
        return None


@functools.lru_cache(_REMEMBERED_PATTERNS)
def _matcher_of(pattern: str) -> Any:
    """Return a matcher of strings in which this pattern matches; None if the library rejects the pattern."""
    from llguidance import LLMatcher, LLTokenizer

    schema = json.dumps({"type": "string", "pattern": pattern})
    matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_json_schema(schema), log_level=QUIET)
    return None if matcher.is_error() else matcher
