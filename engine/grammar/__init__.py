"""Structured output: what a grammar says, whether it can be followed, and which tokens it allows next.

The one room that knows the library (llguidance), which is imported with the first grammar. Masks are numpy arrays.
"""

from engine.grammar.compiled import CompiledGrammars, GrammarError, Matcher, UnfollowableGrammar
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.source import MAX_GRAMMAR_CHARS, Fault, fault_of, schema_grammar

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
