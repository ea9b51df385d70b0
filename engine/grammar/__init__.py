"""Structured output: the checks of a grammar, and the tokens that it allows next.

The only package that knows the library (llguidance), which is imported with the first grammar. Masks are numpy arrays;
compiling is a module of its own, because importing numpy takes longer than everything else that reads a grammar.
"""
