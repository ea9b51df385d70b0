"""Which texts a grammar allows as whole outputs, by one matcher of bytes for all of them."""

from __future__ import annotations

from collections.abc import Iterable

from llguidance import LLMatcher, LLTokenizer

from engine.core.messages import Grammar
from engine.grammar.patterns import QUIET
from engine.grammar.source import definition_of

__all__ = ["allowed", "allows"]

_TOKENIZER = LLTokenizer("byte")


def allows(grammar: Grammar, text: str) -> bool:
    return allowed(grammar, [text]) == [text]


def allowed(grammar: Grammar, texts: Iterable[str]) -> list[str]:
    """Return the texts that are whole outputs of a grammar."""
    matcher, accepted = LLMatcher(_TOKENIZER, definition_of(grammar), log_level=QUIET), []
    for text in texts:
        matcher.reset()
        written = list(text.encode())
        if matcher.try_consume_tokens(written) == len(written) and matcher.is_accepting():
            accepted.append(text)
    return accepted
