"""Whether a pattern of a schema is found in a property's name, as the library would match it.

Python's own expressions may take for ever, and hold the interpreter meanwhile; the library's take linear time. The
front end's event loop calls this with patterns and names that a client wrote.
"""

from __future__ import annotations

import functools
import json
from typing import Any, Final

# Patterns and answers that are remembered: the ends of a schema are asked for several times.
_REMEMBERED_PATTERNS: Final = 64
_REMEMBERED_ANSWERS: Final = 4096
# The library's log level: the default writes a line to stderr for each grammar that meets a bound.
QUIET: Final = 0


@functools.lru_cache(_REMEMBERED_ANSWERS)
def is_found(pattern: str, name: str) -> bool | None:
    """Return whether a pattern is found in a name; None for a pattern that the library refuses."""
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
    """Return the matcher of a text with this pattern in it; None if the library refuses the pattern."""
    from llguidance import LLMatcher, LLTokenizer

    schema = json.dumps({"type": "string", "pattern": pattern})
    matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_json_schema(schema), log_level=QUIET)
    return None if matcher.is_error() else matcher
