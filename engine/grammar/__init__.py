"""Structured output: what a grammar says, whether it can be followed, and which tokens it allows next.

The one room that knows the library (llguidance), which is imported with the first grammar. Masks are numpy arrays: what
compiles is a module of its own, because numpy takes longer to import than all that reads a grammar.
"""
