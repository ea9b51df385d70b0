"""Structured output: what a grammar says, whether it can be followed, and which tokens it allows next.

The one room that knows the library (llguidance), which is imported with the first grammar. Masks are numpy arrays.
What compiles is imported when it is asked for: numpy takes longer to import than all that reads a grammar.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.grammar.source import MAX_GRAMMAR_CHARS, Fault, fault_of, schema_grammar

if TYPE_CHECKING:
    from engine.grammar.compiled import (
        CompiledGrammars,
        GrammarCompiler,
        GrammarError,
        Matcher,
        UnfollowableGrammar,
    )

__all__ = [
    "MAX_GRAMMAR_CHARS",
    "CompiledGrammars",
    "Fault",
    "GrammarCompiler",
    "GrammarError",
    "Matcher",
    "UnfollowableGrammar",
    "fault_of",
    "schema_grammar",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'engine.grammar' has no attribute {name!r}")
    from engine.grammar import compiled

    value = globals()[name] = getattr(compiled, name)
    return value
