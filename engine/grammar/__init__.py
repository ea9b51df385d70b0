"""Structured output: the checks of a grammar, and the tokens that it allows next.

The only package that imports the library (llguidance), with the first grammar. Masks are numpy arrays; compiling has a
module of its own, because importing numpy takes longer than the other modules together.
"""
